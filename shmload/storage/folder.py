"""A folder whose files together never exceed a budget, however many processes write there.

Eviction is taken before anything is written: a reservation counts with its full size from its first moment, and what is in the way
is evicted first. Whoever reads leases; what is leased stays. The file system is the state: which files there are is what the folder
says, who lives is what locks say (both in ledger.py), and both are right after any kill.

The hold of a process on files of a budgeted folder: while one lives, nobody evicts them.

Whoever waits for room looks again after pauses that double from 2 to 50 ms: a look costs 0.1 ms, and a process that dies frees its
files without a word.

Eviction in a budgeted folder: what is evicted for it, and what is said if there is none.

All victims are chosen before the first is removed, so a request that cannot be met removes nothing. A disk that is smaller than the
budget is no error: where the kernel finds no blocks for a file, as much is evicted as the file needs, in the same order.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, TypeVar

from shmload import faults
from shmload.errors import CacheFull, StoreError
from shmload.processes.file_lock import FileLock
from shmload.storage.ledger import NEW, OURS, Kept, Ledger, Session, unlink

__all__ = ["BudgetedFolder", "FolderStatistics", "Lease", "Leases", "Reservation"]

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05  # between two looks for room


Order = Callable[[Iterator[Kept]], Iterable[Kept]]
"""Of the files that nobody has leased, given oldest first, those that may be evicted, the first to go first."""


_CONTROL_NBYTES = 4096  # what a lease or a control file takes of the disk, about


def _mapped_below(folder: str) -> set[int]:
    """Return the inodes of files in a folder that a process has mapped, as far as this process may see others."""
    found: set[int] = set()
    wanted = os.fsencode(os.path.realpath(folder)) + b"/"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            found.update(int(line.split(maxsplit=5)[4]) for line in maps if wanted in line)
    return found


def repeated(
    try_once: Callable[[], T], timeout_s: float | None, waits_out: tuple[type[Exception], ...] = (CacheFull, TimeoutError)
) -> T:
    """What a try returns, made again after pauses that double while it fails in one of these ways and the time is not over.

    Args:
        waits_out: CacheFull: there is no room; TimeoutError: another process is still writing the file.
    """
    deadline = math.inf if timeout_s is None else monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return try_once()
        except waits_out:
            if (left_s := deadline - monotonic()) <= 0:
                raise
        sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


Release = Callable[[tuple[int, ...]], None]


class Leases:
    """Several files, leased together. A context manager; ends with `release`, its last reference, or its process.

    It is this process's: in a forked child it holds nothing, and its end there ends nothing. A child takes leases of its own.

    Attributes:
        folder: where they lie.
        files: what is leased, oldest first.
    """

    def __init__(self, folder: str, files: tuple[Kept, ...], release: Release) -> None:
        self.folder = folder
        self.files = files
        self._release: Release | None = release

    @property
    def names(self) -> list[str]:
        """Names within the folder, oldest first."""
        return [kept.name for kept in self.files]

    @property
    def paths(self) -> list[str]:
        """Paths of the files, oldest first."""
        return [f"{self.folder}/{kept.name}" for kept in self.files]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(kept.nbytes for kept in self.files)

    def release(self) -> None:
        """Lets them go. Twice is no error."""
        release, self._release = self._release, None
        if release is not None:
            release(tuple(kept.ino for kept in self.files))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # the module's names go before the last objects do
            self.release()

    def __repr__(self) -> str:
        state = ", released" if self._release is None else ""
        return f"<{type(self).__name__} of {len(self.files)} files, {self.nbytes} bytes in {self.folder}{state}>"


class Lease(Leases):
    """One file that nobody evicts meanwhile. A context manager; ends with `release`, its last reference, or its process.

    Attributes:
        folder: where it lies.
        files: the one file.
    """

    _fd = -1

    @property
    def name(self) -> str:
        """Its name within the folder."""
        return self.files[0].name

    @property
    def path(self) -> str:
        """Where it lies."""
        return f"{self.folder}/{self.name}"

    @property
    def fd(self) -> int:
        """A descriptor for reading, opened at the first use and closed with the lease."""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def release(self) -> None:
        """Lets it go, and closes `fd`. Twice is no error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().release()


