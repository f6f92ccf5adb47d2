"""A plain web server as a store: objects to be read by name.

Where bytes of an object go as they come: into memory, or into a file.

A file is not written through a mapping: each page would be made by a fault, cleared, and only then filled. Measured (ext4), CPU per
MiB: 0.63 ms through a new mapping, 0.22 by pwrite out of a buffer that stays in the processor's cache, where the checksum finds it,
too. A full disk is an error then, no SIGBUS.

Reading objects over HTTP: what S3-compatible stores and plain web servers have in common.

An object is read by ranges, several at once, each straight into its place. Nothing is believed: an answer says which bytes of how
many it holds, how long it is and of which version, and all of that is compared with what was asked for and with the other ranges.
What is missing after a failure is asked for from where it broke off, in the same version. A server that answers a range with the
whole object is read up to the range's end.
"""

from __future__ import annotations

import os
import re
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeVar, cast
from urllib.parse import quote, unquote, urljoin, urlsplit

import numpy as np
from typing_extensions import Buffer

from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, StoreError
from shmload.storage.local import StoredObject, checked_key
from shmload.storage.outage import Outage
from shmload.storage.transport import Answer, Retry, RetryPolicy, TransientError, Transport

__all__ = ["FilePart", "HttpStore", "MemoryTarget", "Version", "WebReader", "all_of", "joined_crc32c", "unquoted"]

_BUFFER_NBYTES = 64 << 10  # more makes larger pages, out of memory that virtual machines give back to their hosts when free
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its highest power in the lowest bit


class MemoryTarget:
    """A range that goes into memory.

    Attributes:
        nbytes: of the range.
        done: how many of them are in place.
    """

    def __init__(self, out: memoryview) -> None:
        self.out = out
        self.nbytes = len(out)
        self.done = 0

    def receive(self, answer: Answer) -> Iterator[None]:
        """Takes what an answer brings, from `done` on; stops at each look to see whether it is still wanted."""
        begin = self.done
        for got in answer.reading(self.out[begin:]):
            self.done = begin + got
            yield


class FilePart:
    """A range that goes into a file; otherwise as MemoryTarget.

    Args:
        fd: open for writing.
        offset: where the range begins in the file.
        nbytes: of the range.
    Attributes:
        crc32c: of what is in place.
    """

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self._fd, self._offset = fd, offset
        self.nbytes = nbytes
        self.done = 0
        self.crc32c = 0
        self._room = memoryview(bytearray(min(nbytes, _BUFFER_NBYTES)))

    def receive(self, answer: Answer) -> Iterator[None]:
        try:
            if answer.is_plain():
                yield from self._by_reading(answer, answer.num_read_ahead())
                yield from self._straight(answer, self.nbytes - self.done - 1)
            yield from self._by_reading(answer, self.nbytes - self.done)  # the client itself sees the body's end
        except OSError as error:
            raise StoreError(
                f"a copy of {self.nbytes:,} bytes cannot be written: {error.strerror}. Give the cache a folder on a disk with "
                "more room, or fewer bytes"
            ) from error

    def _straight(self, answer: Answer, nbytes: int) -> Iterator[None]:
        begin = self.done
        for done, crc in answer.to_file(self._fd, self._offset + begin, nbytes, self.crc32c):
            self.done, self.crc32c = begin + done, crc
            yield

    def _by_reading(self, answer: Answer, nbytes: int) -> Iterator[None]:
        end = min(self.done + nbytes, self.nbytes)
        got = -1
        while got and self.done < end:
            got = 0
            try:
                for got in answer.reading(self._room[: end - self.done]):  # noqa: B007  # kept when it breaks off
                    pass
            finally:
                self._write(self._room[:got])
            yield

    def _write(self, data: memoryview) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._offset + self.done + written)
        self.crc32c = crc32c(data, self.crc32c)
        self.done += len(data)


def joined_crc32c(parts: list[tuple[int, int]]) -> int:
    """The checksum of bytes of which parts were checked apart.

    Args:
        parts: (checksum, bytes) of each, in order.
    Source: M. Adler, zlib, crc32_combine: to append n bytes is to multiply by x^(8n), modulo the polynomial.
    """
    crc = 0
    for part, nbytes in parts:
        crc = _times(_power_of_x(8 * nbytes), crc) ^ part
    return crc


def _power_of_x(exponent: int) -> int:
    found, square = 1 << 31, 1 << 30  # 1 and x
    while exponent:
        if exponent & 1:
            found = _times(square, found)
        square = _times(square, square)
        exponent >>= 1
    return found


def _times(one: int, other: int) -> int:
    """The product of two polynomials, modulo that of the checksum."""
    found, bit = 0, 1 << 31
    while bit:
        if one & bit:
            found ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return found


