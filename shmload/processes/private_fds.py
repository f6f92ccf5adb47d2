"""Register descriptors that every forked child closes, because they must belong to this process alone.

A file lock and a pipe live as long as any copy of their descriptor is open. A forked child would keep both, and make a dead owner
look alive. Every such descriptor is registered here and closed in each forked child; exec closes it too if it was opened
close-on-exec.
"""

from __future__ import annotations

import os
from contextlib import suppress


class _PrivateFd(int):
    """A descriptor that remembers its file, because a program that closes all descriptors may have reused the number since."""

    file: tuple[int, int]


_descriptors: dict[int, _PrivateFd] = {}


def keep(fd: int) -> int:
    """Register a descriptor. Return it as an int that `close` and `is_kept` recognize even if its number is reused.

    Args:
        fd: an open descriptor.
    """
    kept = _PrivateFd(fd)
    kept.file = _file_of(fd)
    _descriptors[fd] = kept
    return kept


def is_kept(fd: int) -> bool:
    """Return whether a descriptor is registered and still refers to the same file."""
    kept = _descriptors.get(fd)
    if kept is None or (isinstance(fd, _PrivateFd) and fd is not kept):
        return False
    with suppress(OSError):
        return kept.file == _file_of(fd)
    return False


def close(fd: int) -> None:
    """Close a registered descriptor. Do nothing if it is closed already, for example in a forked child."""
    if is_kept(fd) and _descriptors.pop(fd, None) is not None:  # None if another thread closes it now
        os.close(fd)


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _close_all() -> None:
    for fd in list(_descriptors.values()):
        close(fd)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_all)
