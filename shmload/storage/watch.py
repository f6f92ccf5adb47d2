"""Waiting for room in a budgeted folder without asking again and again.

The kernel's inotify tells what wakes a waiter: a lease taken back is a write into its user's file, an end of a process closes that
file and those it was writing, a publication or an eviction is a rename or a removal. The kernel tells of a close shortly before it
takes the lock away; so behind each event a second look follows soon. Where inotify is not to be had (too many instances, a network
file system whose other machines it does not see) the look that is due every half second has to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from time import monotonic

from shmload.storage.ledger import NEW
from shmload.storage.presence import USERS

LOOK_S = 0.5  # at the latest
_SECOND_LOOK_S = 0.005
_MODIFIED, _CLOSED_WRITTEN, _MOVED_FROM, _MOVED_TO, _DELETED = 0x2, 0x8, 0x40, 0x80, 0x200  # <sys/inotify.h>
_COMING_AND_GOING = _CLOSED_WRITTEN | _MOVED_FROM | _DELETED

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """What happens in a folder from now on. A context manager."""

    def __init__(self, folder: str) -> None:
        self._fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_fresh = False  # an event has just come
        for path, events in (
            (f"{folder}/{USERS}", _COMING_AND_GOING | _MODIFIED),
            (f"{folder}/{NEW}", _COMING_AND_GOING),
            (folder, _MOVED_FROM | _DELETED | _MOVED_TO),
        ):
            if self._fd >= 0:
                _libc.inotify_add_watch(self._fd, os.fsencode(path), events)

    def wait(self, deadline: float | None) -> bool:
        """Returns when it is worth a look; False: the deadline, a value of the monotonic clock, is over."""
        left = LOOK_S if deadline is None else deadline - monotonic()
        if left <= 0:
            return False
        longest = min(left, _SECOND_LOOK_S if self._is_fresh else LOOK_S)
        self._is_fresh = bool(self._fd >= 0 and select.select([self._fd], [], [], longest)[0])
        if self._fd < 0:
            select.select([], [], [], longest)
        elif self._is_fresh:
            self._drain()
        return True

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _drain(self) -> None:
        try:
            while os.read(self._fd, 1 << 16):
                pass
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
