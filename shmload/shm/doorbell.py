"""Doorbells: semaphores in shared memory by which one process wakes another.

A doorbell means "look again", and nothing more: the state is in the owner words (src/protocol.h). It is never a lock, because a
killed holder would never release it. Posts may be lost with a killed process and may come too often, so every wait has a timeout
and is followed by a look.

A doorbell has a name where possible. A read-only, full or missing /dev/shm cannot hold it (the C library keeps semaphores there).
Then the semaphore is in a memfd, and its name is the owner's descriptor under /proc, as with segments.
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
    """Several bells that are rung together: one waiter at each of them wakes."""

    def __init__(self, bells: Sequence[Doorbell]) -> None:
        self._bells = tuple(bells)

    def post_up_to(self, count: int) -> None:
        """Ring each bell until `count` rings are pending there."""
        for bell in self._bells:
            bell.post_up_to(count)


class Doorbell(Bell):
    """One semaphore. The process that created it removes its name with `close`.

    Args:
        name: begins with a slash; the argument of `attach`.
        fd: the memfd that contains it; -1 for a named semaphore.
    """

    def __init__(self, name: str, fd: int = -1, *, is_owner: bool) -> None:
        self.name, self._fd = name, fd
        self._owner_pid = os.getpid() if is_owner else 0

    @classmethod
    def create(cls, name: str) -> Doorbell:
        """Create a bell without pending rings.

        Args:
            name: begins with a slash. A bell in a memfd gets another name.
        Raises:
            OSError: a bell of neither kind can be created, for lack of memory or of descriptors.
        """
        if posix_ipc is None:
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
