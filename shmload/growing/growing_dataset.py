"""`GrowingDataset`: the samples of a growing cache for ShmLoader, by snapshot and record, in any process.

A worker opens a snapshot at the first order of its epoch: it reads the list of files, maps the new ones, and unmaps those that are
no longer listed. So the start of an epoch costs a worker only its new files.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt
from shmload.formats.per_process import PerProcess
from shmload.formats.tfrecord.tfrecord_dataset import TFRecordDataset
from shmload.growing.cache_file import CacheFile
from shmload.growing.damage import report_bad
from shmload.growing.epoch_snapshot import EPOCH_SHIFT, Snapshot, read_snapshot, snapshot_path
from shmload.growing.growing_epochs import GrowingEpochs
from shmload.growing.growing_run import JoinedRun
from shmload.growing.intake import MAX_INFLATED_BYTES, WalkedFile
from shmload.processes.fork_lock import ForkLock
from shmload.schedule.any_schedule import Uneven
from shmload.schedule.snapshot_schedule import SnapshotSchedule

log = logging.getLogger("shmload")


class GrowingDataset:
    """The samples of a `SampleCache`, a different set in each epoch; created by `SampleCache.dataset`, for ShmLoader with a `seed`.

    It belongs to one training run: all of the run's loaders and ranks read the same samples in the same epoch. An index
    identifies a sample of an epoch; `where` returns its file and record. It has no length, because each epoch has its own:
    `len(loader)` is that of the next one.

    Args:
        folder: the cache.
        joined: the run.
        make_epochs: makes one loader's epochs, in the trainer.
        records: reads records of any file by a schema.
    """

    def __init__(
        self, folder: Path, joined: JoinedRun, make_epochs: Callable[..., GrowingEpochs], records: TFRecordDataset
    ) -> None:
        self.folder = folder
        self._joined: JoinedRun | None = joined
        self._make_epochs = make_epochs
        self.schema: Mapping[str, Any] = records.schema
        self._records = records
        self._run_path: Path | None = None
        self._begin()

    def _begin(self) -> None:
        self._lock = ForkLock()
        self._files: dict[CacheFile, _Opened] = {}  # a file may be replaced under its name
        # the newest two snapshots, by run and epoch, because a state may belong to another run
        self._opened: dict[tuple[Path, int], tuple[Snapshot, SnapshotRecords]] = {}

    def __getstate__(self) -> dict[str, Any]:
        left = {"_lock": None, "_files": None, "_opened": None, "_joined": None, "_make_epochs": None}
        return {**vars(self), **left, "_run_path": self.run_path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def run_path(self) -> Path:
        """Return the folder that contains this run's snapshots."""
        if self._joined is not None:
            return self._joined.run.path
        assert self._run_path is not None
        return self._run_path

    def epoch_schedule(
        self, *, seed: int, rank: int, world_size: int, batch_size: int, shuffle: bool, uneven: Uneven
    ) -> SnapshotSchedule:
        """Return the schedule of each epoch's samples by rank and step, which ShmLoader uses in place of a length.

        Args:
            seed, rank, world_size, batch_size, shuffle, uneven: see ShmLoader. The schedule is the same for all ranks.
        Raises:
            RuntimeError: this is a copy of the dataset from another process.
        """
        if self._joined is None:
            raise RuntimeError(
                "this is a copy of a growing dataset from another process: make one here, SampleCache(folder, "
                'capacity_bytes).dataset(..., run="name"), with the same name in all ranks'
            )
        self._joined.world_size = world_size
        epochs = self._make_epochs(smallest=batch_size * world_size if uneven == "drop" else 1)
        return SnapshotSchedule(epochs, seed=seed, uneven=uneven, world_size=world_size, batch_size=batch_size, is_shuffled=shuffle)

    def __len__(self) -> int:
        raise TypeError(
            "a growing dataset has another length in each epoch: read it with ShmLoader(dataset, seed=...), whose len() is that of "
            "the next epoch, without a sampler of your own"
        )

    def where(self, index: int) -> tuple[str, int]:
        """Return the file name and the record number of a sample.

        Args:
            index: index of the sample, from `loader.last_indices`, an audit or an error.
        Raises:
            IndexError: the snapshot of its epoch does not exist any more.
        """
        snapshot, _ = self._at(index >> EPOCH_SHIFT)
        return snapshot.place(index & ((1 << EPOCH_SHIFT) - 1))

    # ------------------------------------------------------------ reading

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = self._read(operator.index(index), lambda records, local: records[int(local[0])])
        return sample

    @property
    def read_batch_into(self) -> Callable[[Any, Any], None] | None:
        """Return a function that reads samples of one epoch into rows; None if a decoder is needed."""
        return None if self._records.read_batch_into is None else self._read_batch_into

    def _read_batch_into(self, indices: Any, out: Any) -> None:
        def read(records: TFRecordDataset, local: NDArray[np.int64]) -> None:
            assert records.read_batch_into is not None
            records.read_batch_into(local, out)

        self._read(indices, read)

    def read_into(self, index: int, out: Any) -> None:
        """Read one sample into its row.

        Args:
            index: the sample.
            out: the row.
        """
        self._read(index, lambda records, local: records.read_into(int(local[0]), out))

    def _read(self, indices: Any, read: Callable[[TFRecordDataset, NDArray[np.int64]], Any]) -> Any:
        keys = np.atleast_1d(np.asarray(indices, np.int64))
        epoch = int(keys[0]) >> EPOCH_SHIFT
        snapshot, records = self._at(epoch)
        local = keys - (epoch << EPOCH_SHIFT)
        try:
            return read(records, local)
        except ShardCorrupt as error:
            for number in set(np.searchsorted(snapshot.ends, local, "right").tolist()):
                file = records.taken[number]
                if str(error).startswith(f"{file.path}:"):
                    if file.why_unreadable:
                        raise ShardCorrupt(f"{file.path}: {file.why_unreadable}") from error
                    file.report(error)
            raise

    def _at(self, epoch: int) -> tuple[Snapshot, SnapshotRecords]:
        place = self.run_path, epoch
        found = self._opened.get(place)
        if found is None:
            with self._lock:
                found = self._opened.get(place)
                if found is None:
                    found = self._open(*place)
                    self._opened = dict([*self._opened.items(), (place, found)][-2:])
        return found

    def _open(self, run: Path, epoch: int) -> tuple[Snapshot, SnapshotRecords]:
        path = snapshot_path(run, epoch)
        snapshot = read_snapshot(path)
        if snapshot is None:
            raise IndexError(
                f"epoch {epoch} has no snapshot at {path}: the indices of a growing dataset come from its own order, so read it "
                "with ShmLoader(dataset, seed=...), without a sampler of your own"
            )
        files: dict[CacheFile, _Opened] = {}
        for file in snapshot.files:
            known = self._files.get(file)
            files[file] = known if known is not None and known.is_there() else _Opened(self.folder, file)
        self._files = files
        records = copy.copy(self._records)
        assert isinstance(records, SnapshotRecords)
        records.take(list(files.values()))
        return snapshot, records

    def __repr__(self) -> str:
        return f"GrowingDataset({os.fspath(self.folder)!r}, {', '.join(self.schema)})"


