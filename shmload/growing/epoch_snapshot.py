"""`Snapshot`: the files that an epoch reads.

The index of a sample is `epoch << EPOCH_SHIFT | record`, where records are counted through the snapshot's files. So an index
identifies its snapshot, and a sample's random numbers differ between epochs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt
from shmload.growing.cache_file import CacheFile

EPOCH_SHIFT = 40  # bits of an index that contain the record
MAX_EPOCH = (1 << (63 - EPOCH_SHIFT)) - 1
_VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """The files of an epoch, oldest first, with their state when the snapshot was settled."""

    epoch: int
    files: tuple[CacheFile, ...]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return the number of records up to and including each file."""
        return np.cumsum([file.num_records for file in self.files], dtype=np.int64)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Return the number of records before each file."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def n(self) -> int:
        """Return the number of samples."""
        return int(self.ends[-1]) if self.files else 0

    @cached_property
    def digest(self) -> str:
        """Return a digest of the snapshot, which differs between snapshots."""
        return hashlib.blake2b(self.dumps(), digest_size=8).hexdigest()

    def place(self, record: int) -> tuple[str, int]:
        """Return the file that contains a record, and the record's number in it."""
        file = int(np.searchsorted(self.ends, record, "right"))
        return self.files[file].name, record - int(self.starts[file])

    def dumps(self) -> bytes:
        """Return the snapshot as JSON, the same bytes for equal snapshots."""
        return json.dumps({"version": _VERSION, "epoch": self.epoch, "files": self.files}).encode()


def snapshot_path(run: Path, epoch: int) -> Path:
    """Return the path of a run's snapshot of an epoch."""
    return run / f"epoch-{epoch}.json"


def read_snapshot(path: Path) -> Snapshot | None:
    """Return the snapshot in a file; None if the file does not exist.

    Raises:
        ShardCorrupt: the file is damaged.
    """
    try:
        found = json.loads(path.read_bytes())
        if found["version"] != _VERSION:
            raise ValueError(f"it has version {found['version']}, this shmload reads {_VERSION}")
        return Snapshot(found["epoch"], tuple(CacheFile(*file) for file in found["files"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ShardCorrupt(f"{path}: is not a snapshot of a growing cache: {error}") from error
