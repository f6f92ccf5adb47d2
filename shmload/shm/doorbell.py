"""Doorbells: named POSIX semaphores that say "look again", and nothing more.

The truth stands in the owner words (src/protocol.h). A bell is never a lock: a killed holder would never give it back. Posts may be
lost with a killed process and may come too often, so every wait has an end and is followed by a look.
"""

from __future__ import annotations

import os

import posix_ipc

from shmload._core.bell import Bell


class Doorbell(Bell):
    """One semaphore. Whoever created it gives up its name with `close`."""

    def __init__(self, name: str, semaphore: posix_ipc.Semaphore, *, is_owner: bool) -> None:
        self._semaphore = semaphore
        self.name = name
        self._owner_pid = os.getpid() if is_owner else 0
        self._is_closed = False

    @classmethod
    def create(cls, name: str) -> Doorbell:
        """Makes a bell that nobody has rung. The name begins with a slash."""
        semaphore = posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0)
        try:
            return cls(name, semaphore, is_owner=True)
        except BaseException:
            semaphore.unlink()
            raise

    @classmethod
    def attach(cls, name: str) -> Doorbell:
        """Opens another process's bell."""
        return cls(name, posix_ipc.Semaphore(name), is_owner=False)

    def post(self) -> None:
        """Rings once."""
        self._semaphore.release()

    @property
    def value(self) -> int:
        """Pending rings."""
        return int(self._semaphore.value)

    def close(self) -> None:
        """Lets go of the bell; the owner gives up its name too. Safe to call twice, and in a forked child."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._owner_pid == os.getpid():
            try:
                self._semaphore.unlink()
            except posix_ipc.ExistentialError:
                pass
        self._semaphore.close()
