"""What a run asks of the cache's folder: which files an epoch may read, and that they stay.

Once the cache is full an epoch leaves the oldest files out, a share of the budget called headroom. They are what samplers may evict
while the epoch runs; without it everything would be held in every epoch, and the cache would never be renewed.

What a growing cache is doing, for its own process and for stats readers.

One training run's snapshots, the same for all its ranks.

    .growing/runs/<name>/epoch-<e>.json   frozen by the first rank to need it, visible when it is whole; the others read it
    .growing/runs/<name>/epoch-<e>.begun  a rank has begun to read it; until then it may be frozen anew
    .growing/runs/<name>/spare            reserved room, which becomes the next snapshot if the disk is full by then
    .growing/runs/<name>/attending        a shared flock on it says that a rank of the run lives
    .growing/runs/<name>/gate             whoever comes or goes holds an exclusive flock on it

A rank that comes to a run nobody attends, and resumes nothing, is the first of a new one: snapshots of an earlier run of the same
name go. One that resumes keeps those up to its epoch's, and so is given the very samples that it would have had.

The trainer's side of a growing dataset: which snapshot an epoch has, and the hold on its files while it is read.

An epoch's snapshot is frozen when its first batch is ordered, which is while the last batches of the epoch before are still under
way: no worker stands still for it. Its files are held from then until a later epoch begins, the loader closes or the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from shmload.errors import CacheFull, StateMismatch, WorkerDied
from shmload.formats.paths import is_hidden, write_whole
from shmload.growing.files import (
    CONTROL,
    EPOCH_SHIFT,
    MAX_EPOCH,
    CacheFile,
    Gone,
    Intake,
    Snapshot,
    WriterStatistics,
    locked,
    newest_generation,
    read_own_name,
    read_snapshot,
    reported_bad,
    reports,
    snapshot_path,
)
from shmload.growing.sampler_supervisor import Samplers
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.file_lease import Leases
from shmload.storage.file_locks import KeptFile, try_lock
from shmload.storage.ledger import Kept
from shmload.world import run_key

LOOK_S = 0.05  # between looks for the first samples; other machines' writers ring no bell
EXAMINE_S = 0.2  # how long files dropped in by others may keep an epoch from beginning, behind the first of them


class Library:
    """The files of one cache, as one process sees them.

    Args:
        folder: the cache's.
        file_nbytes, headroom: as of SampleCache.
        samplers: those that this process has started; may change.

    Attributes:
        readers: the loaders' epochs, as long as they last.
    """

    def __init__(self, folder: BudgetedFolder, *, file_nbytes: int, headroom: float, samplers: list[Samplers]) -> None:
        self.path = Path(folder.path)
        self.folder = folder
        room = max(int(folder.capacity_bytes * headroom), 2 * file_nbytes)
        self.readable_nbytes = folder.capacity_bytes - room
        self._samplers = samplers
        self.readers: WeakSet[GrowingEpochs] = WeakSet()
        self._intake = Intake(self.path / CONTROL / "known.json")
        self._is_first = True

    def collected(self, at_least: int, timeout_s: float) -> Sequence[CacheFile]:
        """The files that an epoch may read, oldest first: all that fit beside the headroom.

        Args:
            at_least: samples that they must hold.
            timeout_s: seconds to wait for that.
        Raises:
            TimeoutError: they do not.
            WorkerDied: they never will, as all samplers have been given up.
        """
        deadline = monotonic() + timeout_s
        while True:
            for samplers in self._samplers:
                samplers.look()
            files = self._readable()
            there = sum(file.num_records for file in files)
            if there >= at_least:
                return files
            left = deadline - monotonic()
            if left <= 0:
                are_done = self._samplers and all(samplers.are_done for samplers in self._samplers)
                done = " Its samplers have come to their end." if are_done else ""
                raise TimeoutError(
                    f"{self.path} holds {there} samples after {timeout_s} s, an epoch needs {at_least}.{done} Wait longer "
                    "(timeout_s), begin with fewer (min_samples), or see in cache.stats() what its writers do"
                )
            sleep(min(left, LOOK_S))

    def _readable(self) -> list[CacheFile]:
        """What fits beside the headroom."""
        files = self.files()
        kept: list[CacheFile] = []
        nbytes = 0
        for file in reversed(files):
            nbytes += file.nbytes
            if nbytes > self.readable_nbytes and kept:
                break
            kept.append(file)
        return kept[::-1]

    def files(self) -> list[CacheFile]:
        """What an epoch could read now if there were no headroom to leave, oldest first. Looks into files dropped in by others."""
        self.folder.refresh()
        self._intake.load()
        bad = reported_bad(self.path)
        found: list[CacheFile] = []
        names = set()
        began, has_looked = monotonic(), False
        for kept in self.folder.files():
            if not is_of_samples(kept.name) or kept.name in bad:
                continue
            if (own := read_own_name(kept.name)) is not None:
                if own[1] == kept.nbytes:
                    found.append(CacheFile(kept.name, own[0], kept.nbytes, kept.published_ns))
                continue
            names.add(kept.name)
            path = self.path / kept.name
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            count = self._intake.known(kept.name, status)
            if count is None and (self._is_first or not has_looked or monotonic() - began < EXAMINE_S):
                count, has_looked = self._intake.look(path, status), True
            if isinstance(count, int):
                found.append(CacheFile(kept.name, count, kept.nbytes, kept.published_ns))
        self._intake.keep(names)
        self._is_first = False
        return found

    def bad(self) -> dict[str, str]:
        """Files that are left out, and why."""
        found = {}
        for kept in self.folder.files():
            own = read_own_name(kept.name)
            if own is not None and own[1] != kept.nbytes:
                found[kept.name] = f"{self.path / kept.name}: has {kept.nbytes} bytes, and was published with {own[1]}"
        return {**found, **self._intake.bad, **reported_bad(self.path)}


def is_of_samples(name: str) -> bool:
    """Whether a file in the folder is meant as samples: what is not is never read, nor evicted."""
    is_beside = is_hidden(name) or name.endswith((".shmload-index", ".tfindex", ".index", ".idx"))
    return "tfrecord" in name.lower() and not is_beside


def are_samples(candidates: Iterator[Kept]) -> Iterator[Kept]:
    """The order of eviction: oldest first, and nothing that is no samples."""
    return (kept for kept in candidates if is_of_samples(kept.name))


RATE_S = 60.0  # what is published in so many seconds makes the rate


@dataclass(frozen=True)
class CacheStatistics:
    """A growing cache at one moment.

    Attributes:
        nbytes: of all files, those that are being written included at what is reserved for them.
        num_leased: files that epochs under way keep from being evicted.
        generation: how many files writers have published so far.
        num_evicted: of those, how many are gone.
        bytes_per_s, samples_per_s: published in the last minute.
        bad: files that are left out, and why.
        writers: the living ones.
        samplers: those under supervision, of any process here.
    """

    capacity_bytes: int
    nbytes: int
    num_files: int
    num_samples: int
    num_leased: int
    num_writing: int
    generation: int
    num_evicted: int
    bytes_per_s: float
    samples_per_s: float
    bad: Mapping[str, str]
    writers: Sequence[WriterStatistics]
    samplers: Sequence[Mapping[str, Any]]


def statistics_of(library: Library) -> CacheStatistics:
    """The cache now."""
    files, of_folder = library.files(), library.folder.statistics()
    control = library.path / CONTROL
    generation = newest_generation(control)
    newest = [file for file in files if file.mtime_ns > (time() - RATE_S) * 1e9]
    return CacheStatistics(
        capacity_bytes=library.folder.capacity_bytes,
        nbytes=of_folder.nbytes,
        num_files=len(files),
        num_samples=sum(file.num_records for file in files),
        num_leased=of_folder.num_leased,
        num_writing=of_folder.num_writing,
        generation=generation,
        num_evicted=generation - sum(file.generation >= 0 for file in files),
        bytes_per_s=sum(file.nbytes for file in newest) / RATE_S,
        samples_per_s=sum(file.num_records for file in newest) / RATE_S,
        bad=library.bad(),
        writers=[WriterStatistics(**one) for _, one in reports(control, "writers")],
        samplers=[{"trainer": pid, **one} for pid, all_of_it in reports(control, "samplers") for one in all_of_it],
    )


SPARE = "spare"
SPARE_NBYTES = 4096  # it is reserved in multiples of this
KEPT_SNAPSHOTS = 64  # of a run: states of older epochs cannot be resumed


def run_name(given: str | None, world_size: int) -> str:
    """What the ranks of a run have in common and no other run has: as given, else what their launcher set for them all.

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


