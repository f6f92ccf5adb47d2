"""Doorbells: POSIX semaphores that say "look again", and nothing more.

The truth stands in the owner words (src/protocol.h). A bell is never a lock: a killed holder would never give it back. Posts may be
lost with a killed process and may come too often, so every wait has an end and is followed by a look.

A bell has a name where names can be made. A read-only, full or missing /dev/shm has no place for one (the C library files
semaphores there): then the semaphore lies in a memfd, and its name is the owner's descriptor under /proc, as with segments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Self

import posix_ipc

from shmload._core.bell import Bell, make_semaphore
from shmload.shm import names
from shmload.shm.segment import memfd_path, open_segment

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
