"""What the loader asks of anything that says which samples come next.

The contract is torch's own: iterate, and get one batch's keys at a time. So every torch batch sampler is an `Orders` as
it stands, pipelines and mixtures can be, and a `Schedule` becomes one by saying whose and from where: ScheduledOrders.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shmload.schedule.schedule import Schedule

__all__ = ["BatchIndices", "Orders", "ScheduledOrders"]

BatchIndices = NDArray[np.int64] | list[Any]
"""One batch: sample indices as an int64 array, or a list of whatever keys a sampler yields."""


class Orders(Protocol):
    """Yields the batches of one epoch in order; every `iter` starts anew."""

    def __iter__(self) -> Iterator[BatchIndices]: ...


@dataclass(frozen=True)
class ScheduledOrders:
    """A rank's batches of one epoch, from `first_step` on: to seek, make another.

    Steps in which the rank has no rows (uneven="exact") do not appear.

    Example:
        >>> schedule = Schedule(5, batch_size=2, seed=0, shuffle=False)
        >>> [batch.tolist() for batch in ScheduledOrders(schedule, epoch=3, first_step=1)]
        [[2, 3], [4]]
    """

    schedule: Schedule
    epoch: int
    first_step: int = 0
    rank: int = 0

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        for step in range(self.first_step, self.schedule.num_steps_of(self.rank)):
            yield self.schedule.batch(self.epoch, step, self.rank)

    def __len__(self) -> int:
        return max(self.schedule.num_steps_of(self.rank) - self.first_step, 0)
