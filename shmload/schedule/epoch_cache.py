"""`EpochCache`: keep what an order computes for a whole epoch, for the two epochs that are in use at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class EpochCache(Generic[T]):
    """The values of the newest two epochs, because the next epoch is ordered before the trainer has finished this one.

    Thread/process safety: two threads may both compute a value; the results are equal. A copy or a pickle starts empty.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], T] = {}

    def get(self, seed: int, epoch: int, make: Callable[[int, int], T]) -> T:
        """Return the value of an epoch. Compute it with `make(seed, epoch)` if it is not cached."""
        key = (seed, epoch)
        value = self._values.get(key)
        if value is None:
            value = make(seed, epoch)
            self._values = dict([*self._values.items(), (key, value)][-2:])
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochCache, ()
