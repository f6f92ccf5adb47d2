"""Record signals to the launcher until it asks for them.

The handlers raise no exception, because it could come after a rank was started and before it is recorded.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """The error for a run that was ended by a signal, raised after all ranks have ended.

    Args:
        number: the signal.
        text: the message.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Signals:
    """A context manager that records signals. Outside the main thread it does nothing, because other threads get no signals.

    Ignored signals stay ignored. If the program has a handler for a signal, `take` calls it; an exception that it raises ends the
    run.

    Args:
        wake: called at each signal.

    Attributes:
        caught: (signal, time of the monotonic clock) of the signals that have not been taken, in order.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.caught: list[tuple[int, float]] = []
        self._before: dict[int, Any] = {}
        self._ignored_children = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before != signal.SIG_IGN:  # None for a handler that was not installed by Python
                    self._before[number] = before
            self.install()
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # the kernel would keep no exit codes
                self._ignored_children = True
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def install(self) -> None:
        """Install the handlers; call it again if other code may have replaced them."""
        for number in self._before:
            signal.signal(number, self._catch)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._ignored_children:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def _catch(self, number: int, frame: Any) -> None:
        self.caught.append((number, monotonic()))
        self._wake()

    def interrupted_since(self, time_s: float) -> bool:
        """Return whether a ^C that has not been taken came after a time of the monotonic clock."""
        return any(number == signal.SIGINT and caught_s > time_s for number, caught_s in self.caught)

    def take(self) -> int:
        """Take the recorded signals in order. Call the program's handler for each that has one; return the first that has none.

        Returns:
            the signal that ends the run; 0 if there is none.
        """
        while self.caught:
            number, _ = self.caught.pop(0)
            before = self._before[number]
            if before in (signal.SIG_DFL, signal.default_int_handler):
                return number
            before(number, None)
        return 0
