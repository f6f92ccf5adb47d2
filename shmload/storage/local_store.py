"""`LocalStore`: a folder as a store.

An object is written next to its final path under a name that listings skip, synced to the disk, and renamed, so readers see either
the old bytes or the new ones. A killed writer leaves such a partial file, which is ignored; files older than a day are removed when
a process first writes into that folder. The etag is (time, size, inode) of the file, which a rename always changes; every read
compares it before and after.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from typing_extensions import Buffer

from shmload.errors import ObjectMissing, StoreError
from shmload.storage.folder_walk import FolderIdentity, identity_of
from shmload.storage.keys import checked_key, checked_prefix, is_listed
from shmload.storage.partial_files import PARTIAL_PREFIX, is_partial, remove_abandoned
from shmload.storage.store import StoredObject

__all__ = ["LocalStore"]

_tidied: set[str] = set()  # folders in which this process has removed abandoned files


@dataclass(frozen=True)
class LocalStore:
    """A folder of this machine, or one that it has mounted.

    Attributes:
        root: path of the folder; created at the first write.
    """

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(os.path.abspath(self.root)))

    @property
    def url(self) -> str:
        """Return the folder's path."""
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
                if path.parent != self.root:
                    with contextlib.suppress(OSError):  # it has other files; empty folders are removed, as a bucket has none
                        path.parent.rmdir()

    def _path(self, key: str) -> Path:
        path = self.root / checked_key(key, self.url)
        if is_partial(key):
            raise StoreError(
                f"{key!r} cannot be a key of {self.url}: names that begin with {PARTIAL_PREFIX!r} belong to unfinished files"
            )
        return path

    @contextmanager
    def _opened(self, key: str, etag: str | None) -> Iterator[BinaryIO]:
        """Open the object, in the version `etag` if given, and check at the end that its version has not changed."""
        path = self._path(key)
        with _named("read", path), open(path, "rb", buffering=0) as file:
            before = _describe(key, os.fstat(file.fileno())).etag
            if etag is not None and etag != before:
                raise StoreError(
                    f"{path} has changed: version {etag} was requested, but it is now {before}. Read its version again"
                )
            yield file
            if _describe(key, os.fstat(file.fileno())).etag != before:
                raise StoreError(f"{path} was modified while it was read. Replace files by renaming new ones over them")

    def _fill(self, key: str, file: BinaryIO, out: memoryview, offset: int) -> None:
        size = os.fstat(file.fileno()).st_size
        if offset < 0 or offset + len(out) > size:
            raise StoreError(f"{self._path(key)} has {size:,} bytes: cannot read {len(out):,} at {offset:,}")
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
                with _unlisted_file(path.parent) as file:
                    half = file.name
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

    def _walk(self, folder: Path, prefix: str, above: tuple[FolderIdentity, ...] = ()) -> Iterator[StoredObject]:
        """Yield all files below a folder in order of their keys: "a-b" comes before "a/b", so folders sort as name plus "/".

        Links are followed, except to one of the folders `above`, through which this one was reached. A link that leads nowhere is
        yielded, too, so that a reader of the object names it in an error instead of missing its samples.
        """
        found: list[tuple[str, str]] = []
        with _named("list", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if (identity := identity_of(folder)) in above:
                return
            above = (*above, identity)
        with _named("list", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            found = sorted((entry.name + "/" * entry.is_dir(), entry.path) for entry in entries)
        for name, path in found:
            if is_partial(name) or not is_listed(name.removesuffix("/"), str(folder)):
                continue
            if name.endswith("/"):
                yield from self._walk(Path(path), prefix + name, above)
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                try:
                    state = os.stat(path)
                except FileNotFoundError:
                    state = os.lstat(path)
                if stat.S_ISREG(state.st_mode) or stat.S_ISLNK(state.st_mode):
                    yield _describe(prefix + name, state)


def _describe(key: str, state: os.stat_result) -> StoredObject:
    return StoredObject(key, state.st_size, f"{state.st_mtime_ns:x}-{state.st_size:x}-{state.st_ino:x}")


def _unlisted_file(folder: Path) -> BinaryIO:
    """Create a file that is not listed, in a folder that is created for it. It is buffered: a single write() may write less."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder with its last file
            if str(folder) not in _tidied:
                _tidied.add(str(folder))
                remove_abandoned(folder)
            return open(f"{folder}/{PARTIAL_PREFIX}{secrets.token_hex(8)}", "xb")


def _sync_folder(folder: Path) -> None:
    """Sync a rename to the disk. Some network file systems do not support this; then their own guarantees apply."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # another process has just deleted the file, and the folder with it
        return
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


@contextmanager
def _named(verb: str, path: Path) -> Iterator[None]:
    """Turn OSErrors about the file into StoreErrors that name the operation and the path."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if verb == "read" and isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            link = f": it is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else ""
            raise ObjectMissing(f"no such object: {path}{link}") from None
        raise StoreError(f"cannot {verb} {path}: {error.strerror or error}") from error
