"""What a path begins with (`Head`), what there is to say of it (`Summary`), and how values and types are put in words."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

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
    """

    path: Path
    begin: bytes
    compression: str = ""
    nbytes: int = 0
    is_folder: bool = False


def head_of(path: Path) -> Head:
    """Looks at a path.

    Raises:
        OSError: it cannot be read.
        ValueError: it is empty.
    """
    if path.is_dir():
        if not any(path.iterdir()):
            raise ValueError(f"{path}: the folder is empty")
        return Head(path, b"", is_folder=True)
    nbytes = os.stat(path).st_size
    if not nbytes:
        raise ValueError(f"{path}: the file is empty")
    with open(path, "rb") as file:
        begin = file.read(PEEK)
    for name, (magic, opener) in _OPENERS.items():
        if begin.startswith(magic):
            try:
                with opener(path) as file:
                    return Head(path, file.read(PEEK), name, nbytes)
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                raise ValueError(f"{path}, offset 0: the {name} stream is damaged or cut: {error}") from error
    if begin[0] == 0x78 and int.from_bytes(begin[:2], "big") % 31 == 0:  # a zlib stream, perhaps
        try:
            return Head(path, zlib.decompressobj().decompress(begin, PEEK), "zlib", nbytes)
        except zlib.error:
            pass
    return Head(path, begin, "", nbytes)


SHOWN = 6  # values of an array
SHOWN_CHARACTERS = 60  # of text


@dataclass(frozen=True)
class Sizes:
    """Bytes of samples."""

    min: int
    median: int
    max: int
    num_samples: int  # that were looked at

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Sizes | None:
        """Of some sizes; None if there are none."""
        found = np.asarray(sizes if isinstance(sizes, np.ndarray) else list(sizes), np.int64)
        if not len(found):
            return None
        return cls(int(found.min()), int(np.median(found)), int(found.max()), len(found))


@dataclass
class Summary:
    """One path.

    Attributes:
        fields: name -> what it holds, in words: "float32 (28, 28)".
        samples: the first ones, whole.
        notes: what else is worth knowing.
    """

    path: str
    format: str
    nbytes: int
    num_samples: int
    fields: dict[str, str] = field(default_factory=dict)
    sizes: Sizes | None = None
    samples: Sequence[Mapping[str, Any]] = ()
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, with shortened samples."""
        plain = {**vars(self), "sample_nbytes": self.sizes and asdict(self.sizes)}
        del plain["sizes"]
        plain["samples"] = [{name: shortened(value) for name, value in sample.items()} for sample in self.samples]
        return plain


def shortened(value: Any) -> str:
    """A value in a line."""
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN_CHARACTERS else value[: SHOWN_CHARACTERS - 3] + "...")
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes: {bytes(value[:8]).hex(' ')}{' ...' if len(value) > 8 else ''}"
    if hasattr(value, "detach"):  # a tensor of a type that numpy lacks
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}: {_numbers(value.detach().float().numpy())}"
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{value.dtype} {value.shape}: {_numbers(value)}"
    if isinstance(value, (np.generic, np.ndarray)):
        return str(value.item())
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def described(spec: Any) -> str:
    """A schema's field in words."""
    if not isinstance(spec, tuple):
        return spec.__name__ if isinstance(spec, type) else str(spec)
    dtype, shape = spec
    extents = ", ".join("any" if extent is None else str(extent) for extent in shape)
    return f"{dtype} ({extents}{',' if len(shape) == 1 else ''})" if shape else str(dtype)


def nbytes_of(sample: Mapping[str, Any]) -> int:
    """Bytes of the values of a sample."""
    total = 0
    for value in sample.values():
        if isinstance(value, str):
            total += len(value.encode("utf-8", "surrogateescape"))
        else:
            total += value.nbytes if hasattr(value, "nbytes") else len(value) if hasattr(value, "__len__") else 8
    return total


def _numbers(array: Any) -> str:
    flat = array.reshape(-1)
    shown = " ".join(f"{number:.4g}" if array.dtype.kind == "f" else str(number) for number in flat[:SHOWN].tolist())
    return shown + (" ..." if flat.size > SHOWN else "")