class GrowingRun:
    """This rank's part in a run; ends with the object.

    Args:
        resumed: the epoch that is gone on in; None: the run begins.
    """

    def __init__(self, folder: Path, name: str, resumed: int | None) -> None:
        self.name = name
        self.path = run_path(folder, name)
        while not self._attend(resumed):
            pass

    def _attend(self, resumed: int | None) -> bool:
        """Begins to attend. False: another process has just removed the run (`forget_runs`), as nobody attended it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), locked(self.path / "gate"):
            path = os.fspath(self.path / "attending")
            self._attending = KeptFile(path)
            if try_lock(self._attending.fd):
                for epoch in self._epochs():
                    if resumed is None or epoch > resumed:
                        self._forget(epoch)
            fcntl.flock(self._attending.fd, fcntl.LOCK_SH)
            return os.path.samestat(os.fstat(self._attending.fd), os.stat(path))
        return False

    def _epochs(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("epoch-")) for path in self.path.glob("epoch-*.json"))

    def read(self, epoch: int) -> Snapshot | None:
        """An epoch's snapshot, if it is frozen."""
        return read_snapshot(snapshot_path(self.path, epoch))

    def freeze(self, snapshot: Snapshot) -> bool:
        """Makes this the epoch's snapshot, unless another rank was first. A few of the newest are kept."""
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
        """Make a spare file of at least `nbytes` without any more of the disk: of the oldest snapshot that no rank reads.

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
        """Reserve room for the next epoch's snapshot, if there is any: samplers may fill the disk until then."""
        with suppress(OSError), locked(self.path / "gate"), open(self.path / SPARE, "ab") as spare:
            os.posix_fallocate(spare.fileno(), 0, -(-nbytes // SPARE_NBYTES) * SPARE_NBYTES)

    def begin(self, epoch: int) -> None:
        """Says that this epoch's snapshot is read, so that it stays what it is."""
        self._mark(epoch).touch()

    def take_back(self, snapshot: Snapshot) -> bool:
        """Forgets a snapshot that no rank has begun to read. False: one has.

        A rank that froze it ahead of its time and was killed held its files no longer, and they may be gone before another comes.
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
        """Attends no longer. Twice is no error."""
        self._attending.close()


def forget_runs(folder: Path, is_there: Callable[[str], bool]) -> None:
    """Removes runs that nobody attends and of whose samples nothing is left: no state of theirs can be resumed."""
    runs = folder / CONTROL / "runs"
    for path in runs.iterdir() if runs.is_dir() else ():
        with suppress(OSError, ValueError), open(path / "attending", "rb+") as file:  # it is attended, or on its way out
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            snapshots = [snapshot for kept in path.glob("epoch-*.json") if (snapshot := read_snapshot(kept))]
            if not any(is_there(each.name) for snapshot in snapshots for each in snapshot.files):
                shutil.rmtree(path, ignore_errors=True)


Missing = Literal["error", "skip", "substitute"]
NAMED = 5  # files that are gone that an error names
log = logging.getLogger("shmload")


class JoinedRun:
    """The run that all loaders of a dataset read in, joined at the first look.

    Args:
        folder: of the cache.
        name: of the run; None: drawn, or made of what the launcher says.

    Attributes:
        world_size: set with the schedule of the first loader, before any epoch is asked for.
    """

    def __init__(self, folder: Path, name: str | None) -> None:
        self._folder, self._name = folder, name
        self.world_size = 1
        self._run: GrowingRun | None = None

    @property
    def run(self) -> GrowingRun:
        """This rank's part in it."""
        if self._run is None:
            self._run = GrowingRun(self._folder, run_name(self._name, self.world_size), None)
        return self._run

    def go_on_in(self, name: str, epoch: int) -> None:
        """Joins the run that a state names, in the epoch that it is of."""
        if self._run is not None and self._run.name != name:
            self._run.leave()
            self._run = None
        if self._run is None:
            self._run = GrowingRun(self._folder, name, epoch)


class GrowingEpochs:
    """The epochs of one loader in its run: each loader of a dataset is in an epoch of its own, and holds that one's files.

    Args:
        joined: the run.
        min_samples: an epoch waits for so many.
        timeout_s: for so long at most.
        missing: what a resume does about samples that were evicted.
        smallest: samples without which an epoch has no step.
    """

    identity = "growing cache"
    n = 0

    def __init__(
        self, library: Library, joined: JoinedRun, *, min_samples: int, timeout_s: float, missing: Missing, smallest: int
    ) -> None:
        self._library, self._joined = library, joined
        self._timeout_s, self._missing = timeout_s, missing
        self._least = max(min_samples, smallest)
        self._snapshots: dict[int, Snapshot] = {}
        self._holds: dict[int, Leases] = {}
        self._gone: dict[int, Gone] = {}
        self._begun: set[int] = set()
        self._unsettled = -1  # an epoch that could not be frozen ahead of its time
        library.readers.add(self)

    # ------------------------------------------------------------ the run

    @property
    def run(self) -> GrowingRun:
        """This rank's part in its run."""
        return self._library.folder.evicting(lambda: self._joined.run)

    def state(self, epoch: int) -> dict[str, Any] | None:
        """What a state says of an epoch's snapshot; None before it is begun, as until then it may be frozen anew."""
        snapshot = self._snapshots.get(epoch)
        if snapshot is None or epoch not in self._begun:
            return None
        return {"run": self.run.name, "n": snapshot.n, "digest": snapshot.digest}

    def go_on_from(self, named: Mapping[str, Any] | None, epoch: int) -> None:
        """Takes a state's snapshot for its epoch; None: it names none, as one that was taken before its epoch began.

        Raises:
            StateMismatch: it is not kept any more, or samples of it are gone and that is an error, or this names none.
        """
        if named is None and epoch > MAX_EPOCH:
            raise StateMismatch(
                f"a growing dataset's epoch is at most {MAX_EPOCH}, the state's is {epoch}: load what state_dict() returned"
            )
        if named is None:
            return
        is_dict = isinstance(named, Mapping) and isinstance(named.get("digest"), str)
        if not is_dict or not is_run_name(named.get("run")) or epoch > MAX_EPOCH:
            raise StateMismatch(f"the state names no snapshot of epoch {epoch}: {named!r:.200}. Load what state_dict() returned")
        path = run_path(self._library.path, named["run"])
        snapshot = read_snapshot(snapshot_path(path, epoch))
        if snapshot is None or snapshot.digest != named["digest"]:
            held = "is not there" if snapshot is None else "is another"
            raise StateMismatch(
                f"the state names the snapshot {named['digest']} of epoch {epoch}, which {held} in {path}: resume "
                "with the folder that the state was saved with, or begin this epoch anew with a state of its start"
            )
        before = self._snapshots, self._holds, self._gone
        self._snapshots, self._holds, self._gone = {}, {}, {}
        try:
            self._take(snapshot, is_named=True)
        except StateMismatch:
            self._snapshots, self._holds, self._gone = before
            raise
        for hold in before[1].values():
            hold.release()
        self._joined.go_on_in(named["run"], epoch)
        self._begun = {epoch}

    # ------------------------------------------------------------ an epoch

    def is_settled(self, epoch: int) -> bool:
        """Whether an epoch has a snapshot, or is to have one now, whatever it takes.

        One that lies ahead of those begun must not disturb them: what stands in its way is raised when it begins.
        """
        if epoch in self._snapshots or not self._begun or epoch <= max(self._begun):
            return True
        if epoch == self._unsettled:
            return False
        try:
            self.snapshot(epoch, timeout_s=0.0)
        except (TimeoutError, WorkerDied, StateMismatch, CacheFull):
            self._unsettled = epoch  # another look with each batch would cost too much
            return False
        return True

    def snapshot(self, epoch: int, timeout_s: float | None = None) -> Snapshot:
        """An epoch's snapshot; frozen by the first rank that asks for it.

        Args:
            timeout_s: seconds to wait for samples; None: the dataset's own.
        Raises:
            TimeoutError: too few samples have been collected.
            StateMismatch: it was frozen long ago, and samples of it are gone.
            CacheFull: the disk is full, and no file of the cache may be evicted.
        """
        folder, has_evicted = self._library.folder, False
        known = self._snapshots.get(epoch)
        if known is not None:
            return known
        if epoch > MAX_EPOCH:
            raise ValueError(f"a growing dataset's epoch is at most {MAX_EPOCH}; got {epoch}")
        while (found := self.run.read(epoch)) is None or not self._take(found, is_named=False):
            if found is not None:
                continue
            files = self._library.collected(self._least, self._timeout_s if timeout_s is None else timeout_s)
            hold = folder.lease_many([file.name for file in files])
            held = frozenset(hold.names)
            kept = tuple(file for file in files if file.name in held)
            if sum(file.num_records for file in kept) < self._least:
                hold.release()  # evicted between the look and the hold
                continue
            found = Snapshot(epoch, kept)
            try:
                is_ours = folder.evicting(partial(self.run.freeze, found))
            except CacheFull:
                hold.release()
                if timeout_s is not None or has_evicted or not folder.free_disk(1):  # ahead of its time an epoch evicts nothing
                    raise
                has_evicted = True
                continue
            if is_ours:
                self._holds[epoch], self._snapshots[epoch] = hold, found
                log.info("epoch %d reads %d samples in %d files", epoch, found.n, len(kept))
                return found
            hold.release()
        return found

    def _take(self, snapshot: Snapshot, *, is_named: bool) -> bool:
        """Holds what is there of a snapshot's files, and does what is to be done about the others.

        Args:
            is_named: by a state.
        Returns:
            False: some are gone, and nobody had begun to read it, so it is to be frozen anew.
        """
        hold = self._library.folder.lease_many([file.name for file in snapshot.files])
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
        self._holds[snapshot.epoch], self._snapshots[snapshot.epoch] = hold, snapshot
        return True

    def _is_replaced(self, file: CacheFile) -> bool:
        with suppress(FileNotFoundError):
            return file.is_replaced(os.stat(self._library.path / file.name))
        return True

    def keys(self, epoch: int, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices of an epoch's records, less those that are gone; never none, as other ranks have a batch here too."""
        gone = self._gone.get(epoch)
        if gone is not None:
            there = records[~gone.mask(records)] if self._missing == "skip" else records[:0]
            records = there if len(there) else gone.substituted(records[: 1 if self._missing == "skip" else None])
        return records + (epoch << EPOCH_SHIFT)

    # ------------------------------------------------------------ holds

    def begins(self, epoch: int) -> None:
        """Says that an epoch is read from now on: files of earlier ones may be evicted."""
        self._release(epoch)
        self._unsettled = -1
        for earlier in [e for e in self._snapshots if e < epoch - 1]:
            del self._snapshots[earlier]
            self._gone.pop(earlier, None)
        snapshot = self.snapshot(epoch)
        if epoch not in self._holds:  # the loader has been closed since
            self._take(snapshot, is_named=True)
        self._library.folder.evicting(partial(self.run.begin, epoch))
        self._begun = {epoch}

    def ended(self) -> None:
        """Says that none is read any more."""
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


_REMEDY = (
    'cache.dataset(missing="skip") reads the rest, missing="substitute" other samples of that epoch in their place; or begin '
    "the next epoch with set_epoch"
)
_REMEDY_ALL = "begin the next epoch with set_epoch: nothing of this one is left to read"
