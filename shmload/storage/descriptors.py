"""Descriptors whose locks say "this process lives", and so must not live on in anything it forks.

A flock belongs to the open file: as long as a forked child keeps a copy of the descriptor, its dead parent would seem to live. They
are opened close-on-exec and through here, which closes each forked child's copies. Closing a copy ends no lock of the parent's.
"""

from __future__ import annotations

import errno
import fcntl
import os

_kept: set[int] = set()


def open_kept(path: str, flags: int) -> int:
    """Opens a file whose descriptor no child shall have."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    _kept.add(fd)
    return fd


def close_kept(fd: int) -> None:
    """Closes it; in a forked child, where it is closed already, does nothing."""
    if fd in _kept:
        _kept.discard(fd)
        os.close(fd)


def is_locked(path: str) -> bool:
    """Whether somebody holds a lock on the file. One that is not there has no holder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Takes a lock if nobody else holds it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True


def _close_all() -> None:
    for fd in _kept:
        try:
            os.close(fd)
        except OSError:  # a program that has closed every descriptor
            pass
    _kept.clear()


os.register_at_fork(after_in_child=_close_all)
