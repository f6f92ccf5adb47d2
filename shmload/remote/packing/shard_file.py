"""A shard on its way: written into a file without a name, which goes with its last descriptor, also when the process is
killed."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from shmload._core.crc32c import crc32c
from shmload.formats.tar.header import archive_nbytes
from shmload.formats.tar.shard import ShardIndex, pack_index
from shmload.remote.manifest import INDEX_SUFFIX, IndexEntry, ShardEntry
from shmload.remote.packing.spool import Spool


@dataclass(frozen=True)
class Record:
    """A shard that is in the store, as it is noted there for a packing that goes on.

    Attributes:
        first: position in the packing order of its first sample.
        extensions: of its members, sorted.
    """

    first: int
    extensions: tuple[str, ...]
    shard: ShardEntry

    @property
    def number(self) -> int:
        """Of the shard, which its name ends in."""
        return int(self.shard.name.rpartition("-")[2].removesuffix(".tar"))

    @property
    def stop(self) -> int:
        """Position behind its last sample."""
        return self.first + self.shard.num_samples


class ShardFile:
    """A shard that is being written.

    Args:
        name: that it will have.
        first: position in the packing order of its first sample.
        spool: has a file for it.
    """

    def __init__(self, name: str, first: int, spool: Spool) -> None:
        self.name, self.first = name, first
        self.nbytes = self.num_samples = 0
        self._crc = 0
        self._spool, self._file = spool, spool.take()

    @property
    def path(self) -> Path:
        """A path by which this process opens it."""
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    def append(self, records: memoryview, num_samples: int) -> None:
        """Adds samples, which lie end to end."""
        self._write(records)
        self.num_samples += num_samples

    def finish(self) -> tuple[Record, bytes]:
        """Ends the archive; what is noted of it, and its index."""
        self._write(memoryview(bytes(archive_nbytes(self.nbytes) - self.nbytes)))
        self._file.truncate()  # of a longer shard before it
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            packed = pack_index(self.name, data)
        extensions = tuple(sorted(ShardIndex(self.name, packed).extensions))
        index = IndexEntry(self.name + INDEX_SUFFIX, len(packed), f"{crc32c(packed):08x}")
        entry = ShardEntry(self.name, self.nbytes, self.num_samples, f"{self._crc:08x}", index)
        return Record(self.first, extensions, entry), packed

    def _write(self, data: memoryview) -> None:
        self._crc = crc32c(data, self._crc)
        self.nbytes += len(data)
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Gives its file back."""
        self._spool.give(self._file)
