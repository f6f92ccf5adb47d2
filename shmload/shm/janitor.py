"""Removing what dead owners have left in /dev/shm, and nothing else.

A group is dead if nobody holds the flock on its control segment. A flock, unlike a pid, is right across PID namespaces that share
/dev/shm. The janitor takes that lock itself and keeps it until the names are gone, the control segment's last: nobody comes to
life under its hands, and of two janitors one goes by. Owners make their control segments under another name and rename them when
they are locked (segment.py), so one that can be locked is dead at once: a container that is restarted finds its old ring.

A group without a control segment has none to ask. It is left alone until its files are older than a guard.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from shmload.shm import names
from shmload.shm.names import NEW, SHM_DIR, STEM_PATTERN

GUARD_S = 5.0
_HEADER = struct.Struct("<8s88xq")  # magic and owner_pid of shml_header in src/layout.h
_MAGIC = b"SHMLOLD1"

_State = Literal["living", "dead", "no control"]
_WHY = {
    "dead": "nobody holds its lock: its owner is dead",
    "no control": "it has no control segment: its owner died at its start or its end",
}


class Leftover(NamedTuple):
    """What a dead loader has left.

    Attributes:
        age_s: how long ago the youngest of its files changed.
        pid: its owner's, in the PID namespace that it lived in; 0: not known.
        why: why it is taken for dead.
        error: why it could not be removed; empty if it was, or if it was only looked for.
    """

    stem: str
    paths: tuple[str, ...]
    nbytes: int
    age_s: float
    uid: int
    pid: int
    why: str
    error: str = ""


def find_leftovers(folder: str = SHM_DIR, *, guard_s: float = GUARD_S) -> list[Leftover]:
    """The groups of this user whose owners are dead."""
    return list(_go_over(folder, guard_s, removes=False))


def sweep(folder: str = SHM_DIR, *, guard_s: float = GUARD_S) -> list[Leftover]:
    """Removes them, and says of each that it has, or why it could not."""
    return list(_go_over(folder, guard_s, removes=True))


def _go_over(folder: str, guard_s: float, *, removes: bool) -> Iterator[Leftover]:
    groups: dict[str, list[str]] = defaultdict(list)
    try:
        names = os.listdir(folder)
    except OSError:
        return
    uid = os.getuid()
    for name in names:
        match = STEM_PATTERN.fullmatch(name)
        if match and int(match[2]) == uid:
            groups[match[1]].append(f"{folder}/{name}")
    for stem, paths in sorted(groups.items()):
        control = f"{folder}/{stem}-control"
        with _held(control, uid) as (state, pid):
            found = None if state == "living" else _described(stem, sorted(paths), uid, pid, _WHY[state])
            if found is not None and (state == "dead" or found.age_s >= guard_s):
                yield _removed(found, control) if removes else found


@contextmanager
def _held(control: str, uid: int) -> Iterator[tuple[_State, int]]:
    """Whether the owner of a control segment lives, and its pid; if it does not, its lock is held in the block."""
    for path in (control, control + NEW):
        try:
            fd = names.keep(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        except FileNotFoundError:
            continue
        except OSError:  # no descriptor is left, say: what cannot be asked counts as living
            yield "living", 0
            return
        try:
            yield _state_of(fd, path, uid) if path == control else ("living" if _is_locked(fd) else "no control", 0)
        finally:
            names.close(fd)
        return
    yield "no control", 0


def _state_of(fd: int, path: str, uid: int) -> tuple[_State, int]:
    status = os.fstat(fd)
    if status.st_uid != uid or not stat.S_ISREG(status.st_mode) or _is_locked(fd):
        return "living", 0
    try:
        if not os.path.samestat(status, os.stat(path, follow_symlinks=False)):
            return "living", 0  # somebody has removed it meanwhile, and another has begun
    except FileNotFoundError:
        return "living", 0
    head = os.pread(fd, _HEADER.size, 0)
    magic, pid = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0)
    return "dead", pid if magic == _MAGIC else 0


def _is_locked(fd: int) -> bool:
    """Whether somebody else holds the lock; if not, this descriptor does from now on."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # where flock is not to be had at all, nobody is declared dead
        return True
    return False


def _described(stem: str, paths: list[str], uid: int, pid: int, why: str) -> Leftover | None:
    """The leftover, or None if it is another user's after all or has just gone."""
    nbytes, youngest = 0, 0.0
    for path in paths:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        if status.st_uid != uid:
            return None
        nbytes += status.st_blocks * 512
        youngest = max(youngest, status.st_mtime, status.st_ctime)
    return Leftover(stem, tuple(paths), nbytes, time.time() - youngest, uid, pid, why)


def _removed(leftover: Leftover, control: str) -> Leftover:
    for path in sorted(
        leftover.paths, key=lambda path: path == control
    ):  # as long as it is there, its lock guards the others
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            return leftover._replace(error=f"{path}: {os.strerror(error.errno or errno.EPERM)}")
    return leftover
