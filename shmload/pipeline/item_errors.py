"""Errors of single items. Each item has its own outcome, even if several were fetched together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shmload._core.trainer import Order
from shmload.engine.bad_samples import BadSamples, NextIndex, OnError
from shmload.errors import SampleTimeout, WorkerDied
from shmload.pipeline.item_schedule import StreamSchedule
from shmload.worker.stage_engine import FailedItem

Outcome = tuple[Any, BaseException | None]


class NamedErrors(BadSamples):
    """A loader's policy for bad samples, which names the items that took too long or ended their worker.

    Args:
        on_error, max_bad, next_index: as for `BadSamples`.
        name: key -> the item's name, for error messages.
    """

    def __init__(self, on_error: OnError, max_bad: int | None, next_index: NextIndex | None, name: Callable[[int], str]) -> None:
        super().__init__(on_error, max_bad, next_index)
        self._name = name

    def name(self, key: Any) -> str:
        return self._name(int(key))

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        return super().replaced(order, bad, lambda: self.named(order, bad, error()))

    def named(self, order: Order, bad: Sequence[int], error: BaseException) -> BaseException:
        """Add the items' names to an error that lacks them. Errors of functions already have them."""
        if isinstance(error, SampleTimeout | WorkerDied):
            names = ", ".join(self._name(int(order.indices[row])) for row in bad)
            error.add_note(f"shmload: {names}; sample_timeout_s is the timeout of DistributedBatchedMap")
        return error


class ItemErrors(NamedErrors):
    """A policy that omits bad items from a group fetched together, and keeps their errors."""

    def __init__(self, name: Callable[[int], str]) -> None:
        super().__init__("skip", None, None, name)
        self.of_step: dict[int, dict[int, BaseException]] = {}  # step -> row -> error

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        for row in bad:
            first_row = row if order.origins is None else order.origins[row][0]
            self.of_step.setdefault(order.step, {})[first_row] = self.named(order, [row], error())
        return super().replaced(order, bad, error)


def outcomes_of(
    schedule: StreamSchedule, rank: int, step: int, items: list[Any], errors: Mapping[int, BaseException], lost: Exception | None
) -> Iterator[Outcome]:
    """Yield the outcome of each item of a step, in order. Afterwards, forget the step's number of rounds.

    Args:
        schedule, rank, step: of the items.
        items: the items that arrived.
        errors: row -> error of an item that was left out.
        lost: why no item arrived, if none did.
    """
    found = iter(items)
    for row in range(len(schedule.positions(step, rank))):
        item = None if row in errors else next(found, None)
        if isinstance(item, FailedItem):
            yield None, item.failure.exception()
        else:
            yield item, errors.get(row, lost)
    schedule.order.rounds_at.pop(step, None)
