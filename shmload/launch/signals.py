"""Keep signals to the launcher until it asks for them.

They are not raised in the handler, because an exception could fall between the start of a rank and its record.
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
    """A signal ended the run. All ranks have ended.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Signals:
    """A context in which signals are kept. It catches nothing outside the main thread, because other threads get no signals.

    Ignored signals stay ignored. If the program has a handler for a signal, that handler is called when the launcher looks; an
    exception that it raises ends the run.

    Args:
        wake: called at each signal.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.caught: list[tuple[int, float]] = []  # not taken yet: (signal, time of the monotonic clock)
        self._before: dict[int, Any] = {}
        self._ignored_children = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before is not None and before != signal.SIG_IGN:  # None: not installed by Python
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
        """Return the signal that ends the run, or 0. Call the program's own handlers."""
        while self.caught:
            number, _ = self.caught.pop(0)
            before = self._before[number]
            if before in (signal.SIG_DFL, signal.default_int_handler):
                return number
            before(number, None)
        return 0
