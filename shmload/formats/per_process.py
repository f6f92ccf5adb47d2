"""An object that every process makes for itself, at its first use, such as an open file of a library that does not survive a fork.

A forked child neither uses nor closes what its parent opened, because closing would run the library on a state whose locks and
threads stayed in the parent. The child opens its own. The lock that keeps two threads from opening twice belongs to the process,
too: a lock that another thread held at the fork would never be released in the child.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shmload.world import ForkLock

T = TypeVar("T")


class PerProcess(Generic[T]):
    """What is opened once a process. It is given `open` at each use, not to keep it: its owner is freed as soon as it is
    dropped.

    Args:
        is_inherited: a forked child goes on with its parent's, as it may where files are only mapped.
    """

    def __init__(self, is_inherited: bool = False) -> None:
        self._is_inherited = is_inherited
        self._held: tuple[int, T] | None = None  # and the process it was opened in
        self._inherited: list[object] = []
        self._lock = ForkLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._is_inherited,)  # it is opened again where it is unpickled

    @property
    def is_open(self) -> bool:
        """Whether this process has opened it."""
        return self._held is not None and self._held[0] in (0, os.getpid())

    def get(self, open: Callable[[], T]) -> T:
        """This process's own, which `open` makes."""
        pid, held = 0 if self._is_inherited else os.getpid(), self._held
        if held is not None and held[0] == pid:
            return held[1]
        with self._lock:
            held = self._held
            if held is None or held[0] != pid:
                self._inherited.append(held)
                held = self._held = (pid, open())
        return held[1]
