"""What a run asks of the cache's folder: which files an epoch may read, and that they stay.

Once the cache is full an epoch leaves the oldest files out, a share of the budget called headroom. They are what samplers may evict
while the epoch runs; without it everything would be held in every epoch, and the cache would never be renewed.

What a growing cache is doing, for its own process and for stats readers.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import Any

from shmload.growing.files import CONTROL, CacheFile, Intake, newest_generation, read_own_name, told_bad
from shmload.growing.samplers import Samplers
from shmload.growing.writer import WriterStatistics, told_by_samplers, told_by_writers
from shmload.storage.folder import BudgetedFolder, Leases
from shmload.storage.ledger import Kept

LOOK_S = 0.05  # between looks for the first samples; other machines' writers ring no bell
EXAMINE_S = 0.2  # how long files dropped in by others may keep an epoch from beginning, behind the first of them


class Library:
    """The files of one cache, as one process sees them.

    Args:
        folder: the cache's.
        file_nbytes, headroom, max_age_s, settle_s: as of SampleCache.
        samplers: those that this process has started; may change.
    """

    def __init__(
        self,
        folder: BudgetedFolder,
        *,
        file_nbytes: int,
        headroom: float,
        max_age_s: float | None,
        settle_s: float,
        samplers: list[Samplers],
    ) -> None:
        self.path = Path(folder.path)
        self.folder = folder
        room = max(int(folder.capacity_bytes * headroom), 2 * file_nbytes)
        self.readable_nbytes = folder.capacity_bytes - room
        self._max_age_s = max_age_s
        self._samplers = samplers
        self._intake = Intake(self.path / CONTROL / "known.json", settle_s)
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
                done = " Its samplers have come to their end." if self._are_done else ""
                raise TimeoutError(
                    f"{self.path} holds {there} samples after {timeout_s} s, an epoch needs {at_least}.{done} Wait longer "
                    "(timeout_s), begin with fewer (min_samples), or see in cache.stats() what its writers do"
                )
            self._wait(min(left, LOOK_S))

    @property
    def _are_done(self) -> bool:
        return bool(self._samplers) and all(samplers.are_done for samplers in self._samplers)

    def _wait(self, longest_s: float) -> None:
        poll = select.poll()
        for samplers in self._samplers:
            poll.register(samplers.sentinel, select.POLLIN)
        poll.poll(longest_s * 1000)

    def _readable(self) -> list[CacheFile]:
        """What fits beside the headroom, and is not too old."""
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
        self._discard_old()
        self.folder.refresh()
        self._intake.load()
        bad = told_bad(self.path)
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

    def _discard_old(self) -> None:
        if self._max_age_s is None:
            return
        for kept in self.folder.files():
            if kept.published_ns < (time() - self._max_age_s) * 1e9 and is_of_samples(kept.name):
                self.folder.discard(kept.name)  # one that is leased stays until it is not

    def hold(self, names: Sequence[str]) -> Hold:
        """Keeps files from being evicted, by this process and as long as it lives."""
        return Hold(self.folder.lease_many(names))

    def bad(self) -> dict[str, str]:
        """Files that are left out, and why."""
        found = {}
        for kept in self.folder.files():
            own = read_own_name(kept.name)
            if own is not None and own[1] != kept.nbytes:
                found[kept.name] = f"{self.path / kept.name}: has {kept.nbytes} bytes, and was published with {own[1]}"
        return {**found, **self._intake.bad, **told_bad(self.path)}


class Hold:
    """Files of a snapshot, leased together."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.names = frozenset(leases.names)

    def release(self) -> None:
        """Lets them go."""
        self._leases.release()


def is_of_samples(name: str) -> bool:
    """Whether a file in the folder is meant as samples: what is not is never read, nor evicted."""
    return "tfrecord" in name.lower() and not name.endswith((".shmload-index", ".tfindex", ".index", ".idx"))


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
        num_gone: samples of resumed epochs that are gone, by epoch.
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
    num_gone: Mapping[int, int]


def statistics_of(library: Library, num_gone: Mapping[int, int]) -> CacheStatistics:
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
        writers=told_by_writers(control),
        samplers=told_by_samplers(control),
        num_gone=num_gone,
    )
