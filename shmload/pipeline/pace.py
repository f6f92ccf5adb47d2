"""How many single items are fetched together: one of those that take long, many of those that cost less than fetching them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmload.pipeline.plan import Plan

if TYPE_CHECKING:
    from shmload.loader import ShmLoader
    from shmload.pipeline.stream import Stream

WORTH_S = 1e-3  # of a worker's time for what is fetched at once: above it, fetching costs little
MOST = 64


class Pace:
    """Sets a stream's rounds by what items have cost so far. It decides when they come, never which.

    It looks after 8 fetches, then each time their number has doubled.
    """

    def __init__(self, stream: Stream, plan: Plan) -> None:
        self._stream, self._plan = stream, plan
        self._num_fetched, self._next_look = 0, 8

    def fetched(self, loader: ShmLoader[Any] | None) -> None:
        """Says that something was fetched."""
        self._num_fetched += 1
        if self._num_fetched < self._next_look or self._plan.collate is not None or self._plan.num_workers == 0:
            return
        self._next_look *= 2
        workers = [] if loader is None else loader.stats().get("workers", [])
        num_items = sum(worker["num_samples"] for worker in workers)
        if num_items:
            self._stream.rounds = self._rounds(sum(worker["busy_s"] for worker in workers) / num_items)

    def _rounds(self, item_s: float) -> int:
        most = MOST
        if self._plan.buffer_size is not None:
            ordered = (self._plan.prefetch_factor(1) or 1) * self._plan.num_workers
            most = min(most, max(self._plan.buffer_size // ordered, 1))
        return max(min(int(WORTH_S / item_s), most), 1) if item_s > 0 else most
