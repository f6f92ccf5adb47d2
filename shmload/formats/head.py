"""The first bytes of a file or object, by which its format is recognized."""

from __future__ import annotations

import io
import mmap
import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shmload.formats.compression import compression_of, expanded_file, split_compression
from shmload.formats.file_names import without_number
from shmload.storage.folder_walk import walk_following_links

__all__ = ["COMPRESSIONS", "PEEK", "Head", "head_of", "head_of_object"]

_STEP = 64 << 10  # bytes per request while the beginning of a compressed object is expanded
PEEK = 1536  # bytes: three blocks of a tar file
COMPRESSIONS = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd", "br": "brotli", "snappy": "snappy"}  # ending -> name


@dataclass(frozen=True)
class Head:
    """The first bytes, the name and the size of a file, folder or object.

    Attributes:
        path: path of a file or folder, or the name of an object on a store.
        begin: its first bytes, at most `PEEK`, expanded if it is compressed as a whole; empty for a folder.
        compression: "zlib" or a name in `COMPRESSIONS`; empty if it is not compressed. First bytes do not reveal brotli and snappy.
        nbytes: size of the file as it is stored.
        is_folder: whether it is a folder.
        is_local: whether `path` can be opened.
    """

    path: Path
    begin: bytes
    compression: str = ""
    nbytes: int = 0
    is_folder: bool = False
    is_local: bool = True

    @property
    def stem(self) -> str:
        """Return the name in lower case, without a compression's ending and without a number after the format's ending."""
        return without_number(split_compression(self.path.name.lower())[0])

    def starts_with(self, magic: bytes) -> bool:
        """Return whether an uncompressed file begins with these bytes."""
        return not self.compression and self.begin.startswith(magic)

    def read(self) -> Any:
        """Return all bytes of a local file: decompressed into memory, or a read-only map if it is not compressed."""
        with open(self.path, "rb") as file:
            if not self.compression:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if self.compression == "zlib":
                return zlib.decompress(file.read())
            kind = next(kind for kind, name in COMPRESSIONS.items() if name == self.compression)
            return expanded_file(kind, file).read()

    def nbytes_in_all(self) -> int:
        """Return the size of the file, or of all files in the folder, in bytes."""
        if not self.is_folder:
            return self.nbytes
        walk = walk_following_links(str(self.path))
        return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in walk for name in names)


def head_of(path: Path) -> Head:
    """Return the head of a path.

    Args:
        path: path of a file or folder.
    Raises:
        OSError: it cannot be read.
        ValueError: it is empty, or neither a file nor a folder.
    """
    if path.is_dir():
        if not any(path.iterdir()):
            raise ValueError(f"{path}: the folder is empty")
        return Head(path, b"", is_folder=True)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: is a pipe, a device or a socket, and not a file")
    if not found.st_size:
        raise ValueError(f"{path}: the file is empty")
    with open(path, "rb") as file:
        begin = file.read(PEEK)
    return _expanded(path, begin, found.st_size, lambda: open(path, "rb"))


def head_of_object(name: str, nbytes: int, read: Callable[[int, int], Any]) -> Head:
    """Return the head of an object on a store.

    Args:
        name: name of the object.
        nbytes: size of the object.
        read: (offset, nbytes) -> the bytes there.
    Raises:
        ValueError: it is compressed, and damaged.
    """
    begin = bytes(memoryview(read(0, min(PEEK, nbytes))).cast("B"))
    return replace(_expanded(Path(name), begin, nbytes, lambda: _Object(nbytes, read)), is_local=False)


class _Object(io.RawIOBase):
    """An object as a file that is read once from its beginning. A read may return fewer bytes than requested."""

    def __init__(self, nbytes: int, read: Callable[[int, int], Any]) -> None:
        self._nbytes, self._read, self._at = nbytes, read, 0

    def read(self, size: int = -1) -> bytes:
        size = min(size if size >= 0 else self._nbytes, _STEP, self._nbytes - self._at)
        data = bytes(memoryview(self._read(self._at, size)).cast("B")) if size else b""
        self._at += len(data)
        return data


def _expanded(path: Path, begin: bytes, nbytes: int, reopened: Callable[[], Any]) -> Head:
    """Return the head of a file that begins with `begin`; `reopened` returns the file again, to decompress its beginning."""
    if kind := compression_of(begin):
        try:
            with reopened() as file:
                return Head(path, expanded_file(kind, file).read(PEEK), COMPRESSIONS[kind], nbytes)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}, offset 0: {error}") from error
    if begin[:1] == b"\x78" and int.from_bytes(begin[:2], "big") % 31 == 0:  # it may be a zlib stream
        try:
            return Head(path, zlib.decompressobj().decompress(begin, PEEK), "zlib", nbytes)
        except zlib.error:
            pass
    return Head(path, begin[:PEEK], "", nbytes)
