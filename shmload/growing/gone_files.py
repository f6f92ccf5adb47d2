"""Find the samples of a snapshot whose files are gone, and replace them in a resume."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shmload.growing.epoch_snapshot import Snapshot


@dataclass(frozen=True)
class Gone:
    """A snapshot of which some files are gone: which samples are lost, and which samples replace them.

    Attributes:
        snapshot: the snapshot.
        is_gone: for each file of the snapshot, whether it is gone.
    """

    snapshot: Snapshot
    is_gone: tuple[bool, ...]

    @cached_property
    def num_samples(self) -> int:
        """Return the number of samples that are gone."""
        return sum(file.num_records for file, gone in zip(self.snapshot.files, self.is_gone, strict=True) if gone)

    @cached_property
    def _counts(self) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Return for each file whether it is gone, the lost records before it, and the remaining ones up to and including it."""
        gone, counts = np.array(self.is_gone), self.snapshot.ends - self.snapshot.starts
        lost = np.where(gone, counts, 0)
        return gone, np.cumsum(lost) - lost, np.cumsum(counts - lost)

    def mask(self, records: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the records that are gone."""
        gone: NDArray[np.bool_] = self._counts[0][np.searchsorted(self.snapshot.ends, records, "right")]
        return gone

    def substituted(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the records, with the k-th lost record of the snapshot replaced by its k-th remaining one, cyclically."""
        gone, lost_before, there = self._counts
        files = np.searchsorted(self.snapshot.ends, records, "right")
        rank = (lost_before[files] + records - self.snapshot.starts[files]) % there[-1]
        stand_in = np.searchsorted(there, rank, "right")
        before = there[stand_in] - (self.snapshot.ends - self.snapshot.starts)[stand_in]
        return np.where(gone[files], self.snapshot.starts[stand_in] + rank - before, records)
