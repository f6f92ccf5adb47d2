"""Stores that are reached through fsspec: gs://, az://, abfs://, hf://, oci://, sftp:// and others.

A file system is opened in the process that uses it and never passed on, because the connections, event loops and threads of
fsspec's libraries do not survive a fork. A child does not use its parent's file systems, and opens its own.

These libraries have little in common: ranges, a listing, and some version of an object, if only its time. None can make a read
depend on the object being unchanged, so its version is requested after each read, and an object that was replaced is an error, as
in other stores. Only a read of any version by a single request is not checked, because it cannot mix versions. A store on the
Hugging Face hub is pinned to one commit, the newest at its first use, so nothing in it changes.

S3 and web servers have stores of their own (s3_store.py, http_store.py), which take a fraction of the CPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from typing_extensions import Buffer

from shmload.errors import ObjectMissing, StoreError
from shmload.storage.keys import checked_key, checked_prefix
from shmload.storage.outage import Outage
from shmload.storage.partial_files import PARTIAL_PREFIX, is_partial
from shmload.storage.retry import Retry, RetryPolicy, TransientError
from shmload.storage.store import StoredObject
from shmload.storage.transport import describe

__all__ = ["FilesystemStore"]

# Schemes whose objects appear as a whole. In the others, files are written under another name and renamed.
_OBJECTS = ("abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "memory", "oci", "ocilake", "oss", "r2", "s3a")
# scheme -> extra of shmload that installs its library
_PACKAGES = {"gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure", "hf": "huggingface", "sftp": "sftp"}
_VERSIONS = ("etag", "ETag", "generation", "blob_id", "sha", "checksum")  # names that file systems give to an object's version
_TIMES = ("mtime", "last_modified", "LastModified", "updated", "modified", "created")
_TRANSIENT = {"OSError", "EOFError", "TimeoutError", "ClientError", "ServiceRequestError", "ServiceResponseError", "TransportError"}
_TRANSIENT |= {"SSHException"}  # by name, because usually not all of these libraries are installed

_PART_NBYTES = 8 << 20  # a large read consists of parts of this size, several of which are read at once
T = TypeVar("T")


class FilesystemStore:
    """A folder of a file system of fsspec.

    Args:
        url: scheme, host or bucket, and folder, without a password: give that in `options`.
        options: further arguments of the file system, which fsspec calls storage options. `retries` and `timeout_s` among them
            set the retry policy.
        retry_policy: how often and for how long to retry.
        parallel: number of ranges of one large object that are read at once.
    Raises:
        StoreError: fsspec or the scheme's own library is not installed, the scheme is unknown, or the URL contains a password.
        TypeError: `options` is not a dict.
    """

    outage: Outage | None = None  # as in WebReader

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, *, retry_policy: RetryPolicy | None = None, parallel: int = 4
    ) -> None:
        parts = urlsplit(url)
        self.scheme = parts.scheme
        _class_of(self.scheme)
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"{self.scheme}:// takes client={{...}}, a dict of its library's options, not {type(options).__name__}")
        if parts.password is not None:
            raise StoreError(f"the {self.scheme}:// URL contains a password: give it in client={{'password': ...}}")
        self.url = url.rstrip("/")
        self.options = dict(options or {})
        patience = {name: self.options.pop(name) for name in ("retries", "timeout_s") if name in self.options}
        self.retry_policy = replace(retry_policy or RetryPolicy(), **patience)
        self.parallel = parallel
        self._root: str | None = None  # path of the folder in the file system
        self._pool = _FileSystemPool()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_pool": _FileSystemPool()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FilesystemStore) and (self.url, self.options) == (other.url, other.options)

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"FilesystemStore({self.url!r})"

    # ------------------------------------------------------------ reading

    def head(self, key: str) -> StoredObject:
        return self._asked(key, "look at", lambda system, path: self._described(system, key, path))

    def get(self, key: str, *, etag: str | None = None) -> Buffer:
        found = self.head(key)
        out = np.empty(found.nbytes, np.uint8).data
        self.read_into(key, out, etag=found.etag if etag is None else etag)
        return out.toreadonly()

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        view = memoryview(out).cast("B")
        if offset < 0:
            raise StoreError(f"{self._name(key)} has no bytes at {offset:,}: offsets begin at 0")
        is_alone = len(view) <= _PART_NBYTES and self.scheme in _OBJECTS  # one request returns bytes of one version only
        version = self.head(key).etag if etag is None and not is_alone else etag
        got = self._asked(key, "read", lambda system, path: self._read(system, path, view, offset))
        if version is None and got == len(view) > 0:
            return
        now = self.head(key)
        if version not in (None, now.etag):
            raise StoreError(
                f"{self._name(key)} has changed: version {version} was requested, but it is now {now.etag}. Read its version again"
            )
        if got < len(view) or offset > now.nbytes:
            raise StoreError(f"{self._name(key)} has {now.nbytes:,} bytes: cannot read {len(view):,} at {offset:,}")

    def _read(self, system: Any, path: str, out: memoryview, offset: int) -> int:
        """Read as many bytes of a range as exist. Return their number."""
        num_parts = -(-len(out) // _PART_NBYTES)
        bounds = list(pairwise(len(out) * number // num_parts for number in range(num_parts + 1))) if num_parts else []
        try:
            return sum(_put(out, begin, data) for begin, data in self._parts(system, path, bounds, offset))
        except Exception as error:
            if _status_of(error) != 416:  # the object ends before the range
                raise
            return 0

    def _parts(self, system: Any, path: str, bounds: list[tuple[int, int]], offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield the offset of each part within the range, and its bytes."""
        if not system.async_impl:
            with system.open(path, "rb", cache_type="none", block_size=_PART_NBYTES) as file:
                for begin, end in bounds:
                    file.seek(offset + begin)
                    yield begin, file.read(end - begin)
            return
        for first in range(0, len(bounds), self.parallel):
            some = bounds[first : first + self.parallel]
            starts, ends = ([offset + bound[side] for bound in some] for side in (0, 1))
            slow = system.slow_by(ends[-1] - starts[0])
            found = slow.cat_ranges([path] * len(some), starts, ends, on_error="raise")
            yield from zip([begin for begin, _ in some], found, strict=True)

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        folder = checked_prefix(prefix, self.url)

        def find(system: Any, root: str) -> list[StoredObject]:
            self._forget(system)
            try:
                found = system.find(f"{root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
            objects = []
            for path, info in found.items():
                key = path.removeprefix(root).lstrip("/")
                if info["type"] == "file" and key.startswith(folder) and not is_partial(key):
                    objects.append(_object(key, info))
            return sorted(objects, key=lambda each: each.key)

        return iter(self._asked(None, "list", find))

    # ------------------------------------------------------------ writing

    def put(self, key: str, data: Buffer) -> StoredObject:
        sent = bytes(memoryview(data).cast("B"))
        return self._written(key, lambda system, path: system.slow_by(len(sent)).pipe_file(path, sent))

    def put_file(self, key: str, path: Path) -> StoredObject:
        return self._written(key, lambda system, to: system.slow_by(os.path.getsize(path)).put_file(str(path), to))

    def _written(self, key: str, write: Callable[[Any, str], object]) -> StoredObject:
        def once(system: Any, path: str) -> StoredObject:
            if self.scheme in _OBJECTS:
                write(system, path)
            else:
                folder = path.rpartition("/")[0]
                system.makedirs(folder, exist_ok=True)
                half = f"{folder}/{PARTIAL_PREFIX}{secrets.token_hex(8)}"
                try:
                    write(system, half)
                    system.mv(half, path)
                except BaseException:
                    with contextlib.suppress(Exception):
                        system.rm_file(half)
                    raise
            return self._described(system, key, path)

        return self._asked(key, "write", once)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(ObjectMissing):
                self._asked(key, "delete", lambda system, path: system.rm_file(path))

    def close(self) -> None:
        """Close the connections of this process. The store opens new ones when it is used again."""
        self._pool.close()

    # ------------------------------------------------------------ the file system

    def _path(self, system: Any, key: str | None) -> str:
        """Return the path of an object, or of the folder if `key` is None, in the file system."""
        root = self._rooted(system)
        if key is None:
            return root
        path = f"{root}/{key}"
        if is_partial(key):
            raise StoreError(
                f"{key!r} cannot be a key of {self.url}: names that begin with {PARTIAL_PREFIX!r} belong to unfinished files"
            )
        if system._strip_protocol(path) != path:
            raise StoreError(f"{key!r} cannot be a key of {self.url}: its library interprets part of it differently")
        return path

    def _name(self, key: str | None) -> str:
        return self.url if key is None else f"{self.url}/{key}"

    def _described(self, system: Any, key: str, path: str) -> StoredObject:
        self._forget(system)
        info = system.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return _object(key, info)

    def _forget(self, system: Any) -> None:
        """Clear the file system's cache of listings, if objects may have changed."""
        if self.scheme != "hf":
            system.invalidate_cache()

    def _rooted(self, system: Any) -> str:
        """Return the folder's path in the file system; on the Hugging Face hub, at the newest commit."""
        if self._root is None:
            root: str = system._strip_protocol(self.url)
            if self.scheme == "hf":
                at = system.resolve_path(root)
                if hasattr(at, "repo_id"):
                    sha = system._api.repo_info(at.repo_id, repo_type=at.repo_type, revision=at.revision).sha
                    kind = "" if at.repo_type == "model" else f"{at.repo_type}s/"
                    root = "/".join(part for part in (f"{kind}{at.repo_id}@{sha}", at.path_in_repo) if part)
            self._root = root.rstrip("/")
        return self._root

    def _opened(self) -> Any:
        """Open a file system for this process."""
        made = _class_of(self.scheme)
        given = {**made._get_kwargs_from_urls(self.url), **self.options}
        if self.scheme != "sftp":
            return made(**given, skip_instance_cache=True)
        stall_s = min(self.retry_policy.stall_s, self.retry_policy.timeout_s)
        waits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), stall_s)
        system = made(**{**waits, **given}, skip_instance_cache=True)
        system.ftp.get_channel().settimeout(stall_s)  # waits forever by default
        return system

    def _asked(self, key: str | None, verb: str, ask: Callable[[Any, str], T]) -> T:
        """Call `ask` and return its result, with retries.

        A retry opens a new connection if the file system serves one caller at a time.

        Args:
            key: key of the object; None is the folder.
            verb: the operation in words, for the error.
            ask: called with a file system and the path.
        Raises:
            ObjectMissing: the object does not exist.
            StoreError: the operation failed.
        """
        if key is not None:
            checked_key(key, self.url)  # before anything is opened
        outage = self.outage if verb in ("look at", "read") else None  # as in WebReader
        tries = Retry(self.retry_policy, f"{verb} {self._name(key)}", outage)
        while True:
            try:
                with self._pool.one(self._opened) as system:
                    bounded = _Bounded(system, tries.left_s) if system.async_impl else _Unbounded(system)
                    found = ask(bounded, self._path(system, key))
                tries.succeeded()
                return found
            except StoreError:
                raise
            except Exception as error:
                failure = self._failure(error, key, verb)
            if isinstance(failure, StoreError):
                raise failure
            tries.failed(failure)

    def _failure(self, error: Exception, key: str | None, verb: str) -> StoreError | TransientError:
        """Return the error to raise for an exception of the file system's library."""
        status = _status_of(error)
        # FileExistsError means that a file is where a folder should be
        kinds = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
        if (isinstance(error, kinds) and verb != "write") or status == 404:
            return ObjectMissing(f"no such object: {self._name(key)}")
        said = self._without_secrets(describe(error))
        if type(error).__name__ == "FSTimeoutError":
            said = "its library got no answer in time, after all its retries"
        if re.search("BlobArchived|InvalidObjectState", f"{said} {getattr(error, 'error_code', '')} {error.__cause__}"):
            remedy = "the object is archived: restore (rehydrate) it first, then read it"
        elif isinstance(error, PermissionError) or status in (401, 403) or "uthenticat" in type(error).__name__:
            remedy = "check the credentials in the environment, where the scheme's library looks for them, or in client={...}"
        elif (
            status in (408, 429)
            or (status or 0) >= 500
            or (status is None and not isinstance(error, kinds) and _is_of_network(error))
        ):
            is_silent = isinstance(error, TimeoutError) or type(error).__name__ == "FSTimeoutError"
            return TransientError(said, of_store=True, is_silent=is_silent)
        else:
            remedy = "check the URL and client={...}, which contains the file system's options"
        return StoreError(f"cannot {verb} {self._name(key)}: {said}; {remedy}")

    def _without_secrets(self, text: str) -> str:
        """Remove the values of options, which may be secret, and URL queries from a library's message."""
        for value in self.options.values():
            for part in re.findall(r"[^;&=\s]{8,}", value) if isinstance(value, str) else ():
                text = text.replace(part, "...")
        return re.sub(r"\?\S+", "?...", text)


