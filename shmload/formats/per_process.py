"""`PerProcess`: an object that each process opens for itself at its first use, such as a library's file.

A forked child neither uses nor closes an object that its parent opened, because closing would run the library on a state whose
locks and threads stayed in the parent. The child opens its own. The lock that prevents two threads from opening twice belongs to
the process, too: a lock that another thread held at the fork would never be released in the child.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shmload.processes.fork_lock import ForkLock

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Holds an object that is opened once per process. A pickle does not contain the object.

    `open` is passed to each `get` and not kept, because a bound method of the owner would make a reference cycle.

    Args:
        is_inherited: whether a forked child continues to use its parent's object, which is allowed if files are only mapped.
    """

    def __init__(self, is_inherited: bool = False) -> None:
        self._is_inherited = is_inherited
        self._held: tuple[int, T] | None = None  # the object, and the process that opened it
        self._inherited: list[object] = []  # the parents' objects, kept so that this process never closes them
        self._lock = ForkLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._is_inherited,)  # the process that unpickles it opens it again

    @property
    def is_open(self) -> bool:
        """Return whether this process has opened it."""
        return self._held is not None and self._held[0] in (0, os.getpid())

    def get(self, open: Callable[[], T]) -> T:
        """Return this process's object. The first call in the process creates it with `open`; other threads wait for that."""
        pid, held = 0 if self._is_inherited else os.getpid(), self._held
        if held is not None and held[0] == pid:
            return held[1]
        with self._lock:
            held = self._held
            if held is None or held[0] != pid:
                self._inherited.append(held)
                held = self._held = (pid, open())
        return held[1]
