"""The hook through which other ranks of a node take part in an engine's work (`share="node"`)."""

from __future__ import annotations

from typing import Any

from shmload._core.trainer import Order, TrainerRing
from shmload.engine.ring import Ring
from shmload.shm.doorbell import Doorbell
from shmload.worker.job import PeerRing


class RankHook:
    """A hook of an engine whose ring is read or filled by other ranks. In this base class, the methods do nothing.

    Attributes:
        helpers: workers of other ranks that fill chunks of the ring, for the supervisor; None without helpers.
    """

    helpers: Any = None

    def order_bell(self, ring: TrainerRing, bell: Doorbell) -> Doorbell:
        """Return the doorbell that announces orders to the workers: `bell`, or another that rings it."""
        return bell

    def peer_rings(self, ring: Ring) -> tuple[PeerRing, ...]:
        """Return rings of other ranks in which this engine's workers help. Called before the workers are started."""
        return ()

    def started(self, ring: Ring) -> None:
        """Called when the engine's workers have been started."""

    def failed(self, error: BaseException) -> None:
        """Called when the engine could not be made."""

    def before_next(self, order: Order) -> None:
        """Called when the program requests the front order. An exception reaches the program, and the order stays in the queue.

        Args:
            order: the front order.
        """

    def after_next(self, *, is_gone: bool) -> None:
        """Called after `next`, whether or not it raised.

        Args:
            is_gone: whether the front order was delivered or failed; if not, it is still in the queue.
        """

    def check_ranks(self) -> int:
        """Check the other ranks, together with the engine's own check for deaths. Return the number of recovered chunks."""
        return 0

    def abandoned(self) -> None:
        """Called when all orders were dropped."""

    def pass_begins(self) -> None:
        """Called when a pass over the loader begins."""

    def pass_left(self) -> None:
        """Called when a pass was left before its end."""

    def counters(self) -> dict[str, Any]:
        """Return additional entries of `stats()`."""
        return {}

    def closing(self, *, is_broken: bool) -> None:
        """Called before the engine closes.

        Args:
            is_broken: whether it closes because a worker that may not be replaced has died.
        """

    def closed(self) -> None:
        """Called when the engine has closed."""
