"""Removing what dead owners have left in /dev/shm, and nothing else.

A group is dead if nobody holds the flock on its control segment. A flock, unlike a pid, is right across PID namespaces that share
/dev/shm. Files that are younger than a guard are left alone: between the creation of a segment and its flock a living owner looks
dead for a moment.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from shmload.shm.names import SHM_DIR, STEM_PATTERN

GUARD_S = 5.0


class Leftover(NamedTuple):
    """What a dead loader has left: its stem, its files, their size, and how long ago the youngest changed."""

    stem: str
    paths: tuple[str, ...]
    nbytes: int
    age_s: float
    uid: int


def find_leftovers(folder: str = SHM_DIR, *, guard_s: float = GUARD_S) -> list[Leftover]:
    """The groups of this user whose owners are dead."""
    groups: dict[str, list[str]] = defaultdict(list)
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    uid = os.getuid()
    for name in names:
        match = STEM_PATTERN.fullmatch(name)
        if match and int(match[2]) == uid:
            groups[match[1]].append(f"{folder}/{name}")
    return [found for stem, paths in sorted(groups.items()) for found in _dead(stem, sorted(paths), uid, guard_s)]


def sweep(folder: str = SHM_DIR, *, guard_s: float = GUARD_S, dry_run: bool = False) -> list[Leftover]:
    """Removes them; with `dry_run` only says which."""
    leftovers = find_leftovers(folder, guard_s=guard_s)
    for leftover in () if dry_run else leftovers:
        for path in leftover.paths:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
    return leftovers


def _dead(stem: str, paths: list[str], uid: int, guard_s: float) -> Iterator[Leftover]:
    nbytes, youngest = 0, 0.0
    for path in paths:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
        if status.st_uid != uid:
            return
        nbytes += status.st_blocks * 512
        youngest = max(youngest, status.st_mtime, status.st_ctime)
        if path.endswith("-control") and _is_locked(path):
            return
    age_s = time.time() - youngest
    if age_s >= guard_s:
        yield Leftover(stem, tuple(paths), nbytes, age_s, uid)


def _is_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
