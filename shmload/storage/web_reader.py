"""`WebReader`: read objects over HTTP. It is the base of `S3Store` and `HttpStore`.

An object is read by ranges, several at once, each directly into its destination. No answer is trusted: the range, the total size,
the length and the version that it reports are compared with the request and with the other ranges. After a failure only the missing
bytes are requested again, in the same version. If a server answers a range request with the whole object, it is read up to the
range's end.
"""

from __future__ import annotations

import logging
import re
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
from typing_extensions import Buffer

from shmload.errors import StoreError
from shmload.storage.joined_crc32c import joined_crc32c
from shmload.storage.outage import Outage
from shmload.storage.parallel_map import T, parallel_map
from shmload.storage.range_target import FilePart, MemoryTarget
from shmload.storage.retry import Retry, RetryPolicy, TransientError
from shmload.storage.store import StoredObject
from shmload.storage.transport import Answer

__all__ = ["Version", "WebReader", "unquoted"]

log = logging.getLogger("shmload")

_PART_NBYTES = 16 << 20  # minimum size of a range
_PROGRESS_NBYTES = 64 << 10  # bytes between two failures that count as progress
_LONGEST = 1 << 62  # length of a request for all bytes
_UNKNOWN = -1  # length of an object if the server does not announce it
_PIECE_NBYTES = 1 << 20  # bytes read at a time if the length is unknown
_DECODED = ("gzip", "x-gzip", "deflate")  # Content-Encodings that are decoded when a whole body is read
_OF_TIME = "time:"  # the beginning of a version that is made from Last-Modified
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Version:
    """The version of an object that all ranges of one read must have. It also tells the ranges if one of them has failed.

    Args:
        url: URL of the object.
        etag: the requested version; None is that of the first answer.
    """

    def __init__(self, url: str, etag: str | None) -> None:
        self.url = url
        self.etag = etag
        self.given_up = threading.Event()  # set when another range has failed for good
        self._lock = threading.Lock()

    @property
    def condition(self) -> dict[str, str]:
        """Return the headers that request this version. Servers never match weak etags, or those that we make from times."""
        return {"If-Match": f'"{self.etag}"'} if self.etag and not self.etag.startswith(("W/", _OF_TIME)) else {}

    def see(self, found: str) -> None:
        """Raise StoreError if an answer has another version."""
        with self._lock:
            if self.etag is None:
                self.etag = found
        if not _are_equal(found, self.etag):
            raise self.changed(found)

    def changed(self, found: str = "another one") -> StoreError:
        return StoreError(
            f"{self.url} has changed: version {self.etag} was being read, but it is now {found}. Read its version again"
        )


