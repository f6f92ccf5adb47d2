"""What may pass is tried again: how often, how long, with which pauses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from shmload.errors import StoreError

__all__ = ["Patience", "Tries", "Unsure"]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_wait: Callable[[float], object] = threading.Event().wait  # never set: a pause that signals may interrupt


class Unsure(Exception):
    """A try failed in a way that may pass.

    Args:
        what: what happened, in words.
        pause_s: how long the server asks to be left alone.
    """

    def __init__(self, what: str, *, pause_s: float = 0.0) -> None:
        super().__init__(what)
        self.pause_s = pause_s


@dataclass(frozen=True)
class Patience:
    """How long an operation is tried.

    Attributes:
        retries: further tries after one that failed, without progress between them.
        timeout_s: after this long without progress no further try is begun.
        stall_s: a server that says nothing for so long has failed the try.
    """

    retries: int = 5
    timeout_s: float = 60.0
    stall_s: float = 10.0


class Tries:
    """Counts the tries of one operation, and waits between them.

    Args:
        patience: how many and how long.
        doing: the operation in words, for the error.
    """

    def __init__(self, patience: Patience, doing: str) -> None:
        self.patience = patience
        self.doing = doing
        self.progressed()

    def progressed(self) -> None:
        """Bytes came: what failed before does not count any more."""
        self.num_failed = 0
        self._since = monotonic()

    def failed(self, failure: Unsure) -> None:
        """Waits before the next try: twice as long each time, by chance between half and whole, so that many readers spread.

        Raises:
            StoreError: there is no next try.
        """
        self.num_failed += 1
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self.num_failed - 1)) * random.uniform(0.5, 1)
        pause = max(pause, failure.pause_s)
        spent = monotonic() - self._since
        if self.num_failed > self.patience.retries:
            raise StoreError(
                f"cannot {self.doing}: {failure}; failed {self.num_failed} times in {spent:.1f} s. "
                "Look after the server, or give the client more retries"
            ) from None
        if spent + pause > self.patience.timeout_s:
            raise StoreError(
                f"cannot {self.doing}: {failure}; no progress in {spent:.1f} s ({self.num_failed} tries), of "
                f"timeout_s={self.patience.timeout_s:g}. Look after the server, or give the client a longer timeout_s"
            ) from None
        _wait(pause)
