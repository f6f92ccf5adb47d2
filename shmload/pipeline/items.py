"""Single items that were fetched together, each with its own outcome: the item, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shmload.bad_samples import BadSamples
from shmload.orders import Order
from shmload.pipeline.program import FailedItem
from shmload.pipeline.stream import StreamSchedule

Outcome = tuple[Any, BaseException | None]


class ItemErrors(BadSamples):
    """Leaves out of what is fetched together those items that ended their worker or took too long, and keeps their errors."""

    def __init__(self) -> None:
        super().__init__("skip", None, lambda order, row, tries: 0)
        self.of_step: dict[int, dict[int, BaseException]] = {}  # step -> row -> error

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        for row in bad:
            first_row = row if order.origins is None else order.origins[row][0]
            self.of_step.setdefault(order.step, {})[first_row] = error()
        return super().replaced(order, bad, error)


def items_of(
    schedule: StreamSchedule, rank: int, steps: range, items: Sequence[Any], errors: ItemErrors
) -> Iterator[Outcome]:
    """The outcomes of all items of some steps, in order.

    Args:
        steps: from the first one asked for to behind the last that came; those before it had nothing but errors.
        items: what came.
    """
    found, step = iter(items), steps.start
    while step < steps.stop:
        of_step = errors.of_step.pop(step, {})
        for row in range(len(schedule.positions(step, rank))):
            item = None if row in of_step else next(found)
            if isinstance(item, FailedItem):
                yield None, item.failure.exception()
            else:
                yield item, of_step.get(row)
        behind = schedule.behind(step)
        schedule.order.rounds_at.pop(step, None)
        step = behind
