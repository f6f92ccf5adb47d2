"""Doorbells: semaphores in shared memory by which one process wakes another.

Ringing a doorbell only means "check again": the state is in the owner words (src/protocol.h). A doorbell is never used as a lock,
because a killed holder would never release it. A wake-up may be lost with a killed process, and may come without a reason. So every
wait has a timeout, and the waiter checks the state after it.

A doorbell is a named semaphore where possible. The C library keeps these in /dev/shm; if that is read-only, full or missing, the
semaphore is in a memfd, and its name is the owner's descriptor under /proc, as with segments.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from shmload._core.bell import Bell, make_semaphore
from shmload.processes import private_fds
from shmload.shm.segment import memfd_path, open_segment

try:
    import posix_ipc
except ImportError:  # no wheel for Python 3.14, where it is not required: every bell is in a memfd
    posix_ipc = None

log = logging.getLogger("shmload")


class JointBell:
    """Several bells that are rung together, so that a waiter at each of them wakes.

    Args:
        bells: the bells.
    """

    def __init__(self, bells: Sequence[Doorbell]) -> None:
        self._bells = tuple(bells)

    def post_up_to(self, count: int) -> None:
        """Ring each bell until `count` rings are pending there."""
        for bell in self._bells:
            bell.post_up_to(count)


class Doorbell(Bell):
    """One semaphore. The process that created it removes its name with `close`.

    Args:
        name: the argument of `attach`: the semaphore's name, which begins with a slash, or a path of `memfd_path`.
        fd: the memfd that contains it; -1 for a named semaphore.
        is_owner: whether this process has created it.
    """

    def __init__(self, name: str, fd: int = -1, *, is_owner: bool) -> None:
        self.name, self._fd = name, fd
        self._owner_pid = os.getpid() if is_owner else 0

    @classmethod
    def create(cls, name: str, *, is_named: bool = True) -> Doorbell:
        """Create a bell without pending rings.

        Args:
            name: begins with a slash. A bell in a memfd gets another name.
            is_named: make a named semaphore, where possible.
        Raises:
            OSError: a bell of neither kind can be created, for lack of memory or of descriptors.
        """
        if posix_ipc is None or not is_named:
            return cls._unnamed(name)
        try:
            posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0).close()
        except (OSError, ValueError, posix_ipc.Error) as error:
            log.debug("the bell %s gets no name (%s), so it is in a memfd", name, error)
            return cls._unnamed(name)
        try:
            return cls(name, is_owner=True)
        except BaseException:
            posix_ipc.unlink_semaphore(name)
            raise

    @classmethod
    def _unnamed(cls, name: str) -> Doorbell:
        fd = private_fds.keep(os.memfd_create(name[1:], os.MFD_CLOEXEC))
        try:
            os.fchmod(fd, 0o600)
            make_semaphore(fd)
            return cls(memfd_path(name[1:], fd), fd, is_owner=True)
        except BaseException:
            private_fds.close(fd)
            raise

    @classmethod
    def attach(cls, name: str) -> Self:
        """Open another process's bell.

        Args:
            name: the `name` of the owner's bell.
        Raises:
            FileNotFoundError: its owner has ended.
        """
        if not name.startswith("/proc/"):
            return cls(name, is_owner=False)
        fd = open_segment(name)
        try:
            return cls(name, fd, is_owner=False)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Remove the name, if this process created it. Does nothing in a forked child. Idempotent."""
        if self._owner_pid != os.getpid():
            return
        self._owner_pid = 0
        if self._fd >= 0:
            private_fds.close(self._fd)
            return
        with suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_semaphore(self.name)