class Reservation:
    """A file that is being written: nobody sees it, and it counts with all the bytes reserved until it is published or abandoned.

    A context manager that abandons what the block has not published. What its process leaves when it is killed is removed by the
    next process that needs room. Write to `path` or `fd` as to a file of its full length (mode "r+b", not "wb"), never beyond it.

    Args:
        folder: that made it: BudgetedFolder.reserve.
        session: its process at the folder.
        file: what is written.
    Attributes:
        name: of the temporary file.
        nbytes: what is reserved; also the file's length until it is published.
    """

    def __init__(self, folder: BudgetedFolder, session: Session, file: FileLock, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._folder = folder
        self._session = session
        self._file = file
        self._is_open = True

    @property
    def path(self) -> str:
        """Where the file lies until it is published."""
        return f"{self._session.folder}/{NEW}/{self.name}"

    @property
    def fd(self) -> int:
        """Its descriptor, open for reading and writing; not to be closed, nor used behind `publish`."""
        self._check_open()
        return self._file.fd

    def grow(self, nbytes: int, *, timeout_s: float | None = 0.0) -> None:
        """Reserves more: `nbytes` in addition. What is written stays.

        Args:
            nbytes: how many more.
            timeout_s: seconds to wait for room; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there is no room for it; the reservation stays as it was.
            ValueError: fewer than 0.
        """
        self._check_open()
        if nbytes < 0:
            raise ValueError(f"a reservation grows by 0 bytes or more; got {nbytes}")
        self._folder._grow(self._session, self._file.fd, self.name, self.nbytes, nbytes, timeout_s)
        self.nbytes += nbytes

    def publish(self, name: str, *, nbytes: int | None = None) -> Kept:
        """Gives the file its name: from here on all see it, whole, and it may be evicted.

        Args:
            name: within the folder; another file of that name is an error.
            nbytes: how many bytes were written, if fewer than were reserved; the rest is given back.
        Raises:
            FileExistsError: the folder has a file of that name.
            StoreError: more was written than reserved.
        """
        with self.publish_leased(name, nbytes=nbytes) as lease:
            return lease.files[0]  # type: ignore[no-any-return]  # the block's value is of either class

    def publish_leased(self, name: str, *, nbytes: int | None = None) -> Lease:
        """`publish`, and leases the file in the same moment.

        Args:
            name: within the folder; another file of that name is an error.
            nbytes: how many bytes were written, if fewer than were reserved.
        Raises:
            FileExistsError: the folder has a file of that name.
            StoreError: more was written than reserved.
        """
        check_name(name)
        session, fd, folder = self._session, self.fd, self._session.folder
        written = os.fstat(fd).st_size
        if not os.path.samestat(os.stat(self.path), os.fstat(fd)):
            raise StoreError(f"{self.path} is another file than the one reserved: write into it instead of replacing it")
        if written > self.nbytes or (nbytes is not None and nbytes > self.nbytes):
            raise StoreError(
                f"{max(written, nbytes or 0)} bytes were written for {name} where {self.nbytes} are reserved: "
                f"reserve enough, or grow the reservation first"
            )
        if nbytes is not None and nbytes != written:
            os.ftruncate(fd, nbytes)
        if self._folder.durable:
            os.fdatasync(fd)
        os.fchmod(fd, os.fstat(fd).st_mode | OURS)
        faults.hit("before_publish")
        with session.locked() as ledger:
            if os.path.lexists(f"{folder}/{name}"):
                raise FileExistsError(f"{folder} has a file {name} already: publish under another name, or discard it first")
            ledger.changing()
            time_ns = ledger.next_time()
            os.utime(fd, ns=(time_ns, time_ns))
            os.rename(self.path, f"{folder}/{name}")
            faults.hit("after_publish")
            status = os.fstat(fd)
            kept = Kept(name, status.st_size, status.st_mtime_ns, status.st_ino)
            ledger.end_writing(self.name)
            ledger.add(kept)
            session.process_leases.hold([kept.ino])
        self._is_open = False
        session.end_writing(self.name)
        return Lease(folder, (kept,), functools.partial(self._folder._let_go, session))

    def abandon(self) -> None:
        """Removes the file and gives its room back. Does nothing once it is published, or in a forked child."""
        if not self._is_open or self._session.is_closed or self._session.pid != os.getpid():
            return
        self._is_open = False
        with self._session.locked() as ledger:
            ledger.changing()
            if os.path.exists(self.path):
                os.unlink(self.path)
            ledger.end_writing(self.name)
        self._session.end_writing(self.name)

    def _check_open(self) -> None:
        if not self._is_open or self._session.is_closed:
            raise ValueError(f"the reservation {self.name} has been published or abandoned, or its folder closed")
        if self._session.pid != os.getpid():
            raise ValueError(f"the reservation {self.name} is process {self._session.pid}'s: a forked child makes its own")

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def __repr__(self) -> str:
        return f"<Reservation of {self.nbytes} bytes in {self._session.folder}{'' if self._is_open else ', ended'}>"


def check_name(name: str) -> None:
    """Refuses what cannot be a file of the folder."""
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise ValueError(f"a file of the folder is named by 1 to 255 bytes without '/' and not beginning with '.'; got {name!r}")


begun: weakref.WeakSet[Any] = weakref.WeakSet()  # objects that begin anew in a forked child, by `_begin`


@dataclass(frozen=True, slots=True)
class FolderStatistics:
    """A folder at one moment.

    Attributes:
        capacity_bytes: the budget.
        num_files: files that are published.
        nbytes: of all files, those that are being written included at what is reserved for them.
        num_writing: files that are being written.
        num_leased: files that any process has leased.
        num_evicted: files that this process has evicted so far.
        nbytes_evicted: their bytes.
    """

    capacity_bytes: int
    nbytes: int
    num_files: int
    num_writing: int
    num_leased: int
    num_evicted: int
    nbytes_evicted: int


class BudgetedFolder:
    """Files within a budget, shared by all processes of a node.

    Picklable; a forked or spawned process goes on with what it is given. All users of a folder give the same budget. What lies
    there beside the files published through this class is neither counted nor touched, unless `adopts`.

    Args:
        path: of the folder, on a local disk or in memory; made if it is not there.
        capacity_bytes: what its files' lengths may add up to.
        adopts: count all files that do not begin with ".", whoever put them there, and evict them like others. Those that others
            write into the folder count from the next look on, so only what is written through this class keeps the budget.
        durable: bytes are on the disk before the file has its name, so that no file is ever seen that a power failure has cut.
        order: which of the files that are not leased may be evicted, the first to go first; None: the oldest first.
    Raises:
        ValueError: no budget, or living processes use the folder with another one.
        StoreError: the folder's file system has no locks.
    Cost: a reservation and its publication 0.1 ms in a folder of 10,000 files, a lease 10 us.
    Thread/process safety: all methods, from any thread and process.
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
        order: Order | None = None,
    ) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"a budget is at least 1 byte; got {capacity_bytes=}")
        self.path = os.path.abspath(os.fspath(path))
        self.capacity_bytes = int(capacity_bytes)
        self.adopts = adopts
        self.durable = durable
        self.order: Order = order or iter  # the oldest first
        self.num_evicted = self.nbytes_evicted = 0
        self._begin()
        session = self._session()
        with session.locked() as ledger:
            session.sweep()
            with contextlib.suppress(CacheFull):
                self._make_room(session, ledger, 0, self.order)  # a budget smaller than the last one

    def reserve(self, nbytes: int, *, timeout_s: float | None = 0.0) -> Reservation:
        """Makes room for a file, and a file in it that nobody sees yet.

        Args:
            nbytes: how long it may become.
            timeout_s: seconds to wait until leases end, if nothing may be evicted; 0 = do not wait; None = forever.
        Raises:
            CacheFull: there was no room in time, or can never be.
        """
        made = self._obtain(None, nbytes, timeout_s, self.order)
        assert isinstance(made, Reservation)
        return made

    def obtain(self, name: str, nbytes: int, *, timeout_s: float | None = None, order: Order | None = None) -> Lease | Reservation:
        """A lease of a file, or, if it is not there, the room to write it.

        Of several processes that ask for a file that is not there one gets the reservation; the others wait for its publication. If
        it is abandoned, or its process dies, the next one gets it.

        Args:
            name: of the file.
            nbytes: how long it may become, if it must be written.
            timeout_s: seconds to wait for its writer, or for room; 0 = do not wait; None = forever.
            order: which files may go for this one; None: the folder's.
        Raises:
            CacheFull: there was no room in time, or can never be.
            TimeoutError: another process was still writing it.
        """
        check_name(name)
        return self._obtain(name, nbytes, timeout_s, order or self.order)

    def lease(self, name: str) -> Lease:
        """Holds a file: nobody evicts it until the lease, or this process, ends.

        Args:
            name: of the file.
        Raises:
            FileNotFoundError: it is not there, or no longer.
        """
        session = self._session()

        def try_once() -> Lease:
            with session.locked() as ledger:
                kept = ledger.files.get(name)
                if kept is None:
                    raise FileNotFoundError(f"{self.path} has no file {name}: it was evicted, or never published")
                session.process_leases.hold([kept.ino])
                return Lease(self.path, (kept,), functools.partial(self._let_go, session))

        return self.evicting(try_once)

    def lease_many(self, names: Iterable[str] | None = None) -> Leases:
        """Holds many files at once: those of `names` that are there; None: all.

        One lease for all of them, in one moment; no descriptor is kept open, so their number is not bounded by a limit of those.
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

    def files(self) -> list[Kept]:
        """What is published, oldest first."""
        session = self._session()
        with session.locked() as ledger:
            return list(ledger.files.values())

    def discard(self, name: str) -> bool:
        """Removes a file, unless it is leased.

        Args:
            name: of the file.
        Returns:
            whether it did; False: the file is not there, or leased.
        """
        session = self._session()
        with session.locked() as ledger:
            kept = ledger.files.get(name)
            if kept is None or kept.ino in session.process_leases.leased():
                return False
            self._remove(ledger, kept)
            return True

    def refresh(self) -> None:
        """Looks at the folder itself: for files that others have put there, or that have grown. Evicts down to the budget.

        Only where `adopts`: everything else is seen without.
        """
        session = self._session()
        with session.locked() as ledger:
            before = ledger.files
            ledger.list_again()
            if ledger.files != before:  # only this shows the others a file that has grown where it lies
                ledger.changing()
            with contextlib.suppress(CacheFull):
                self._make_room(session, ledger, 0, self.order)

    def statistics(self) -> FolderStatistics:
        """The folder now."""
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
        """Ends this process's leases and reservations. The next use begins anew."""
        with self._opening:
            session, self._opened = self._opened, None
        if session is not None:
            session.close()

    def _let_go(self, session: Session, inos: tuple[int, ...]) -> None:
        """What leases end by. It is this object's, so that the session lives as long as a lease of it does."""
        session.let_go(inos)

    def _obtain(self, name: str | None, nbytes: int, timeout_s: float | None, order: Order) -> Lease | Reservation:
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
                        f"another process was still writing {name} into {self.path} after {timeout_s} s: wait longer"
                    )
                self._make_room(session, ledger, nbytes, order)
                return session.begin_writing(temporary, nbytes)

        found = repeated(lambda: self.evicting(try_once, order=order), timeout_s)
        if isinstance(found, Lease):
            return found
        reservation = Reservation(self, session, found, temporary, nbytes)
        faults.hit("after_reserve")
        try:
            self._allocate(found.fd, 0, nbytes, timeout_s, order)
        except BaseException:
            reservation.abandon()
            raise
        return reservation

    def _grow(self, session: Session, fd: int, name: str, nbytes: int, more: int, timeout_s: float | None) -> None:
        """For Reservation.grow."""
        self._check_budget(nbytes + more)

        def set_nbytes(ledger: Ledger, nbytes: int) -> None:
            ledger.changing()
            os.ftruncate(fd, nbytes)
            ledger.set_writing(name, nbytes)

        def try_once() -> None:
            with session.locked() as ledger:
                session.sweep()
                self._make_room(session, ledger, more, self.order)
                set_nbytes(ledger, nbytes + more)

        repeated(try_once, timeout_s)
        try:
            self._allocate(fd, nbytes, more, timeout_s, self.order)
        except BaseException:
            with session.locked() as ledger:
                set_nbytes(ledger, nbytes)
            raise

    def _check_budget(self, nbytes: int) -> None:
        if not 0 <= nbytes <= self.capacity_bytes:
            raise CacheFull(
                f"a file of {nbytes} bytes can never lie in {self.path}: its budget is {self.capacity_bytes} bytes; make files "
                f"smaller or the budget larger"
            )

    def _make_room(self, session: Session, ledger: Ledger, nbytes: int, order: Order) -> None:
        """Evicts until so much fits; or raises CacheFull, and then evicts nothing. The folder's lock is held."""
        excess = ledger.nbytes + nbytes - self.capacity_bytes
        if excess <= 0:
            return
        leased = session.process_leases.leased()
        victims, freed = [], 0
        for kept in order(kept for kept in ledger.files.values() if kept.ino not in leased):
            victims.append(kept)
            freed += kept.nbytes
            if freed >= excess:
                for victim in victims:
                    self._remove(ledger, victim)
                    faults.hit("mid_evict")
                self.num_evicted += len(victims)
                self.nbytes_evicted += freed
                return
        held = [kept for kept in ledger.files.values() if kept.ino in leased]
        mine = sum(kept.nbytes for kept in held if session.process_leases.holds(kept.ino))
        raise CacheFull(
            f"{self.path} has no room for {nbytes} bytes more: {ledger.nbytes} of its budget of {self.capacity_bytes} bytes are in "
            f"use ({len(ledger.files)} files, {len(ledger.writing)} being written), "
            f"{sum(kept.nbytes for kept in held)} of them are leased, {mine} by this process, and {freed} may be evicted: make the "
            f"budget larger, hold fewer files at once, or wait longer"
        )

    def _remove(self, ledger: Ledger, kept: Kept) -> None:
        ledger.changing()
        unlink(f"{self.path}/{kept.name}")
        ledger.remove(kept.name)

    def _allocate(self, fd: int, start: int, nbytes: int, timeout_s: float | None, order: Order) -> None:
        """Takes a file's blocks, so that no later write meets a full disk. A disk smaller than the budget evicts, too."""
        if not nbytes:
            return

        def allocate() -> None:
            os.posix_fallocate(fd, start, nbytes)

        repeated(lambda: self.evicting(allocate, nbytes, order), timeout_s)

    def evicting(self, write: Callable[[], T], nbytes: int = _CONTROL_NBYTES, order: Order | None = None) -> T:
        """Return what `write` returns. While the disk is full, evict files that are not leased and call it again.

        Args:
            write: leaves nothing behind if it raises.
            nbytes: how many bytes it needs, about.
            order: which files may be evicted; None: the folder's.
        Raises:
            CacheFull: the disk is full, and nothing more may be evicted.
        """
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not self.free_disk(nbytes, order):
                    disk = os.statvfs(self.path)
                    raise CacheFull(
                        f"the disk of {self.path} has no room for {nbytes} bytes more: {disk.f_bavail * disk.f_frsize} bytes are "
                        f"free, and nothing more of the cache's budget of {self.capacity_bytes} bytes may be evicted, as it is "
                        f"leased or mapped: free some, or make the budget smaller"
                    ) from error

    def free_disk(self, nbytes: int, order: Order | None = None) -> bool:
        """Evict files that are not leased, whatever the budget, until `nbytes` are free or none is left.

        Files that a process has mapped stay, because their blocks are free only once nobody maps them any more.

        Args:
            nbytes: bytes to free.
            order: the order in which files are evicted; None is the folder's own.
        Returns:
            whether any was evicted.
        """
        session, order = self._session(), order or self.order
        mapped = _mapped_below(self.path)
        with session.locked() as ledger:
            session.sweep()
            leased = session.process_leases.leased()
            freed = 0
            for kept in list(order(kept for kept in ledger.files.values() if kept.ino not in leased and kept.ino not in mapped)):
                if freed >= nbytes:
                    break
                self._remove(ledger, kept)
                self.num_evicted += 1
                freed += kept.nbytes
        self.nbytes_evicted += freed
        return freed > 0

    def _session(self) -> Session:
        """This process's own."""
        if self._opened is None:
            with self._opening:
                if self._opened is None:
                    opened = Session(self.path, self.capacity_bytes, adopts=self.adopts)
                    weakref.finalize(self, opened.close)
                    self._opened = opened
        return self._opened

    def _begin(self) -> None:
        """As in a process that has not used the folder yet; a forked child begins here."""
        self._opened = None
        self._opening = threading.Lock()
        begun.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_opened", "_opening")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"<BudgetedFolder {self.path} of {self.capacity_bytes} bytes>"


def _begin_in_child() -> None:
    for each in list(begun):
        each._begin()


os.register_at_fork(after_in_child=_begin_in_child)
