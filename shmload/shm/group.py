"""Everything one loader shares with its workers: its segments and bells, under one stem, closed together.

With the first group of a process the leavings of dead ones are swept away and the reaper starts.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import weakref

from shmload.shm import janitor, names, reaper
from shmload.shm.doorbell import Doorbell
from shmload.shm.names import NEW, SHM_DIR, new_stem
from shmload.shm.segment import Kind, Segment

log = logging.getLogger("shmload")

_alive: weakref.WeakSet[Group] = weakref.WeakSet()
_has_swept = False


class _Mark:
    """An empty locked file in the place of a control segment that has no name there: bells have, and a janitor would take them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = names.keep(os.open(path + NEW, flags, 0o600))
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(path + NEW, path)  # never seen unlocked: see janitor.py

    def close(self) -> None:
        """Removes it. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        names.close(self._fd)


class Group:
    """The segments and bells of one loader. Closed at the process's end at the latest."""

    def __init__(self) -> None:
        global _has_swept
        if not _has_swept:
            _has_swept = True
            try:
                for leftover in janitor.sweep():
                    if leftover.error:
                        log.warning("could not remove %s of a loader that died: %s", leftover.stem, leftover.error)
                    else:
                        log.info("removed %s: %d bytes of a loader that died", leftover.stem, leftover.nbytes)
            except OSError as error:
                log.warning("could not sweep the leavings of dead loaders: %s", error)
        self._pid = os.getpid()
        self._owned: list[Segment | Doorbell | _Mark] = []
        reaper.enter()
        self.stem = new_stem()
        _alive.add(self)

    def segment(self, part: str, nbytes: int, *, kind: Kind = "auto", slots: tuple[int, int] | None = None) -> Segment:
        """A new segment of the group; see Segment.create."""
        segment = Segment.create(f"{self.stem}-{part}", nbytes, kind=kind, slots=slots)
        self._owned.append(segment)
        if part == "control" and segment.kind == "memfd":
            try:
                self._owned.append(_Mark(f"{SHM_DIR}/{segment.name}"))
            except OSError as error:  # no folder, or it is read-only: then nothing of ours can be there to be taken
                log.debug("no mark for %s: %s", segment.name, error)
        return segment

    def doorbell(self, part: str) -> Doorbell:
        """A new bell of the group."""
        bell = Doorbell.create(f"/{self.stem}-{part}")
        self._owned.append(bell)
        return bell

    def give_up(self, segment: Segment) -> None:
        """Closes one segment before the others."""
        self._owned.remove(segment)
        segment.close()

    def close(self) -> None:
        """Gives up every name. Mappings stay valid. Does nothing in a forked child, or twice."""
        if self._pid != os.getpid():
            return
        self._pid = -1
        for owned in reversed(self._owned):
            owned.close()
        self._owned.clear()
        _alive.discard(self)
        reaper.leave()


@atexit.register
def _close_all() -> None:
    for group in list(_alive):
        group.close()
