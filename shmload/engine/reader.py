"""Reading a running ring: `shmload top`, `shmload trace` and `loader.stats()` read control blocks through one class, `RingReader`.

From outside a block is found first: by name in /dev/shm, or in a memfd, seen under /proc/<pid>/fd. Whether the owner of a named
block lives is known by the flock on it. It is not asked for by taking it: /proc/locks lists who holds what. Only a block whose
lock no process in sight holds is asked about as `shmload clean` does (shm/janitor.py): it is a dead loader's, or that of another
container which shares /dev/shm. A block is mapped read-only, and nothing in it is believed before its sizes were checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shmload._core.mapping import Mapping
from shmload._core.stats_reader import StatsReader
from shmload.engine.stats import Report, Snapshot, describe
from shmload.shm import janitor
from shmload.shm.janitor import Leftover
from shmload.shm.names import SHM_DIR, STEM_PATTERN

if TYPE_CHECKING:
    from shmload.engine.trace import Tape

_CONTROL = "-control"
_FLOCK = re.compile(r"\d+: FLOCK +\w+ +WRITE (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")
_MEMFD = re.compile(r"/memfd:(.+) \(deleted\)")


class Block(NamedTuple):
    """A living loader's control block.

    Attributes:
        stem: its group's, unique on the host.
        path: what to open.
        pid: the trainer's in this PID namespace; None: it lives in another one.
        kind: "shm" or "memfd".
    """

    stem: str
    path: str
    uid: int
    pid: int | None
    kind: str


class Found(NamedTuple):
    """What was found on the host."""

    blocks: list[Block]
    leftovers: list[Leftover]


class RingReader:
    """One ring's control block.

    Args:
        control: mapping of the whole block; read-only is enough.
    Raises:
        ValueError: it is no control block of this version, or a damaged one.
    """

    def __init__(self, control: Mapping) -> None:
        self.control = control
        self._stats_reader = StatsReader(control)

    @classmethod
    def open(cls, path: str) -> Self:
        """Maps the block at a path of `find`.

        Raises:
            ValueError: as the class.
            OSError: it may not be read, or has gone.
        """
        is_name = not path.startswith("/proc/")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if is_name else 0))
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes == 0:
                raise ValueError(f"{path} is no control block: it is empty")
            return cls(Mapping(fd, nbytes, writable=False))
        finally:
            os.close(fd)

    @staticmethod
    def find(folder: str = SHM_DIR, proc: str = "/proc") -> Found:
        """The blocks of this host.

        Cost: a stat for each name of ours, and a readlink for each descriptor of each process that may be read.
        """
        leftovers = janitor.find_leftovers(folder)
        dead = {leftover.stem for leftover in leftovers}
        named = [block for block in _named(folder, _holders(proc)) if block.stem not in dead]
        return Found([*named, *_in_memfds(proc)], leftovers)

    def snapshot(self) -> Snapshot:
        """What the block says now."""
        return self._stats_reader.snapshot()

    def report(self) -> Report:
        """What that means, over the ring's whole life."""
        return describe(self.snapshot())

    def tape(self, *, with_history: bool) -> Tape:
        """What its recorders tell, from now on or from what they hold already."""
        from shmload.engine.trace import Tape  # here: a loader that is not traced need not import it

        return Tape(self.control, with_history=with_history)


def _named(folder: str, holders: dict[tuple[int, int, int], int]) -> Iterator[Block]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        match = STEM_PATTERN.fullmatch(name)
        if match is None or name != match[1] + _CONTROL:
            continue
        try:
            status = os.lstat(f"{folder}/{name}")
        except FileNotFoundError:
            continue
        if status.st_size:  # an empty one only marks that the ring is in a memfd (shm/group.py)
            key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
            yield Block(match[1], f"{folder}/{name}", status.st_uid, holders.get(key), "shm")


def _holders(proc: str) -> dict[tuple[int, int, int], int]:
    """Who holds an exclusive flock on which file (device's numbers, inode): proc_locks(5). Others' PID namespaces do not show."""
    try:
        lines = Path(proc, "locks").read_text().splitlines()
    except OSError:
        return {}
    held = filter(None, map(_FLOCK.match, lines))
    return {(int(one[2], 16), int(one[3], 16), int(one[4])): int(one[1]) for one in held}


def _in_memfds(proc: str) -> Iterator[Block]:
    """The lowest pid that has one open is its trainer's: workers map it and close it."""
    seen = set()
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        try:
            descriptors = os.listdir(f"{proc}/{pid}/fd")
        except OSError:  # it has gone, or is another user's
            continue
        for fd in descriptors:
            path = f"{proc}/{pid}/fd/{fd}"
            try:
                name = _MEMFD.fullmatch(os.readlink(path))
                match = name and STEM_PATTERN.fullmatch(name[1])
                if match and name and name[1] == match[1] + _CONTROL and match[1] not in seen:
                    seen.add(match[1])
                    yield Block(match[1], path, os.stat(path).st_uid, pid, "memfd")
            except OSError:
                continue


# ------------------------------------------------------------ the processes of a ring

PAGE = os.sysconf("SC_PAGE_SIZE")
_HELPERS = ("multiprocessing.spawn", "multiprocessing.forkserver")  # the command is their parent's


class Process(NamedTuple):
    """One process of this PID namespace.

    Attributes:
        rss_bytes: what it has in memory, the ring it maps included.
        private_bytes: of that, what it shares with no file and no segment.
        is_stopped: by a signal or a debugger.
    """

    parent: int
    is_stopped: bool
    rss_bytes: int
    private_bytes: int


def look(pid: int | None, proc: str = "/proc") -> Process | None:
    """What is known of a process; None if it has gone, or nothing of it may be read."""
    if not pid:
        return None
    try:
        words = Path(f"{proc}/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        pages = [int(word) for word in Path(f"{proc}/{pid}/statm").read_bytes().split()]
        return Process(int(words[1]), words[0] in (b"T", b"t"), pages[1] * PAGE, (pages[1] - pages[2]) * PAGE)
    except (OSError, IndexError, ValueError):
        return None


def command_of(pid: int | None, proc: str = "/proc") -> str:
    """Its command line; its parent's if multiprocessing has started it; empty if that cannot be read."""
    if not pid:
        return ""
    try:
        words = Path(f"{proc}/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    if any(helper in word for word in words for helper in _HELPERS):
        found = look(pid, proc)
        return command_of(None if found is None else found.parent, proc) or " ".join(words)
    return " ".join(words)


def add_memory(report: dict[str, Any], proc: str = "/proc", *, is_known: bool = True) -> None:
    """Adds to a report what its workers' processes take and whether one is stopped; None where unknown.

    Args:
        is_known: their pids are those of this PID namespace.
    """
    names = ("is_stopped", "rss_bytes", "private_bytes")
    for worker in report["workers"]:
        found = look(worker["pid"], proc) if is_known else None
        worker.update({name: None if found is None else getattr(found, name) for name in names})
    for name in names[1:]:
        report["memory"][f"workers_{name}"] = sum(worker[name] or 0 for worker in report["workers"]) or None
