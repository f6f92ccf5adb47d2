"""Signals to the launcher, kept until it looks: an exception out of a handler could come between a rank's start and its record."""

from __future__ import annotations

import os
import signal
import threading
from time import monotonic
from types import TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """A signal has ended the run, and all ranks have ended.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Signals:
    """Catches signals while it is entered. In other threads than the main one it catches nothing: they get none.

    One that is ignored stays so. One that the program has a handler for is the program's affair: its handler is called when the
    launcher looks, and what it raises ends the run.

    Args:
        wake: descriptor of an eventfd, which a signal makes readable.
    """

    def __init__(self, wake: int) -> None:
        self._wake = wake
        self._caught: list[tuple[int, float]] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before != signal.SIG_IGN:  # the first: not installed by Python
                    self._before[number] = before
                    signal.signal(number, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _catch(self, number: int, frame: Any) -> None:
        self._caught.append((number, monotonic()))
        os.eventfd_write(self._wake, 1)

    @property
    def any_caught(self) -> bool:
        """Whether one waits to be taken."""
        return bool(self._caught)

    def interrupted_since(self, time_s: float) -> bool:
        """Whether there has been a ^C that nobody has taken, after a time of the monotonic clock."""
        return any(number == signal.SIGINT and caught_s > time_s for number, caught_s in self._caught)

    def take(self) -> int:
        """The number of a signal that is to end the run; 0: none is. Calls the program's own handlers."""
        while self._caught:
            number, _ = self._caught.pop(0)
            before = self._before[number]
            if before in (signal.SIG_DFL, signal.default_int_handler):
                return number
            before(number, None)
        return 0