T = TypeVar("T")
U = TypeVar("U")


def all_of(do: Callable[[T], U], things: Iterable[T], num_threads: int, given_up: threading.Event) -> list[U]:
    """What `do` makes of each, by threads that end with the call. The first failure, or Ctrl-C, sets `given_up` and is raised."""
    with ThreadPoolExecutor(num_threads, "shmload-store") as threads:
        try:
            futures = [threads.submit(do, each) for each in things]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            given_up.set()
            threads.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


_PART_NBYTES = 16 << 20  # the least that is worth a range of its own
_PROGRESS_NBYTES = 64 << 10  # what counts as progress between two failures
_LONGEST = 1 << 62  # bytes: as many as there are
_UNKNOWN = -1  # bytes of an object whose server has not said
_PIECE_NBYTES = 1 << 20  # of such an object that are read at a time
_DECODED = ("gzip", "x-gzip", "deflate")  # Content-Encodings that a whole body is decoded from
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Version:
    """The version of an object that all ranges of one read have to be of.

    Args:
        url: of the object.
        etag: the version asked for; None: whichever comes first.
    """

    def __init__(self, url: str, etag: str | None) -> None:
        self.url = url
        self.etag = etag
        self.given_up = threading.Event()  # another range has failed for good
        self._lock = threading.Lock()

    @property
    def condition(self) -> dict[str, str]:
        """Headers that ask for this version. Weak etags never match there, and made up ones mean nothing to a server."""
        return {"If-Match": f'"{self.etag}"'} if self.etag and not self.etag.startswith(("W/", "time:")) else {}

    def see(self, found: str) -> None:
        """Compares an answer's version."""
        with self._lock:
            if self.etag is None:
                self.etag = found
        if found != self.etag:
            raise self.changed(found)

    def changed(self, found: str = "another one") -> StoreError:
        return StoreError(
            f"{self.url} has changed: version {self.etag} was being read, {found} is there now. Read its version anew"
        )


