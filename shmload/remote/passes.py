"""Which pass over a dataset an iterator begins, agreed on by all workers of a rank.

A loader tells an iterable dataset nothing of epochs, and its workers, which may be new ones for every pass, each begin an iterator
of their own. What they have in common is the base seed that torch draws for a pass (persistent workers keep it and count their
turns). So they meet at a board in memory:

    nonce | number of the next pass | (base seed, turn, its pass) of the newest passes

Who finds its seed and turn there takes the pass; who does not begins a new one. A worker of a pass that was broken off may come
late: it finds its own, or takes a number that nobody misses, and the passes of others stay what they are.

The board is a memfd, which forked workers inherit and others open under /proc/<trainer>/fd. What is sent to other machines counts
by itself, from the pass that is next; here, where nobody hears of it, that pass is taken for begun.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shmload.shm import travel

__all__ = ["Passes"]

_HEADER = struct.Struct("<16sQQ")  # nonce, next pass, entries ever written
_ENTRY = struct.Struct("<QQQ")
_KEPT = 256


class Passes:
    """Counts passes. Shared with every copy of it in this process's children.

    Args:
        next_pass: the number of the first.
    """

    def __init__(self, next_pass: int = 0) -> None:
        self._lock = threading.Lock()
        self._turns: dict[int, int] = {}  # of this process's passes, by base seed
        self._nonce = os.urandom(16)
        self._fd = os.memfd_create("shmload-passes")
        os.pwrite(self._fd, _HEADER.pack(self._nonce, next_pass, 0).ljust(_HEADER.size + _KEPT * _ENTRY.size, b"\0"), 0)
        self._home = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._close = weakref.finalize(self, os.close, self._fd)

    def begin(self, base_seed: int | None) -> int:
        """The number of the pass that an iterator begins.

        Args:
            base_seed: that torch has drawn for the workers; None in the trainer, where each iterator is a pass.
        """
        with self._held() as (next_pass, written):
            if base_seed is None:
                self._set(next_pass + 1, written)
                return next_pass
            turn = self._turns.get(base_seed, 0)
            self._turns[base_seed] = turn + 1
            for number in range(max(written - _KEPT, 0), written):
                seed, its_turn, found = _ENTRY.unpack(os.pread(self._fd, _ENTRY.size, _place(number)))
                if (seed, its_turn) == (base_seed, turn):
                    return int(found)
            os.pwrite(self._fd, _ENTRY.pack(base_seed, turn, next_pass), _place(written))
            self._set(next_pass + 1, written + 1)
            return next_pass

    def set_next(self, number: int) -> None:
        """Makes the next pass this one, in all processes."""
        with self._held() as (_, written):
            self._set(number, written)

    @property
    def next(self) -> int:
        """The number of the next pass."""
        with self._held() as (next_pass, _):
            return next_pass

    def _set(self, next_pass: int, written: int) -> None:
        os.pwrite(self._fd, _HEADER.pack(self._nonce, next_pass, written), 0)

    @contextmanager
    def _held(self) -> Iterator[tuple[int, int]]:
        with self._lock:  # a lock on a file is the process's, not the thread's
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                _, next_pass, written = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))
                yield next_pass, written
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        if travel.is_abroad():
            return {"home": "", "nonce": b"", "next": self.begin(None)}
        return {"home": self._home, "nonce": self._nonce, "next": self.next}

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            fd = os.open(state["home"], os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            fd = -1
        if fd >= 0 and os.pread(fd, 16, 0) == state["nonce"]:
            self._lock, self._turns = threading.Lock(), {}
            self._nonce, self._fd, self._home = state["nonce"], fd, state["home"]
            self._close = weakref.finalize(self, os.close, fd)
            return
        if fd >= 0:  # another process has the number by now
            os.close(fd)
        self.__init__(state["next"])  # type: ignore[misc]  # as a new one


def _place(number: int) -> int:
    return _HEADER.size + number % _KEPT * _ENTRY.size
