"""What a process has open of a budgeted folder: its ledger, its leases of a process, its lock against its own threads.

Each process begins its own at its first use, a forked child too. A lease may be let go by the garbage collector at any moment, also
while this very thread is inside the lock; then it is put aside, and whoever leaves the lock sees to it.

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
import fcntl
import logging
import os
import secrets
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from shmload.errors import StoreError
from shmload.storage.ledger import HIDDEN, NEW, Ledger, close_kept, is_locked, open_kept, try_lock

USERS = f"{HIDDEN}/users"
_HEADER = struct.Struct("<8sQqQ")  # magic, capacity, most files or -1, how often the leases behind it have changed
_MAGIC = b"SHMLUSE1"
_VERSION_AT = 24


class ProcessLeases:
    """This process among the users of a folder."""

    def __init__(self, folder: str, capacity_bytes: int, max_files: int) -> None:
        """To be made under the folder's lock: before its own lock is there, the file would seem a dead one's."""
        self._users = f"{folder}/{USERS}"
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = f"{self._users}/{self.name}"
        self._fd = open_kept(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, capacity_bytes, max_files, 0), 0)
        self._version = 0
        self._counts: dict[int, int] = {}  # leases in this process by inode
        self._slots: dict[int, int] = {}  # where in the file the inode stands
        self._free: list[int] = []
        self._others: dict[str, tuple[int, frozenset[int]]] = {}  # leases of other users, as of which change

    @property
    def num_leased(self) -> int:
        """Files that this process has leased."""
        return len(self._counts)

    def holds(self, ino: int) -> bool:
        return ino in self._counts

    def hold(self, inos: Iterable[int]) -> None:
        """Leases files. Those that it holds already it only counts; of the others, the folder's lock must be held."""
        fresh = []
        for ino in inos:
            count = self._counts.get(ino, 0)
            self._counts[ino] = count + 1
            if not count:
                fresh.append(ino)
        while fresh and self._free:
            self._put(self._free.pop(), fresh.pop())
        if fresh:
            first = len(self._slots)  # no slot is free, so all below it are taken
            for place, ino in enumerate(fresh, first):
                self._slots[ino] = place
            os.pwrite(self._fd, array.array("Q", fresh).tobytes(), _HEADER.size + 8 * first)
        self.ring()

    def drop(self, inos: Iterable[int]) -> None:
        """Takes leases back. Wakes who waits for room."""
        freed = []
        for ino in inos:
            self._counts[ino] -= 1
            if not self._counts[ino]:
                del self._counts[ino]
                freed.append(self._slots.pop(ino))
        if not freed:
            return
        if not self._counts:
            os.ftruncate(self._fd, _HEADER.size)
            self._free.clear()
        else:
            for place in freed:
                os.pwrite(self._fd, bytes(8), _HEADER.size + 8 * place)
            self._free += freed
        self.ring()

    def ring(self) -> None:
        """Tells all that something has changed here."""
        self._version += 1
        os.pwrite(self._fd, self._version.to_bytes(8, "little"), _VERSION_AT)

    def leased(self) -> set[int]:
        """Inodes that any living process has leased. Removes what dead ones have left."""
        found = set(self._counts)
        for name in self._living():
            version, inos = self._others.get(name, (-1, frozenset()))
            data = _read(f"{self._users}/{name}", _HEADER.size)
            if len(data) == _HEADER.size and version != (version_now := _HEADER.unpack(data)[3]):
                table = _read(f"{self._users}/{name}")[_HEADER.size :]
                inos = frozenset(array.array("Q", table[: len(table) // 8 * 8])) - {0}
                self._others[name] = (version_now, inos)
            found |= inos
        return found

    def budgets(self) -> Iterator[tuple[str, int, int]]:
        """What the other living users say: name, capacity, most files."""
        for name in self._living():
            data = _read(f"{self._users}/{name}", _HEADER.size)
            if len(data) == _HEADER.size:
                _, capacity_bytes, max_files, _ = _HEADER.unpack(data)
                yield name, capacity_bytes, max_files

    def close(self) -> None:
        """Ends all leases of this process."""
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        close_kept(self._fd)

    def _put(self, place: int, ino: int) -> None:
        self._slots[ino] = place
        os.pwrite(self._fd, ino.to_bytes(8, "little"), _HEADER.size + 8 * place)

    def _living(self) -> Iterator[str]:
        for name in os.listdir(self._users):
            if name == self.name:
                continue
            if is_locked(f"{self._users}/{name}"):
                yield name
                continue
            self._others.pop(name, None)
            try:
                os.unlink(f"{self._users}/{name}")
            except FileNotFoundError:
                pass


def _read(path: str, nbytes: int = -1) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(nbytes) or b""
    except FileNotFoundError:  # it has just left
        return b""


log = logging.getLogger("shmload")
_REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "fuse.sshfs", "glusterfs", "afs")


class Session:
    """One process at one folder.

    Raises:
        ValueError: others use the folder with another budget.
        StoreError: the folder's file system has no locks.
    """

    def __init__(self, folder: str, capacity_bytes: int, max_files: int | None, *, adopts: bool) -> None:
        self.folder = folder
        for part in (USERS, NEW):
            os.makedirs(f"{folder}/{part}", exist_ok=True)
        _check_locks(folder)
        self.pid = os.getpid()
        self.ledger = Ledger(folder, adopts=adopts)
        self.descriptors: dict[str, int] = {}  # of the files that this process is writing, by temporary name
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int, ...]] = deque()
        files = -1 if max_files is None else max_files
        with self.ledger.locked():
            self.process_leases = ProcessLeases(folder, capacity_bytes, files)
            others = [each for each in self.process_leases.budgets() if each[1:] != (capacity_bytes, files)]
        if others:
            self.close()
            raise ValueError(
                f"process {others[0][0].split('-')[0]} uses {folder} with a budget of {_budget(*others[0][1:])}; this one was "
                f"given {_budget(capacity_bytes, files)}: give all users of a folder the same"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[Ledger]:
        """Alone in the folder among threads and processes, with a ledger that is up to date."""
        try:
            with self._lock, self.ledger.locked():
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
        for name in [name for name in self.ledger.writing if name not in self.descriptors]:
            if not is_locked(f"{self.folder}/{NEW}/{name}"):
                self.ledger.changing()
                _unlink(f"{self.folder}/{NEW}/{name}")
                self.ledger.end_writing(name)

    def begin_writing(self, name: str, nbytes: int) -> None:
        """Makes a file for a reservation, of its length at once: so a listing counts it right. The folder's lock is held."""
        path = f"{self.folder}/{NEW}/{name}"
        self.ledger.changing()
        fd = open_kept(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, nbytes)
        except BaseException:
            close_kept(fd)
            raise
        self.ledger.set_writing(name, nbytes)
        self.descriptors[name] = fd

    def end_writing(self, name: str) -> None:
        """Unlocks and closes it: waiters wake. Mappings of the file may live on."""
        fd = self.descriptors.pop(name)
        fcntl.flock(fd, fcntl.LOCK_UN)
        close_kept(fd)

    def close(self) -> None:
        """Ends everything this process holds of the folder."""
        for name in list(self.descriptors):
            _unlink(f"{self.folder}/{NEW}/{name}")  # the next one that needs room takes it off the ledger
            self.end_writing(name)
        self.process_leases.close()
        self.ledger.close()
        self.pid = -1

    def close_if_mine(self) -> None:
        """`close`, unless a parent has left it to this process or it is closed."""
        if self.pid == os.getpid():
            self.close()

    def _settle(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    self.process_leases.drop(self._dropped.popleft())
            finally:
                self._lock.release()


def _budget(capacity_bytes: int, max_files: int) -> str:
    return f"{capacity_bytes} bytes" + (f" and {max_files} files" if max_files >= 0 else "")


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _check_locks(folder: str) -> None:
    """Two open files of one name must not both get an exclusive lock."""
    with tempfile.NamedTemporaryFile(dir=f"{folder}/{HIDDEN}", prefix="locks-") as one, open(one.name, "rb+") as other:
        try:
            holds = try_lock(one.fileno()) and not try_lock(other.fileno())
        except OSError as error:
            raise StoreError(
                f"{folder} is on a file system without file locks ({kind_of(folder)}: {error.strerror}), which a cache needs to "
                f"be shared: choose a folder on a local disk"
            ) from None
        if not holds:
            raise StoreError(
                f"{folder} is on a file system ({kind_of(folder)}) whose file locks lock nobody out: choose a folder on a local "
                f"disk"
            )
    if kind_of(folder).startswith(_REMOTE):
        log.warning(
            "%s is on a network file system (%s): processes of this machine share it as they should; other machines may only put "
            "files there",
            folder,
            kind_of(folder),
        )


def kind_of(folder: str) -> str:
    """The kind of its file system, as the kernel names it."""
    device = os.stat(folder).st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        if words[2] == f"{os.major(device)}:{os.minor(device)}":
            return words[words.index("-") + 1]
    return "unknown"
