"""The `Format` protocol: how samples are recognized, indexed, decoded and described.

To add a format, write a class with these methods in a file or folder here, and add it to the list in `known_formats.py`. Formats of
other packages are registered at run time (`known_formats.register`). There are four protocols:

* `Format`: enough for `shmload inspect`. `ColumnFormat` (`column_format.py`) is the base of formats that have no more than this.
* `ShardFormat`: also read by `RemoteDataset` and `shmload pack`. `BlockFormat` (`block_format.py`) is its usual base.
* `IndexedBeside`: also indexed by `shmload index`.
* `NamedByIndex` (`index_json.py`): for formats whose shards are listed in an index.json.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

from shmload.formats.block_index import Read
from shmload.formats.head import Head
from shmload.formats.summary import Summary

__all__ = ["Format", "IndexedBeside", "ShardFormat"]


class Format(Protocol):
    """A way of storing samples in files. An instance holds the options for reading them, and can be pickled.

    Attributes:
        name: the value of `layout=` that selects it. It is also stored in index files, so it never changes.
        title: its name in the output of `shmload inspect` and in messages.
        endings: endings of the names of its files, in lower case, without a compression's: ".tar" also covers "x.tar.gz". Empty if
            names do not identify it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    endings: ClassVar[tuple[str, ...]]

    def recognize(self, head: Head) -> bool:
        """Return whether a file, folder or object is of this format, by its first bytes and its name.

        Args:
            head: the beginning of the file, folder or object.
        """

    def index(self, url: str, nbytes: int, read: Read) -> Any:
        """Return the positions of a shard's samples, as a `RecordIndex` or a similar object. Only the necessary bytes are read.

        Args:
            url: URL of the shard, for errors.
            nbytes: size of the shard.
            read: returns the bytes of a range.
        Raises:
            ShardCorrupt: the shard does not match its format; the message names the offset and the cause.
        """

    def decode(self, index: Any, data: memoryview, sample: int) -> dict[str, Any]:
        """Return the fields of a sample by name. Their values do not alias `data`.

        Args:
            index: a result of `index`.
            data: the bytes of the block that contains the sample (`block_index.py`).
            sample: its number within the shard.
        Raises:
            ValueError: the bytes do not match the format; the caller adds the shard and the offset.
        """

    def describe(self, head: Head, num_samples: int) -> Summary:
        """Return the output of `shmload inspect` for a local file or folder.

        Args:
            head: head of the path, which `recognize` has accepted.
            num_samples: number of samples to show, from the first one on.
        Raises:
            OSError, ValueError: the file cannot be read, or is damaged.
        """


class ShardFormat(Format, Protocol):
    """A format that `RemoteDataset` reads. `BlockFormat` implements the methods below by means of those of `Format`.

    Arguments are those of `Format`: `url`, `nbytes` and `read` of a shard, an `index` of it, and the `number` of a sample in it.
    """

    def scan(self, url: str, nbytes: int, read: Read) -> bytes:
        """Return the index of a shard as bytes, which `unpack` accepts. Only the necessary bytes are read.

        Raises:
            ShardCorrupt: the shard does not match its format; the message names the offset and the cause.
        """

    def pack(self, url: str, data: Any) -> bytes:
        """Return the same bytes as `scan`, given all bytes of a shard as `data`."""

    def unpack(self, url: str, packed: Any, nbytes: int) -> Any | None:
        """Return the index in `packed`, a result of `scan`; None if it is damaged, or was made for another size or format."""

    def known(self, url: str, nbytes: int) -> Any | None:
        """Return the index of a shard if it is known without reading the shard, else None."""

    def sample(self, index: Any, number: int, read: Read) -> dict[str, Any]:
        """Read and decode one sample. Return its fields by name, which do not alias the bytes that `read` returns.

        Raises:
            ShardCorrupt: its bytes do not match the format.
        """

    def span(self, index: Any, number: int) -> tuple[int, int]:
        """Return the (offset, nbytes) of the range from which a sample is read."""


@runtime_checkable
class IndexedBeside(Protocol):
    """A format whose local dataset keeps an index next to each file.

    Attributes:
        index_suffix: the suffix that is added to the name of the file.
    """

    index_suffix: ClassVar[str]

    def write_index(self, path: str) -> int:
        """Write the index next to a file, unless a valid one exists. Return the number of samples."""
