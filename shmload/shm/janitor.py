"""Remove the files that dead owners have left in /dev/shm, and no others.

A group (the files of one loader) is dead if no process holds the lock on its control segment (processes/file_lock.py). The janitor
takes that lock itself and keeps it until the names are removed, the control segment's last. So no owner can begin in between, and
of two janitors one skips the group. Owners create control segments under another name and rename them once they are locked
(segment.py, segment_group.py). So a control segment that can be locked belongs to a dead owner, however new it is, and a container
that is restarted can remove its old ring.

A group without a control segment has no lock to check. It is left alone until its files are older than a guard time.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from shmload.processes.file_lock import FileLock
from shmload.shm.names import NEW, SHM_DIR, STEM_PATTERN

GUARD_S = 5.0  # minimum age of a group without a control segment before it is removed
_HEADER = struct.Struct("<8s88xq")  # magic and owner_pid of shml_header in src/layout.h
_MAGIC = b"SHMLOLD1"

_State = Literal["living", "dead", "no control"]
_WHY = {
    "dead": "its lock is free, so its owner is dead",
    "no control": "it has no control segment: its owner died at its start or its end",
}


class Leftover(NamedTuple):
    """The files of a dead loader.

    Attributes:
        stem: the common prefix of their names.
        paths: the files.
        nbytes: their memory.
        age_s: seconds since the newest of them changed.
        uid: their owner.
        pid: the process id of the loader, in its PID namespace; 0 if unknown.
        why: the reason why the loader is considered dead.
        error: the reason why the files could not be removed; "" if they were removed, or if removing was not tried.
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
    """Return the groups of this user whose owners are dead.

    Args:
        folder: where to look.
        guard_s: minimum age in seconds of a group without a control segment.
    """
    return list(_examine(folder, guard_s, removes=False))


def sweep(folder: str = SHM_DIR, *, guard_s: float = GUARD_S) -> list[Leftover]:
    """Remove the groups of this user whose owners are dead, and return them.

    Args:
        folder: where to look.
        guard_s: minimum age in seconds of a group without a control segment.
    """
    return list(_examine(folder, guard_s, removes=True))


def _examine(folder: str, guard_s: float, *, removes: bool) -> Iterator[Leftover]:
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
        with _locked_if_dead(control, uid) as (state, pid):
            found = None if state == "living" else _described(stem, sorted(paths), uid, pid, _WHY[state])
            if found is not None and (state == "dead" or found.age_s >= guard_s):
                yield _removed(found, control) if removes else found


@contextmanager
def _locked_if_dead(control: str, uid: int) -> Iterator[tuple[_State, int]]:
    """Yield whether the owner of a control segment lives, and its pid. If it is dead, hold its lock in the block."""
    for path in (control, control + NEW):
        try:
            lock = FileLock.open(path)
        except FileNotFoundError:
            continue
        except OSError:  # for example, no descriptor is left; an owner that cannot be checked counts as living
            yield "living", 0
            return
        try:
            yield _state_of(lock, path, uid) if path == control else ("living" if _is_locked(lock) else "no control", 0)
        finally:
            lock.close()
        return
    yield "no control", 0


def _state_of(lock: FileLock, path: str, uid: int) -> tuple[_State, int]:
    status = os.fstat(lock.fd)
    if status.st_uid != uid or not stat.S_ISREG(status.st_mode) or _is_locked(lock):
        return "living", 0
    if not lock.is_at(path):
        return "living", 0  # its owner has removed it in the meantime, and another may have begun
    head = os.pread(lock.fd, _HEADER.size, 0)
    magic, pid = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0)
    return "dead", pid if magic == _MAGIC else 0


def _is_locked(lock: FileLock) -> bool:
    """Return whether another process holds a lock. If not, this process holds it from now on."""
    try:
        return not lock.try_acquire()
    except OSError:  # on a file system without locks, nobody is declared dead
        return True


def _described(stem: str, paths: list[str], uid: int, pid: int, why: str) -> Leftover | None:
    """Return the leftover, or None if a file belongs to another user or has just gone."""
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
    for path in sorted(leftover.paths, key=lambda path: path == control):  # last, because its lock guards the others
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            return leftover._replace(error=f"{path}: {os.strerror(error.errno or errno.EPERM)}")
    return leftover
