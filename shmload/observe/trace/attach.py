"""Recording loaders from outside: their control blocks are found, mapped read-only, and read at intervals.

Nothing is written into a block, and no lock is kept: whether an owner lives is asked of its flock, as the janitor does, with a
shared lock that is given up at once.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic, sleep

from shmload._core.mapping import Mapping
from shmload.observe.trace.tape import Tape
from shmload.observe.trace.timeline import Timeline, timeline_of
from shmload.shm.names import SHM_DIR, STEM_PATTERN

CONTROL = "-control"
SHORTEST_S, LONGEST_S = 0.0005, 0.05  # between two looks
FILLED_SHARE = 0.25  # of a recorder, that a look should find
SEARCH_S = 0.1  # between two looks for new rings: torch mode makes one for each epoch
_MEMFD = re.compile(r"/memfd:(.+-control)(?: \(deleted\))?")


@dataclass
class Watch:
    """The rings that are being recorded. A context manager is not needed: mappings end with it.

    Args:
        pid: of the trainer whose rings are wanted; None: everyone's.
    """

    pid: int | None = None
    tapes: dict[str, Tape] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # name -> why it cannot be read

    def search(self, *, with_history: bool = True) -> None:
        """Attaches to rings that are new since the last search."""
        for name, path in living_rings():
            if name in self.tapes or name in self.refused:
                continue
            try:
                tape = Tape(_mapped(path), with_history=with_history)
            except FileNotFoundError:  # it has just gone
                continue
            except (OSError, ValueError) as error:
                self.refused[name] = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
                continue
            if self.pid is None or tape.owner_pid == self.pid:
                self.tapes[name] = tape
            else:
                self.refused[name] = f"{path}: it is of process {tape.owner_pid}"

    def record(self, seconds: float) -> None:
        """Reads for so long, as often as the fullest recorder demands."""
        end, next_search = monotonic() + seconds, 0.0
        pause = SHORTEST_S
        while True:
            now = monotonic()
            if now >= next_search:
                self.search()
                next_search = now + SEARCH_S
            most = max((tape.drain() / tape.capacity for tape in self.tapes.values()), default=0.0)
            pause = min(max(pause * min(FILLED_SHARE / max(most, 0.01), 2.0), SHORTEST_S), LONGEST_S)
            if now >= end:
                return
            sleep(min(pause, end - now))  # nobody rings for an onlooker

    def timelines(self) -> list[Timeline]:
        """What was recorded, ring by ring; without those that did nothing."""
        told = [timeline_of(tape) for tape in self.tapes.values()]
        return [timeline for timeline in told if timeline.has_content]


def living_rings(folder: str = SHM_DIR) -> Iterator[tuple[str, str]]:
    """(name, path) of the control block of each loader of this user whose owner lives; also of those in a memfd."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    marked = set()
    for name in names:
        if not name.endswith(CONTROL) or STEM_PATTERN.fullmatch(name) is None:
            continue
        nbytes = _size_if_owned(f"{folder}/{name}")
        if nbytes:
            yield name, f"{folder}/{name}"
        elif nbytes == 0:  # a mark: the ring itself is a memfd
            marked.add(name)
    if marked or not names:
        yield from _memfds()


def _size_if_owned(path: str) -> int | None:
    """Bytes of a file of this user's that somebody has locked; None if nobody has, or it is not to be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return status.st_size
    finally:
        os.close(fd)
    return None


def _memfds() -> Iterator[tuple[str, str]]:
    """Control blocks that lie in memfds, by the descriptors of their owners."""
    seen = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        folder = f"/proc/{process}/fd"
        try:
            descriptors = os.listdir(folder)
        except OSError:  # another user's, or gone
            continue
        for fd in descriptors:
            try:
                match = _MEMFD.fullmatch(os.readlink(f"{folder}/{fd}"))
            except OSError:  # it has just been closed
                continue
            if match and STEM_PATTERN.fullmatch(match[1]) and match[1] not in seen:
                seen.add(match[1])
                yield match[1], f"{folder}/{fd}"


def _mapped(path: str) -> Mapping:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Mapping(fd, os.fstat(fd).st_size, writable=False)
    finally:
        os.close(fd)
