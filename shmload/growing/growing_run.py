"""`GrowingRun`: a rank's membership in a training run, whose ranks share the snapshots of its epochs.

    .growing/runs/<name>/epoch-<e>.json   written once by the first rank to need it, visible when complete
    .growing/runs/<name>/epoch-<e>.begun  a rank has begun to read the snapshot; until then it may be replaced
    .growing/runs/<name>/spare            reserved disk space, which becomes the next snapshot if the disk is full
    .growing/runs/<name>/attending        each rank of the run holds a shared lock on it until it ends
    .growing/runs/<name>/gate             locked by a rank that joins the run or writes a snapshot to a full disk

A rank that joins a run without living ranks, and does not resume, is the first of a new run: snapshots of an earlier run of the
same name are deleted. A rank that resumes keeps the snapshots up to its epoch, so it reads the same samples as without the
interruption.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from shmload.formats.atomic_write import write_whole
from shmload.growing.cache_file import CONTROL
from shmload.growing.epoch_snapshot import Snapshot, read_snapshot, snapshot_path
from shmload.processes.file_lock import FileLock, locked
from shmload.processes.run_key import run_key

log = logging.getLogger("shmload")

SPARE = "spare"
SPARE_NBYTES = 4096  # the size of the spare file is a multiple of this
KEPT_SNAPSHOTS = 64  # number kept in each run; older epochs cannot be resumed


def run_name(given: str | None, world_size: int) -> str:
    """Return the name that a run's ranks share and no other run has: the given one, else one from their launcher's variables.

    Args:
        given: the user's name; if None, a single rank gets a random name.
        world_size: the number of ranks.
    """
    if given is None and world_size == 1:
        return secrets.token_hex(6)
    key = run_key()[1:] if given is None else ("named", given)  # the first part of the key differs between nodes
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def is_run_name(name: object) -> bool:
    """Return whether an object is a valid name of a run, because it becomes part of a path, and a state may contain anything."""
    return isinstance(name, str) and re.fullmatch("[0-9a-f]{12}", name) is not None


def run_path(folder: Path, name: str) -> Path:
    """Return the folder of a run's snapshots."""
    return folder / CONTROL / "runs" / name