class WebReader(ABC):
    """Heads and bytes of objects behind HTTP."""

    retry_policy: RetryPolicy
    parallel: int
    outage: Outage | None = None  # set by a dataset, whose reads fail together; writing and listing do not use it

    @abstractmethod
    def url_of(self, key: str) -> str:
        """The object's URL, without credentials."""

    @abstractmethod
    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        """Sends a request about an object."""

    @abstractmethod
    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | TransientError:
        """What an answer means that is no success."""

    def head(self, key: str) -> StoredObject:
        return self._begin(key, 1, None)[0]  # the first byte's answer has reasons and a length of its own, one to HEAD has not

    def get(self, key: str, *, etag: str | None = None) -> Buffer:
        return self._begin(key, _LONGEST, etag)[1]

    def _begin(self, key: str, nbytes: int, etag: str | None) -> tuple[StoredObject, Buffer]:
        """An object and its first bytes, by one request, which is repeated if it breaks off."""
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
                            raise TransientError(f"a body ended after {target.done:,} of {target.nbytes:,} bytes")
                        data = target.out.toreadonly()
                    if nbytes == _LONGEST and _encoding_of(answer, url) in _DECODED:
                        data = _decoded(data, url)
                    return StoredObject(key, total, version.etag or ""), data
            with self.ask("HEAD", key, {}) as answer:  # an empty object has no first byte to ask for
                total, _ = self._checked(answer, version, f"read {url}", 0, 0)
                if total:
                    raise StoreError(f"{url} has {total:,} bytes, but its server refuses ranges of it")
                return StoredObject(key, 0, version.etag or ""), b""

        return self.repeatedly(f"read {url}", try_once, outage=self.outage)

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        view = memoryview(out).cast("B")
        self._fill_all(key, offset, [MemoryTarget(view[begin:end]) for begin, end in self._parts(len(view))], etag)

    def read_to_file(self, key: str, fd: int, nbytes: int, *, etag: str | None = None) -> int:
        """An object of known length into a file, by ranges in parallel; its CRC-32C, taken as the bytes come."""
        parts = [FilePart(fd, begin, end - begin) for begin, end in self._parts(nbytes)]
        self._fill_all(key, 0, parts, etag)
        return joined_crc32c([(part.crc32c, part.nbytes) for part in parts])

    def repeatedly(
        self, doing: str, try_once: Callable[[], T], is_over: Callable[[], bool] = bool, outage: Outage | None = None
    ) -> T:
        """Return what the first try returns that does not fail.

        Args:
            doing: the operation in words, for the error.
            try_once: one try.
            is_over: returns whether the result is no longer wanted, so that no further try is made.
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
        """Where the parts that are worth a range of their own begin and end."""
        num_parts = min(self.parallel, max(1, nbytes // _PART_NBYTES))
        return list(pairwise(nbytes * number // num_parts for number in range(num_parts + 1)))

    def _fill_all(self, key: str, offset: int, parts: Sequence[MemoryTarget | FilePart], etag: str | None) -> None:
        """Reads ranges that follow each other, in threads that end with the call, so that no fork meets one; a failure ends all."""
        version = Version(self.url_of(key), etag)
        begins = accumulate((part.nbytes for part in parts[:-1]), initial=offset)
        if len(parts) == 1:
            self._fill(key, offset, parts[0], version)
            return
        ranges = list(zip(begins, parts, strict=True))
        all_of(lambda each: self._fill(key, *each, version), ranges, len(parts), version.given_up)

    def _fill(self, key: str, offset: int, target: MemoryTarget | FilePart, version: Version) -> None:
        """Reads one range into its place, however often it breaks off."""
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
                    if whole:
                        _skip(answer, begin)
                    for _ in target.receive(answer):
                        if version.given_up.is_set():
                            return
                if target.done < target.nbytes:
                    raise TransientError(f"a body ended after {target.done - before:,} of {missing:,} bytes")
            except TransientError as failure:
                if target.done - before >= _PROGRESS_NBYTES:
                    tries.progressed()
                tries.failed(failure)
        if target.done == target.nbytes:
            tries.succeeded()

    def _checked(self, answer: Answer, version: Version, doing: str, begin: int, nbytes: int) -> tuple[int, bool]:
        """Compares an answer with what was asked for: how many bytes the object has, and whether the body is all of them.

        Where all of an object was asked for, the number may be `_UNKNOWN`: the body ends where the connection or its pieces do.
        That it names a range decides, not its status: there are servers that send a range as 200.
        """
        if answer.status == 412:
            raise version.changed()
        if answer.status == 416:
            match = re.fullmatch(r"bytes \*/(\d+)", answer.headers.get("Content-Range", ""))
            raise _outside(version.url, begin, nbytes, int(match[1]) if match else None)
        if answer.status not in (200, 206):
            raise self.failure(answer, version.url, doing)
        version.see(_etag_of(answer, version.url))
        said = answer.headers.get("Content-Range")
        if said is None and answer.status == 200:
            length = answer.headers.get("Content-Length")  # of HEAD too, whose answer has no body
            encoding, is_all = _encoding_of(answer, version.url), nbytes == _LONGEST
            if encoding and not (is_all and encoding in _DECODED):
                raise StoreError(
                    f"{version.url} came encoded as {encoding}, though the request forbids it: have the server store the object "
                    "without Content-Encoding, or switch its compression off"
                )
            if length is None and is_all:
                return _UNKNOWN, True
            if length is None:
                raise StoreError(f"{version.url} has no known length: its server has to send Content-Length")
            return int(length), True
        match = _CONTENT_RANGE.fullmatch(said or "")
        if match is None:
            raise TransientError(f"an answer did not say which range it was: {said!r}")
        first, last, total = map(int, match.groups())
        if first != begin or last != min(begin + nbytes, total) - 1:
            raise TransientError(f"bytes {first:,} to {last + 1:,} came, where {begin:,} to {begin + nbytes:,} were asked for")
        if answer.nbytes not in (None, last + 1 - first):
            raise TransientError(f"an answer announced {answer.nbytes:,} bytes for a range of {last + 1 - first:,}")
        return total, False


def _encoding_of(answer: Answer, url: str) -> str:
    """Return the body's Content-Encoding, "" if there is none or the object's name says that its bytes are compressed."""
    encoding: str = answer.headers.get("Content-Encoding", "identity").strip().lower()
    return "" if encoding == "identity" or url.lower().endswith((".gz", ".tgz", ".zst", ".br")) else encoding


def _decoded(data: Buffer, url: str) -> bytes:
    """Return what a body of encoding gzip or deflate contains."""
    try:
        return zlib.decompress(data, wbits=zlib.MAX_WBITS | 32)
    except zlib.error as error:
        raise TransientError(f"the body of {url} is not what its Content-Encoding says ({error})") from None


def _up_to_its_end(answer: Answer) -> bytes:
    """Read a body of which nobody has said how long it is."""
    pieces = []
    while True:
        room = memoryview(bytearray(_PIECE_NBYTES))
        got = max(answer.reading(room), default=0)
        pieces.append(room[:got])
        if got < len(room):
            return b"".join(pieces)


def _etag_of(answer: Answer, url: str) -> str:
    """The version that an answer names; without a name, time and length must do."""
    etag = answer.headers.get("ETag")
    if etag:
        return unquoted(etag)
    modified = answer.headers.get("Last-Modified")
    if modified is None:
        raise StoreError(f"the server of {url} gives no versions: it has to send ETag or Last-Modified")
    return f"time:{modified}"


def unquoted(etag: str) -> str:
    """A version's name without its quotes; a weak one keeps them."""
    return etag[1:-1] if etag.startswith('"') else etag


