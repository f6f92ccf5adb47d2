"""Keep what an order without a formula computes for a whole epoch, for the two epochs in use at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class EpochCache(Generic[T]):
    """The newest two epochs' values: workers are sent the next epoch's orders before the trainer has ended this one.

    Thread/process safety: two threads may both make a value, which is the same; a copy or a pickle begins empty.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], T] = {}

    def get(self, seed: int, epoch: int, make: Callable[[int, int], T]) -> T:
        """The value of an epoch, made where it is not kept."""
        key = (seed, epoch)
        value = self._values.get(key)
        if value is None:
            value = make(seed, epoch)
            self._values = dict([*self._values.items(), (key, value)][-2:])
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochCache, ()