class _Unbounded:
    """A file system without time limits."""

    def __init__(self, system: Any) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def slow_by(self, nbytes: int) -> Any:
        """Return the same file system, with additional time for a transfer of `nbytes` bytes."""
        return self


class _Bounded(_Unbounded):
    """An asynchronous file system whose calls have a time limit, because its library's own retries may take minutes."""

    def __init__(self, system: Any, wait_s: float) -> None:
        super().__init__(system)
        self._wait_s = wait_s

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(found, timeout=self._wait_s) if name in _CALLS else found  # fsspec's `sync` takes the timeout

    def slow_by(self, nbytes: int) -> Any:
        return _Bounded(self._system, self._wait_s + nbytes / _SLOWEST)


_CALLS = frozenset(("info", "find", "cat_ranges", "pipe_file", "put_file", "rm_file"))
_SLOWEST = 1 << 16  # bytes per second that a transfer is expected to reach at least


class _FileSystemPool:
    """The file systems of one store, by process.

    A forked child neither uses nor closes its parent's file systems, because closing them would end the parent's connections. An
    asynchronous file system serves all threads at once; the others serve one thread at a time. There is no lock, which a fork
    might leave locked: each step is a single operation of a list.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[Any]] = {}  # idle or shared file systems by process

    @contextmanager
    def one(self, make: Callable[[], Any]) -> Iterator[Any]:
        """Lend a file system for the duration of the context. One whose use has failed is not used again, unless it is shared."""
        idle = self._of.setdefault(os.getpid(), [])
        try:
            system = idle.pop()
        except IndexError:
            system = make()
        if serves_all := system.async_impl or "hf" in system.protocol:
            idle.append(system)
        yield system
        if not serves_all:
            idle.append(system)

    def close(self) -> None:
        """Close the file systems of this process. Asynchronous ones end with their last reference."""
        for system in self._of.pop(os.getpid(), []):
            client: Any = getattr(system, "client", None)
            if hasattr(client, "close"):
                client.close()  # SSH has a thread

    def __del__(self) -> None:
        self.close()


def _class_of(scheme: str) -> Any:
    """Return the class of a scheme's file systems.

    Args:
        scheme: scheme of the URL.
    Raises:
        StoreError: the scheme is unknown, or its library is not installed.
    """
    try:
        import fsspec

        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = _PACKAGES.get(scheme)
        remedy = f"pip install 'shmload[{extra}]'" if extra else "install it"
        raise StoreError(f"{scheme}:// needs a library that is not installed ({error}): {remedy}") from None
    except ValueError:
        raise StoreError(
            f"{scheme}:// is not a known kind of store: give a folder, file://, http://, https://, s3://bucket/folder, or a scheme "
            "of fsspec, such as gs://, az://, hf:// or sftp://"
        ) from None


def _object(key: str, info: Mapping[str, Any]) -> StoredObject:
    """Return the description of an object. Its version is the etag or checksum, else its time and length."""
    nbytes = int(info["size"])
    for name in _VERSIONS:
        if info.get(name):
            return StoredObject(key, nbytes, str(info[name]).strip('"'))
    for name in _TIMES:
        if when := info.get(name):
            return StoredObject(key, nbytes, f"{when.timestamp() if isinstance(when, datetime) else when}-{nbytes:x}")
    return StoredObject(key, nbytes, f"{nbytes:x}")


def _put(out: memoryview, begin: int, data: bytes) -> int:
    out[begin : begin + len(data)] = data
    return len(data)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status in a library's error, or None. Libraries store it under various names."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            found = getattr(holder, name, None)
            if isinstance(found, int) and 100 <= found < 600:
                return found
            if isinstance(found, str) and re.fullmatch(r"[1-5]\d\d", found):
                return int(found)
    return None


def _is_of_network(error: BaseException) -> bool:
    """Return whether the error comes from the network or the operating system, so that a retry may succeed."""
    return not _TRANSIENT.isdisjoint(kind.__name__ for kind in type(error).__mro__)
