"""Which actors write straight into the ring, and whether one that is believed dead still may: a lock for an actor's life.

An actor that reaches the trainer's memory decodes into the slot of its batch. Then Ray's word that it has died is not enough: it
may only be out of reach, or stopped, and write later, into rows that are another's by then. So as it starts it takes an OFD lock
(fcntl(2), F_OFD_SETLK) on one byte of the control segment's file. The kernel takes it back when the last thread of its process
has left its memory, however it ends. Who hands on what an actor had waits for that.

* Each actor has a byte of its own, at a number that the agent draws; the file need not be as long. The trainer asks for all of
  them.
* By the lock the agent knows that an actor reaches *this* segment, and not another machine's or a copy: it sees the byte locked
  through a descriptor of its own, in the one kernel that both are in. No other actor is given a slot.
* The byte behind an actor's is the agent's, which locks it for as long as the actor may live. The actor waits for it in a thread,
  and when it gets it the agent has ended, or wants it ended. Then Ray has GRACE_S to do that, and the actor ends itself: where
  its raylet has been killed, Ray lets it go on until its sample is done. The thread needs the GIL; an actor that is stopped is
  Ray's to end, or the user's.
* processes/file_lock.py cannot serve here: a flock covers a whole file and is only asked for by taking it. The owner's flock on
  the same file and these locks do not see each other.
* An OFD lock lives as long as any copy of its descriptor. Children that the user's code forks close theirs
  (`private_fds.keep`), and exec closes it (CLOEXEC). One that is forked in C and does not exec holds it, and then what its actor
  had waits for it, too. None of them has the ring mapped (Mapping's `inherit`).
* Where the kernel has no such lock (a sandbox), no actor gets it, and batches come by Ray's store.

Rejected: the actor's pid, which means nothing in another PID namespace; POSIX locks, which any close of the file drops; host
names and Ray's node ids, as containers of one node may have a /dev/shm each, and two nodes of Ray may share one.
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

GRACE_S = 5.0  # that Ray has to end an actor, which may then clean up
LOOK_S = 0.02  # how often who waits for a lock looks
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_ALL = (0, 0)  # from the first byte to the last there could be


def draw() -> int:
    """The byte of a new actor, behind which there is one of the agent's."""
    return 2 * secrets.randbelow(1 << 61)


def let_live(fd: int, byte: int) -> None:
    """Has the actor of this byte, which is still to be made, live until `let_end`, or until this process ends.

    Args:
        fd: of the control segment.
    """
    with suppress(OSError):  # the kernel has no such locks, and no actor will take one
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte + 1)


def let_end(fd: int, byte: int) -> None:
    """Has the actor of this byte end itself, if it has taken its lock and is not stopped."""
    with suppress(OSError):
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte + 1)


def hold(path: str, byte: int) -> bool:
    """Takes the lock for the rest of this process, which ends when the agent says so, or ends.

    Returns:
        False: the segment cannot be reached from here, or not be locked.
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
    """Whether the actor of this byte lives and has the lock.

    Args:
        fd: of the control segment.
        byte: None: whether any actor has.
    """
    begin, length = _ALL if byte is None else (byte, 1)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, begin, length, 0))
    except OSError as error:
        if error.errno == errno.EINVAL:  # the kernel has no such locks, so nobody has one
            return False
        raise
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def wait_until_free(fd: int, byte: int, timeout_s: float) -> bool:
    """Waits so long until the actor of this byte has ended; whether it has. At once for one that has not taken its lock."""
    deadline, pause = monotonic() + timeout_s, threading.Event()
    while is_held(fd, byte):
        if monotonic() >= deadline:
            return False
        pause.wait(LOOK_S)
    return True
