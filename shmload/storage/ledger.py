"""What lies in a budgeted folder, as all its processes know it, without a listing each time.

    <folder>/.shmload/ledger    a header, and behind it what came and went since the ledger was last written anew
    <folder>/.shmload/new/      files that are being written, each locked by its writer and as long as its reservation

The folder is the truth and the ledger a copy of it: a listing of 10,000 files takes 40 ms, the ledger's news since the last look
a microsecond. An exclusive flock on the ledger is the folder's lock; whoever holds it reads the news, and may change files. Before
the first change it marks the ledger as dirty, behind the last as clean again, with the folder's time of change. A ledger that is
dirty (its writer was killed), damaged, gone, of another boot, or older than the folder (somebody else put a file there, or took
one) is written anew from a listing. So there is nothing to recover, and nothing to believe.

Descriptors whose locks say "this process lives", and so must not live on in anything it forks.

A flock belongs to the open file: as long as a forked child keeps a copy of the descriptor, its dead parent would seem to live. They
are opened close-on-exec and through here, which closes each forked child's copies. Closing a copy ends no lock of the parent's.

How files become safe from a power failure without anybody waiting for the disk.

A file has its name as soon as its bytes are in the page cache, which no kill can take. Until they are known to be on the disk it
carries a mark; a minute later, when the kernel has long written them, a sync costs nothing and the mark goes. A file that still has
it at the first look of another boot may lack bytes, and is removed (ledger.py). File systems write a file's mode and name in the
order of their changes, so no file has its name without the mark. Rejected: a sync before the name, 0.5 s of a pass over 880 MB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

from shmload import faults
from shmload.errors import StoreError

_kept: set[int] = set()


def open_kept(path: str, flags: int) -> int:
    """Opens a file whose descriptor no child shall have."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    _kept.add(fd)
    return fd


def close_kept(fd: int) -> None:
    """Closes it; in a forked child, where it is closed already, does nothing."""
    if fd in _kept:
        _kept.discard(fd)
        os.close(fd)


def is_locked(path: str) -> bool:
    """Whether somebody holds a lock on the file. One that is not there has no holder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Takes a lock if nobody else holds it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return False
    return True


def _close_all() -> None:
    for fd in _kept:
        try:
            os.close(fd)
        except OSError:  # a program that has closed every descriptor
            pass
    _kept.clear()


os.register_at_fork(after_in_child=_close_all)


FRESH = stat.S_IXUSR  # the mark; a file of data is not executable otherwise, and a listing brings its mode along
SETTLES_AFTER_S = 60.0  # the kernel begins to write what has been dirty for 30 s


class Durability:
    """The files that a process has published and not yet settled."""

    def __init__(self) -> None:
        self._fresh: deque[tuple[float, str]] = deque()
        self._lock = threading.Lock()

    def published(self, path: str) -> None:
        """Notes one more, and settles those that are old enough."""
        now, due = monotonic(), []
        with self._lock:
            self._fresh.append((now, path))
            while self._fresh[0][0] < now - SETTLES_AFTER_S:
                due.append(self._fresh.popleft()[1])
        for each in due:
            settle(each)


def settle(path: str) -> None:
    """Takes the mark off a file, once its bytes are on the disk; does nothing if the file is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fdatasync(fd)
        os.fchmod(fd, os.fstat(fd).st_mode & ~FRESH)
    finally:
        os.close(fd)


