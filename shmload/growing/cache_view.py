"""`CacheView`: one process's view of the files of a growing cache, and the choice of those that an epoch may read.

When the cache is full, an epoch leaves out the oldest files, a share of the budget called headroom. Samplers may evict these
while the epoch runs; without headroom every file would be leased in every epoch, and the cache would never be renewed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from weakref import WeakSet

from shmload.formats.file_names import is_hidden
from shmload.growing.cache_file import CONTROL, CacheFile, read_own_name
from shmload.growing.damage import reported_bad
from shmload.growing.intake import Intake
from shmload.growing.samplers import Samplers
from shmload.schedule.epoch_snapshots import EpochSnapshots
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.ledger import PublishedFile

LOOK_S = 0.05  # interval of polling for the first samples, because writers may be on other machines, which cannot ring a bell
EXAMINE_S = 0.2  # a listing examines added files for this long, and the rest later; the first listing examines all


class CacheView:
    """One process's view of the files of a cache.

    Args:
        folder: the cache's folder.
        file_nbytes, headroom: see SampleCache.
        samplers: the samplers that this process has started; may change.

    Attributes:
        readers: the epochs of loaders that are alive.
    """

    def __init__(self, folder: BudgetedFolder, *, file_nbytes: int, headroom: float, samplers: list[Samplers]) -> None:
        self.path = Path(folder.path)
        self.folder = folder
        room = max(int(folder.capacity_bytes * headroom), 2 * file_nbytes)
        self.readable_nbytes = folder.capacity_bytes - room
        self._samplers = samplers
        self.readers: WeakSet[EpochSnapshots[Any]] = WeakSet()
        self._intake = Intake(self.path / CONTROL / "known.json")
        self._is_first = True

    def collected(self, at_least: int, timeout_s: float) -> Sequence[CacheFile]:
        """Return the files that an epoch may read, oldest first: all files outside the headroom. Wait for the first samples.

        Args:
            at_least: the minimum number of samples in them.
            timeout_s: seconds to wait for that number.
        Raises:
            TimeoutError: there are too few samples.
            WorkerDied: there will never be enough, because all samplers have been given up.
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
                done = " Its samplers have ended." if are_done else ""
                raise TimeoutError(
                    f"{self.path} holds {there} samples after {timeout_s} s, an epoch needs {at_least}.{done} Wait longer "
                    "(timeout_s), begin with fewer (min_samples), or inspect its writers in cache.stats()"
                )
            sleep(min(left, LOOK_S))

    def _readable(self) -> list[CacheFile]:
        """Return the files outside the headroom."""
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
        """Return the files that an epoch could read now without headroom, oldest first. Examine added files."""
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
        """Return the ignored files, and the reason for each."""
        found = {}
        for kept in self.folder.files():
            own = read_own_name(kept.name)
            if own is not None and own[1] != kept.nbytes:
                found[kept.name] = f"{self.path / kept.name}: has {kept.nbytes} bytes, and was published with {own[1]}"
        return {**found, **self._intake.bad, **reported_bad(self.path)}


def is_of_samples(name: str) -> bool:
    """Return whether a file in the folder contains samples. Other files are neither read nor evicted."""
    is_beside = is_hidden(name) or name.endswith((".shmload-index", ".tfindex", ".index", ".idx"))
    return "tfrecord" in name.lower() and not is_beside


def are_samples(candidates: Iterator[PublishedFile]) -> Iterator[PublishedFile]:
    """Return the files that contain samples, in the order of eviction: oldest first."""
    return (kept for kept in candidates if is_of_samples(kept.name))
