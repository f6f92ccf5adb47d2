"""Which files an epoch reads, frozen.

An index of an epoch's sample is `epoch << EPOCH_SHIFT | record`, where records are counted through the snapshot's files. So an
order tells a worker by itself which snapshot it is of, and the sample's randomness is new in each epoch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt
from shmload.growing.names import CacheFile

EPOCH_SHIFT = 40
MAX_EPOCH = (1 << (63 - EPOCH_SHIFT)) - 1
_VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """The files of an epoch, oldest first, as they were when it was frozen."""

    epoch: int
    files: tuple[CacheFile, ...]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """How many records there are up to and with each file."""
        return np.cumsum([file.num_records for file in self.files], dtype=np.int64)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """How many records there are before each file."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def n(self) -> int:
        """Samples."""
        return int(self.ends[-1]) if self.files else 0

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(file.nbytes for file in self.files)

    @cached_property
    def digest(self) -> str:
        """Tells snapshots apart."""
        return hashlib.blake2b(self.dumps(), digest_size=8).hexdigest()

    def place(self, record: int) -> tuple[str, int]:
        """The file that holds a record, and which of its records it is."""
        file = int(np.searchsorted(self.ends, record, "right"))
        return self.files[file].name, record - int(self.starts[file])

    def dumps(self) -> bytes:
        """As a file of its own, the same bytes for the same snapshot."""
        return json.dumps({"version": _VERSION, "epoch": self.epoch, "files": self.files}).encode()

    @classmethod
    def loads(cls, data: bytes, path: Any) -> Snapshot:
        """Inverse of `dumps`.

        Raises:
            ShardCorrupt: it is none; `path` is named.
        """
        try:
            said = json.loads(data)
            if said["version"] != _VERSION:
                raise ValueError(f"it has version {said['version']}, this shmload reads {_VERSION}")
            return cls(said["epoch"], tuple(CacheFile(*file) for file in said["files"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ShardCorrupt(f"{path}: is no snapshot of a growing cache: {error}") from error


@dataclass(frozen=True)
class Gone:
    """A snapshot of which some files are there no more, and which samples stand in for theirs."""

    snapshot: Snapshot
    is_gone: tuple[bool, ...]  # [file]

    @cached_property
    def num_samples(self) -> int:
        """That are gone."""
        return sum(file.num_records for file, gone in zip(self.snapshot.files, self.is_gone, strict=True) if gone)

    @cached_property
    def _counts(self) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Whether each file is gone; how many records before it are; how many up to and with it are not."""
        gone, counts = np.array(self.is_gone), self.snapshot.ends - self.snapshot.starts
        lost = np.where(gone, counts, 0)
        return gone, np.cumsum(lost) - lost, np.cumsum(counts - lost)

    def mask(self, records: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which records are gone."""
        gone: NDArray[np.bool_] = self._counts[0][np.searchsorted(self.snapshot.ends, records, "right")]
        return gone

    def substituted(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """The records, with others of the snapshot in place of those that are gone: the k-th of these by the k-th that is there."""
        gone, lost_before, there = self._counts
        files = np.searchsorted(self.snapshot.ends, records, "right")
        rank = (lost_before[files] + records - self.snapshot.starts[files]) % there[-1]
        stand_in = np.searchsorted(there, rank, "right")
        before = there[stand_in] - (self.snapshot.ends - self.snapshot.starts)[stand_in]
        return np.where(gone[files], self.snapshot.starts[stand_in] + rank - before, records)
