"""The protocol of a log that records each pass and each batch, in the order in which they reach the program."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from shmload._core.trainer import Order
from shmload.engine.config import LoaderConfig


class DeliveryLog(Protocol):
    """A log of deliveries, for `audit=`.

    Attributes:
        is_on: whether deliveries are recorded. If not, no method need be called.
        last: order of the last yielded batch, set by the code that yields it.
        num_passes: passes begun in this run; in torch mode, passes have no other number.
    """

    is_on: bool
    last: Order | None
    num_passes: int

    def resumed(self, epoch: int, step: int, *, by: str = "state", beyond: Collection[int] = ()) -> None:
        """Record that the next pass begins at this step.

        Args:
            epoch, step: position of the next batch.
            by: the cause of the resume.
            beyond: later steps that have already been delivered.
        """

    def begins(self, config: LoaderConfig, epoch: int, step: int, *, schedule: Any = None, rank: int = 0) -> None:
        """Record that a pass begins.

        Args:
            config: arguments of the loader.
            epoch, step: position of its first batch.
            schedule: the schedule, if the order of samples can be computed.
            rank: the rank whose part of the schedule is read.
        """

    def delivered(
        self, order: Order, batch: Any, *, valid: int | None = None, epoch: int | None = None, step: int | None = None
    ) -> None:
        """Record a batch that is about to be yielded.

        Args:
            order: its order.
            batch: the batch, or `outcome.NOTHING`.
            valid: rows that are not padding.
            epoch, step: position as the user counts it; None if it equals that of the order.
        """

    def ended(self, epoch: int, step: int) -> None:
        """Record that the pass has ended.

        Args:
            epoch, step: position after its last batch.
        """
