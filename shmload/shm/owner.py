"""Descriptors that say "the owner lives", and so must not live on in anything it forks.

A flock belongs to the open file and a pipe stays open while any copy of its end does. A forked child would keep both, and make a
dead trainer look alive. Every such descriptor is registered here and closed in each forked child; exec closes them too (CLOEXEC).
"""

from __future__ import annotations

import os

_descriptors: set[int] = set()


def keep(fd: int) -> int:
    """Registers a descriptor of the owner's."""
    _descriptors.add(fd)
    return fd


def close(fd: int) -> None:
    """Closes one that was registered, if it has not been (in a forked child it has)."""
    if fd in _descriptors:
        _descriptors.discard(fd)
        try:
            os.close(fd)
        except OSError:  # a program that closes every descriptor before it ends, say
            pass


def _close_all() -> None:
    for fd in _descriptors:
        os.close(fd)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_all)
