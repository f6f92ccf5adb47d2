"""The tar shards that a process has opened: their indexes, and the mapped files."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shmload._core.mapped_file import MappedFile
from shmload._core.tar_rows import TarRows
from shmload.errors import ShardCorrupt
from shmload.formats.tar.shard_index import NUM_COMPARED_ON_MAP, SUFFIX, ShardIndex, changed
from shmload.processes.fork_lock import ForkLock


class OpenedShards:
    """The indexes of a dataset's shards, and the shards that this process has mapped so far.

    Args:
        indexes: the index of each shard.
        alternatives: for each field, the extensions of which a sample's member has one, the preferred ones first.
        counts: number of samples of each shard; None takes them from the indexes.
    Attributes:
        starts: number of the first sample of each shard, and the number of samples; int64.
        rows: finds the members of samples in native code.
    """

    def __init__(
        self, indexes: Sequence[ShardIndex], alternatives: Sequence[Sequence[str]], counts: NDArray[np.int64] | None = None
    ) -> None:
        self.indexes = indexes
        numbers = [i.num_samples for i in indexes] if counts is None else counts
        self.starts = np.concatenate([[0], np.cumsum(numbers)]).astype(np.int64)
        self.rows = TarRows(self.starts)
        self._begin: list[int] = self.starts.tolist()
        self._alternatives = alternatives
        self._mapped: dict[int, NDArray[np.uint8]] = {}
        self._lock = ForkLock()

    def __len__(self) -> int:
        return self._begin[-1]

    def at(self, index: int) -> tuple[int, int]:
        """Return (shard, sample within it) of the sample with this index, which must not be negative."""
        shard = bisect_right(self._begin, index) - 1
        return shard, index - self._begin[shard]

    def data(self, shard: int) -> NDArray[np.uint8]:
        """Return the bytes of a shard, a view of its map; the first call maps it."""
        return self._mapped[shard] if shard in self._mapped else self._open(shard)

    def open_all(self, indices: NDArray[np.int64]) -> None:
        """Map the shards of these samples.

        Raises:
            ShardCorrupt: a shard has been modified since it was indexed.
        """
        while (shard := self.rows.unopened(indices)) >= 0:
            self._open(shard)
        self.check(indices)

    def check(self, indices: NDArray[np.int64]) -> None:
        """Check that the shards of these samples, all mapped, are unchanged. Call this again after everything is read.

        Raises:
            ShardCorrupt: a shard has changed.
        """
        if (shard := self.rows.changed(indices)) >= 0:
            raise changed(self.indexes[shard])

    def map(self, shard: int) -> tuple[NDArray[np.uint8], bytes | None, tuple[int, int, int, int] | None]:
        """Map a shard. Return (its bytes, path of its file, state of its file by which changes are noticed).

        A subclass may return None for path and state if the file cannot change.

        Raises:
            ShardCorrupt: the shard has been modified since it was indexed.
        """
        index = self.indexes[shard]
        file = MappedFile(os.fsencode(index.path))
        if file.state[2:] != (index.nbytes, index.mtime_ns):
            raise changed(index)
        if not index.fits(memoryview(file), NUM_COMPARED_ON_MAP):
            raise ShardCorrupt(
                f"{index.path}: was replaced by a shard of the same size and time after it was indexed: remove "
                f"{index.path}{SUFFIX}, if there is one, and create the dataset again"
            )
        return np.frombuffer(memoryview(file), np.uint8), os.fsencode(index.path), file.state

    def _open(self, shard: int) -> NDArray[np.uint8]:
        data, path, state = self.map(shard)
        with self._lock:
            if shard not in self._mapped:
                index = self.indexes[shard]
                known = [[names.index(e) if e in names else 255 for e in index.extensions] for names in self._alternatives]
                ranks = np.array(known, np.uint8).reshape(len(self._alternatives), len(index.extensions))
                columns = (index.offsets, index.sizes, index.member_extensions, index.first, ranks)
                self.rows.open(shard, data, *columns, path, state)
                self._mapped[shard] = data
            return self._mapped[shard]
