"""One caller at a time: of several threads that ask one iterator for batches each gets its own, and waits for its turn.

A call in a thread that is inside already (a signal handler's, a sampler's, a callback's) would wait for itself, so it is refused.
Waiting does not hold up ^C. In a forked child nobody is inside but the thread that has forked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakSet

LEAVE_S = 1.0  # for who is inside to come out


class Turns:
    """Whose turn it is: `with turns: ...`. Loaders do it in these lines, as calls would cost as much again as the lock:

    with turns.lock:
        if turns.is_taken:
            raise turns.refusal()
        turns.is_taken = True
        try:
            ...
        finally:
            turns.is_taken = False
    """

    __slots__ = ("__weakref__", "is_taken", "lock")

    def __init__(self) -> None:
        self.lock: Any = RLock()
        self.is_taken = False  # by the thread that has the lock
        _all.add(self)

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.is_taken:
            self.lock.release()
            raise self.refusal()
        self.is_taken = True

    def __exit__(self, *exc: object) -> None:
        self.is_taken = False
        self.lock.release()

    def __reduce__(self) -> Any:
        return Turns, ()  # a copy has its own

    @contextmanager
    def others_out(self) -> Iterator[None]:
        """Waits until no other thread is inside, where those hear that they must go; not for ever: they may be in a user's code."""
        is_mine = self.lock.acquire(timeout=LEAVE_S)
        try:
            yield
        finally:
            if is_mine:
                self.lock.release()

    @staticmethod
    def refusal() -> RuntimeError:
        """The error of a call within a call."""
        return RuntimeError(
            "this iterator is being asked for a batch already, further up in this thread: a sampler, a dataset, a callback or a "
            "signal handler that is called meanwhile cannot take the next one. Take it when the first call has returned"
        )


_all: WeakSet[Turns] = WeakSet()


def _in_child() -> None:
    for turns in list(_all):
        if not turns.lock._is_owned():  # whoever had it is not in this process
            turns.lock._at_fork_reinit()
            turns.is_taken = False


os.register_at_fork(after_in_child=_in_child)
