"""Every control block on this host: named ones in /dev/shm, and those in memfds, seen under /proc/<pid>/fd.

Whether the owner of a named block lives is known by the flock on it. It is not asked for by taking it: /proc/locks lists who holds
what. Only a block whose lock no process in sight holds is asked about as `shmload clean` does (shm/janitor.py): it is a dead
loader's, or that of another container which shares /dev/shm.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from shmload._core.mapping import Mapping
from shmload._core.onlooker import Onlooker
from shmload.engine.stats import Process, Report, Snapshot, add_memory, command_of, describe, look
from shmload.shm import janitor
from shmload.shm.janitor import Leftover
from shmload.shm.names import SHM_DIR, STEM_PATTERN

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


def find(folder: str = SHM_DIR, proc: str = "/proc") -> Found:
    """Looks once. Cost: a stat for each name of ours, and a readlink for each descriptor of each process that may be read."""
    leftovers = janitor.find_leftovers(folder)
    dead = {leftover.stem for leftover in leftovers}
    named = [block for block in _named(folder, _holders(proc)) if block.stem not in dead]
    return Found([*named, *_in_memfds(proc)], leftovers)


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
    found = {}
    try:
        lines = Path(proc, "locks").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        if held := _FLOCK.match(line):
            found[int(held[2], 16), int(held[3], 16), int(held[4])] = int(held[1])
    return found


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


HISTORY = 60  # looks of which the samples per second are kept
FINDING_SHARE = 20  # finding takes at most one part in so many of the time
FINDING_S = 2.0  # and happens at most so often


def read_block(path: str) -> Snapshot:
    """What a control block says now.

    Raises:
        ValueError: it is no control block of this version, or a damaged one.
        OSError: it may not be read, or has gone.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if path.startswith("/proc/") else os.O_NOFOLLOW))
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes == 0:
            raise ValueError(f"{path} is no control block: it is empty")
        return Onlooker(Mapping(fd, nbytes, writable=False)).snapshot()
    finally:
        os.close(fd)


class Watch:
    """The loaders of this host, or of some of its processes.

    Args:
        pids: trainers, or the processes that have started them; none: all loaders.
        folder: where named segments lie.
    """

    def __init__(self, pids: Iterable[int] = (), *, folder: str = SHM_DIR) -> None:
        self._pids = frozenset(pids)
        self._folder = folder
        self._found = Found([], [])
        self._found_at, self._finding_s = -float("inf"), 0.0
        self._last: dict[str, Snapshot] = {}
        self._history: dict[str, deque[float]] = {}
        self._commands: dict[str, str] = {}

    def look(self) -> Report:
        """What has happened since the last look; of a loader that was not there then, since it began.

        Returns:
            loaders, one report each (docs/top.md); totals over them; what dead ones have left; blocks that could not be read.
        """
        found = self._find()
        reports, unreadable = [], []
        for block in found.blocks:
            process = look(block.pid)
            if self._pids and self._pids.isdisjoint({block.pid, process and process.parent}):
                continue
            try:
                seen = read_block(block.path)
            except (FileNotFoundError, PermissionError):  # it has closed since, or is another user's
                continue
            except (OSError, ValueError) as error:
                unreadable.append({"path": block.path, "uid": block.uid, "pid": block.pid, "why": str(error)})
                continue
            reports.append(self._report(block, seen, process))
        self._forget({report["stem"] for report in reports})
        reports.sort(key=lambda report: (report["parent_pid"] or 0, report["rank"], -report["age_s"]))
        return {
            "time_s": time.time(),
            "loaders": reports,
            "totals": totals(reports),
            "leftovers": {
                "num": len(found.leftovers),
                "nbytes": sum(leftover.nbytes for leftover in found.leftovers),
                "pids": [leftover.pid or None for leftover in found.leftovers],
            },
            "unreadable": unreadable,
        }

    def _find(self) -> Found:
        began = time.monotonic()
        if began - self._found_at >= max(FINDING_S, FINDING_SHARE * self._finding_s):
            self._found = find(self._folder)
            self._found_at, self._finding_s = began, time.monotonic() - began
        return self._found

    def _report(self, block: Block, seen: Snapshot, process: Process | None) -> Report:
        report = describe(seen, self._last.get(block.stem))
        is_at_home = (
            block.pid == seen["owner_pid"]
        )  # else its workers' pids are of another PID namespace, and here another's
        add_memory(report, is_known=is_at_home)
        self._last[block.stem] = seen
        history = self._history.setdefault(block.stem, deque(maxlen=HISTORY))
        history.append(report["samples_per_s"])
        if block.stem not in self._commands:
            self._commands[block.stem] = command_of(block.pid)
        return {
            "stem": block.stem,
            "kind": block.kind,
            "uid": block.uid,
            "pid": block.pid,
            "owner_pid": seen["owner_pid"],
            "parent_pid": None if process is None else process.parent,
            "is_stopped": None if process is None else process.is_stopped,
            "command": self._commands[block.stem],
            "rank": seen["rank"],
            "world_size": seen["world_size"],
            **report,
            "history": list(history),
        }

    def _forget(self, stems: set[str]) -> None:
        for kept in (self._last, self._history, self._commands):
            for stem in [stem for stem in kept if stem not in stems]:
                del kept[stem]


def totals(reports: list[Report]) -> Report:
    """What all loaders do together."""
    return {
        "num_loaders": len(reports),
        "num_workers": sum(len(report["workers"]) for report in reports),
        "samples_per_s": sum(report["samples_per_s"] for report in reports),
        "nbytes_per_s": sum(report["nbytes_per_s"] for report in reports),
        "ring_nbytes": sum(report["memory"]["ring_nbytes"] for report in reports),
        "num_bad_samples": sum(report["num_bad_samples"] for report in reports),
        "num_restarts": sum(report["num_restarts"] for report in reports),
    }
