"""Something that every process opens for itself, at its first use: files of libraries that do not survive a fork.

A child that inherits an open file leaves it alone, does not even close it (that would run the library on a state whose locks and
threads stayed behind in the parent), and opens its own. The lock that keeps two threads from opening twice goes by the process,
too: one that another thread held at the fork would never be released in the child.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """What is opened once a process. It is given `open` at each use, not to keep it: its owner is freed as soon as it is
    dropped."""

    def __init__(self) -> None:
        self._held: tuple[int, T] | None = None  # and the process it was opened in
        self._inherited: list[object] = []
        self._locks: dict[int, Lock] = {}  # by process

    @property
    def is_open(self) -> bool:
        """Whether this process has opened it."""
        return self._held is not None and self._held[0] == os.getpid()

    def get(self, open: Callable[[], T]) -> T:
        """This process's own, which `open` makes."""
        pid, held = os.getpid(), self._held
        if held is not None and held[0] == pid:
            return held[1]
        with self._locks.setdefault(pid, Lock()):
            held = self._held
            if held is None or held[0] != pid:
                self._inherited.append(held)
                held = self._held = (pid, open())
        return held[1]
