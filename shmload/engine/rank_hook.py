"""The points at which the other ranks of a node take part in an engine's work (`share="node"`)."""

from __future__ import annotations

from typing import Any

from shmload._core.trainer import Order, TrainerRing
from shmload.engine.ring import Ring
from shmload.shm.segment import Doorbell
from shmload.worker.job import PeerRing


class RankHook:
    """Called by an engine whose ring other ranks read or fill. The methods here do nothing.

    Attributes:
        helpers: workers of other ranks that fill chunks of the ring, as a supervisor deals with them; None if there are none.
    """

    helpers: Any = None

    def order_bell(self, ring: TrainerRing, bell: Doorbell) -> Doorbell:
        """Return the doorbell that announces orders to the workers: `bell`, or another that rings it."""
        return bell

    def peer_rings(self, ring: Ring) -> tuple[PeerRing, ...]:
        """Return rings of other ranks in which this engine's workers help. Called before the workers are started."""
        return ()

    def started(self, ring: Ring) -> None:
        """The engine's workers have been started."""

    def failed(self, error: BaseException) -> None:
        """The engine could not be made."""

    def before_next(self, order: Order) -> None:
        """The program asks for the front order. An exception leaves the order in the queue."""

    def after_next(self, *, is_gone: bool) -> None:
        """The front order was delivered or lost (`is_gone`), or is still in the queue."""

    def look(self) -> int:
        """Check on the other ranks, along with the engine's own check for deaths. Return how many chunks were taken back."""
        return 0

    def abandoned(self) -> None:
        """All orders were dropped."""

    def pass_begins(self) -> None:
        """A pass over the loader begins."""

    def pass_left(self) -> None:
        """A pass was left before its end."""

    def counters(self) -> dict[str, Any]:
        """Return what to add to `stats()`."""
        return {}

    def closing(self, *, is_broken: bool) -> None:
        """The engine is about to close; `is_broken`: because a worker died for good."""

    def closed(self) -> None:
        """The engine has closed."""