def _outside(url: str, offset: int, nbytes: int, total: int | None) -> StoreError:
    has = "fewer" if total is None else f"{total:,}"
    return StoreError(f"{url} has {has} bytes: there are no {nbytes:,} at {offset:,}")


def _skip(answer: Answer, nbytes: int) -> None:
    """Reads past what was not asked for."""
    room = memoryview(bytearray(min(nbytes, 1 << 20)))
    while nbytes:
        got = max(answer.reading(room[:nbytes]), default=0)
        if got == 0:
            raise TransientError(f"a body ended {nbytes:,} bytes before the range")
        nbytes -= got


_MOST_REDIRECTS = 5


class HttpStore(WebReader):
    """What lies below a URL; it can be read, but neither listed nor written.

    Args:
        url: http:// or https://.
        retry_policy: how often and how long is tried again.
        parallel: ranges of one large object that are read at once.
        ca_file: certificates to trust beside the system's.
    """

    def __init__(self, url: str, *, retry_policy: RetryPolicy | None = None, parallel: int = 4, ca_file: str | None = None) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise StoreError(
                f"{parts.scheme}://{parts.hostname}: a store's URL has neither user nor password, nor anything behind ? or #"
            )
        self.retry_policy = retry_policy or RetryPolicy()
        self.parallel = parallel
        self.ca_file = ca_file
        self.url = f"{parts.scheme}://{parts.netloc}{quote(unquote(parts.path), safe='/-_.~')}".rstrip("/")
        self._queries: dict[str, str] = {}
        self._transports: dict[str, Transport] = {}

    def add_query(self, key: str, query: str) -> None:
        """Send a query with each request for this object, such as the signature of a presigned URL. No error or name shows it.

        Raises:
            StoreError: the object has another query already, so it may be another object.
        """
        if self._queries.setdefault(key, query) != query:
            raise StoreError(
                f"{self.url_of(key)} was given twice, with different queries: an object is known by its path, so give each path "
                "once"
            )

    def put(self, *_: Any) -> NoReturn:
        """A web server is only read."""
        raise StoreError(f"{self.url} can only be read: write to a folder or to s3://")

    put_file = delete = put

    def list_objects(self, prefix: str = "") -> NoReturn:
        raise StoreError(
            f"{self.url} cannot be listed: a web server has no one way to say what it holds. Name the shards, for example as "
            f"{self.url}/name-{{000000..000099}}.tar, or write a manifest beside them"
        )

    def url_of(self, key: str) -> str:
        return f"{self.url}/{quote(checked_key(key, self.url), safe='/-_.~')}"

    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        url = first = self.url_of(key)
        for _ in range(_MOST_REDIRECTS + 1):
            parts = urlsplit(url)
            transport = self._transport(f"{parts.scheme}://{parts.netloc}")
            query = parts.query or self._queries.get(key, "") * (url == first)
            target = (parts.path or "/") + (f"?{query}" if query else "")
            full = {"Host": parts.netloc, "Accept-Encoding": "identity", "User-Agent": "shmload", **headers}
            answer = transport.request(method, target, full)
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            answer.close()
            following = urljoin(url, answer.headers.get("Location", ""))
            if urlsplit(following).scheme not in ("http", "https") or (transport.secure and following.startswith("http:")):
                raise StoreError(f"{self.url_of(key)} leads elsewhere, to what is no https: URL: give the right URL")
            url = following
        raise StoreError(f"{self.url_of(key)} leads elsewhere more than {_MOST_REDIRECTS} times: give the URL of its end")

    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | TransientError:
        said = f"{answer.status} {answer.reason}"
        if answer.status in (404, 410):
            return ObjectMissing(f"no such object: {url}")
        if answer.status in (408, 429) or (answer.status >= 500 and answer.status != 501):
            return TransientError(f"the server says {said}", of_store=True)
        remedy = "it wants to know who asks: use s3:// with credentials" if answer.status in (401, 403) else "look at the URL"
        if answer.status in (400, 401, 403) and any(url == self.url_of(key) for key in self._queries):
            remedy = "the signature in the URL's query may be wrong or expired: make a new URL"
        return StoreError(f"cannot {doing}: the server says {said}; {remedy}")

    def _transport(self, base_url: str) -> Transport:
        if base_url not in self._transports:
            self._transports[base_url] = Transport(base_url, stall_s=self.retry_policy.stall_s, ca_file=self.ca_file)
        return self._transports[base_url]

    def close(self) -> None:
        """Closes idle connections; the store opens others when it is used again."""
        for transport in self._transports.values():
            transport.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HttpStore) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"
