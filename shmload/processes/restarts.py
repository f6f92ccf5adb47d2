"""Decide when to restart a process that fails repeatedly, and when to give up."""

from __future__ import annotations


class RestartPolicy:
    """A limit on consecutive failures, and the pauses between restarts.

    Args:
        max_restarts: number of consecutive failures that are tolerated.
        pause_s: seconds before the first restart; the pause doubles with each consecutive failure.
        max_pause_s: the longest pause.

    Attributes:
        in_a_row: failures since the last success.
    """

    def __init__(self, max_restarts: int, pause_s: float = 0.0, max_pause_s: float = 0.0) -> None:
        self._max_restarts, self._pause_s, self._max_pause_s = max_restarts, pause_s, max_pause_s
        self.in_a_row = 0

    def failed(self, *, after_success: bool = False) -> float | None:
        """Count a failure. Return the seconds to pause before the restart, or None to give up.

        Args:
            after_success: whether the process had achieved something before it failed.
        """
        self.in_a_row = 1 if after_success else self.in_a_row + 1
        if self.in_a_row > self._max_restarts:
            return None
        return min(self._pause_s * 2.0 ** min(self.in_a_row - 1, 99), self._max_pause_s)  # 2**1024 overflows a float

    def succeeded(self) -> None:
        """Forget the failures so far."""
        self.in_a_row = 0
