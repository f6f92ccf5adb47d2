"""Read a running ring's control block for `shmload top`, `shmload trace` and `loader.stats()`.

Other programs must first find a block: by its name in /dev/shm, or in a memfd through /proc/<pid>/fd. The flock on a named block
shows whether its owner lives, and /proc/locks lists the owner's pid. Leftovers of dead loaders, as `shmload clean` finds them
(shm/janitor.py), are reported separately; a block whose lock is held by no visible process and that is not a leftover belongs to
another container that shares /dev/shm. A block is mapped read-only, and its contents are used only after its sizes were checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from shmload._core.mapping import Mapping
from shmload._core.stats_reader import StatsReader
from shmload.engine.stage_record import StagePlaces, load_stages
from shmload.engine.stats import Report, describe
from shmload.engine.time_shares import Snapshot
from shmload.engine.worker_cpu import runnable_ns
from shmload.shm import janitor
from shmload.shm.janitor import Leftover
from shmload.shm.names import SHM_DIR, STEM_PATTERN

_CONTROL = "-control"
_FLOCK = re.compile(r"\d+: FLOCK +\w+ +WRITE (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")
_MEMFD = re.compile(r"/memfd:(.+) \(deleted\)")


class ControlBlock(NamedTuple):
    """The control block of a living loader.

    Attributes:
        stem: name of its segment group, unique on the host.
        path: path for `RingReader.open`.
        uid: id of the user who owns it.
        pid: the trainer's pid in this PID namespace; None if it lives in another one.
        kind: "shm" or "memfd".
    """

    stem: str
    path: str
    uid: int
    pid: int | None
    kind: str


class HostRings(NamedTuple):
    """The control blocks of living loaders and the leftovers of dead ones, as found on the host."""

    blocks: list[ControlBlock]
    leftovers: list[Leftover]


class RingReader:
    """A reader of one ring's control block.

    Args:
        control: mapping of the whole block; may be read-only.
    Raises:
        ValueError: it is not a control block of this version, or it is damaged.
    """

    def __init__(self, control: Mapping) -> None:
        self.control = control
        self._stats_reader = StatsReader(control)

    @classmethod
    def open(cls, path: str) -> Self:
        """Map the block at a path returned by `find`.

        Args:
            path: path of the block.
        Raises:
            ValueError: it is not a control block of this version, or it is damaged.
            OSError: it is not readable, or no longer exists.
        """
        is_name = not path.startswith("/proc/")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if is_name else 0))
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes == 0:
                raise ValueError(f"{path} is not a control block: it is empty")
            return cls(Mapping(fd, nbytes, writable=False))
        finally:
            os.close(fd)

    @staticmethod
    def find(folder: str = SHM_DIR, proc: str = "/proc") -> HostRings:
        """Find the blocks of this host.

        Args:
            folder: folder of named segments.
            proc: mount point of procfs.
        Cost: one stat per name of shmload's, and one readlink per descriptor of each process that this user may read.
        """
        leftovers = janitor.find_leftovers(folder)
        dead = {leftover.stem for leftover in leftovers}
        named = [block for block in _named(folder, _holders(proc)) if block.stem not in dead]
        return HostRings([*named, *_in_memfds(proc)], leftovers)

    def snapshot(self, seen_pid: int | None = None) -> Snapshot:
        """Return the current values of the block, by name (src/stats_reader.pyx), and `runnable_ns` of each worker.

        `runnable_ns` (worker_cpu.py) is None for threads of the trainer and for workers whose samples are read on a cluster.

        Args:
            seen_pid: the trainer's process id as this process sees it; None if it is known to be the block's. If they differ, the
                trainer is in another PID namespace, and its workers' ids mean other processes here.
        """
        seen: Snapshot = self._stats_reader.snapshot()
        is_known = seen_pid in (None, seen["owner_pid"])
        for worker in seen["workers"]:
            is_process = worker["pid"] not in (0, seen["owner_pid"]) and not worker["num_actors"]
            worker["runnable_ns"] = runnable_ns(worker["pid"]) if is_known and is_process else None
        return seen

    @property
    def pipeline_stages(self) -> StagePlaces | None:
        """Return the stages of the ring's pipeline and where each runs; None if the ring does not belong to a pipeline."""
        return load_stages(memoryview(self.control))

    def report(self) -> Report:
        """Return the report of the ring's whole life."""
        return describe(self.snapshot())


def _named(folder: str, holders: dict[tuple[int, int, int], int]) -> Iterator[ControlBlock]:
    """Yield the control blocks of the files in a folder; `holders` has the pid that holds the lock on each file."""
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
        if status.st_size:  # an empty file only marks that the ring is in a memfd (shm/segment_group.py)
            key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
            yield ControlBlock(match[1], f"{folder}/{name}", status.st_uid, holders.get(key), "shm")


def _holders(proc: str) -> dict[tuple[int, int, int], int]:
    """Return the pid that holds each exclusive flock, by (major, minor, inode), from proc_locks(5), in this PID namespace."""
    try:
        lines = Path(proc, "locks").read_text().splitlines()
    except OSError:
        return {}
    held = filter(None, map(_FLOCK.match, lines))
    return {(int(one[2], 16), int(one[3], 16), int(one[4])): int(one[1]) for one in held}


def _in_memfds(proc: str) -> Iterator[ControlBlock]:
    """Yield blocks in memfds. The lowest pid that has one open is its trainer's, because workers close it once it is mapped."""
    seen = set()
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        try:
            descriptors = os.listdir(f"{proc}/{pid}/fd")
        except OSError:  # the process has ended, or belongs to another user
            continue
        for fd in descriptors:
            path = f"{proc}/{pid}/fd/{fd}"
            try:
                name = _MEMFD.fullmatch(os.readlink(path))
                match = name and STEM_PATTERN.fullmatch(name[1])
                if match and name and name[1] == match[1] + _CONTROL and match[1] not in seen:
                    seen.add(match[1])
                    yield ControlBlock(match[1], path, os.stat(path).st_uid, pid, "memfd")
            except OSError:
                continue
