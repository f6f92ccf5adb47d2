"""How files become safe from a power failure without anybody waiting for the disk.

A file has its name as soon as its bytes are in the page cache, which no kill can take. Until they are known to be on the disk it
carries a mark; a minute later, when the kernel has long written them, a sync costs nothing and the mark goes. A file that still has
it at the first look of another boot may lack bytes, and is removed (ledger.py). File systems write a file's mode and name in the
order of their changes, so no file has its name without the mark. Rejected: a sync before the name, 0.5 s of a pass over 880 MB.
"""

from __future__ import annotations

import functools
import os
import stat
import threading
from collections import deque
from time import monotonic

__all__ = ["FRESH", "SETTLES_AFTER_S", "Settling", "boot_id", "settle"]

FRESH = stat.S_IXUSR  # the mark; a file of data is not executable otherwise, and a listing brings its mode along
SETTLES_AFTER_S = 60.0  # the kernel begins to write what has been dirty for 30 s


class Settling:
    """The files that a process has published and not yet settled."""

    def __init__(self) -> None:
        self._fresh: deque[tuple[float, str]] = deque()
        self._lock = threading.Lock()

    def published(self, path: str) -> None:
        """Notes one more, and settles those that are old enough."""
        now, due = monotonic(), []
        with self._lock:
            self._fresh.append((now, path))
            while self._fresh[0][0] < now - SETTLES_AFTER_S:
                due.append(self._fresh.popleft()[1])
        for each in due:
            settle(each)


def settle(path: str) -> None:
    """Takes the mark off a file, once its bytes are on the disk; does nothing if the file is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fdatasync(fd)
        os.fchmod(fd, os.fstat(fd).st_mode & ~FRESH)
    finally:
        os.close(fd)


@functools.cache
def boot_id() -> bytes | None:
    """Which boot of the machine this is; None if nobody says."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except OSError:
        return None
