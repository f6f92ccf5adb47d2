"""`GrowingEpochs`: the snapshot of each epoch of one loader, and the lease on its files.

An epoch's snapshot is settled when its first batch is ordered, while the last batches of the previous epoch are still in progress,
so no worker waits for it. Its files are leased from then until a later epoch begins, the loader closes or the process ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shmload.errors import CacheFull, StateMismatch, WorkerDied
from shmload.growing.cache_file import CacheFile
from shmload.growing.cache_view import CacheView
from shmload.growing.epoch_snapshot import EPOCH_SHIFT, MAX_EPOCH, Snapshot, read_snapshot, snapshot_path
from shmload.growing.gone_files import Gone
from shmload.growing.growing_run import GrowingRun, JoinedRun, is_run_name, run_path
from shmload.schedule.epoch_snapshots import EpochSnapshots
from shmload.storage.file_lease import Leases

log = logging.getLogger("shmload")

Missing = Literal["error", "skip", "substitute"]
NAMED = 5  # number of missing files that an error names at most
_REMEDY = (
    'cache.dataset(missing="skip") reads the rest, missing="substitute" other samples of that epoch in their place; or begin '
    "the next epoch with set_epoch"
)
_REMEDY_ALL = "begin the next epoch with set_epoch: nothing of this one is left to read"


class GrowingEpochs(EpochSnapshots[Snapshot]):
    """The epochs of one loader in its run. Each loader of a dataset has its own epoch, and leases the files of that epoch.

    Args:
        view: the cache's files.
        joined: the run.
        min_samples: number of samples that an epoch waits for.
        timeout_s: seconds that it waits at most.
        missing: what a resume does about samples that are gone: see `SampleCache.dataset`.
        smallest: number of samples without which an epoch would have no step; epochs wait for these, too.
    """

    identity = "growing cache"
    not_yet = (TimeoutError, WorkerDied, StateMismatch, CacheFull)

    def __init__(
        self, view: CacheView, joined: JoinedRun, *, min_samples: int, timeout_s: float, missing: Missing, smallest: int
    ) -> None:
        super().__init__()
        self._view, self._joined = view, joined
        self._timeout_s, self._missing = timeout_s, missing
        self._least = max(min_samples, smallest)
        self._holds: dict[int, Leases] = {}
        self._gone: dict[int, Gone] = {}
        view.readers.add(self)

    # ------------------------------------------------------------ the run

    @property
    def run(self) -> GrowingRun:
        """Return this rank's membership in its run, evicting files if the disk is full."""
        return self._view.folder.evicting(lambda: self._joined.run)

    def named(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the description of a snapshot for a state."""
        return {"run": self.run.name, "n": snapshot.n, "digest": snapshot.digest}

    def restart(self, epoch: int) -> None:
        """Check an epoch whose state names no snapshot: it is settled when it begins.

        Raises:
            StateMismatch: the epoch is greater than `MAX_EPOCH`.
        """
        if epoch > MAX_EPOCH:
            raise StateMismatch(
                f"a growing dataset's epoch is at most {MAX_EPOCH}, the state's is {epoch}: load a result of state_dict()"
            )

    def resume(self, named: Mapping[str, Any], epoch: int) -> None:
        """Read the snapshot that a state names in its epoch.

        Raises:
            StateMismatch: the snapshot is no longer kept, samples of it are gone and `missing` is "error", or the state has none.
        """
        is_dict = isinstance(named, Mapping) and isinstance(named.get("digest"), str)
        if not is_dict or not is_run_name(named.get("run")) or epoch > MAX_EPOCH:
            raise StateMismatch(f"the state names no snapshot of epoch {epoch}: {named!r:.200}. Load what state_dict() returned")
        path = run_path(self._view.path, named["run"])
        snapshot = read_snapshot(snapshot_path(path, epoch))
        if snapshot is None or snapshot.digest != named["digest"]:
            held = "is not there" if snapshot is None else "is another"
            raise StateMismatch(
                f"the state names the snapshot {named['digest']} of epoch {epoch}, which {held} in {path}: resume "
                "with the folder that the state was saved with, or restart this epoch with a state of its start"
            )
        before = self._holds, self._gone
        self._holds, self._gone = {}, {}
        try:
            self._take(snapshot, is_named=True)
        except StateMismatch:
            self._holds, self._gone = before
            raise
        for hold in before[0].values():
            hold.release()
        self._joined.go_on_in(named["run"], epoch)
        self._read_from(epoch, snapshot)

    # ------------------------------------------------------------ an epoch

    def settle(self, epoch: int, *, is_ahead: bool) -> Snapshot:
        """Return an epoch's snapshot, which the first rank of the run that asks for it settles, and lease its files.

        Args:
            epoch: the epoch.
            is_ahead: do not wait for samples, and do not evict any.

        Raises:
            TimeoutError: too few samples have been collected.
            StateMismatch: another rank has begun to read the snapshot, and samples of it are gone.
            CacheFull: the disk is full, and no file of the cache may be evicted.
        """
        folder, has_evicted = self._view.folder, False
        if epoch > MAX_EPOCH:
            raise ValueError(f"a growing dataset's epoch is at most {MAX_EPOCH}; got {epoch}")
        while (found := self.run.read(epoch)) is None or not self._take(found, is_named=False):
            if found is not None:
                continue
            files = self._view.collected(self._least, 0.0 if is_ahead else self._timeout_s)
            hold = folder.lease_many([file.name for file in files])
            held = frozenset(hold.names)
            kept = tuple(file for file in files if file.name in held)
            if sum(file.num_records for file in kept) < self._least:
                hold.release()  # a file was evicted before it was leased
                continue
            found = Snapshot(epoch, kept)
            try:
                is_ours = folder.evicting(partial(self.run.write, found))
            except CacheFull:
                hold.release()
                if is_ahead or has_evicted or not folder.free_disk(1):
                    raise
                has_evicted = True
                continue
            if is_ours:
                self._holds[epoch] = hold
                log.info("epoch %d reads %d samples in %d files", epoch, found.n, len(kept))
                return found
            hold.release()
        return found

    def _take(self, snapshot: Snapshot, *, is_named: bool) -> bool:
        """Lease the files of a snapshot that exist, and handle the others according to `missing`.

        Args:
            snapshot: the snapshot.
            is_named: whether a state names it.
        Returns:
            False if files are gone and no rank has begun to read the snapshot, so that it can be replaced.
        """
        hold = self._view.folder.lease_many([file.name for file in snapshot.files])
        held = frozenset(hold.names)
        is_gone = tuple(file.name not in held or self._is_replaced(file) for file in snapshot.files)
        if any(is_gone):
            if not is_named and self.run.take_back(snapshot):
                hold.release()
                return False
            gone = Gone(snapshot, is_gone)
            text = _words_of(gone)
            if self._missing == "error" or all(is_gone):
                hold.release()
                raise StateMismatch(f"{text}. Remedy: {_REMEDY if not all(is_gone) else _REMEDY_ALL}")
            did = "left out" if self._missing == "skip" else "replaced by others of that epoch"
            log.warning("%s; they are %s", text, did)
            self._gone[snapshot.epoch] = gone
        self._holds[snapshot.epoch] = hold
        return True

    def _is_replaced(self, file: CacheFile) -> bool:
        with suppress(FileNotFoundError):
            return file.is_replaced(os.stat(self._view.path / file.name))
        return True

    def keys(self, epoch: int, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of an epoch's records, without those that are gone.

        Return at least one, because other ranks have a batch at this step. If all are gone, it is one that is read elsewhere in the
        epoch, and does not count as valid.
        """
        gone = self._gone.get(epoch)
        if gone is not None:
            there = records[~gone.mask(records)] if self._missing == "skip" else records[:0]
            records = there if len(there) else gone.substituted(records[: 1 if self._missing == "skip" else None])
        return records + (epoch << EPOCH_SHIFT)

    def has_lost(self, epoch: int) -> bool:
        return epoch in self._gone and self._missing == "skip"

    def num_kept(self, epoch: int, records: NDArray[np.int64]) -> int:
        return int((~self._gone[epoch].mask(records)).sum())

    # ------------------------------------------------------------ holds

    def begins(self, epoch: int) -> None:
        """Begin reading an epoch; files of earlier ones may be evicted from now on.

        Args:
            epoch: the epoch.
        """
        self._release(epoch)
        super().begins(epoch)
        self._gone = {each: gone for each, gone in self._gone.items() if each >= epoch - 1}

    def opened(self, epoch: int, snapshot: Snapshot) -> None:
        """Lease the files again if the loader was closed in the meantime, and keep other ranks from replacing the snapshot."""
        if epoch not in self._holds:
            self._take(snapshot, is_named=True)
        self._view.folder.evicting(partial(self.run.begin, epoch))

    def ended(self) -> None:
        """Release all files after the last epoch."""
        self._release(MAX_EPOCH + 1)

    def _release(self, epoch: int) -> None:
        for earlier in [e for e in self._holds if e < epoch]:
            self._holds.pop(earlier).release()


def _words_of(gone: Gone) -> str:
    snapshot = gone.snapshot
    names = [f"{file.name} ({file.num_records})" for file, is_gone in zip(snapshot.files, gone.is_gone, strict=True) if is_gone]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"epoch {snapshot.epoch}: {gone.num_samples} of its {snapshot.n} samples are gone, evicted or replaced since: "
        f"{', '.join(names[:NAMED])}{more}"
    )
