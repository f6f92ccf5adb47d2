"""File locks that show whether a Ray actor can still write into the ring, even if Ray has reported its death.

An actor that reaches the trainer's memory decodes into the slot of its batch. Ray's report of its death is then not enough: the
actor may only be unreachable or stopped, and may later write into rows that belong to another batch by then. So each actor takes an
OFD lock (fcntl(2), F_OFD_SETLK) on one byte of the control segment's file when it starts. However its process ends, the kernel
releases the lock only after the process has released its memory. An actor's rows are reused only after that.

* Each actor has its own byte, at an offset that the agent draws; the file need not be that long. The trainer queries all bytes at
  once.
* The lock proves that an actor reaches *this* segment, not that of another machine or a copy, because the agent sees the byte
  locked through its own descriptor, in the kernel that both share. Other actors do not get a slot.
* The byte after an actor's byte belongs to the agent, which locks it for as long as the actor may live. The actor waits for it in a
  thread. When the actor gets this lock, the agent has ended, or wants the actor to end. Ray then has GRACE_S to end the actor;
  after that the actor ends itself, because Ray lets it finish its sample if its raylet has been killed. The thread needs the GIL.
  An actor that is stopped must be ended by Ray or the user.
* processes/file_lock.py cannot be used here, because a flock covers a whole file and can only be tested by taking it. The owner's
  flock on the same file and these locks do not affect each other.
* An OFD lock lives as long as any copy of its descriptor. Children that the user's code forks close theirs (`private_fds.keep`),
  and exec closes it (CLOEXEC). A child that is forked in C without exec keeps it, so its actor's rows also wait for that child.
  None of them has the ring mapped (Mapping's `inherit`).
* If the kernel does not have such locks (in some sandboxes), no actor gets one, and batches come through Ray's object store.

Rejected: the actor's pid, which means nothing in another PID namespace; POSIX locks, which are dropped whenever the process
closes the file; host names and Ray's node ids, because containers of one node may each have their own /dev/shm, and two Ray nodes
may share one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import threading
from contextlib import suppress
from time import monotonic

from shmload.processes import private_fds
from shmload.shm.segment import open_segment

GRACE_S = 5.0  # time for Ray to end an actor, before it ends itself without cleaning up
LOOK_S = 0.02  # polling interval while waiting for a lock
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_ALL = (0, 0)  # from the first byte to the last possible one


def draw() -> int:
    """Return the byte of a new actor. The byte after it belongs to the agent."""
    return 2 * secrets.randbelow(1 << 61)


def let_live(fd: int, byte: int) -> None:
    """Let the actor of this byte, which is not created yet, live until `let_end` or until this process ends.

    Args:
        fd: the descriptor of the control segment.
        byte: the actor's byte.
    """
    with suppress(OSError):  # the kernel has no such locks, and no actor will take one
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte + 1)


def let_end(fd: int, byte: int) -> None:
    """Release the agent's byte, so that the actor ends itself after GRACE_S, if it has taken its lock and is not stopped.

    Args:
        fd: the descriptor of the control segment.
        byte: the actor's byte.
    """
    with suppress(OSError):
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte + 1)


def hold(path: str, byte: int) -> bool:
    """Take the actor's lock for the rest of this process, and end the process after the agent releases its byte or ends.

    Args:
        path: the path of the control segment.
        byte: the actor's byte.
    Returns:
        whether the lock was taken; False if the segment cannot be reached from here or cannot be locked.
    """
    try:
        fd = private_fds.keep(open_segment(path))
    except OSError:
        return False
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
    except OSError:
        private_fds.close(fd)
        return False
    threading.Thread(target=_end_when_told, args=(fd, byte), daemon=True).start()
    return True


def _end_when_told(fd: int, byte: int) -> None:
    _lock(fd, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, byte + 1)
    threading.Event().wait(GRACE_S)
    os._exit(1)


def _lock(fd: int, command: int, kind: int, byte: int) -> None:
    fcntl.fcntl(fd, command, _FLOCK.pack(kind, 0, byte, 1, 0))


def is_held(fd: int, byte: int | None = None) -> bool:
    """Return whether the actor of this byte holds its lock, and so can write into the ring.

    Args:
        fd: the descriptor of the control segment.
        byte: the actor's byte; None for any byte, including those that a living agent locks.
    """
    begin, length = _ALL if byte is None else (byte, 1)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, begin, length, 0))
    except OSError as error:
        if error.errno == errno.EINVAL:  # the kernel has no such locks, so no actor has one
            return False
        raise
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def wait_until_free(fd: int, byte: int, timeout_s: float) -> bool:
    """Wait until the actor of this byte has ended, and return whether it has. An actor without a lock counts as ended.

    Args:
        fd: the descriptor of the control segment.
        byte: the actor's byte.
        timeout_s: longest time to wait.
    """
    deadline, pause = monotonic() + timeout_s, threading.Event()
    while is_held(fd, byte):
        if monotonic() >= deadline:
            return False
        pause.wait(LOOK_S)
    return True
