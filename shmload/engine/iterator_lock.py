"""A lock that lets one thread at a time ask an iterator for a batch.

Several threads may call `next` on one iterator: each gets its own batch, one thread after the other. A second call in the thread
that is already inside (from a signal handler, a sampler or a callback) would wait for itself, so it raises an error. Ctrl-C can
interrupt the wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakSet

LEAVE_S = 1.0  # seconds that a caller inside gets to return before the iterator is closed


class IteratorLock:
    """A lock that a thread cannot take twice: `with iterator_lock: ...`.

    Iterators contain the same code inline, because method calls would double the cost of the lock:

    with iterator_lock.lock:
        if iterator_lock.is_taken:
            raise iterator_lock.nested_call_error()
        iterator_lock.is_taken = True
        try:
            ...
        finally:
            iterator_lock.is_taken = False
    """

    __slots__ = ("__weakref__", "is_taken", "lock")

    def __init__(self) -> None:
        self.lock: Any = RLock()
        self.is_taken = False  # True while the thread that holds the lock is inside
        _all.add(self)

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.is_taken:
            self.lock.release()
            raise self.nested_call_error()
        self.is_taken = True

    def __exit__(self, *exc: object) -> None:
        self.is_taken = False
        self.lock.release()

    def __reduce__(self) -> Any:
        return IteratorLock, ()  # a copy gets its own lock

    @contextmanager
    def wait_until_alone(self) -> Iterator[None]:
        """Wait until no other thread is inside, but at most `LEAVE_S` seconds, because that thread may be running the user's code.

        Then keep other threads out during the block, if the wait succeeded.
        """
        is_mine = self.lock.acquire(timeout=LEAVE_S)
        try:
            yield
        finally:
            if is_mine:
                self.lock.release()

    @staticmethod
    def nested_call_error() -> RuntimeError:
        """Return the error of a call within a call."""
        return RuntimeError(
            "next() was called within next() of the same iterator, in the same thread. Samplers, datasets, callbacks and signal "
            "handlers that run during next() cannot take the next batch; take it after the first call has returned"
        )


_all: WeakSet[IteratorLock] = WeakSet()


def _in_child() -> None:
    for iterator_lock in list(_all):
        if not iterator_lock.lock._is_owned():  # the thread that held it does not exist in this process
            iterator_lock.lock._at_fork_reinit()
            iterator_lock.is_taken = False


os.register_at_fork(after_in_child=_in_child)
