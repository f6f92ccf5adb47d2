"""What a process has open of a budgeted folder: its ledger, its presence, its lock against its own threads.

Each process begins its own at its first use, a forked child too. A lease may be let go by the garbage collector at any moment, also
while this very thread is inside the lock; then it is put aside, and whoever leaves the lock sees to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from shmload.errors import StoreError
from shmload.storage.descriptors import close_kept, is_locked, open_kept, try_lock
from shmload.storage.ledger import HIDDEN, NEW, Ledger
from shmload.storage.presence import USERS, Presence

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
            self.presence = Presence(folder, capacity_bytes, files)
            others = [each for each in self.presence.budgets() if each[1:] != (capacity_bytes, files)]
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
            self.end_writing(name)
        self.presence.close()
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
                    self.presence.drop(self._dropped.popleft())
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
