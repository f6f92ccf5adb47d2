"""Number the passes over an iterable dataset so that all workers of a rank agree.

A loader does not pass the epoch to an iterable dataset, and its workers, which may be new processes for every pass, each begin
their own iterator. They have in common the base seed that torch draws for a pass. Persistent workers keep the seed, so each worker,
a process or a thread, also counts how many passes it has begun with it (its *turn*). The workers agree through a board in shared
memory:

    nonce | number of the next pass | (base seed, turn, number) of the newest passes

A worker that finds its seed and turn on the board joins that pass; otherwise it begins a new one. A late worker of an abandoned
pass finds its own entry, or takes an unused number, and does not change the passes of others.

The board is a memfd. Forked workers inherit it, and others open it as /proc/<trainer>/fd. A copy on another machine counts by
itself, beginning with the next pass. Because that machine cannot report back, this pass counts as begun here.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.processes.fork_lock import ForkLock
from shmload.processes.trial import is_trial
from shmload.shm import pickling

_KEPT = 256  # passes on the board
_NBYTES = 8 * (4 + 3 * _KEPT)


class _Turns(threading.local):
    """The turns that a worker has begun. Worker threads share the counter, but each has turns of its own.

    Attributes:
        of_seed: base seed -> number of turns.
    """

    def __init__(self) -> None:
        self.of_seed: dict[int, int] = {}


class PassCounter:
    """Numbers the passes over a dataset, together with all of its copies in child processes.

    Args:
        next_pass: the number of the first pass.
    """

    is_of_one_worker = True  # each worker thread gets a shallow copy when it starts, and keeps the `_since` of that time

    def __init__(self, next_pass: int = 0) -> None:
        fd = os.memfd_create("shmload-passes")
        os.ftruncate(fd, _NBYTES)
        self._open(fd, f"/proc/{os.getpid()}/fd/{fd}")
        self._board[:2] = np.frombuffer(os.urandom(16), np.uint64)
        self._board[2] = next_pass

    def _open(self, fd: int, home: str) -> None:
        self._lock = ForkLock()  # the trainer may fork workers while another of its threads begins a pass
        self._turns = _Turns()
        self._since = 0  # the first entry that counts: older ones are from before `set_next`
        self._fd, self._home = fd, home
        self._board = np.frombuffer(mmap.mmap(fd, _NBYTES), np.uint64)  # nonce (2 words), next pass, entries ever written, entries
        self._close = weakref.finalize(self, os.close, fd)

    def begin(self, base_seed: int | None) -> int:
        """Return the number of the pass that an iterator begins.

        Args:
            base_seed: the seed that torch drew for the workers; None in the trainer, where each iterator is a separate pass.
        """
        with self._held() as board:
            number = int(board[2])
            if base_seed is not None:
                turns = self._turns.of_seed
                turn = turns[base_seed] = turns.get(base_seed, 0) + 1
                entries, written = board[4:].reshape(_KEPT, 3), int(board[3])
                passes = entries[np.arange(max(self._since, written - _KEPT), written) % _KEPT]
                (known,) = np.nonzero((passes[:, 0] == base_seed) & (passes[:, 1] == turn))
                if len(known):
                    return int(passes[known[0], 2])
                entries[written % _KEPT] = base_seed, turn, number
                board[3] = written + 1
            board[2] = number + 1
            return number

    def set_next(self, number: int) -> None:
        """Make `number` the next pass in all processes, even if torch draws the same seed for it as for an earlier pass."""
        with self._held() as board:
            board[2] = number
            self._since = int(board[3])

    def number_of(self, base_seed: int | None, since: int) -> int:
        """Return the number of a pass that the trainer has begun.

        Args:
            base_seed: the seed that torch drew for its workers; None without workers.
            since: `next` when the trainer began the pass. Another loader may have taken this number before the pass's workers did.
        """
        with self._held() as board:
            entries, written = board[4:].reshape(_KEPT, 3), int(board[3])
            passes = entries[np.arange(max(0, written - _KEPT), written) % _KEPT]
            numbers = passes[(passes[:, 0] == (base_seed or 0)) & (passes[:, 2] >= since), 2]
            return int(numbers[0]) if base_seed is not None and len(numbers) else since

    @property
    def next(self) -> int:
        """Return the number of the next pass."""
        return int(self._board[2])

    @contextmanager
    def _held(self) -> Iterator[NDArray[np.uint64]]:
        if is_trial():
            yield self._board.copy()
            return
        with self._lock:  # a file lock belongs to the process, not to the thread
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield self._board
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __copy__(self) -> PassCounter:
        made = object.__new__(PassCounter)
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        if pickling.is_for_another_machine():
            return {"home": "", "nonce": b"", "next": self.begin(None)}
        return {"home": self._home, "nonce": self._board[:2].tobytes(), "next": self.next, "since": self._since}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd = -1
        with suppress(OSError):
            fd = os.open(state["home"], os.O_RDWR | os.O_CLOEXEC)
        if fd >= 0 and os.pread(fd, 16, 0) == state["nonce"]:
            self._open(fd, state["home"])
            self._since = state["since"]
            return
        if fd >= 0:  # the number was reused by another process
            os.close(fd)
        self.__init__(state["next"])  # type: ignore[misc]  # start a new board
