"""A folder whose files together never exceed a budget, however many processes write there.

Files are evicted before anything is written: a reservation counts with its full size from the start, and other files are evicted
until it fits. Leased files are never evicted. All victims are chosen before the first is removed, so a request that cannot be met
removes nothing. The file system is the only state: the folder's files, and locks that show which processes are alive (ledger.py,
process_leases.py). Both are correct after any kill.

The disk may be smaller than the budget: when the kernel finds no blocks for a file, as many files are evicted as it needs, in the
same order.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shmload import faults
from shmload.errors import CacheFull
from shmload.processes.file_lock import FileLock
from shmload.storage.file_lease import Lease, Leases
from shmload.storage.folder_session import Session
from shmload.storage.fork_reset import reset_after_fork
from shmload.storage.ledger import Ledger, PublishedFile, unlink
from shmload.storage.reservation import Reservation, check_name
from shmload.storage.room_wait import T, wait_for_room

__all__ = ["BudgetedFolder", "FolderStatistics"]

EvictionOrder = Callable[[Iterator[PublishedFile]], Iterable[PublishedFile]]
"""Maps the unleased files, oldest first, to those that may be evicted, in the order of eviction."""

_CONTROL_NBYTES = 4096  # approximate disk space of a lease or a control file


def _mapped_below(folder: str) -> set[int]:
    """Return the inodes of the folder's files that any visible process has mapped."""
    found: set[int] = set()
    wanted = os.fsencode(os.path.realpath(folder)) + b"/"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            found.update(int(line.split(maxsplit=5)[4]) for line in maps if wanted in line)
    return found


@dataclass(frozen=True, slots=True)
class FolderStatistics:
    """The state of a folder at one moment.

    Attributes:
        capacity_bytes: the budget.
        nbytes: bytes of all files; a file that is being written counts with its reserved bytes.
        num_files: number of published files.
        num_writing: number of files that are being written.
        num_leased: number of files that any process has leased.
        num_evicted: number of files that this process has evicted so far.
        nbytes_evicted: bytes of the files that this process has evicted.
    """

    capacity_bytes: int
    nbytes: int
    num_files: int
    num_writing: int
    num_leased: int
    num_evicted: int
    nbytes_evicted: int


