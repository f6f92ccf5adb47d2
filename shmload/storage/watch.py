"""Waiting for room in a budgeted folder without asking again and again.

The kernel's inotify tells what wakes a waiter: a lease taken back is a write into its user's file, an end of a process closes that
file and those it was writing, a publication or an eviction is a rename or a removal. The kernel tells of a close shortly before it
takes the lock away; so behind each event further looks follow, soon at first, then at doubled pauses. Where inotify is not to be
had (too many instances; other machines on a network file system) the look that is due every half second has to do.
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
_SOON_S = 0.005
_MODIFIED, _CLOSED_WRITTEN, _MOVED_FROM, _MOVED_TO, _DELETED = 0x2, 0x8, 0x40, 0x80, 0x200  # <sys/inotify.h>
_COMING_AND_GOING = _CLOSED_WRITTEN | _MOVED_FROM | _DELETED

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """What happens in a folder from now on. A context manager."""

    def __init__(self, folder: str) -> None:
        self._fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pause_s = LOOK_S  # until the next look, if nothing happens
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
        happened = select.select([self._fd] if self._fd >= 0 else [], [], [], min(left, self._pause_s))[0]
        self._pause_s = _SOON_S if happened else min(2 * self._pause_s, LOOK_S)
        if happened:
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
