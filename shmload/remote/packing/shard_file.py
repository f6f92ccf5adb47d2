"""ShardFile: a tar archive that is being written in a temporary file, with its checksum and its index."""

from __future__ import annotations

import mmap
from pathlib import Path

from shmload._core.crc32c import crc32c
from shmload.formats.compression import zstd_pieces
from shmload.formats.tar.shard_index import ShardIndex, pack_index
from shmload.formats.tar.writer import archive_nbytes
from shmload.remote.manifest import INDEX_SUFFIX, IndexEntry, PackedObject, ShardEntry
from shmload.remote.packing.shard_record import ShardRecord
from shmload.remote.packing.spool import Spool


class ShardFile:
    """A shard that is being written.

    Args:
        name: its name in the store.
        first: position of its first sample in the packing order.
        spool: provides the file.
    """

    def __init__(self, name: str, first: int, spool: Spool) -> None:
        self.name, self.first = name, first
        self.nbytes = self.num_samples = 0
        self._crc = 0
        self._spool, self._file = spool, spool.take()

    @property
    def path(self) -> Path:
        """Return the path under which this process can open the file."""
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    def append(self, records: memoryview, num_samples: int) -> None:
        """Append the records of `num_samples` samples, given as consecutive bytes."""
        self._write(records)
        self.num_samples += num_samples

    def finish(self) -> tuple[ShardRecord, bytes]:
        """Finish the archive. Return its record and its index."""
        self._write(memoryview(bytes(archive_nbytes(self.nbytes) - self.nbytes)))
        self._file.truncate()  # a longer shard may have used the file before
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            packed = pack_index(self.name, data)
        extensions = tuple(sorted(ShardIndex(self.name, packed).extensions))
        index = IndexEntry(self.name + INDEX_SUFFIX, len(packed), f"{crc32c(packed):08x}")
        entry = ShardEntry(self.name, self.nbytes, self.num_samples, f"{self._crc:08x}", index)
        return ShardRecord(self.first, extensions, entry), packed

    def _write(self, data: memoryview) -> None:
        self._crc = crc32c(data, self._crc)
        self.nbytes += len(data)
        while data:
            data = data[self._file.write(data) :]

    def compress(self, level: int) -> PackedObject:
        """Replace the finished archive by its compressed form, which is sent instead."""
        plain, self._file = self._file, self._spool.take()
        self.nbytes = self._crc = 0
        with mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            for piece in zstd_pieces(view, level):
                self._write(memoryview(piece))
        self._file.truncate()
        self._spool.give(plain)
        return PackedObject(self.nbytes, f"{self._crc:08x}")

    def close(self) -> None:
        """Return the file to the spool."""
        self._spool.give(self._file)
