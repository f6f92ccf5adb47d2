"""File locks (flock) that show whether their owner is alive.

The kernel releases a lock when its process ends, however it ends. Unlike a process id, a lock means the same in every PID namespace
that reaches the file. Three rules keep that true:

* A lock belongs to the open file, so it lasts as long as any copy of its descriptor or any mapping of the file. So forked children
  close their copies (private_fds.py), exec does too (O_CLOEXEC), and `close` unlocks before it closes.
* After a file was opened and before the lock was granted, the file may have been removed and another one created under its name.
  Code that removes locked files calls `is_at` once it has the lock.
* On a file system without locks, every attempt raises OSError; the caller decides whether the owner then counts as alive.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shmload.processes import private_fds


class FileLock:
    """An open file that this process can lock, exclusively or shared. It is closed when the object dies, if not before.

    Args:
        fd: the file's descriptor, opened close-on-exec; every child forked from now on closes its copy.

    Attributes:
        fd: the descriptor, or -1 after `close`.
    """

    fd = -1

    def __init__(self, fd: int) -> None:
        self._pid = os.getpid()
        self.fd = private_fds.keep(fd)

    @classmethod
    def open(cls, path: str | os.PathLike[str], flags: int = 0, mode: int = 0o666) -> FileLock:
        """Open a file for reading and writing, not yet locked.

        Args:
            path: the file. A symbolic link is refused.
            flags: more flags for os.open, such as os.O_CREAT.
            mode: the permissions of a file that is created.
        """
        return cls(os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, mode))

    def acquire(self, *, shared: bool = False) -> None:
        """Lock the file; wait while another process has it.

        Args:
            shared: take a lock that others can share. Changing the kind of a held lock releases it for a moment.
        """
        fcntl.flock(self.fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def try_acquire(self) -> bool:
        """Lock the file for this process alone. Return False at once if another process has locked it.

        Raises:
            OSError: the file system has no locks.
        """
        return try_lock(self.fd)

    def release(self) -> None:
        """Unlock the file and keep it open."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path still names this file."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Unlock and close the file; mappings of it stay valid. Idempotent, and without effect in a forked child."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and self._pid == os.getpid() and private_fds.is_kept(fd):
            fcntl.flock(fd, fcntl.LOCK_UN)
            private_fds.close(fd)

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # at exit, module globals may be deleted before the last objects
            self.close()


def try_lock(fd: int) -> bool:
    """Lock a file for this process alone. Return False at once if another process has locked it.

    Args:
        fd: a descriptor that is registered in private_fds.py, so that no forked child keeps the lock.

    Raises:
        OSError: the file system has no locks.
    """
    return _try(fd, fcntl.LOCK_EX)


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Return whether a process holds a lock on a file; False if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not _try(fd, fcntl.LOCK_SH)  # shared, so that two processes that ask at once do not see each other
    finally:
        os.close(fd)


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[int]:
    """Hold the lock on a file inside the block; create the file if it is missing. Yield the file's descriptor.

    Args:
        path: the file.
    """
    lock = FileLock.open(path, os.O_CREAT)
    try:
        lock.acquire()
        yield lock.fd
    finally:
        lock.close()
