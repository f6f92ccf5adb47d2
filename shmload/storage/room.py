"""Room in a budgeted folder: what is evicted for it, and what is said if there is none.

All victims are chosen before the first is removed, so a request that cannot be met removes nothing. A disk that is smaller than the
budget is no error: where the kernel finds no blocks for a file, as much is evicted as the file needs, in the same order.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from time import monotonic

from shmload import faults
from shmload.errors import CacheFull
from shmload.storage.ledger import Kept, Ledger
from shmload.storage.session import Session
from shmload.storage.watch import Watch

Order = Callable[[Iterator[Kept]], Iterable[Kept]]
"""Of the files that nobody has leased, given oldest first, those that may be evicted, the first to go first."""


class Room:
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
        leased = session.presence.leased()
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
        mine = sum(kept.nbytes for kept in held if session.presence.holds(kept.ino))
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
            leased = session.presence.leased()
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