class GrowingRun:
    """This rank's membership in a run, for as long as the object lives.

    Args:
        folder: the cache.
        name: the name of the run.
        resumed: the epoch that is resumed; None if the run begins.
    """

    def __init__(self, folder: Path, name: str, resumed: int | None) -> None:
        self.name = name
        self.path = run_path(folder, name)
        while not self._attend(resumed):
            pass

    def _attend(self, resumed: int | None) -> bool:
        """Join the run. Return False if another process has just removed it (`forget_runs`), because it had no members."""
        self.path.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), locked(self.path / "gate"):
            path = self.path / "attending"
            self._attending = FileLock.open(path, os.O_CREAT)
            if self._attending.try_acquire():
                for epoch in self._epochs():
                    if resumed is None or epoch > resumed:
                        self._forget(epoch)
            self._attending.acquire(shared=True)
            return self._attending.is_at(path)
        return False

    def _epochs(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("epoch-")) for path in self.path.glob("epoch-*.json"))

    def read(self, epoch: int) -> Snapshot | None:
        """Return an epoch's snapshot, or None if it has not been written."""
        return read_snapshot(snapshot_path(self.path, epoch))

    def write(self, snapshot: Snapshot) -> bool:
        """Write the epoch's snapshot unless another rank was first. Return whether it was written.

        Snapshots older than the newest `KEPT_SNAPSHOTS` are deleted. On a full disk, the spare file becomes the snapshot.

        Raises:
            OSError: it cannot be written.
        """
        path, data = snapshot_path(self.path, snapshot.epoch), snapshot.dumps()
        try:
            is_ours = write_whole(path, data, is_new=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with locked(self.path / "gate"):
                self._recycle(snapshot.epoch, len(data))
                with open(self.path / SPARE, "rb+", buffering=0) as spare:
                    spare.write(data)
                    spare.truncate()
                try:
                    os.link(self.path / SPARE, path)
                    is_ours = True
                except FileExistsError:
                    is_ours = False
                (self.path / SPARE).unlink()
        for epoch in self._epochs()[:-KEPT_SNAPSHOTS]:
            self._forget(epoch)
        self._reserve(2 * len(data))
        return is_ours

    def _recycle(self, epoch: int, nbytes: int) -> None:
        """Make a spare file of at least `nbytes` bytes from the oldest snapshots that no rank reads, without more disk space.

        Raises:
            OSError: the disk is full, and neither a spare file nor such a snapshot is large enough.
        """
        spare = self.path / SPARE
        for earlier in [e for e in self._epochs() if e < epoch - 1]:
            if spare.exists() and spare.stat().st_size >= nbytes:
                return
            log.info("the disk of %s is full: epoch %d can no longer be resumed", self.path, earlier)
            os.replace(snapshot_path(self.path, earlier), spare)
            self._forget(earlier)
        if not spare.exists() or spare.stat().st_size < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.path))

    def _reserve(self, nbytes: int) -> None:
        """Reserve disk space for the next epoch's snapshot if possible, because samplers may fill the disk before it."""
        with suppress(OSError), locked(self.path / "gate"), open(self.path / SPARE, "ab") as spare:
            os.posix_fallocate(spare.fileno(), 0, -(-nbytes // SPARE_NBYTES) * SPARE_NBYTES)

    def begin(self, epoch: int) -> None:
        """Mark an epoch's snapshot as being read, so that no rank replaces it."""
        self._mark(epoch).touch()

    def take_back(self, snapshot: Snapshot) -> bool:
        """Delete a snapshot unless a rank has started reading it. Return whether it was deleted.

        If the rank that wrote it ahead of time was killed, its files are no longer leased and may be gone.
        """
        with locked(self.path / "gate"):
            if self._mark(snapshot.epoch).exists():
                return False
            if self.read(snapshot.epoch) == snapshot:
                self._forget(snapshot.epoch)
            return True

    def _mark(self, epoch: int) -> Path:
        return self.path / f"epoch-{epoch}.begun"

    def _forget(self, epoch: int) -> None:
        snapshot_path(self.path, epoch).unlink(missing_ok=True)
        self._mark(epoch).unlink(missing_ok=True)

    def leave(self) -> None:
        """Leave the run. Idempotent."""
        self._attending.close()


def forget_runs(folder: Path, is_there: Callable[[str], bool]) -> None:
    """Remove runs that have no members and whose samples are all gone, because no state of theirs can be resumed.

    Args:
        folder: the cache.
        is_there: returns whether the cache has a file of this name.
    """
    runs = folder / CONTROL / "runs"
    for path in runs.iterdir() if runs.is_dir() else ():
        with suppress(OSError, ValueError), closing(FileLock.open(path / "attending")) as attending:
            if not attending.try_acquire():
                continue
            snapshots = [snapshot for kept in path.glob("epoch-*.json") if (snapshot := read_snapshot(kept))]
            if not any(is_there(each.name) for snapshot in snapshots for each in snapshot.files):
                shutil.rmtree(path, ignore_errors=True)


class JoinedRun:
    """The run in which all loaders of a dataset read, joined on first use.

    Args:
        folder: the cache.
        name: the name of the run; None for a random name, or one derived from the launcher's environment.

    Attributes:
        world_size: set with the schedule of the first loader, before any epoch is requested.
    """

    def __init__(self, folder: Path, name: str | None) -> None:
        self._folder, self._name = folder, name
        self.world_size = 1
        self._run: GrowingRun | None = None

    @property
    def run(self) -> GrowingRun:
        """Return this rank's membership in the run."""
        if self._run is None:
            self._run = GrowingRun(self._folder, run_name(self._name, self.world_size), None)
        return self._run

    def go_on_in(self, name: str, epoch: int) -> None:
        """Join the run of a state to resume it at this epoch, leaving another run."""
        if self._run is not None and self._run.name != name:
            self._run.leave()
            self._run = None
        if self._run is None:
            self._run = GrowingRun(self._folder, name, epoch)
