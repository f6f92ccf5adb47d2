"""Who uses a budgeted folder, and which files each has leased.

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
import fcntl
import os
import secrets
import struct
from collections.abc import Iterable, Iterator

from shmload.storage.descriptors import close_kept, is_locked, open_kept
from shmload.storage.ledger import HIDDEN

USERS = f"{HIDDEN}/users"
_HEADER = struct.Struct("<8sQqQ")  # magic, capacity, most files or -1, how often the leases behind it have changed
_MAGIC = b"SHMLUSE1"
_VERSION_AT = 24


class Presence:
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
