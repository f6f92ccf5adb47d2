"""A folder as a store.

An object is written beside its place under a name that no listing shows, brought to the disk, and renamed: readers see the old
bytes or the new ones. What a killed writer leaves are such names, which count for nothing; a day later they go when a process first
writes into that folder. A version is (time, size, inode) of the file, which a rename always changes; every read compares it
before and after.

What every store offers: objects under keys, read whole or by ranges, written whole.

Keys are relative to the store's root and use "/" between parts, whatever the store is. An object is written as a whole or not at
all: nobody ever reads half of one. What changed between two reads is seen by its `etag`.

Keys of objects: parts joined by "/", that name nothing outside the store's root and mean the same in every store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from typing_extensions import Buffer

from shmload.errors import ObjectMissing, StoreError

__all__ = ["HALF", "LocalStore", "Store", "StoredObject", "checked_key", "checked_prefix", "is_key", "remove_abandoned"]


def is_key(key: str) -> bool:
    """Whether the text can name an object: relative, no empty part, no "." or "..", nothing unprintable."""
    return all(part not in ("", ".", "..") for part in key.split("/")) and key.isprintable() and len(key.encode()) <= 1024


def checked_key(key: str, url: str) -> str:
    """The key, if it is one.

    Raises:
        StoreError: it is none; `url` says of which store.
    """
    if not is_key(key):
        raise StoreError(
            f'{key!r} is no key of {url}: a key is relative to it, has no empty part and no "." or "..", nothing '
            f"unprintable, and at most 1,024 bytes. Try {posixpath.normpath('/' + key).strip('/')!r}"
        )
    return key


def checked_prefix(prefix: str, url: str) -> str:
    """A folder's key with a "/" behind it; empty for the root."""
    trimmed = prefix.removesuffix("/")
    return checked_key(trimmed, url) + "/" if trimmed else ""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a store."""

    key: str  # relative to the store's root
    nbytes: int
    etag: str  # another one whenever the bytes may be others


class Store(Protocol):
    """Objects under keys. Picklable; opened again in each process that uses it, so it lives through fork and spawn.

    Every method raises StoreError, which says the URL, what was asked and what the store answered, never a credential; of an object
    that is not there, its subclass ObjectMissing. What may pass is tried again with growing pauses before that.
    """

    @property
    def url(self) -> str:
        """The root, without credentials."""

    def head(self, key: str) -> StoredObject:
        """What is there, without its bytes."""

    def get(self, key: str, *, etag: str | None = None) -> Buffer:
        """All bytes of an object; with `etag`, of that version or an error."""

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        """As many bytes as `out` has, from `offset`, straight into it, by ranges in parallel; the GIL is free meanwhile."""

    def put(self, key: str, data: Buffer) -> StoredObject:
        """Writes an object."""

    def put_file(self, key: str, path: Path) -> StoredObject:
        """Writes a file's bytes, in parts if it is large. Memory stays at a few parts."""

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        """All objects under the folder `prefix` ("a" holds "a/b" but not "ab"), in order of their keys, however many."""

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; one that is not there is no error."""


HALF = ".half-"  # begins the names of files that are being written
_ABANDONED_S = 86_400


def remove_abandoned(folder: Path) -> None:
    """Removes what killed writers have left, as far as can be seen: what nobody has written to for a day."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it has its name by now, or is another user's
                if entry.name.startswith(HALF) and entry.stat().st_mtime < time.time() - _ABANDONED_S:
                    os.unlink(entry.path)


_tidied: set[str] = set()  # folders in which this process has looked for what killed writers have left