class _Opened:
    """A file of the cache, mapped by the constructor. If it is gone or damaged, it has no data, and reading its samples fails.

    It has the attributes of a `RecordFile` that `TFRecordDataset` uses.
    """

    def __init__(self, folder: Path, expected: CacheFile) -> None:
        self.path = os.fspath(folder / expected.name)
        self.nbytes = 0
        self.data: Any = b""
        self.state: tuple[Any, ...] | None = None
        self._status: os.stat_result | None = None  # None: the file differs from the snapshot's
        self._offsets = np.zeros(expected.num_records + 1, np.int64)
        self.why_unreadable = ""  # if the file of the snapshot does not exist any more
        try:
            status = os.stat(self.path)
            if expected.is_replaced(status):
                self.why_unreadable = "has been replaced since the epoch's snapshot was settled, so the epoch cannot read it"
                log.warning("%s %s", self.path, self.why_unreadable)
                return
            self._status = status
            file = WalkedFile(self.path, "auto", MAX_INFLATED_BYTES)
            nbytes, num_records = file.nbytes, len(file.offsets()) - 1
            if (nbytes, num_records) != (expected.nbytes, expected.num_records):
                raise ShardCorrupt(
                    f"{self.path}: has {num_records} records in {nbytes} bytes, and had {expected.num_records} in "
                    f"{expected.nbytes} when the epoch's snapshot was settled"
                )
        except FileNotFoundError:  # if it was evicted before a resume, the order contains none of its records
            self.why_unreadable = "has been removed since the epoch's snapshot was settled; only the cache itself may remove files"
            return
        except ShardCorrupt as error:
            self.report(error)
            return
        self.nbytes, self.data, self.state, self._offsets = file.nbytes, file.data, file.state, file.offsets()

    def report(self, error: ShardCorrupt) -> None:
        """Report that the file is damaged, unless another file, which may be good, has its name now."""
        folder, name = os.path.split(self.path)
        with suppress(FileNotFoundError):
            if self.is_there():
                report_bad(Path(folder), name, str(error), os.stat(self.path).st_ctime_ns)

    def is_there(self) -> bool:
        """Return whether its name still refers to this file."""
        then = self._status
        with suppress(FileNotFoundError):
            now = os.stat(self.path)
            return then is not None and (now.st_ino, now.st_size, now.st_mtime_ns) == (then.st_ino, then.st_size, then.st_mtime_ns)
        return False

    def offsets(self) -> NDArray[np.int64]:
        """Return the offsets of its records; for an unreadable file, an array of the same length."""
        return self._offsets


class SnapshotRecords(TFRecordDataset):
    """A TFRecordDataset of files that are already open."""

    def take(self, opened: list[_Opened]) -> None:
        """Read from these files from now on."""
        self.taken = opened
        self.paths = [one.path for one in opened]
        self._file_nbytes = []
        self._held = PerProcess(is_inherited=True)

    def _files(self) -> Any:
        return self.taken
