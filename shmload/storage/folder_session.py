"""The state of one process that uses a budgeted folder: its ledger, its leases, and a lock between its threads.

Each process opens its own session at first use, a forked child too. The garbage collector may release a lease at any moment, even
while the same thread holds the lock; the release is then queued, and the thread that leaves the lock performs it. Closing is queued
in the same way, because another file may reuse a descriptor that is closed while another thread writes to it. For the same reason
only its writer closes a file that is being written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from shmload.errors import StoreError
from shmload.processes.file_lock import FileLock, is_locked, try_lock
from shmload.storage.ledger import HIDDEN, NEW, Ledger, unlink
from shmload.storage.process_leases import USERS, ProcessLeases

log = logging.getLogger("shmload")

_REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "fuse.sshfs", "glusterfs", "afs")


class Session:
    """This process's use of a folder.

    Args:
        folder: path of the folder.
        capacity_bytes: the budget.
        adopts, recreates: as in `BudgetedFolder`.
    Raises:
        FileNotFoundError: the folder was removed, and `recreates` is false.
        ValueError: other processes use the folder with another budget.
        StoreError: the folder's file system has no locks.
    """

    def __init__(self, folder: str, capacity_bytes: int, *, adopts: bool, recreates: bool) -> None:
        self.folder = folder
        if recreates:
            os.makedirs(folder, exist_ok=True)
        for part in (HIDDEN, USERS, NEW):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{folder}/{part}")
        _check_locks(folder)
        self.pid = os.getpid()
        self.ledger = Ledger(folder, adopts=adopts)
        self.writing: dict[str, FileLock] = {}  # by temporary name
        self.is_closed = False
        self._is_open = True  # whether the descriptors are open; they close when no thread holds the lock
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int, ...]] = deque()  # leases that ended while the lock was held
        with self.ledger.locked():
            self.process_leases = ProcessLeases(folder, capacity_bytes)
            others = [each for each in self.process_leases.budgets() if each[1] != capacity_bytes]
        if others:
            self.close()
            raise ValueError(
                f"process {others[0][0].split('-')[0]} uses {folder} with a budget of {others[0][1]} bytes, but this one was given "
                f"{capacity_bytes} bytes: give all users of a folder the same"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[Ledger]:
        """Hold the folder's lock among threads and processes, with a ledger that is up to date.

        Raises:
            ValueError: another thread has closed the folder.
        """
        try:
            with self._lock:
                if self.is_closed:
                    raise ValueError(
                        f"{self.folder} was closed by one thread while another used it: close it after all threads have finished"
                    )
                with self.ledger.locked():
                    yield self.ledger
        finally:
            self._run_queued()

    def let_go(self, inos: tuple[int, ...]) -> None:
        """End leases, now or when the lock is released. Has no effect in a forked child."""
        if self.pid == os.getpid():
            self._dropped.append(inos)
            self._run_queued()

    def sweep(self) -> None:
        """Remove files of dead writers. Requires the folder's lock."""
        for name in [name for name in self.ledger.writing if name not in self.writing]:
            if not is_locked(f"{self.folder}/{NEW}/{name}"):
                self.ledger.changing()
                unlink(f"{self.folder}/{NEW}/{name}")
                self.ledger.end_writing(name)

    def begin_writing(self, name: str, nbytes: int) -> FileLock:
        """Create and lock a reservation's file under a temporary name, with its full length of `nbytes`, which listings count.

        Requires the folder's lock.
        """
        self.ledger.changing()
        file = FileLock.open(f"{self.folder}/{NEW}/{name}", os.O_CREAT | os.O_EXCL)
        file.acquire()
        os.ftruncate(file.fd, nbytes)
        self.writing[name] = file
        self.ledger.set_writing(name, nbytes)
        return file

    def end_writing(self, name: str) -> None:
        """Close the file of a reservation, which releases its lock. Idempotent."""
        if (file := self.writing.pop(name, None)) is not None:
            file.close()

    def close(self) -> None:
        """Release everything that this process holds, now or when the lock is released. Has no effect in a forked child."""
        if self.pid == os.getpid():
            self.is_closed = True
            self._run_queued()

    def _run_queued(self) -> None:
        """Perform queued work, unless a thread holds the lock: it will perform the work when it releases the lock."""
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
        for name in list(self.writing):  # another thread may be ending the file that it wrote
            unlink(f"{self.folder}/{NEW}/{name}")  # the next process that needs room removes it from the ledger
        self.writing.clear()
        self.process_leases.close()
        self.ledger.close()


def _check_locks(folder: str) -> None:
    """Raise StoreError unless an exclusive lock on an open file excludes another open file of the same name."""
    with tempfile.NamedTemporaryFile(dir=f"{folder}/{HIDDEN}", prefix="locks-") as one, open(one.name, "rb+") as other:
        reason = "locks do not exclude other processes"
        try:
            holds = try_lock(one.fileno()) and not try_lock(other.fileno())
        except OSError as error:
            holds, reason = False, str(error.strerror)
    if not holds:
        raise StoreError(
            f"{folder} is on a file system without file locks ({file_system_type(folder)}: {reason}), which a shared cache needs: "
            "choose a folder on a local disk"
        )
    if (kind := file_system_type(folder)).startswith(_REMOTE):
        log.warning("%s is on a network file system (%s): processes of other machines may only add files there", folder, kind)


def file_system_type(folder: str) -> str:
    """Return the type of the folder's file system, as the kernel names it."""
    device = os.stat(folder).st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        if words[2] == f"{os.major(device)}:{os.minor(device)}":
            return words[words.index("-") + 1]
    return "unknown"
