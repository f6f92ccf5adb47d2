"""How many single items are fetched together: one of those that take long, many of those that cost less than fetching them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmload.pipeline.plan import PoolOptions

if TYPE_CHECKING:
    from shmload.loader import ShmLoader

WORTH_S = 1e-3  # of a worker's time for what is fetched at once: above it, fetching costs little
MOST = 64


class FetchBatching:
    """Says how many by what items have cost so far. It decides when they come, never which.

    It looks after 8 fetches, then each time their number has doubled.
    """

    def __init__(self, pool: PoolOptions) -> None:
        self._pool = pool
        self._num_fetched, self._next_look = 0, 8

    def after_fetch(self, loader: ShmLoader[Any]) -> int | None:
        """How many rounds are to be fetched together from now on; None: as before."""
        self._num_fetched += 1
        if self._num_fetched < self._next_look or self._pool.num_workers == 0:
            return None
        self._next_look *= 2
        workers = loader.stats().get("workers", [])
        num_items = sum(worker["num_samples"] for worker in workers)
        return self._rounds(sum(worker["busy_s"] for worker in workers) / num_items) if num_items else None

    def _rounds(self, item_s: float) -> int:
        most = MOST
        if self._pool.buffer_size is not None:
            ordered = self._pool.prefetch_factor(1) * self._pool.num_workers
            most = min(most, max(self._pool.buffer_size // ordered, 1))
        return max(min(int(WORTH_S / item_s), most), 1) if item_s > 0 else most
