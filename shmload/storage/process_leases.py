"""`ProcessLeases`: the processes that use a budgeted folder, and the files that each has leased.

    <folder>/.shmload/users/<pid>-<word>    one file per process: its budget, and the inodes of the files it has leased

The process holds a flock on its file, so the file counts exactly as long as the process lives, however it ends. 10,000 leases take
80 kB of this file and no descriptor. A lease is written under the folder's lock, so it cannot race with an eviction. It is removed
without the lock: an eviction that does not see the removal yet only spares a file. Files are known by inode; a leased file is not
removed, so its inode number is not reused.

Rejected: a flock on each leased file (one descriptor each; the usual limit is 1,024), byte-range locks at the inode's number (the
kernel searches them linearly, so 10,000 take seconds), and POSIX record locks (closing any descriptor of the file drops all of
them).
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import struct
from collections.abc import Iterable, Iterator

from shmload.processes.file_lock import FileLock, is_locked
from shmload.storage.ledger import HIDDEN, unlink

USERS = f"{HIDDEN}/users"
_LEASE_HEADER = struct.Struct("<QQ")  # the budget, and how often the leases after it have changed


class ProcessLeases:
    """The leases of this process in a folder.

    Create it under the folder's lock, because the file seems to be that of a dead process until it is locked.

    Args:
        folder: path of the folder.
        capacity_bytes: the budget.
    """

    def __init__(self, folder: str, capacity_bytes: int) -> None:
        self._users = f"{folder}/{USERS}"
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = f"{self._users}/{self.name}"
        self._file = FileLock.open(self._path, os.O_CREAT | os.O_EXCL)
        self._file.acquire()
        self._capacity_bytes = capacity_bytes
        self._version = 0
        with contextlib.suppress(OSError):  # the disk is full: the first lease writes the header, after room was made
            self._write_header()
        self._counts: dict[int, int] = {}  # number of leases of this process, by inode
        self._slots: dict[int, int] = {}  # index of each inode in the file's table
        self._free: list[int] = []  # unused indices of the table
        # by other process: the version at which its leases were read, and the leases
        self._others: dict[str, tuple[int, frozenset[int]]] = {}

    def holds(self, ino: int) -> bool:
        return ino in self._counts

    def hold(self, inos: Iterable[int]) -> None:
        """Lease files. The folder's lock must be held if any of them is not leased by this process yet."""
        inos = list(inos)
        fresh = [ino for ino in dict.fromkeys(inos) if ino not in self._counts]
        num_reused = min(len(fresh), len(self._free))
        added = fresh[num_reused:]
        first = len(self._slots) + len(self._free)  # end of the table
        self._write_header()
        if added:  # before anything is counted, because the disk may be full
            _write_all(self._file.fd, array.array("Q", added).tobytes(), _LEASE_HEADER.size + 8 * first)
        for ino in inos:
            self._counts[ino] = self._counts.get(ino, 0) + 1
        for ino in fresh[:num_reused]:
            self._put(self._free.pop(), ino)
        self._slots.update(zip(added, range(first, first + len(added)), strict=True))
        self._changed()

    def drop(self, inos: Iterable[int]) -> None:
        """End one lease of each of these files. Does not need the folder's lock."""
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
        """Make other processes read the leases again."""
        self._version += 1
        self._write_header()

    def _write_header(self) -> None:
        os.pwrite(self._file.fd, _LEASE_HEADER.pack(self._capacity_bytes, self._version), 0)

    def leased(self) -> set[int]:
        """Return the inodes that any living process has leased. Remove the files of dead processes."""
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
        """Yield the name and the budget of each other living process."""
        for name in self._living():
            data = _read(f"{self._users}/{name}", _LEASE_HEADER.size)
            if len(data) == _LEASE_HEADER.size:
                yield name, _LEASE_HEADER.unpack(data)[0]

    def close(self) -> None:
        """End all leases of this process."""
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
    """Write all of `data`. Raises OSError if the disk fills up."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _read(path: str, nbytes: int = -1) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(nbytes) or b""
    except FileNotFoundError:  # the process has just closed the folder
        return b""
