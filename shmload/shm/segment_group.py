"""The segments and doorbells of one loader: created under one stem and closed together.

The first named group of a process removes the files of dead loaders (janitor.py) and starts the reaper (reaper.py). An unnamed
group has nothing in /dev/shm that must be removed if the process is killed, so it needs neither.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import weakref
from contextlib import suppress
from typing import Any

from shmload.processes.file_lock import FileLock
from shmload.shm import janitor, reaper
from shmload.shm.doorbell import Doorbell
from shmload.shm.names import NEW, SHM_DIR, new_stem
from shmload.shm.segment import Segment, memfds_work

log = logging.getLogger("shmload")
_alive: weakref.WeakSet[SegmentGroup] = weakref.WeakSet()
_has_swept = False


class _OwnerLockFile:
    """An empty locked file in place of an unnamed control segment, so that a janitor does not remove the group's named bells."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = FileLock.open(path + NEW, os.O_CREAT | os.O_EXCL, 0o600)
        if not self._lock.try_acquire():  # a janitor is examining it, and may remove it
            self._lock.close()
            os.unlink(path + NEW)
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", path)
        os.rename(path + NEW, path)  # never visible unlocked: see janitor.py

    def close(self) -> None:
        """Remove the file. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._lock.close()


class SegmentGroup:
    """The segments and bells of one loader. It is closed at exit, if not before.

    Args:
        is_named: put them in /dev/shm where they fit. False if no other process maps them: they are then memfds, where these work.

    Attributes:
        stem: the prefix of their names.
        is_named: whether they may be in /dev/shm.
        control: the control segment; None before it is created.
    """

    def __init__(self, *, is_named: bool = True) -> None:
        self._pid = os.getpid()
        self._owned: list[Segment | Doorbell | _OwnerLockFile] = []
        self.is_named = is_named or not memfds_work()
        self.control: Segment | None = None
        if self.is_named:
            _sweep_once()
            reaper.enter()
        self.stem = new_stem()
        _alive.add(self)

    def segment(self, part: str, nbytes: int, **options: Any) -> Segment:
        """Create a segment of the group.

        Args:
            part: end of its name, unique in the group. The segment "control" carries the group's lock.
            nbytes: its size.
            options: options of `Segment.create`.
        """
        if not self.is_named:
            options["kind"] = "memfd"
        segment = Segment.create(f"{self.stem}-{part}", nbytes, **options)
        self._owned.append(segment)
        if part == "control":
            self.control = segment
            if self.is_named and segment.kind == "memfd":
                try:
                    self._owned.append(_OwnerLockFile(f"{SHM_DIR}/{segment.name}"))
                except OSError as error:  # no folder, or it is read-only: then it cannot contain bells to remove
                    log.debug("no lock file for %s: %s", segment.name, error)
        return segment

    def doorbell(self, part: str) -> Doorbell:
        """Create a bell of the group.

        Args:
            part: end of its name, unique in the group.
        """
        bell = Doorbell.create(f"/{self.stem}-{part}", is_named=self.is_named)
        self._owned.append(bell)
        return bell

    def close_segment(self, segment: Segment) -> None:
        """Close one segment before the group is closed."""
        self._owned.remove(segment)
        segment.close()

    def close(self) -> None:
        """Remove every name. Mappings stay valid. Does nothing in a forked child. Idempotent."""
        if self._pid != os.getpid():
            return
        self._pid = -1
        for owned in reversed(self._owned):
            owned.close()
        self._owned.clear()
        _alive.discard(self)
        if self.is_named:
            reaper.leave()


def _sweep_once() -> None:
    """Remove the files of dead loaders, the first time that this process calls it."""
    global _has_swept
    if _has_swept:
        return
    _has_swept = True
    try:
        for leftover in janitor.sweep():
            if leftover.error:
                log.warning("could not remove %s of a loader that died: %s", leftover.stem, leftover.error)
            else:
                log.info("removed %s: %d bytes of a loader that died", leftover.stem, leftover.nbytes)
    except OSError as error:
        log.warning("could not remove what dead loaders have left: %s", error)


@atexit.register
def _close_groups() -> None:
    for group in list(_alive):
        group.close()
