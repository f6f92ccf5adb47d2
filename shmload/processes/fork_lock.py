"""A lock that a forked child can use, whatever another thread held at the fork."""

from __future__ import annotations

import os
from threading import Lock


class ForkLock:
    """A lock that is fresh in a forked child, where one that another thread held at the fork would never be released."""

    def __init__(self) -> None:
        self._locks: dict[int, Lock] = {}

    def __enter__(self) -> None:
        self._locks.setdefault(os.getpid(), Lock()).acquire()

    def __exit__(self, *_: object) -> None:
        self._locks[os.getpid()].release()
