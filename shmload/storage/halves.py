"""Files of a folder that are being written, and what killed writers have left of them.

A writer holds a lock on its file, which ends with it however it dies. So an unlocked one is nobody's any more, and goes when a
process first writes into that folder. The name says whose machine it is: on some network file systems the locks of one machine
are not seen by another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import zlib
from pathlib import Path

from shmload.storage.descriptors import try_lock

__all__ = ["HALF", "make_half", "remove_abandoned"]

HALF = ".half-"  # begins their names


def make_half(folder: Path) -> tuple[int, str]:
    """(descriptor, path) of a new file to be written."""
    while True:
        fd, path = tempfile.mkstemp(prefix=_prefix(), dir=folder)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: there nobody removes it, either
                fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, path):
                return fd, path
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # somebody has found it before it was locked


def remove_abandoned(folder: Path) -> list[str]:
    """Removes what dead writers of this machine have left; says which."""
    removed = []
    for name in [name for name in os.listdir(folder) if name.startswith(_prefix())]:
        path = f"{folder}/{name}"
        with contextlib.suppress(OSError):  # it has its name by now, or is another user's, or there are no locks
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if try_lock(fd) and _is_at(fd, path):
                    os.unlink(path)
                    removed.append(name)
            finally:
                os.close(fd)
    return removed


def _prefix() -> str:
    return f"{HALF}{zlib.crc32(os.uname().nodename.encode()):08x}-"


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
