"""What lies in a budgeted folder, as all its processes know it, without a listing each time.

    <folder>/.shmload/ledger    which change of the folder was the last
    <folder>/.shmload/new/      files that are being written, each locked by its writer and as long as its reservation

The folder is the truth, and each process has a copy of it: a listing of 10,000 files takes 40 ms. An exclusive flock on the ledger
is the folder's lock. Whoever holds it may change files: before the first change it marks the ledger as dirty, behind the last it
writes a new token there with the folder's time of change. A process lists the folder if the token is another than that of its
copy, or the ledger is dirty (its writer was killed), damaged, gone, or older than the folder (somebody else put a
file there, or took one). So there is nothing to recover, and nothing to believe.

What a process has open of a budgeted folder: its ledger, its leases of a process, its lock against its own threads.

Each process begins its own at its first use, a forked child too. A lease may be let go by the garbage collector at any moment, also
while this very thread is inside the lock; then it is put aside, and whoever leaves the lock sees to it. So is the end of it all: a
descriptor that was closed under another thread's hands may be another file's by the next write. For the same reason a file that is
being written is closed by its writer alone.

Who uses a budgeted folder, and which files each has leased.

    <folder>/.shmload/users/<pid>-<word>    one file a process: its budget, and the inodes of the files it has leased

Its process holds a flock on it, so it counts exactly as long as the process lives, however that ends. 10,000 leases are 80 kB in
such a file and no descriptor. A lease is written while the folder's lock is held, so that it cannot cross an eviction; it is taken
back without, as an eviction that does not see that yet only spares a file. Files are known by inode: a leased one is not removed,
so its number is not given to another.

Rejected: a flock on each leased file (a descriptor each; the usual limit is 1,024), byte-range locks at the inode's number (the
kernel searches them one after another: 10,000 take seconds), POSIX record locks (closing any descriptor of the file drops all).
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import secrets
import stat
import struct
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from shmload import faults
from shmload.errors import StoreError
from shmload.processes.file_lock import FileLock, is_locked, try_lock

log = logging.getLogger("shmload")

HIDDEN = ".shmload"
NEW = f"{HIDDEN}/new"
OURS = stat.S_ISVTX  # the mark of a published file; the bit has no other meaning on Linux, and a listing brings it along
_REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "fuse.sshfs", "glusterfs", "afs")
_HEADER = struct.Struct("<Q8sq")  # dirty, token of the last change, the folder's time of change


class Kept(NamedTuple):
    """A file of the folder.

    Attributes:
        published_ns: its time of change, which orders the files of a folder.
        ino: its inode, by which leases know it.
    """

    name: str
    nbytes: int
    published_ns: int
    ino: int


class Ledger:
    """One process's view. `locked` brings it up to date; the rest is for inside that block.

    Attributes:
        files: what is published, oldest first.
        writing: files that are being written, and the bytes reserved for each.
        nbytes: of both together.
    """

    def __init__(self, folder: str, *, adopts: bool) -> None:
        self.folder = folder
        self.files: OrderedDict[str, Kept] = OrderedDict()  # a dict would walk over all that was taken from its front
        self.writing: dict[str, int] = {}
        self.nbytes = 0
        self.num_listings = 0
        self._adopts = adopts
        self._path = f"{folder}/{HIDDEN}/ledger"
        self._file = FileLock.open(self._path, os.O_CREAT)
        self._token = b""  # of the change that `files` and `writing` are as of; empty: they are not to be believed
        self._is_changing = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the folder, and up to date. What raises behind the first change leaves the next one a listing."""
        self._file.acquire()
        try:
            self._look()
            faults.hit("holding_lock")
            yield
            if self._is_changing:
                self._write()
        except BaseException:
            if self._is_changing:
                self._token = b""
            raise
        finally:
            self._is_changing = False
            self._file.release()

    def changing(self) -> None:
        """To be called before a file is made, renamed or removed."""
        if not self._is_changing:
            try:
                os.pwrite(self._file.fd, b"\1", 0)
            except OSError:  # on a full disk a ledger that was never written stays empty, and an empty one counts as dirty
                if os.fstat(self._file.fd).st_size >= _HEADER.size:
                    raise
            self._is_changing = True

    def add(self, kept: Kept) -> None:
        self.files[kept.name] = kept
        self.nbytes += kept.nbytes

    def remove(self, name: str) -> None:
        self.nbytes -= self.files.pop(name).nbytes

    def set_writing(self, name: str, nbytes: int) -> None:
        self.nbytes += nbytes - self.writing.get(name, 0)
        self.writing[name] = nbytes

    def end_writing(self, name: str) -> None:
        self.nbytes -= self.writing.pop(name, 0)

    def next_time(self) -> int:
        """A time of publication: now, and behind that of every file that is there."""
        newest = next(reversed(self.files.values()), None)
        return max(time.time_ns(), newest.published_ns + 1 if newest else 0)

    def list_again(self) -> None:
        """Believes the folder and nothing else."""
        token, self._token = self._token, b""
        self.num_listings += 1
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                status = _status(entry)
                if stat.S_ISREG(status.st_mode) and (self._adopts or status.st_mode & OURS) and status.st_nlink:
                    found.append(Kept(entry.name, status.st_size, status.st_mtime_ns, status.st_ino))
        found.sort(key=lambda kept: (kept.published_ns, kept.name))
        self.files = OrderedDict((kept.name, kept) for kept in found)
        with os.scandir(f"{self.folder}/{NEW}") as entries:
            self.writing = {entry.name: _status(entry).st_size for entry in entries}
        self.nbytes = sum(kept.nbytes for kept in found) + sum(self.writing.values())
        self._token = token

    def close(self) -> None:
        self._file.close()

    def _look(self) -> None:
        header = os.pread(self._file.fd, _HEADER.size, 0)
        if os.fstat(self._file.fd).st_nlink == 0:
            raise StoreError(f"{self.folder}/{HIDDEN} was removed while this process used the folder: open it again")
        if len(header) == _HEADER.size:
            dirty, token, changed_ns = _HEADER.unpack(header)
            if not dirty and changed_ns == os.stat(self.folder).st_mtime_ns:
                if token != self._token:
                    self.list_again()
                    self._token = token
                return
        self.list_again()
        self._write()  # at once: whoever finds no room, or no such file, leaves by an exception

    def _write(self) -> None:
        self._token = os.urandom(8)
        try:
            os.pwrite(self._file.fd, _HEADER.pack(0, self._token, os.stat(self.folder).st_mtime_ns), 0)
        except OSError:  # the disk is full: the ledger stays dirty, and is a listing each time until there is room
            self._token = b""


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    """Its state; of one that has gone meanwhile, nothing."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return os.stat_result([0] * 10)


USERS = f"{HIDDEN}/users"
_LEASE_HEADER = struct.Struct("<QQ")  # capacity, how often the leases behind it have changed


class ProcessLeases:
    """This process among the users of a folder."""

    def __init__(self, folder: str, capacity_bytes: int) -> None:
        """To be made under the folder's lock: before its own lock is there, the file would seem a dead one's."""
        self._users = f"{folder}/{USERS}"
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = f"{self._users}/{self.name}"
        self._file = FileLock.open(self._path, os.O_CREAT | os.O_EXCL)
        self._file.acquire()
        self._capacity_bytes = capacity_bytes
        self._version = 0
        with contextlib.suppress(OSError):  # the disk is full: the first lease writes it, after room was made
            self._write_header()
        self._counts: dict[int, int] = {}  # leases in this process by inode
        self._slots: dict[int, int] = {}  # where in the file the inode stands
        self._free: list[int] = []
        self._others: dict[str, tuple[int, frozenset[int]]] = {}  # leases of other users, as of which change

    def holds(self, ino: int) -> bool:
        return ino in self._counts

    def hold(self, inos: Iterable[int]) -> None:
        """Leases files. Those that it holds already it only counts; of the others, the folder's lock must be held."""
        inos = list(inos)
        fresh = [ino for ino in dict.fromkeys(inos) if ino not in self._counts]
        num_reused = min(len(fresh), len(self._free))
        added = fresh[num_reused:]
        first = len(self._slots) + len(self._free)  # where the table ends
        self._write_header()
        if added:  # before anything is counted: the disk may be full
            _write_all(self._file.fd, array.array("Q", added).tobytes(), _LEASE_HEADER.size + 8 * first)
        for ino in inos:
            self._counts[ino] = self._counts.get(ino, 0) + 1
        for ino in fresh[:num_reused]:
            self._put(self._free.pop(), ino)
        self._slots.update(zip(added, range(first, first + len(added)), strict=True))
        self._changed()

    def drop(self, inos: Iterable[int]) -> None:
        """Takes leases back."""
        freed = []
        for ino in inos:
            self._counts[ino] -= 1
            if not self._counts[ino]:
                del self._counts[ino]
                freed.append(self._slots.pop(ino))
        if not freed:
            return
        if not self._counts:
            os.ftruncate(self._file.fd, _LEASE_HEADER.size)
            self._free.clear()
        else:
            for place in freed:
                os.pwrite(self._file.fd, bytes(8), _LEASE_HEADER.size + 8 * place)
            self._free += freed
        self._changed()

    def _changed(self) -> None:
        """Has the others read the leases again."""
        self._version += 1
        self._write_header()

    def _write_header(self) -> None:
        os.pwrite(self._file.fd, _LEASE_HEADER.pack(self._capacity_bytes, self._version), 0)

    def leased(self) -> set[int]:
        """Inodes that any living process has leased. Removes what dead ones have left."""
        found = set(self._counts)
        for name in self._living():
            version, inos = self._others.get(name, (-1, frozenset()))
            data = _read(f"{self._users}/{name}", _LEASE_HEADER.size)
            if len(data) == _LEASE_HEADER.size and version != (version_now := _LEASE_HEADER.unpack(data)[1]):
                table = _read(f"{self._users}/{name}")[_LEASE_HEADER.size :]
                inos = frozenset(array.array("Q", table[: len(table) // 8 * 8])) - {0}
                self._others[name] = (version_now, inos)
            found |= inos
        return found

    def budgets(self) -> Iterator[tuple[str, int]]:
        """What the other living users say: name and capacity."""
        for name in self._living():
            data = _read(f"{self._users}/{name}", _LEASE_HEADER.size)
            if len(data) == _LEASE_HEADER.size:
                yield name, _LEASE_HEADER.unpack(data)[0]

    def close(self) -> None:
        """Ends all leases of this process."""
        unlink(self._path)
        self._file.close()

    def _put(self, place: int, ino: int) -> None:
        self._slots[ino] = place
        os.pwrite(self._file.fd, ino.to_bytes(8, "little"), _LEASE_HEADER.size + 8 * place)

    def _living(self) -> Iterator[str]:
        for name in os.listdir(self._users):
            if name == self.name:
                continue
            if is_locked(f"{self._users}/{name}"):
                yield name
                continue
            self._others.pop(name, None)
            unlink(f"{self._users}/{name}")


def _write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`; a disk that fills up in between is an OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _read(path: str, nbytes: int = -1) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(nbytes) or b""
    except FileNotFoundError:  # it has just left
        return b""


class Session:
    """One process at one folder.

    Raises:
        ValueError: others use the folder with another budget.
        StoreError: the folder's file system has no locks.
    """

    def __init__(self, folder: str, capacity_bytes: int, *, adopts: bool) -> None:
        self.folder = folder
        for part in (USERS, NEW):
            os.makedirs(f"{folder}/{part}", exist_ok=True)
        _check_locks(folder)
        self.pid = os.getpid()
        self.ledger = Ledger(folder, adopts=adopts)
        self.writing: dict[str, FileLock] = {}  # by temporary name
        self.is_closed = False
        self._is_open = True  # descriptors are, until nobody is inside the lock
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int, ...]] = deque()
        with self.ledger.locked():
            self.process_leases = ProcessLeases(folder, capacity_bytes)
            others = [each for each in self.process_leases.budgets() if each[1] != capacity_bytes]
        if others:
            self.close()
            raise ValueError(
                f"process {others[0][0].split('-')[0]} uses {folder} with a budget of {others[0][1]} bytes; this one was given "
                f"{capacity_bytes} bytes: give all users of a folder the same"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[Ledger]:
        """Alone in the folder among threads and processes, with a ledger that is up to date.

        Raises:
            ValueError: the folder was closed meanwhile.
        """
        try:
            with self._lock:
                if self.is_closed:
                    raise ValueError(f"{self.folder} was closed by one thread while another used it: close it when all have done")
                with self.ledger.locked():
                    yield self.ledger
        finally:
            self._settle()

    def let_go(self, inos: tuple[int, ...]) -> None:
        """Ends leases, now or when the lock is left. In a forked child it ends nothing."""
        if self.pid == os.getpid():
            self._dropped.append(inos)
            self._settle()

    def sweep(self) -> None:
        """Removes what dead writers have left. The folder's lock is held."""
        for name in [name for name in self.ledger.writing if name not in self.writing]:
            if not is_locked(f"{self.folder}/{NEW}/{name}"):
                self.ledger.changing()
                unlink(f"{self.folder}/{NEW}/{name}")
                self.ledger.end_writing(name)

    def begin_writing(self, name: str, nbytes: int) -> FileLock:
        """Makes a file for a reservation, of its length at once: so a listing counts it right. The folder's lock is held."""
        self.ledger.changing()
        file = FileLock.open(f"{self.folder}/{NEW}/{name}", os.O_CREAT | os.O_EXCL)
        file.acquire()
        os.ftruncate(file.fd, nbytes)
        self.writing[name] = file
        self.ledger.set_writing(name, nbytes)
        return file

    def end_writing(self, name: str) -> None:
        """Closes it, unless that has been done."""
        if (file := self.writing.pop(name, None)) is not None:
            file.close()

    def close(self) -> None:
        """Ends everything this process holds of the folder, now or when the lock is left. In a forked child it ends nothing."""
        if self.pid == os.getpid():
            self.is_closed = True
            self._settle()

    def _settle(self) -> None:
        """Does what was put aside, unless somebody is inside the lock, and will."""
        while (self._dropped or (self.is_closed and self._is_open)) and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    inos = self._dropped.popleft()
                    if self._is_open:
                        self.process_leases.drop(inos)
                if self.is_closed and self._is_open:
                    self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        self._is_open = False
        for name in self.writing:
            unlink(f"{self.folder}/{NEW}/{name}")  # the next one that needs room takes it off the ledger
        self.writing.clear()
        self.process_leases.close()
        self.ledger.close()


def unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _check_locks(folder: str) -> None:
    """Two open files of one name must not both get an exclusive lock."""
    with tempfile.NamedTemporaryFile(dir=f"{folder}/{HIDDEN}", prefix="locks-") as one, open(one.name, "rb+") as other:
        reason = "they lock nobody out"
        try:
            holds = try_lock(one.fileno()) and not try_lock(other.fileno())
        except OSError as error:
            holds, reason = False, str(error.strerror)
    if not holds:
        raise StoreError(
            f"{folder} is on a file system without file locks ({kind_of(folder)}: {reason}), which a cache needs to be shared: "
            "choose a folder on a local disk"
        )
    if (kind := kind_of(folder)).startswith(_REMOTE):
        log.warning("%s is on a network file system (%s): other machines' processes may only put files there", folder, kind)


def kind_of(folder: str) -> str:
    """The kind of its file system, as the kernel names it."""
    device = os.stat(folder).st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        if words[2] == f"{os.major(device)}:{os.minor(device)}":
            return words[words.index("-") + 1]
    return "unknown"
