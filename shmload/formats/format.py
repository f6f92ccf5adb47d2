"""The `Format` protocol: how samples are recognized, indexed, decoded and described.

A format is one file in this folder, or one folder, and a line in `known_formats.py`. Formats of other packages are registered there
while a program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

from typing_extensions import Buffer

from shmload.formats.head import Head
from shmload.formats.summary import Summary

__all__ = ["Format", "IndexedBeside", "Read", "ShardFormat"]

Read = Callable[[int, int], Buffer]  # (offset, nbytes) -> the bytes there


class Format(Protocol):
    """A format of samples. An instance holds the options that samples are read with, and can be pickled.

    Attributes:
        name: what `layout=` takes; for index files, too, so it never changes.
        title: how `shmload inspect` and messages call it.
        endings: of the names of its files, in lower case, without the ending of a compression. Empty: names do not tell.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    endings: ClassVar[tuple[str, ...]]

    def recognize(self, head: Head) -> bool:
        """Return whether a file, folder or object is of this format, by its first bytes and its name.

        Args:
            head: what it begins with.
        """

    def index(self, url: str, nbytes: int, read: Read) -> Any:
        """Return where the samples of a shard are, as a `RecordIndex` or the like. Only what is needed is read.

        Args:
            url: of the shard, for errors.
            nbytes: of the shard.
            read: returns the bytes of a range.
        Raises:
            ShardCorrupt: the shard is not what the format says; names the offset and the cause.
        """

    def decode(self, index: Any, data: memoryview, sample: int) -> dict[str, Any]:
        """Return the fields of a sample, in memory of their own.

        Args:
            index: as `index` returned it.
            data: the bytes of the sample's block.
            sample: its number within the shard.
        Raises:
            ValueError: the bytes are not what the format says; the caller adds the shard and the offset.
        """

    def describe(self, head: Head, num_samples: int) -> Summary:
        """Return what `shmload inspect` shows of a local file or folder.

        Args:
            head: of the path, which `recognize` has accepted.
            num_samples: how many of the first samples to show.
        Raises:
            OSError, ValueError: the file cannot be read, or is damaged.
        """


class ShardFormat(Format, Protocol):
    """A format that `RemoteDataset` reads; `BlockFormat` implements the methods below by those of `Format`."""

    def scan(self, url: str, nbytes: int, read: Read) -> bytes:
        """Return the packed index of a shard, of which only what is needed is read.

        Raises:
            ShardCorrupt: the shard is not what the format says; names the offset and the cause.
        """

    def pack(self, url: str, data: Any) -> bytes:
        """Return the packed index of a shard whose bytes are here."""

    def unpack(self, url: str, packed: Any, nbytes: int) -> Any | None:
        """Return an index that was packed for a shard of `nbytes` bytes; None if it is damaged or of another shard."""

    def known(self, url: str, nbytes: int) -> Any | None:
        """Return the index of a shard if nothing has to be read for it, else None."""

    def sample(self, index: Any, number: int, read: Read) -> dict[str, Any]:
        """Return the fields of one sample, in memory of their own.

        Raises:
            ShardCorrupt: its bytes are not what the format says.
        """

    def span(self, index: Any, number: int) -> tuple[int, int]:
        """Return the (offset, nbytes) of the range that a sample is read from."""


@runtime_checkable
class IndexedBeside(Protocol):
    """A format whose local dataset keeps an index beside each file.

    Attributes:
        index_suffix: what the name of the index adds to the name of the file.
    """

    index_suffix: ClassVar[str]

    def write_index(self, path: str) -> int:
        """Write the index beside a file unless one that fits is there. Return the number of samples."""