@functools.cache
def boot_id() -> bytes | None:
    """Which boot of the machine this is; None if nobody says."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except OSError:
        return None


HIDDEN = ".shmload"
NEW = f"{HIDDEN}/new"
OURS = (
    stat.S_ISVTX
)  # the mark of a published file; the bit has no other meaning on Linux, and a listing brings it along
_MAGIC = b"SHMLLED1"
_HEADER = struct.Struct(
    "<8s16sQQQq"
)  # magic, boot, dirty, generation, where the news ends, the folder's time of change
_DIRTY_AT = 24
_NEWS = struct.Struct("<cQQqH")  # kind, bytes, inode, time of publication, length of the name that follows
_ALLOCATED = 1 << 20  # bytes of the ledger that are reserved at once, so that a full disk does not stop it
_MIN_COMPACTED = 256 << 10


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
        self._fd = open_kept(self._path, os.O_RDWR | os.O_CREAT)
        self._generation = 0
        self._end = 0  # of the news that this process has read
        self._newest_ns = 0
        self._news: list[bytes] = []
        self._is_changing = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the folder, and up to date. What raises in the block leaves the next one a listing."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        is_known = False
        try:
            self._look()
            is_known = True
            faults.hit("holding_lock")
            yield
            if self._is_changing:
                self._write_news()
        except BaseException:
            if self._is_changing or not is_known:
                self._generation = 0
            raise
        finally:
            self._is_changing = False
            self._news.clear()
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def changing(self) -> None:
        """To be called before a file is made, renamed or removed."""
        if not self._is_changing:
            os.pwrite(self._fd, b"\1", _DIRTY_AT)
            self._is_changing = True

    def add(self, kept: Kept) -> None:
        self._apply(b"+", kept.nbytes, kept.ino, kept.published_ns, kept.name, tell=True)

    def remove(self, name: str) -> None:
        self._apply(b"-", 0, 0, 0, name, tell=True)

    def set_writing(self, name: str, nbytes: int) -> None:
        self._apply(b"w", nbytes, 0, 0, name, tell=True)

    def end_writing(self, name: str) -> None:
        self._apply(b"x", 0, 0, 0, name, tell=True)

    def next_time(self) -> int:
        """A time of publication: now, and behind that of every file that is there."""
        return max(time.time_ns(), self._newest_ns + 1)

    def list_again(self) -> None:
        """Believes the folder and nothing else."""
        self.changing()
        self._list(is_same_boot=True)

    def close(self) -> None:
        close_kept(self._fd)

    def _look(self) -> None:
        header = os.pread(self._fd, _HEADER.size, 0)
        if os.fstat(self._fd).st_nlink == 0:
            raise StoreError(f"{self.folder}/{HIDDEN} was removed while this process used the folder: open it again")
        is_same_boot = False
        if len(header) == _HEADER.size:
            magic, boot, dirty, generation, end, changed_ns = _HEADER.unpack(header)
            is_same_boot = (magic, boot) == (_MAGIC, _boot())
            if is_same_boot and not dirty and changed_ns == os.stat(self.folder).st_mtime_ns:
                if generation != self._generation:
                    self._forget()
                    self._generation, self._end = generation, _HEADER.size
                if end > self._end:
                    self._read_news(os.pread(self._fd, end - self._end, self._end))
                    self._end = end
                return
        self.changing()
        self._list(is_same_boot)

    def _read_news(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            kind, nbytes, ino, published_ns, length = _NEWS.unpack_from(data, at)
            at += _NEWS.size + length
            self._apply(kind, nbytes, ino, published_ns, os.fsdecode(data[at - length : at]))

    def _apply(self, kind: bytes, nbytes: int, ino: int, published_ns: int, name: str, *, tell: bool = False) -> None:
        if tell:
            encoded = os.fsencode(name)
            self._news.append(_NEWS.pack(kind, nbytes, ino, published_ns, len(encoded)) + encoded)
        if kind in b"+-":
            before = self.files.pop(name, None)
            self.nbytes -= before.nbytes if before else 0
        else:
            self.nbytes -= self.writing.pop(name, 0)
        if kind == b"+":
            self.files[name] = Kept(name, nbytes, published_ns, ino)
            self.nbytes += nbytes
            if published_ns < self._newest_ns:
                self._sort()
            self._newest_ns = max(self._newest_ns, published_ns)
        elif kind == b"w":
            self.writing[name] = nbytes
            self.nbytes += nbytes

    def _sort(self) -> None:
        oldest_first = sorted(self.files.values(), key=lambda kept: (kept.published_ns, kept.name))
        self.files = OrderedDict((kept.name, kept) for kept in oldest_first)

    def _forget(self) -> None:
        self.files, self.writing, self.nbytes, self._newest_ns = OrderedDict(), {}, 0, 0

    def _list(self, is_same_boot: bool) -> None:
        """Reads the folder, and writes the ledger anew when the block ends. What another boot has left half on the disk goes."""
        self._forget()
        self.num_listings += 1
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                status = _status(entry)
                if not is_same_boot and status.st_mode & OURS and status.st_mode & FRESH:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
                    continue
                if stat.S_ISREG(status.st_mode) and (self._adopts or status.st_mode & OURS) and status.st_nlink:
                    kept = Kept(entry.name, status.st_size, status.st_mtime_ns, status.st_ino)
                    self.files[kept.name] = kept
                    self.nbytes += kept.nbytes
        self._sort()
        self._newest_ns = max((kept.published_ns for kept in self.files.values()), default=0)
        with os.scandir(f"{self.folder}/{NEW}") as entries:
            for entry in entries:
                self.writing[entry.name] = _status(entry).st_size
        self.nbytes += sum(self.writing.values())
        self._end = 0  # all of it is news

    def _write_news(self) -> None:
        data = b"".join(self._news)
        is_long = self._end > max(_MIN_COMPACTED, 400 * (len(self.files) + len(self.writing)))
        if self._end == 0 or is_long:
            header = os.pread(self._fd, _HEADER.size, 0)
            known = _HEADER.unpack(header)[3] if len(header) == _HEADER.size else 0
            self._generation = max(known % (1 << 62), self._generation) + 1
            self._end = _HEADER.size
            data = b"".join(self._everything())
        end = self._end + len(data)
        try:
            if end > os.fstat(self._fd).st_size:
                os.posix_fallocate(self._fd, 0, -(-end // _ALLOCATED) * _ALLOCATED)
            os.pwrite(self._fd, data, self._end)
            header = _HEADER.pack(_MAGIC, _boot(), 0, self._generation, end, os.stat(self.folder).st_mtime_ns)
            os.pwrite(self._fd, header, 0)
        except OSError:  # the disk is full: the ledger stays dirty, and is a listing each time until there is room
            self._generation = 0
            return
        self._end = end

    def _everything(self) -> Iterator[bytes]:
        for kept in self.files.values():
            encoded = os.fsencode(kept.name)
            yield _NEWS.pack(b"+", kept.nbytes, kept.ino, kept.published_ns, len(encoded)) + encoded
        for name, nbytes in self.writing.items():
            encoded = os.fsencode(name)
            yield _NEWS.pack(b"w", nbytes, 0, 0, len(encoded)) + encoded


def _boot() -> bytes:
    return boot_id() or bytes(16)


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    """Its state; of one that has gone meanwhile, nothing."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return os.stat_result([0] * 10)