class BudgetedFolder:
    """Files within a budget, shared by all processes of a machine.

    It can be pickled and used after a fork or spawn. All users of a folder must give the same budget. Other files in the folder are
    neither counted nor touched, unless `adopts`.

    Args:
        path: path of the folder, on a local disk or in memory; created if missing.
        capacity_bytes: maximum of the files' total length.
        adopts: whether to count and evict all files whose names do not begin with ".", whichever program wrote them. Files of other
            programs count only after the folder is listed again, so they may exceed the budget until then.
        durable: whether to sync a file to the disk before it gets its name, so that a power failure never leaves a truncated file.
        order: which unleased files may be evicted, in the order of eviction; None is the oldest first.
        spares_new: whether a new file may replace, while any file is leased, only files older than the newest leased one, because
            no reader has seen the others yet. Writers then wait for leases to end.
        recreates: whether a folder that was removed since is created again at its next use. False raises FileNotFoundError, so that
            a thread or process that still uses a folder leaves nothing behind when its owner removes it.
        spare_nbytes: bytes to make free together when any must be, because choosing takes time for each file of the folder.
    Raises:
        ValueError: the budget is less than 1, or living processes use the folder with another one.
        StoreError: the folder's file system has no locks.
    Cost: 0.1 ms for a reservation and its publication in a folder of 10,000 files, 10 us for a lease.
    Thread/process safety: all methods may be called from any thread and process.
    Example:
        >>> import tempfile
        >>> folder = BudgetedFolder(tempfile.mkdtemp(), 1000)
        >>> for name in ("a", "b", "c"):
        ...     with folder.reserve(400) as reservation:
        ...         _ = os.pwrite(reservation.fd, name.encode() * 400, 0)
        ...         _ = reservation.publish(name)
        >>> [kept.name for kept in folder.files()]
        ['b', 'c']
    """

    _opened: Session | None
    _opening: threading.Lock

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        adopts: bool = False,
        durable: bool = False,
        order: EvictionOrder | None = None,
        spares_new: bool = False,
        recreates: bool = True,
        spare_nbytes: int = 0,
    ) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"a budget must be at least 1 byte, got {capacity_bytes=}")
        self.path = os.path.abspath(os.fspath(path))
        self.capacity_bytes = int(capacity_bytes)
        self.adopts = adopts
        self.durable = durable
        self.order: EvictionOrder = order or iter  # the oldest first
        self.spares_new = spares_new
        self.recreates = recreates
        self.spare_nbytes = spare_nbytes
        self.num_evicted = self.nbytes_evicted = 0
        self._begin()
        os.makedirs(self.path, exist_ok=True)
        session = self._session()
        with session.locked() as ledger:
            session.sweep()
            with contextlib.suppress(CacheFull):
                self._make_room(session, ledger, 0, self.order)  # the budget may be smaller than that of an earlier run

    def reserve(self, nbytes: int, *, timeout_s: float | None = 0.0) -> Reservation:
        """Make room for a file, and create the file, hidden until it is published.

        Args:
            nbytes: maximum length of the file.
            timeout_s: seconds to wait for leases to end if nothing can be evicted; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there was no room in time, or there can never be.
        """
        made = self._obtain(None, nbytes, timeout_s, self.order)
        assert isinstance(made, Reservation)
        return made

    def obtain(
        self, name: str, nbytes: int, *, timeout_s: float | None = None, order: EvictionOrder | None = None
    ) -> Lease | Reservation:
        """Lease a file; if it does not exist, reserve room to write it.

        If several processes ask for a file that does not exist, one gets the reservation and the others wait for its publication.
        If the file is abandoned or its process dies, the next one gets the reservation.

        Args:
            name: name of the file.
            nbytes: maximum length of the file, if it must be written.
            timeout_s: seconds to wait for the file's writer or for room; 0 = do not wait; None = forever.
            order: which files may be evicted for this one; None is the folder's order.
        Raises:
            CacheFull: there was no room in time, or there can never be.
            TimeoutError: another process was still writing the file.
        """
        check_name(name)
        return self._obtain(name, nbytes, timeout_s, order or self.order)

    def lease(self, name: str) -> Lease:
        """Lease a file, so that it is not evicted until the lease or this process ends.

        Args:
            name: name of the file.
        Raises:
            FileNotFoundError: the file does not exist, or was evicted.
        """
        session = self._session()

        def try_once() -> Lease:
            with session.locked() as ledger:
                kept = ledger.files.get(name)
                if kept is None:
                    raise FileNotFoundError(f"{self.path} has no file {name}: it was evicted or never published")
                session.process_leases.hold([kept.ino])
                return Lease(self.path, (kept,), functools.partial(self._let_go, session))

        return self.evicting(try_once)

    def lease_many(self, names: Iterable[str] | None = None) -> Leases:
        """Lease many files at one moment with one lease. No descriptor is kept open, so their number is not limited.

        Args:
            names: names of the files; missing files are skipped. None leases all files.
        """
        session = self._session()
        wanted = None if names is None else list(dict.fromkeys(names))

        def try_once() -> Leases:
            with session.locked() as ledger:
                if wanted is None:
                    found = tuple(ledger.files.values())
                else:
                    found = tuple(ledger.files[name] for name in wanted if name in ledger.files)
                session.process_leases.hold([kept.ino for kept in found])
                return Leases(self.path, found, functools.partial(self._let_go, session))

        return self.evicting(try_once)

    def files(self) -> list[PublishedFile]:
        """Return the published files, oldest first."""
        session = self._session()
        with session.locked() as ledger:
            return list(ledger.files.values())

    def names_like(self, name: str) -> list[str]:
        """Return the names of the published files that have the same part before the first "-" as `name`."""
        with self._session().locked() as ledger:
            return ledger.group(name)

    def discard(self, name: str) -> bool:
        """Remove a file unless it is leased.

        Args:
            name: name of the file.
        Returns:
            whether the file was removed; False if it does not exist or is leased.
        """
        session = self._session()
        with session.locked() as ledger:
            kept = ledger.files.get(name)
            if kept is None or kept.ino in session.process_leases.leased():
                return False
            self._remove(ledger, kept)
            return True

    def refresh(self) -> None:
        """List the folder again, for files that other programs have added or extended, and evict down to the budget.

        This is only needed with `adopts`.
        """
        session = self._session()
        with session.locked() as ledger:
            before = ledger.files
            ledger.list_again()
            if ledger.files != before:  # other processes notice a file that has grown in place only through this
                ledger.changing()
            with contextlib.suppress(CacheFull):
                self._make_room(session, ledger, 0, self.order)

    def statistics(self) -> FolderStatistics:
        """Return the folder's current state."""
        session = self._session()
        with session.locked() as ledger:
            leased = session.process_leases.leased()
            return FolderStatistics(
                self.capacity_bytes,
                ledger.nbytes,
                len(ledger.files),
                len(ledger.writing),
                sum(kept.ino in leased for kept in ledger.files.values()),
                self.num_evicted,
                self.nbytes_evicted,
            )

    def close(self) -> None:
        """End the leases and reservations of this process. The folder opens again at its next use."""
        with self._opening:
            session, self._opened = self._opened, None
        if session is not None:
            session.close()

    def _let_go(self, session: Session, inos: tuple[int, ...]) -> None:
        """End leases. A lease refers to this method, and so keeps this object and its session alive."""
        session.let_go(inos)

    def _obtain(self, name: str | None, nbytes: int, timeout_s: float | None, order: EvictionOrder) -> Lease | Reservation:
        self._check_budget(nbytes)
        session = self._session()
        temporary = name or f"{os.getpid()}-{secrets.token_hex(4)}"

        def try_once() -> Lease | FileLock:
            with session.locked() as ledger:
                kept = ledger.files.get(name) if name else None
                if kept is not None:
                    session.process_leases.hold([kept.ino])
                    return Lease(self.path, (kept,), functools.partial(self._let_go, session))
                session.sweep()
                if temporary in ledger.writing:
                    raise TimeoutError(
                        f"another process was still writing {name} into {self.path} after {timeout_s} s: increase timeout_s"
                    )
                self._make_room(session, ledger, nbytes, order, for_file=True)
                return session.begin_writing(temporary, nbytes)

        def obtain_once() -> Lease | Reservation:
            found = self.evicting(try_once, order=order, for_file=True)
            return found if isinstance(found, Lease) else self._reserved(session, found, temporary, nbytes, order)

        return wait_for_room(obtain_once, timeout_s)

    def _reserved(self, session: Session, file: FileLock, name: str, nbytes: int, order: EvictionOrder) -> Reservation:
        """Return the reservation of a new file, after its blocks are allocated.

        Raises:
            CacheFull: the disk has no room. The reservation is given back, so that others need not wait for this file.
        """
        reservation = Reservation(
            session,
            file,
            name,
            nbytes,
            durable=self.durable,
            grow=functools.partial(self._grow, session, file.fd, name),
            let_go=functools.partial(self._let_go, session),
        )
        faults.hit("after_reserve")
        try:
            self._allocate(file.fd, 0, nbytes, order)
        except BaseException:
            reservation.abandon()
            raise
        return reservation

    def _grow(self, session: Session, fd: int, name: str, nbytes: int, more: int, timeout_s: float | None) -> None:
        """Reserve `more` bytes for a file that has `nbytes`; see `Reservation.grow`."""
        self._check_budget(nbytes + more)

        def set_nbytes(ledger: Ledger, nbytes: int) -> None:
            ledger.changing()
            os.ftruncate(fd, nbytes)
            ledger.set_writing(name, nbytes)

        def try_once() -> None:
            with session.locked() as ledger:
                session.sweep()
                self._make_room(session, ledger, more, self.order, for_file=True)
                set_nbytes(ledger, nbytes + more)

        wait_for_room(try_once, timeout_s)
        try:
            wait_for_room(lambda: self._allocate(fd, nbytes, more, self.order), timeout_s)
        except BaseException:
            with session.locked() as ledger:
                set_nbytes(ledger, nbytes)
            raise

    def _check_budget(self, nbytes: int) -> None:
        if not 0 <= nbytes <= self.capacity_bytes:
            raise CacheFull(
                f"a file of {nbytes} bytes can never fit in {self.path}, whose budget is {self.capacity_bytes} bytes: make files "
                f"smaller or the budget larger"
            )

    def _evictable(self, session: Session, ledger: Ledger, *, for_file: bool) -> Iterator[PublishedFile]:
        """Yield the files that are not leased, oldest first; for a new file, without those that are spared."""
        leased, files, newest = session.process_leases.leased(), ledger.files.values(), None
        if for_file and self.spares_new and leased:
            newest = next((kept for kept in reversed(files) if kept.ino in leased), None)
        for kept in files:
            if kept is newest:
                return
            if kept.ino not in leased:
                yield kept

    def _make_room(self, session: Session, ledger: Ledger, nbytes: int, order: EvictionOrder, *, for_file: bool = False) -> None:
        """Evict files until `nbytes` more fit, or raise CacheFull and evict nothing. Requires the folder's lock."""
        excess = ledger.nbytes + nbytes - self.capacity_bytes
        if excess <= 0:
            return
        victims, freed = [], 0
        for kept in order(self._evictable(session, ledger, for_file=for_file)):
            if freed >= excess and freed + kept.nbytes > self.spare_nbytes:
                break
            victims.append(kept)
            freed += kept.nbytes
        if freed >= excess:
            for victim in victims:
                self._remove(ledger, victim)
                faults.hit("mid_evict")
            self.num_evicted += len(victims)
            self.nbytes_evicted += freed
            return
        leased = session.process_leases.leased()
        held = [kept for kept in ledger.files.values() if kept.ino in leased]
        mine = sum(kept.nbytes for kept in held if session.process_leases.holds(kept.ino))
        raise CacheFull(
            f"{self.path} has no room for {nbytes} more bytes: {ledger.nbytes} of its budget of {self.capacity_bytes} bytes are in "
            f"use ({len(ledger.files)} files, {len(ledger.writing)} being written), "
            f"{sum(kept.nbytes for kept in held)} of them are leased, {mine} by this process, and {freed} may be evicted: make the "
            f"budget larger, hold fewer files at once, or wait longer"
        )

    def _remove(self, ledger: Ledger, kept: PublishedFile) -> None:
        ledger.changing()
        unlink(f"{self.path}/{kept.name}")
        ledger.remove(kept.name)

    def _allocate(self, fd: int, start: int, nbytes: int, order: EvictionOrder) -> None:
        """Allocate a file's blocks, so that later writes cannot meet a full disk. Evict if the disk is smaller than the budget."""
        if not nbytes:
            return

        def allocate() -> None:
            os.posix_fallocate(fd, start, nbytes)

        self.evicting(allocate, nbytes, order, for_file=True)

    def evicting(
        self, write: Callable[[], T], nbytes: int = _CONTROL_NBYTES, order: EvictionOrder | None = None, *, for_file: bool = False
    ) -> T:
        """Call `write` and return its result. While the disk is full, evict unleased files and call it again.

        Args:
            write: must leave nothing behind if it raises.
            nbytes: approximate number of bytes that it needs.
            order: which files may be evicted; None is the folder's order.
            for_file: whether this is for a new file of the folder, so that `spares_new` applies.
        Raises:
            CacheFull: the disk is full and no more files may be evicted.
        """
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not self.free_disk(nbytes, order, for_file=for_file):
                    disk = os.statvfs(self.path)
                    raise CacheFull(
                        f"the disk of {self.path} has no room for {nbytes} more bytes: {disk.f_bavail * disk.f_frsize} bytes are "
                        f"free, and no more of the cache's budget of {self.capacity_bytes} bytes may be evicted, because it is "
                        f"leased or mapped: free some space, or make the budget smaller"
                    ) from error

    def free_disk(self, nbytes: int, order: EvictionOrder | None = None, *, for_file: bool = False) -> bool:
        """Evict unleased files regardless of the budget, until `nbytes` are free or none is left.

        Files that a process has mapped stay, because their blocks are freed only after the last mapping.

        Args:
            nbytes: bytes to free.
            order, for_file: as for `evicting`.
        Returns:
            whether any was evicted.
        """
        session, order = self._session(), order or self.order
        mapped = _mapped_below(self.path)
        with session.locked() as ledger:
            session.sweep()
            candidates = [kept for kept in self._evictable(session, ledger, for_file=for_file) if kept.ino not in mapped]
            freed = 0
            for kept in list(order(iter(candidates))):
                if freed >= nbytes:
                    break
                self._remove(ledger, kept)
                self.num_evicted += 1
                freed += kept.nbytes
            self.nbytes_evicted += freed
        return freed > 0

    def _session(self) -> Session:
        """Return this process's session; open it at first use."""
        if self._opened is None:
            with self._opening:
                if self._opened is None:
                    opened = Session(self.path, self.capacity_bytes, adopts=self.adopts, recreates=self.recreates)
                    weakref.finalize(self, opened.close)
                    self._opened = opened
        return self._opened

    def _begin(self) -> None:
        """Reset to the state of a process that has not used the folder yet; also called in a forked child."""
        self._opened = None
        self._opening = threading.Lock()
        reset_after_fork(self)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_opened", "_opening")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"<BudgetedFolder {self.path} of {self.capacity_bytes} bytes>"