class WebReader(ABC):
    """Reads objects over HTTP. Subclasses define how a request is sent."""

    retry_policy: RetryPolicy
    parallel: int
    outage: Outage | None = None  # set by a dataset, so that its reads fail together; writing and listing do not use it
    _has_warned = False

    @abstractmethod
    def url_of(self, key: str) -> str:
        """Return the object's URL, without credentials."""

    @abstractmethod
    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        """Send a request about an object and return the answer.

        Args:
            method: HTTP method.
            key: key of the object.
            headers: headers besides those that each request of the store has.
        Raises:
            StoreError, TransientError: no answer came.
        """

    @abstractmethod
    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | TransientError:
        """Return the error to raise for an unsuccessful answer.

        Args:
            answer: the answer.
            url: URL of the object.
            doing: the operation in words.
        """

    def head(self, key: str) -> StoredObject:
        # a GET of the first byte, because an answer to HEAD does not explain errors and may lack the length
        return self._begin(key, 1, None)[0]

    def get(self, key: str, *, etag: str | None = None) -> Buffer:
        return self._begin(key, _LONGEST, etag)[1]

    def _begin(self, key: str, nbytes: int, etag: str | None) -> tuple[StoredObject, Buffer]:
        """Return an object and its first bytes, by one request, which is repeated if it fails."""
        url = self.url_of(key)

        def try_once() -> tuple[StoredObject, Buffer]:
            version = Version(url, etag)
            with self.ask("GET", key, {"Range": f"bytes=0-{nbytes - 1}", **version.condition}) as answer:
                if answer.status != 416:
                    total, _ = self._checked(answer, version, f"read {url}", 0, nbytes)
                    if total == _UNKNOWN:
                        whole = _up_to_its_end(answer)
                        total, data = len(whole), cast(Buffer, whole)
                    else:
                        target = MemoryTarget(np.empty(min(nbytes, total), np.uint8).data)
                        for _ in target.receive(answer):
                            pass
                        if target.done < target.nbytes:
                            raise TransientError(f"the body ended after {target.done:,} of {target.nbytes:,} bytes")
                        data = target.out.toreadonly()
                    if nbytes == _LONGEST and _encoding_of(answer, url) in _DECODED:
                        data = _decoded(data, url)
                    return StoredObject(key, total, version.etag or ""), data
            with self.ask("HEAD", key, {}) as answer:  # an empty object has no first byte to request
                total, _ = self._checked(answer, version, f"read {url}", 0, 0)
                if total:
                    raise StoreError(f"{url} has {total:,} bytes, but its server rejects range requests")
                return StoredObject(key, 0, version.etag or ""), b""

        return self.repeatedly(f"read {url}", try_once, outage=self.outage)

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        view = memoryview(out).cast("B")
        self._fill_all(key, offset, [MemoryTarget(view[begin:end]) for begin, end in self._parts(len(view))], etag)

    def read_to_file(self, key: str, fd: int, nbytes: int, *, etag: str | None = None) -> int:
        """Read an object of known length into a file, by parallel ranges. Return its CRC-32C, computed as the bytes arrive.

        Args:
            key: key of the object.
            fd: descriptor of the file, which has room for the object.
            nbytes: length of the object.
            etag: version of the object; None is the one of the first answer.
        """
        parts = [FilePart(fd, begin, end - begin) for begin, end in self._parts(nbytes)]
        self._fill_all(key, 0, parts, etag)
        return joined_crc32c([(part.crc32c, part.nbytes) for part in parts])

    def repeatedly(
        self, doing: str, try_once: Callable[[], T], is_over: Callable[[], bool] = bool, outage: Outage | None = None
    ) -> T:
        """Call `try_once` until it succeeds, and return its result.

        Args:
            doing: the operation in words, for the error.
            try_once: one try.
            is_over: returns whether the result is no longer needed, so that no further try is made.
            outage: as for `Retry`.
        """
        tries = Retry(self.retry_policy, doing, outage)
        while not is_over():
            try:
                found = try_once()
            except TransientError as failure:
                tries.failed(failure)
            else:
                tries.succeeded()
                return found
        raise StoreError(f"cannot {doing}: another part of it has failed")

    def _parts(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the begin and end of the parts into which a read is divided."""
        num_parts = min(self.parallel, max(1, nbytes // _PART_NBYTES))
        return list(pairwise(nbytes * number // num_parts for number in range(num_parts + 1)))

    def _fill_all(self, key: str, offset: int, parts: Sequence[MemoryTarget | FilePart], etag: str | None) -> None:
        """Read adjacent ranges. The threads end with the call, so a fork cannot meet them; the first failure ends all."""
        version = Version(self.url_of(key), etag)
        begins = accumulate((part.nbytes for part in parts[:-1]), initial=offset)
        if len(parts) == 1:
            self._fill(key, offset, parts[0], version)
            return
        ranges = list(zip(begins, parts, strict=True))
        parallel_map(lambda each: self._fill(key, *each, version), ranges, len(parts), version.given_up)

    def _fill(self, key: str, offset: int, target: MemoryTarget | FilePart, version: Version) -> None:
        """Read one range into its target, with retries from where it broke off."""
        if offset < 0:
            raise StoreError(f"{version.url} has no bytes at {offset:,}: offsets begin at 0")
        end = offset + target.nbytes
        tries = Retry(self.retry_policy, f"read bytes {offset:,} to {end:,} of {version.url}", self.outage)
        while target.done < target.nbytes and not version.given_up.is_set():
            before = target.done
            begin, missing = offset + before, target.nbytes - before
            try:
                headers = {"Range": f"bytes={begin}-{end - 1}", **version.condition}
                with self.ask("GET", key, headers) as answer:
                    total, whole = self._checked(answer, version, tries.doing, begin, missing)
                    if end > total:
                        raise _outside(version.url, offset, target.nbytes, total)
                    if whole and begin:
                        self._warn_once(version.url)
                        _skip(answer, begin)
                    for _ in target.receive(answer):
                        if version.given_up.is_set():
                            return
                if target.done < target.nbytes:
                    raise TransientError(f"the body ended after {target.done - before:,} of {missing:,} bytes")
            except TransientError as failure:
                if target.done - before >= _PROGRESS_NBYTES:
                    tries.progressed()
                tries.failed(failure)
        if target.done == target.nbytes:
            tries.succeeded()

    def _warn_once(self, url: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: its server ignores ranges, so reading a part of an object transfers everything before it: use a server that "
                "answers Range requests (`python -m http.server` does not)",
                url,
            )

    def _checked(self, answer: Answer, version: Version, doing: str, begin: int, nbytes: int) -> tuple[int, bool]:
        """Compare an answer with the request. Return the object's length, and whether the body is the whole object.

        The length may be `_UNKNOWN` if the whole object was requested: the body then ends with the connection or its last chunk.
        The Content-Range header decides whether the body is a range, not the status, because some servers send a range with
        status 200.
        """
        if answer.status == 412:
            raise version.changed()
        if answer.status == 416:
            match = re.fullmatch(r"bytes \*/(\d+)", answer.headers.get("Content-Range", ""))
            raise _outside(version.url, begin, nbytes, int(match[1]) if match else None)
        if answer.status not in (200, 206):
            raise self.failure(answer, version.url, doing)
        said = answer.headers.get("Content-Range")
        match = _CONTENT_RANGE.fullmatch(said or "")
        version.see(_etag_of(answer, version.url, match and match[3]))
        if said is None and answer.status == 200:
            length = answer.headers.get("Content-Length")  # also of HEAD, whose answer has no body
            encoding, is_all = _encoding_of(answer, version.url), nbytes == _LONGEST
            if encoding and not (is_all and encoding in _DECODED):
                raise StoreError(
                    f"{version.url} came encoded as {encoding}, although the request forbids it: have the server store the object "
                    "without Content-Encoding, or disable its compression"
                )
            if length is None and is_all:
                return _UNKNOWN, True
            if length is None:
                raise StoreError(f"{version.url} has no known length: its server must send Content-Length")
            return int(length), True
        if match is None:
            raise TransientError(f"the answer did not say which range it contains: {said!r}")
        first, last, total = map(int, match.groups())
        if first != begin or last != min(begin + nbytes, total) - 1:
            raise TransientError(f"bytes {first:,} to {last + 1:,} came, where {begin:,} to {begin + nbytes:,} were asked for")
        if answer.nbytes not in (None, last + 1 - first):
            raise TransientError(f"the answer announced {answer.nbytes:,} bytes for a range of {last + 1 - first:,}")
        return total, False


def _encoding_of(answer: Answer, url: str) -> str:
    """Return the body's Content-Encoding; "" if there is none, or if the object's name says that its bytes are compressed."""
    encoding: str = answer.headers.get("Content-Encoding", "identity").strip().lower()
    return "" if encoding == "identity" or url.lower().endswith((".gz", ".tgz", ".zst", ".br")) else encoding


def _decoded(data: Buffer, url: str) -> bytes:
    """Return the decompressed body. Of a gzip body with several members `zlib.decompress` would return only the first."""
    parts: list[bytes] = []
    rest = bytes(data)
    try:
        while rest or not parts:
            stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
            parts.append(stream.decompress(rest))
            if not stream.eof:
                raise zlib.error("it is cut off")
            rest = stream.unused_data.lstrip(b"\0")  # zeros may follow a member
    except zlib.error as error:
        raise TransientError(f"the body of {url} does not match its Content-Encoding ({error})") from None
    return b"".join(parts)


def _up_to_its_end(answer: Answer) -> bytes:
    """Read a body of unknown length."""
    pieces = []
    while True:
        room = memoryview(bytearray(_PIECE_NBYTES))
        got = max(answer.reading(room), default=0)
        pieces.append(room[:got])
        if got < len(room):
            return b"".join(pieces)


def _etag_of(answer: Answer, url: str, nbytes: str | None) -> str:
    """Return the version in an answer: its ETag, else its Last-Modified time, with the object's length if that is known.

    `nbytes` is the length according to the answer's Content-Range, if it has one.
    """
    etag = answer.headers.get("ETag")
    if etag:
        return unquoted(etag)
    modified = answer.headers.get("Last-Modified")
    if modified is None:
        raise StoreError(f"the server of {url} does not report versions: it must send ETag or Last-Modified")
    if nbytes is None and "Content-Encoding" not in answer.headers and "Content-Range" not in answer.headers:
        nbytes = answer.headers.get("Content-Length")
    length = "" if nbytes is None else f"/{nbytes}"
    return f"{_OF_TIME}{modified}{length}"


def _are_equal(version: str, other: str) -> bool:
    """Return whether two versions are the same. Those made from times are also the same if only one of them has a length."""
    if version.startswith(_OF_TIME) and ("/" in version) != ("/" in other):
        return version.partition("/")[0] == other.partition("/")[0]
    return version == other


def unquoted(etag: str) -> str:
    """Return an etag without its quotes; a weak one keeps them."""
    return etag[1:-1] if etag.startswith('"') else etag


def _outside(url: str, offset: int, nbytes: int, total: int | None) -> StoreError:
    has = "fewer" if total is None else f"{total:,}"
    return StoreError(f"{url} has {has} bytes: cannot read {nbytes:,} at {offset:,}")


def _skip(answer: Answer, nbytes: int) -> None:
    """Read and discard bytes before the requested range."""
    room = memoryview(bytearray(min(nbytes, 1 << 20)))
    while nbytes:
        got = max(answer.reading(room[:nbytes]), default=0)
        if got == 0:
            raise TransientError(f"the body ended {nbytes:,} bytes before the range")
        nbytes -= got
