"""The rendezvous of the processes of one run on one node: a board, a small text that one process at a time can read and write.

    <stem>-control   the board. Each attending process holds a shared flock on it, so the janitor sees that the meeting is alive
    <stem>-gate      a process that reads or writes the board holds an exclusive flock on it, and others wait for that lock

Both locks are the kernel's: they end with their holder, however it ends. If a holder dies in the middle of a write, the next one
finds an empty board or the previous one. The last process to leave removes both files; the reaper does that for killed ones
(reaper.py). A process that can turn its lock on the board into an exclusive one is the last, and no other is inside the gate.

The names are computed from values that all processes of the run know. Other users can guess them and create these files first,
because everyone may write to /dev/shm. So there are several places, whose stems end in different numbers. A place with a file that
belongs to another user or is not a regular file is skipped, and a place where this user has begun a meeting is preferred to a free
one.

A file that was opened may have been removed by the last process of an earlier meeting. So once both locks are held, it is
verified that the names still refer to these files; otherwise everything is repeated.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from shmload.processes.file_lock import FileLock
from shmload.shm import reaper
from shmload.shm.names import SHM_DIR

_DIGEST_NBYTES = 16
_NUM_PLACES = 16  # number of places of one meeting


class Meeting:
    """This process's attendance at a meeting, from the first `locked_board` until `leave`.

    Args:
        stem: the stem of the first place, which ends in "-0".
    """

    def __init__(self, stem: str) -> None:
        base = f"{SHM_DIR}/{stem.removesuffix('0')}"
        self._places = [(f"{base}{number}-control", f"{base}{number}-gate") for number in range(_NUM_PLACES)]
        self._control_path, self._gate_path = self._places[0]
        self._control: FileLock | None = None
        self._pid = os.getpid()

    @contextmanager
    def locked_board(self) -> Iterator[None]:
        """Enter the gate alone, waiting without limit while another process is inside, and attend the meeting from then on.

        Raises:
            OSError: there is no place for the meeting.
            PermissionError: other users have taken all places.
        """
        gate = self._enter()
        try:
            yield
        finally:
            gate.close()

    def read(self) -> bytes:
        """Return the board's text; empty if nothing has been written yet. Call it in `locked_board`."""
        assert self._control is not None
        data = os.pread(self._control.fd, os.fstat(self._control.fd).st_size, 0)
        digest, text = data[:_DIGEST_NBYTES], data[_DIGEST_NBYTES:]
        return text if digest == _digest(text) else b""

    def write(self, text: bytes) -> None:
        """Overwrite the board. Call it in `locked_board`. If the writer is killed, the board is empty or unchanged."""
        assert self._control is not None
        os.pwrite(self._control.fd, _digest(text) + text, 0)
        os.ftruncate(self._control.fd, _DIGEST_NBYTES + len(text))

    def leave(self) -> None:
        """Stop attending; the last process removes the files. Does nothing in a forked child. Idempotent."""
        if os.getpid() != self._pid or self._control is None:
            return
        control, self._control = self._control, None
        try:
            if control.try_acquire() and control.is_at(self._control_path):
                os.unlink(self._gate_path)  # first: while the old board exists, no process goes past it to a new meeting
                os.unlink(self._control_path)
        except FileNotFoundError:  # the files were removed by someone else
            pass
        finally:
            control.close()

    def _enter(self) -> FileLock:
        while True:
            if self._control is None:
                self._control_path, self._gate_path = self._place()
            try:
                if self._control is None:
                    reaper.watch_meeting(self._control_path)
                    self._control = _opened(self._control_path)
                    self._control.acquire(shared=True)
                gate = _opened(self._gate_path)
            except OSError:
                if _blocking_user(self._control_path) is None and _blocking_user(self._gate_path) is None:
                    raise
                self._let_go()  # another user was quicker
                continue
            try:
                gate.acquire()
                if gate.is_at(self._gate_path) and self._control.is_at(self._control_path):
                    return gate
            except BaseException:  # also the exception of a signal handler while waiting
                gate.close()
                raise
            gate.close()
            self._let_go()

    def _let_go(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _place(self) -> tuple[str, str]:
        """Return the place to meet at: one where this user has begun a meeting, else the first free place."""
        open_to_us = [place for place in self._places if all(_blocking_user(path) is None for path in place)]
        for place in open_to_us:
            if os.path.lexists(place[0]):
                return place
        if open_to_us:
            return open_to_us[0]
        control, gate = self._places[0]
        path, uid = next((path, uid) for path in (control, gate) if (uid := _blocking_user(path)) is not None)
        raise PermissionError(
            errno.EPERM,
            f"files of user {uid} block the place where processes of user {os.geteuid()} meet, and the {_NUM_PLACES - 1} "
            'alternatives are taken, too: ask that user or root to remove them, or leave out share="node"',
            path,
        )


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_NBYTES).digest()


def _opened(path: str) -> FileLock:
    lock = FileLock.open(path, os.O_CREAT | os.O_NONBLOCK, 0o600)
    if not _is_ours(os.fstat(lock.fd)):
        lock.close()
        raise PermissionError(errno.EPERM, f"not a file of user {os.geteuid()}", path)
    return lock


def _is_ours(status: os.stat_result) -> bool:
    """Return whether it is a regular file that only this user can have created or can write to."""
    return status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077


def _blocking_user(path: str) -> int | None:
    """Return the user whose file blocks a path; None if nothing does."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return None if _is_ours(status) else status.st_uid
