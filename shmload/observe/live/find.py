"""Every control block on this host: named ones in /dev/shm, and those in memfds, seen under /proc/<pid>/fd.

Whether the owner of a named block lives is known by the flock on it. It is not asked for by taking it: /proc/locks lists who holds
what. Only a block whose lock no process in sight holds is asked about as `shmload clean` does (shm/janitor.py): it is a dead
loader's, or that of another container which shares /dev/shm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
