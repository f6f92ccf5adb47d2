"""Waiting for room in a budgeted folder without asking again and again.

The kernel's inotify tells what wakes a waiter: a lease taken back is a write into its user's file, an end of a process closes that
file and those it was writing, a publication or an eviction is a rename or a removal. The kernel tells of a close shortly before it
takes the lock away; so behind each event further looks follow, soon at first, then at doubled pauses. Where inotify is not to be
had (too many instances; other machines on a network file system) the look that is due every half second has to do.

Eviction in a budgeted folder: what is evicted for it, and what is said if there is none.

All victims are chosen before the first is removed, so a request that cannot be met removes nothing. A disk that is smaller than the
budget is no error: where the kernel finds no blocks for a file, as much is evicted as the file needs, in the same order.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Callable, Iterable, Iterator
from time import monotonic

from shmload import faults
from shmload.errors import CacheFull
from shmload.storage.ledger import NEW, Kept, Ledger
from shmload.storage.session import USERS, Session

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


Order = Callable[[Iterator[Kept]], Iterable[Kept]]
"""Of the files that nobody has leased, given oldest first, those that may be evicted, the first to go first."""


class Eviction:
    """The budget of a folder, and what this process has evicted to keep it."""

    def __init__(self, path: str, capacity_bytes: int, max_files: int | None) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.max_files = max_files
        self.num_evicted = 0
        self.nbytes_evicted = 0

    def make(self, session: Session, ledger: Ledger, nbytes: int, files: int, order: Order) -> CacheFull | None:
        """Evicts until so much fits; or says why it cannot, and then evicts nothing. The folder's lock is held."""
        excess = ledger.nbytes + nbytes - self.capacity_bytes
        too_many = 0 if self.max_files is None else len(ledger.files) + len(ledger.writing) + files - self.max_files
        if excess <= 0 and too_many <= 0:
            return None
        leased = session.process_leases.leased()
        victims, freed = [], 0
        for kept in order(kept for kept in ledger.files.values() if kept.ino not in leased):
            victims.append(kept)
            freed += kept.nbytes
            if freed >= excess and len(victims) >= too_many:
                for victim in victims:
                    self.remove(ledger, victim)
                    faults.hit("mid_evict")
                self.num_evicted += len(victims)
                self.nbytes_evicted += freed
                return None
        held = [kept for kept in ledger.files.values() if kept.ino in leased]
        mine = sum(kept.nbytes for kept in held if session.process_leases.holds(kept.ino))
        files_allowed = "" if self.max_files is None else f" of at most {self.max_files}"
        return CacheFull(
            f"{self.path} has no room for {nbytes} bytes more: {ledger.nbytes} of its budget of {self.capacity_bytes} bytes are in "
            f"use ({len(ledger.files)} files{files_allowed}, {len(ledger.writing)} being written), "
            f"{sum(kept.nbytes for kept in held)} of them are leased, {mine} by this process, and {freed} may be evicted: make the "
            f"budget larger, hold fewer files at once, or wait longer"
        )

    def remove(self, ledger: Ledger, kept: Kept) -> None:
        ledger.changing()
        try:
            os.unlink(f"{self.path}/{kept.name}")
        except FileNotFoundError:
            pass
        ledger.remove(kept.name)

    def allocate(
        self, session: Session, fd: int, start: int, nbytes: int, timeout_s: float | None, order: Order
    ) -> None:
        """Takes a file's blocks, so that no later write meets a full disk. A disk smaller than the budget evicts, too."""
        if not nbytes:
            return
        for _ in attempts(self.path, timeout_s):
            while True:
                try:
                    os.posix_fallocate(fd, start, nbytes)
                    return
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                if not self._free_disk(session, nbytes, order):
                    break
        disk = os.statvfs(self.path)
        raise CacheFull(
            f"the disk of {self.path} has no room for {nbytes} bytes more: {disk.f_bavail * disk.f_frsize} bytes are free, and "
            f"nothing more of the cache's budget of {self.capacity_bytes} bytes may be evicted: free some, or make the budget "
            f"smaller"
        )

    def _free_disk(self, session: Session, nbytes: int, order: Order) -> bool:
        """Evicts as much as a file needs that the disk has no room for, or what there is; whether that was anything."""
        with session.locked() as ledger:
            session.sweep()
            leased = session.process_leases.leased()
            freed = 0
            for kept in list(order(kept for kept in ledger.files.values() if kept.ino not in leased)):
                if freed >= nbytes:
                    break
                self.remove(ledger, kept)
                self.num_evicted += 1
                freed += kept.nbytes
        self.nbytes_evicted += freed
        return freed > 0


def attempts(path: str, timeout_s: float | None) -> Iterator[None]:
    """One at once; further ones whenever something has happened in the folder, until the time is over."""
    yield
    if timeout_s == 0:
        return
    deadline = None if timeout_s is None else monotonic() + timeout_s
    with Watch(path) as watch:
        yield
        while watch.wait(deadline):
            yield
