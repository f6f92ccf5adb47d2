"""Retry operations on a store: how often, for how long, and with which pauses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from shmload.errors import StoreError
from shmload.storage.outage import Outage

__all__ = ["Retry", "RetryPolicy", "TransientError"]

_FIRST_PAUSE_S = 0.1  # seconds; the pause doubles after each failure
_LONGEST_PAUSE_S = 10.0

_wait: Callable[[float], object] = threading.Event().wait  # never set: a pause that a signal can interrupt


class TransientError(Exception):
    """A failed try that may succeed if it is repeated.

    Args:
        what: what happened, in words.
        pause_s: seconds for which the server asked not to be called.
        of_store: whether the whole store does not answer, so that other objects cannot be read either.
        is_silent: whether the store did not answer until the try's time ran out.
    """

    def __init__(self, what: str, *, pause_s: float = 0.0, of_store: bool = False, is_silent: bool = False) -> None:
        super().__init__(what)
        self.pause_s = pause_s
        self.of_store, self.is_silent = of_store, is_silent


@dataclass(frozen=True)
class RetryPolicy:
    """The number and duration of retries of an operation.

    Attributes:
        retries: number of retries without progress between them.
        timeout_s: seconds without progress after which the operation fails.
        stall_s: seconds without an answer after which a try fails.
    """

    retries: int = 5
    timeout_s: float = 60.0
    stall_s: float = 10.0


class Retry:
    """Counts the tries of one operation and waits between them.

    Args:
        retry_policy: how often and for how long to retry.
        doing: the operation in words, for the error.
        outage: shared record of the store's outage, so that this operation fails with others on the same store. If None, the
            operation uses all of its tries.
    Raises:
        StoreError: the store did not answer another operation less than `stall_s` ago.
    """

    def __init__(self, retry_policy: RetryPolicy, doing: str, outage: Outage | None = None) -> None:
        self.retry_policy = retry_policy
        self.doing = doing
        self._outage = outage
        self.progressed()
        self._retries = retry_policy.retries
        if outage is not None and (recent := outage.since(self._since - retry_policy.stall_s)) is not None:
            if recent.is_silent:
                raise StoreError(recent.text)
            self._retries = 0  # try once: a store that rejects requests does so at once, and it may have recovered

    def progressed(self) -> None:
        """Forget earlier failures, because bytes arrived."""
        self.num_failed = 0
        self._since = monotonic()

    def succeeded(self) -> None:
        """End the store's outage, because the operation succeeded."""
        if self._outage is not None:
            self._outage.end()

    @property
    def left_s(self) -> float:
        """Return the number of seconds during which further tries may begin; at least 0.1."""
        return max(self.retry_policy.timeout_s - (monotonic() - self._since), 0.1)

    def failed(self, failure: TransientError) -> None:
        """Wait before the next try.

        The pause doubles each time, and is shortened by up to half at random, so that readers spread out.

        Args:
            failure: why the try failed.
        Raises:
            StoreError: no tries are left, or another operation on this store has used up its own in the meantime.
        """
        self.num_failed += 1
        if failure.of_store:
            self._fail_with_another()
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self.num_failed - 1)) * random.uniform(0.5, 1)
        pause = max(pause, failure.pause_s)
        spent = monotonic() - self._since
        if self.num_failed > self._retries:
            raise self._given_up(
                f"cannot {self.doing}: {failure}; failed {self.num_failed} times in {spent:.1f} s. "
                "Check the server, or give the client more retries",
                failure,
            ) from None
        if spent + pause > self.retry_policy.timeout_s:
            raise self._given_up(
                f"cannot {self.doing}: {failure}; no progress in {spent:.1f} s ({self.num_failed} tries), with "
                f"timeout_s={self.retry_policy.timeout_s:g}. Check the server, or give the client a longer timeout_s",
                failure,
            ) from None
        _wait(pause)
        if failure.of_store:
            self._fail_with_another()

    def _fail_with_another(self) -> None:
        if self._outage is not None and (found := self._outage.since(self._since)) is not None:
            raise StoreError(found.text) from None

    def _given_up(self, text: str, failure: TransientError) -> StoreError:
        if failure.of_store and self._outage is not None:
            self._outage.record(text, self._since, is_silent=failure.is_silent)
        return StoreError(text)
