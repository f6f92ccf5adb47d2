"""File locks that end with their process.

A flock belongs to the open file: while a forked child keeps a copy of the descriptor, the dead parent would seem alive. So these
files are opened close-on-exec, and each forked child closes its copies. Closing a copy does not unlock the parent's file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys

_kept: set[int] = set()


class KeptFile:
    """A file, open for reading and writing, whose descriptor no child has. It closes with its last reference, if not before."""

    fd = -1

    def __init__(self, path: str, flags: int = 0) -> None:
        self._pid = os.getpid()
        self.fd = os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _kept.add(self.fd)

    def close(self) -> None:
        """Unlock and close the file. Idempotent; has no effect in a forked child. Mappings of the file stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and self._pid == os.getpid():
            fcntl.flock(fd, fcntl.LOCK_UN)
            _kept.discard(fd)
            os.close(fd)

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # module globals are cleared before the last objects
            self.close()


def is_locked(path: str) -> bool:
    """Return whether any process holds a lock on the file; False if the file does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take a lock unless another process holds one. Return whether it was taken."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_all() -> None:
    for fd in _kept:
        with contextlib.suppress(OSError):  # a program may close all of its descriptors
            os.close(fd)
    _kept.clear()


os.register_at_fork(after_in_child=_close_all)
