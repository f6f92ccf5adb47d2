"""One training run's snapshots, the same for all its ranks.

    .growing/runs/<name>/epoch-<e>.json   frozen by the first rank to need it, visible when it is whole; the others read it
    .growing/runs/<name>/epoch-<e>.begun  a rank has begun to read it; until then it may be frozen anew
    .growing/runs/<name>/attending        a shared flock on it says that a rank of the run lives
    .growing/runs/<name>/gate             whoever comes or goes holds an exclusive flock on it

A rank that comes to a run nobody attends, and resumes nothing, is the first of a new one: snapshots of an earlier run of the same
name go. One that resumes keeps those up to its epoch's, and so is given the very samples that it would have had.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shmload.growing.names import CONTROL, write_whole
from shmload.growing.snapshot import Snapshot
from shmload.storage.descriptors import close_kept, open_kept
from shmload.world import run_key

KEPT_SNAPSHOTS = 64  # of a run: states of older epochs cannot be resumed


def run_name(given: str | None, world_size: int) -> str:
    """What the ranks of a run have in common and no other run has: as given, else what their launcher told them all.

    Args:
        given: by the user; None: of one rank a name drawn anew.
    """
    if given is None and world_size == 1:
        return secrets.token_hex(6)
    key = run_key()[1:] if given is None else ("named", given)  # the first is of this node alone
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def is_run_name(name: object) -> bool:
    """Whether it is a name of a run: it becomes part of a path, and a state may say anything."""
    return isinstance(name, str) and re.fullmatch("[0-9a-f]{12}", name) is not None


def run_path(folder: Path, name: str) -> Path:
    """Where a run's snapshots lie."""
    return folder / CONTROL / "runs" / name


def kept_snapshot(path: Path, epoch: int) -> Snapshot | None:
    """The snapshot of an epoch of the run there, if it is frozen and kept."""
    try:
        return read_snapshot(_file(path, epoch))
    except FileNotFoundError:
        return None


def _file(path: Path, epoch: int) -> Path:
    return path / f"epoch-{epoch}.json"


class Run:
    """This rank's part in a run; ends with the object.

    Args:
        resumed: the epoch that is gone on in; None: the run begins.
    """

    def __init__(self, folder: Path, name: str, resumed: int | None) -> None:
        self.name = name
        self._attending = -1
        self.path = run_path(folder, name)
        self.path.mkdir(parents=True, exist_ok=True)
        with self._gate():
            self._attending = open_kept(os.fspath(self.path / "attending"), os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._attending, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                for epoch in self._epochs():
                    if resumed is None or epoch > resumed:
                        self._forget(epoch)
            fcntl.flock(self._attending, fcntl.LOCK_SH)

    @contextmanager
    def _gate(self) -> Iterator[None]:
        fd = os.open(self.path / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def file(self, epoch: int) -> Path:
        """Where an epoch's snapshot lies."""
        return _file(self.path, epoch)

    def _epochs(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("epoch-")) for path in self.path.glob("epoch-*.json"))

    def read(self, epoch: int) -> Snapshot | None:
        """An epoch's snapshot, if it is frozen."""
        return kept_snapshot(self.path, epoch)

    def freeze(self, snapshot: Snapshot) -> bool:
        """Makes this the epoch's snapshot, unless another rank was first. A few of the newest are kept."""
        is_ours = write_whole(self.file(snapshot.epoch), snapshot.dumps(), is_new=True)
        for epoch in self._epochs()[:-KEPT_SNAPSHOTS]:
            self._forget(epoch)
        return is_ours

    def begin(self, epoch: int) -> None:
        """Says that this epoch's snapshot is read, so that it stays what it is."""
        self._mark(epoch).touch()

    def take_back(self, snapshot: Snapshot) -> bool:
        """Forgets a snapshot that no rank has begun to read. False: one has.

        A rank that froze it ahead of its time and was killed held its files no longer, and they may be gone before another comes.
        """
        with self._gate():
            if self._mark(snapshot.epoch).exists():
                return False
            if self.read(snapshot.epoch) == snapshot:
                self._forget(snapshot.epoch)
            return True

    def _mark(self, epoch: int) -> Path:
        return self.path / f"epoch-{epoch}.begun"

    def _forget(self, epoch: int) -> None:
        self.file(epoch).unlink(missing_ok=True)
        self._mark(epoch).unlink(missing_ok=True)

    def leave(self) -> None:
        """Attends no longer. Twice is no error."""
        attending, self._attending = self._attending, -1
        close_kept(attending)

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # as in storage/lease.py
            self.leave()


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file; FileNotFoundError if there is none, ShardCorrupt if it is damaged."""
    return Snapshot.loads(path.read_bytes(), path)


def forget_runs(folder: Path, is_there: Callable[[str], bool]) -> None:
    """Removes runs that nobody attends and of whose samples nothing is left: no state of theirs can be resumed."""
    runs = folder / CONTROL / "runs"
    for path in runs.iterdir() if runs.is_dir() else ():
        try:
            fd = os.open(path / "attending", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            snapshots = [read_snapshot(file) for file in path.glob("epoch-*.json")]
            if not any(is_there(file.name) for snapshot in snapshots for file in snapshot.files):
                shutil.rmtree(path, ignore_errors=True)
        except (OSError, ValueError):  # it is attended, or on its way out
            pass
        finally:
            os.close(fd)
