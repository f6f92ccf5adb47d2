"""Delay KeyboardInterrupt while processes are started or shared state is changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay ^C until the block has ended; without effect in threads other than the main one.

    It is needed, for example, because a worker that was started but not recorded would never be stopped.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    calls: list[tuple[Any, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if calls:
            handler(*calls[-1])
