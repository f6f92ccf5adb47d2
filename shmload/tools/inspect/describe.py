"""From a path to what is in it: the table of formats, in the order in which they are asked.

A new format is a file in `formats/` with `matches(head)`, `describe(head, num_samples)` and, if its index lies beside it,
`index(head)`; and a line here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from shmload.tools.inspect.formats import hdf5, images, npy, parquet, safetensors, tar, tfrecord, tokens, zarr
from shmload.tools.inspect.summary import Head, Indexed, Summary, head_of


class Format(Protocol):
    """One file of `formats/`."""

    NAME: str

    def matches(self, head: Head) -> bool:
        """Whether a path begins as this format does."""

    def describe(self, head: Head, num_samples: int) -> Summary:
        """Everything about it, with the first samples."""


FORMATS: tuple[Format, ...] = (npy, parquet, hdf5, safetensors, zarr, tar, tfrecord, images, tokens)


class Unknown(ValueError):
    """A path is of no format that is known here."""


def recognise(path: Path, dtype: str | None = None) -> tuple[Format, Head]:
    """The format of a path.

    Raises:
        OSError: it cannot be read.
        Unknown: it is none of the formats.
        ValueError: it is empty.
    """
    head = head_of(path, dtype)
    for format in FORMATS:
        if format.matches(head):
            return format, head
    known = ", ".join(format.NAME for format in FORMATS)
    inside = f"what is compressed by {head.compression} in it" if head.compression else "it"
    raise Unknown(f"{path}: {inside} is of no known format ({known}); raw tokens need --dtype")


def describe(path: Path, *, num_samples: int = 3, dtype: str | None = None) -> Summary:
    """Everything about a path, with its first samples.

    Raises:
        OSError, ValueError: it cannot be read, is of no known format, or damaged; the message names it.
    """
    format, head = recognise(path, dtype)
    return format.describe(head, num_samples)


def index(path: Path) -> Indexed:
    """Makes the index beside a path.

    Raises:
        OSError, ValueError: as `describe`.
    """
    format, head = recognise(path)
    build = getattr(format, "index", None)
    if build is None:
        return Indexed(str(path), None, why=f"{format.NAME} needs no index: its samples are found without")
    made: Indexed = build(head)
    return made
