"""What one loader shares with its workers: its segments and bells, under one stem, closed together.

A doorbell is a POSIX semaphore that says "look again", and nothing more: the truth stands in the owner words (src/protocol.h). It
is never a lock, as a killed holder would never give it back. Posts may be lost with a killed process and may come too often, so
every wait has an end and is followed by a look.

A bell has a name where names can be made. A read-only, full or missing /dev/shm has no place for one (the C library files
semaphores there): then the semaphore lies in a memfd, and its name is the owner's descriptor under /proc, as with segments.

With the first group of a process the leavings of dead ones are swept away and the reaper starts.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Self

import posix_ipc

from shmload._core.bell import Bell, make_semaphore
from shmload.shm import janitor, names, reaper
from shmload.shm.names import NEW, SHM_DIR, new_stem
from shmload.shm.segment import Kind, Segment, memfd_path, open_segment

log = logging.getLogger("shmload")


class JointBell:
    """Several bells that are rung as one: somebody at each of them looks."""

    def __init__(self, bells: Sequence[Doorbell]) -> None:
        self._bells = tuple(bells)

    def post_up_to(self, count: int) -> None:
        """Rings each so often that `count` rings are pending there."""
        for bell in self._bells:
            bell.post_up_to(count)


class Doorbell(Bell):
    """One semaphore. Whoever created it gives up its name with `close`.

    Args:
        name: begins with a slash; what `attach` takes.
        fd: of the memfd in which it lies; -1: it is a named one.
    """

    def __init__(self, name: str, fd: int = -1, *, is_owner: bool) -> None:
        self.name = name
        self._fd = fd
        self._owner_pid = os.getpid() if is_owner else 0

    @classmethod
    def create(cls, name: str) -> Doorbell:
        """Makes a bell that nobody has rung.

        Args:
            name: begins with a slash. A bell in a memfd has another one.
        Raises:
            OSError: there is no room, or no descriptor, for either kind.
        """
        try:
            posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0).close()
        except (OSError, ValueError, posix_ipc.Error) as error:
            log.debug("the bell %s gets no name (%s): it lies in a memfd", name, error)
            return cls._unnamed(name)
        try:
            return cls(name, is_owner=True)
        except BaseException:
            posix_ipc.unlink_semaphore(name)
            raise

    @classmethod
    def _unnamed(cls, name: str) -> Doorbell:
        fd = names.keep(os.memfd_create(name[1:], os.MFD_CLOEXEC))
        try:
            os.fchmod(fd, 0o600)
            make_semaphore(fd)
            return cls(memfd_path(name[1:], fd), fd, is_owner=True)
        except BaseException:
            names.close(fd)
            raise

    @classmethod
    def attach(cls, name: str) -> Self:
        """Opens another process's bell.

        Raises:
            FileNotFoundError: its owner has gone.
        """
        if not name.startswith("/proc/"):
            return cls(name, is_owner=False)
        fd = open_segment(name)
        try:
            return cls(name, fd, is_owner=False)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Gives up the name, if this process made it. Safe to call twice, and in a forked child."""
        if self._owner_pid != os.getpid():
            return
        self._owner_pid = 0
        if self._fd >= 0:
            names.close(self._fd)
            return
        try:
            posix_ipc.unlink_semaphore(self.name)
        except posix_ipc.ExistentialError:
            pass


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
