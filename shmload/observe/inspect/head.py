"""The first look at a path, on which formats are recognised."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEEK = 1536  # bytes: three blocks of a tar file
_OPENERS: dict[str, tuple[bytes, Any]] = {
    "gzip": (b"\x1f\x8b", gzip.open),
    "bzip2": (b"BZh", bz2.open),
    "xz": (b"\xfd7zXZ\x00", lzma.open),
}


@dataclass(frozen=True)
class Head:
    """What a path begins with.

    Attributes:
        begin: its first bytes, expanded where it is compressed as a whole; none of a folder.
        compression: "gzip", "bzip2", "xz", "zlib", or none.
        nbytes: of the file as it lies there.
        dtype: of tokens, which only the user knows.
    """

    path: Path
    begin: bytes
    compression: str = ""
    nbytes: int = 0
    dtype: str | None = None

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()


def head_of(path: Path, dtype: str | None = None) -> Head:
    """Looks at a path.

    Raises:
        OSError: it cannot be read.
        ValueError: it is empty.
    """
    if path.is_dir():
        if not any(path.iterdir()):
            raise ValueError(f"{path}: the folder is empty")
        return Head(path, b"", dtype=dtype)
    nbytes = os.stat(path).st_size
    if not nbytes:
        raise ValueError(f"{path}: the file is empty")
    with open(path, "rb") as file:
        begin = file.read(PEEK)
    for name, (magic, opener) in _OPENERS.items():
        if begin.startswith(magic):
            try:
                with opener(path) as file:
                    return Head(path, file.read(PEEK), name, nbytes, dtype)
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                raise ValueError(f"{path}, offset 0: the {name} stream is damaged or cut: {error}") from error
    if begin[0] == 0x78 and int.from_bytes(begin[:2], "big") % 31 == 0:  # a zlib stream, perhaps
        try:
            return Head(path, zlib.decompressobj().decompress(begin, PEEK), "zlib", nbytes, dtype)
        except zlib.error:
            pass
    return Head(path, begin, "", nbytes, dtype)