@dataclass(frozen=True)
class LocalStore:
    """A folder of this machine, or one that it has mounted.

    Attributes:
        root: the folder; made when something is first written.
    """

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(os.path.abspath(self.root)))

    @property
    def url(self) -> str:
        """The folder's path."""
        return str(self.root)

    def head(self, key: str) -> StoredObject:
        with self._opened(key, None) as file:
            return _describe(key, os.fstat(file.fileno()))

    def get(self, key: str, *, etag: str | None = None) -> Buffer:
        with self._opened(key, etag) as file:
            nbytes = os.fstat(file.fileno()).st_size
            data = bytearray(nbytes)
            self._fill(key, file, memoryview(data), 0)
        return memoryview(data).toreadonly()

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        with self._opened(key, etag) as file:
            self._fill(key, file, memoryview(out).cast("B"), offset)

    def put(self, key: str, data: Buffer) -> StoredObject:
        return self._write(key, lambda file: file.write(data))

    def put_file(self, key: str, path: Path) -> StoredObject:
        with open(path, "rb") as source:
            return self._write(key, lambda file: shutil.copyfileobj(source, file, 1 << 20))

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        folder = checked_prefix(prefix, self.url)
        return self._walk(self.root / folder, folder)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with _named("delete", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def _path(self, key: str) -> Path:
        path = self.root / checked_key(key, self.url)
        if path.name.startswith(HALF):
            raise StoreError(f"{key!r} cannot be a key of {self.url}: names that begin with {HALF!r} are of files being written")
        return path

    @contextmanager
    def _opened(self, key: str, etag: str | None) -> Iterator[BinaryIO]:
        """The object, in the version `etag` if one is given, and the same version at the end as at the beginning."""
        path = self._path(key)
        with _named("read", path), open(path, "rb", buffering=0) as file:
            before = _describe(key, os.fstat(file.fileno())).etag
            if etag is not None and etag != before:
                raise StoreError(f"{path} has changed: version {etag} was asked for, {before} is there. Read its version anew")
            yield file
            if _describe(key, os.fstat(file.fileno())).etag != before:
                raise StoreError(f"{path} was written to while it was read. Replace files by renaming new ones over them")

    def _fill(self, key: str, file: BinaryIO, out: memoryview, offset: int) -> None:
        size = os.fstat(file.fileno()).st_size
        if offset < 0 or offset + len(out) > size:
            raise StoreError(f"{self._path(key)} has {size:,} bytes: there are no {len(out):,} at {offset:,}")
        done = 0
        while done < len(out):
            got = os.preadv(file.fileno(), [out[done:]], offset + done)
            if got == 0:
                raise StoreError(f"{self._path(key)} ended at {offset + done:,} of {size:,} bytes while it was read")
            done += got

    def _write(self, key: str, write: Callable[[BinaryIO], object]) -> StoredObject:
        path = self._path(key)
        half = None
        with _named("write", path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if str(path.parent) not in _tidied:
                    _tidied.add(str(path.parent))
                    remove_abandoned(path.parent)
                beside = f"{path.parent}/{HALF}{secrets.token_hex(8)}"
                with open(beside, "xb") as file:  # buffered: a single write() of the kernel's may stop short
                    half = beside
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                    made = _describe(key, os.fstat(file.fileno()))
                    os.replace(half, path)
                    half = None
                _sync_folder(path.parent)
                return made
            finally:
                if half is not None:
                    os.unlink(half)

    def _walk(self, folder: Path, prefix: str) -> Iterator[StoredObject]:
        """All files below, in order of their keys: "a-b" comes before "a/b", so a folder sorts as its name and a slash."""
        found: list[tuple[str, str]] = []
        with _named("list", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            found = sorted((entry.name + "/" * entry.is_dir(), entry.path) for entry in entries)
        for name, path in found:
            if name.startswith(HALF) or not is_key(name.removesuffix("/")):
                continue
            if name.endswith("/"):
                yield from self._walk(Path(path), prefix + name)
                continue
            try:
                state = os.stat(path)
            except FileNotFoundError:
                continue  # deleted since, or a link to nothing
            if stat.S_ISREG(state.st_mode):
                yield _describe(prefix + name, state)


def _describe(key: str, state: os.stat_result) -> StoredObject:
    return StoredObject(key, state.st_size, f"{state.st_mtime_ns:x}-{state.st_size:x}-{state.st_ino:x}")


def _sync_folder(folder: Path) -> None:
    """Brings a rename to the disk. Some network file systems cannot; then their own promise holds."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


@contextmanager
def _named(verb: str, path: Path) -> Iterator[None]:
    """Has what the system refuses to do with a file be a StoreError that says so."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if verb == "read" and isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            raise ObjectMissing(f"no such object: {path}") from None
        raise StoreError(f"cannot {verb} {path}: {error.strerror or error}") from error
