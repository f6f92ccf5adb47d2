"""`Ledger`: one process's copy of a budgeted folder's contents, which is listed again only after another process's change.

    <folder>/.shmload/ledger    identifies the last change of the folder
    <folder>/.shmload/new/      files that are being written, each locked by its writer and as long as its reservation

The folder itself is authoritative. Each process has a copy, because a listing of 10,000 files takes 40 ms. An exclusive flock on
the ledger is the folder's lock, and only its holder may change files. Before the first change the holder marks the ledger as dirty;
after the last it writes a new token and the folder's modification time. A process lists the folder if the token differs from that
of its copy, or if the ledger is dirty (its writer was killed), damaged, missing, or older than the folder (another program added
or removed a file). So nothing needs recovery after a kill.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from shmload import faults
from shmload.errors import StoreError
from shmload.processes.file_lock import FileLock

HIDDEN = ".shmload"  # name of the folder that holds the control files
NEW = f"{HIDDEN}/new"  # where files are while they are written
OURS = stat.S_ISVTX  # marks a published file; on Linux the bit has no other meaning for files, and a listing includes it
_HEADER = struct.Struct("<Q8sq")  # whether it is dirty, token of the last change, the folder's time of change


class PublishedFile(NamedTuple):
    """A published file of the folder.

    Attributes:
        name: name within the folder.
        nbytes: length of the file.
        published_ns: modification time, which orders the files of a folder.
        ino: inode, by which leases identify the file.
    """

    name: str
    nbytes: int
    published_ns: int
    ino: int


class Ledger:
    """One process's copy of the folder's contents. `locked` updates it; use the other methods inside that block only.

    Args:
        folder: path of the folder.
        adopts: as in `BudgetedFolder`.
    Attributes:
        files: published files by name, oldest first.
        writing: bytes reserved for each file that is being written, by temporary name.
        nbytes: bytes of both together.
        num_listings: how often this process has listed the folder.
    """

    def __init__(self, folder: str, *, adopts: bool) -> None:
        self.folder = folder
        # not a dict, in which finding the first entry takes longer the more entries were removed before it
        self.files: OrderedDict[str, PublishedFile] = OrderedDict()
        self.writing: dict[str, int] = {}
        self.nbytes = 0
        self.num_listings = 0
        self._adopts = adopts
        self._path = f"{folder}/{HIDDEN}/ledger"
        self._file = FileLock.open(self._path, os.O_CREAT)
        self._token = b""  # identifies the change that `files` and `writing` reflect; empty: they must be read again
        self._is_changing = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock with an updated copy. If an error follows a change, the next process lists the folder again."""
        self._file.acquire()
        try:
            self._update()
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
        """Mark the ledger as dirty. Call this before a file is created, renamed or removed."""
        if not self._is_changing:
            try:
                os.pwrite(self._file.fd, b"\1", 0)
            except OSError:  # on a full disk a ledger that was never written stays empty, and an empty one counts as dirty
                if os.fstat(self._file.fd).st_size >= _HEADER.size:
                    raise
            self._is_changing = True

    def add(self, kept: PublishedFile) -> None:
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
        """Return a time of publication: now, or later if that is needed to follow all published files."""
        newest = next(reversed(self.files.values()), None)
        return max(time.time_ns(), newest.published_ns + 1 if newest else 0)

    def list_again(self) -> None:
        """Read the folder's contents from the file system."""
        token, self._token = self._token, b""
        self.num_listings += 1
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                status = _status(entry)
                if stat.S_ISREG(status.st_mode) and (self._adopts or status.st_mode & OURS) and status.st_nlink:
                    found.append(PublishedFile(entry.name, status.st_size, status.st_mtime_ns, status.st_ino))
        found.sort(key=lambda kept: (kept.published_ns, kept.name))
        self.files = OrderedDict((kept.name, kept) for kept in found)
        with os.scandir(f"{self.folder}/{NEW}") as entries:
            self.writing = {entry.name: _status(entry).st_size for entry in entries}
        self.nbytes = sum(kept.nbytes for kept in found) + sum(self.writing.values())
        self._token = token

    def close(self) -> None:
        self._file.close()

    def _update(self) -> None:
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
        self._write()  # now, because a caller that finds no room or no file leaves by an exception

    def _write(self) -> None:
        self._token = os.urandom(8)
        try:
            os.pwrite(self._file.fd, _HEADER.pack(0, self._token, os.stat(self.folder).st_mtime_ns), 0)
        except OSError:  # the disk is full: the ledger stays dirty, so each use lists the folder until there is room
            self._token = b""


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    """Return the entry's status, or zeros if the file has been removed since."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return os.stat_result([0] * 10)


def unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
