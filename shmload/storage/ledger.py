"""`Ledger`: one process's copy of a budgeted folder's contents, which follows the changes of other processes.

    <folder>/.shmload/ledger    identifies the last change of the folder; then the journal, the newest changes
    <folder>/.shmload/new/      files that are being written, each locked by its writer and as long as its reservation

The folder itself is authoritative. Each process has a copy, because a listing of 10,000 files takes 40 ms. An exclusive flock on
the ledger is the folder's lock, and only its holder may change files. Before the first change the holder marks the ledger as dirty;
after the last it appends them to the journal, and writes a new token and the folder's modification time. A process whose copy has
an older token applies the changes since then. It lists the folder if the journal lacks some of them, or if the ledger is dirty (its
writer was killed), damaged, missing, or older than the folder (another program added or removed a file). So nothing needs recovery
after a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from shmload import faults
from shmload.errors import StoreError
from shmload.processes.file_lock import FileLock

HIDDEN = ".shmload"  # name of the folder that holds the control files
NEW = f"{HIDDEN}/new"  # where files are while they are written
OURS = stat.S_ISVTX  # marks a published file; on Linux the bit has no other meaning for files, and a listing includes it
_HEADER = struct.Struct("<Q8sqQ")  # whether it is dirty, token and time of the last change, the length of the journal
_JOURNAL_NBYTES = 1 << 16  # maximum length of the journal, which then begins anew


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
        of_group: names of the published files by the part before the first "-".
        num_listings: how often this process has listed the folder.
    """

    def __init__(self, folder: str, *, adopts: bool) -> None:
        self.folder = folder
        # not a dict, in which finding the first entry takes longer the more entries were removed before it
        self.files: OrderedDict[str, PublishedFile] = OrderedDict()
        self.writing: dict[str, int] = {}
        self.nbytes = 0
        self.of_group: dict[str, set[str]] = {}
        self.num_listings = 0
        self._adopts = adopts
        self._path = f"{folder}/{HIDDEN}/ledger"
        self._file = FileLock.open(self._path, os.O_CREAT)
        self._token = b""  # identifies the change that `files` and `writing` reflect; empty: they must be read again
        self._end = 0  # of the journal when its last change was `_token`
        self._is_changing = False
        # entries set since the lock was taken: (whether it is a published file, name, value or None); None: the folder was listed
        self._changes: list[tuple[bool, str, Any]] | None = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock with an updated copy. If an error follows a change, the next process lists the folder again."""
        self._file.acquire()
        try:
            self._update()
            self._changes = []
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
        self._change(True, kept.name, kept)

    def remove(self, name: str) -> None:
        self._change(True, name, None)

    def set_writing(self, name: str, nbytes: int) -> None:
        self._change(False, name, nbytes)

    def end_writing(self, name: str) -> None:
        self._change(False, name, None)

    def group(self, name: str) -> list[str]:
        """Return the names of the published files that have the same part before the first "-" as `name`."""
        return list(self.of_group.get(name.partition("-")[0], ()))

    def next_time(self) -> int:
        """Return a time of publication: now, or later if that is needed to follow all published files."""
        newest = next(reversed(self.files.values()), None)
        return max(time.time_ns(), newest.published_ns + 1 if newest else 0)

    def list_again(self) -> None:
        """Read the folder's contents from the file system."""
        token, self._token = self._token, b""
        self.num_listings += 1
        found: list[PublishedFile] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                status = _status(entry)
                if stat.S_ISREG(status.st_mode) and (self._adopts or status.st_mode & OURS) and status.st_nlink:
                    found.append(PublishedFile(entry.name, status.st_size, status.st_mtime_ns, status.st_ino))
        found.sort(key=lambda kept: (kept.published_ns, kept.name))
        self.files, self.writing, self.nbytes, self.of_group = OrderedDict(), {}, 0, {}
        for kept in found:
            self._set(True, kept.name, kept)
        with os.scandir(f"{self.folder}/{NEW}") as entries:
            for entry in entries:
                self._set(False, entry.name, _status(entry).st_size)
        self._token, self._changes = token, None

    def close(self) -> None:
        self._file.close()

    def _change(self, is_file: bool, name: str, value: Any) -> None:
        """Set or remove an entry, here and with the next `_write` in the copies of other processes."""
        self._set(is_file, name, value)
        if self._changes is not None:
            self._changes.append((is_file, name, value))

    def _set(self, is_file: bool, name: str, value: Any) -> None:
        """Set an entry of `files` or `writing`; None removes it."""
        if not is_file:
            self.nbytes += (value or 0) - self.writing.pop(name, 0)
            if value is not None:
                self.writing[name] = value
            return
        group = name.partition("-")[0]
        if (before := self.files.pop(name, None)) is not None:
            self.nbytes -= before.nbytes
            self.of_group[group].discard(name)
            if not self.of_group[group]:
                del self.of_group[group]
        if value is not None:
            self.files[name] = kept = PublishedFile(*value)
            self.nbytes += kept.nbytes
            self.of_group.setdefault(group, set()).add(name)

    def _update(self) -> None:
        header = os.pread(self._file.fd, _HEADER.size, 0)
        if os.fstat(self._file.fd).st_nlink == 0:
            raise StoreError(f"{self.folder}/{HIDDEN} was removed while this process used the folder: open it again")
        if len(header) == _HEADER.size:
            dirty, token, changed_ns, end = _HEADER.unpack(header)
            if not dirty and changed_ns == os.stat(self.folder).st_mtime_ns:
                if token != self._token and not self._follow(token, end):
                    self.list_again()
                self._token, self._end = token, end
                return
        self.list_again()
        self._write()  # now, because a caller that finds no room or no file leaves by an exception

    def _follow(self, token: bytes, end: int) -> bool:
        """Apply the changes of the journal since this copy's token. Return False, and apply none, if it lacks some."""
        start = self._end if self._end <= end else 0  # 0: it has begun anew
        changes, reached = [], self._token.hex()
        try:
            for line in os.pread(self._file.fd, min(end, _JOURNAL_NBYTES) - start, _HEADER.size + start).splitlines():
                before, after, made = json.loads(line)
                if before != reached:
                    return False
                reached = after
                changes += made
        except ValueError:  # it began anew and is longer than before, or was damaged
            return False
        if reached != token.hex():
            return False
        for change in changes:
            self._set(*change)
        return True

    def _write(self) -> None:
        """Give the folder a new token, and append the changes that lead to it to the journal."""
        before, self._token = self._token, os.urandom(8)
        line = json.dumps([before.hex(), self._token.hex(), self._changes]).encode() + b"\n"
        start = self._end if self._end + len(line) <= _JOURNAL_NBYTES else 0
        self._end = 0  # without the line, other processes list the folder
        if self._changes is not None and len(line) <= _JOURNAL_NBYTES:
            with contextlib.suppress(OSError):  # the disk is full
                if os.pwrite(self._file.fd, line, _HEADER.size + start) == len(line):
                    self._end = start + len(line)
        try:
            changed_ns = os.stat(self.folder).st_mtime_ns
            os.pwrite(self._file.fd, _HEADER.pack(0, self._token, changed_ns, self._end), 0)
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
