"""`Units`: which samples make up the k-th item after slices and batches.

    samples of a rank     0 1 2 3 4 5 6 7 8 9 ...
    slice(2, None)        . . 0 1 2 3 4 5 6 7
    batched(3)                |  0  |  1  | 2        units

Each call of slice or batched adds a *level* above the samples. A unit is an item of the highest level: the samples from which the
stages make one item.

Workers take units in turn: worker w of n takes units w, w + n, ... So every batch is whole whatever the number of workers, the
batches are the same ones in the same order (torch takes workers in turn, too), and their number is known before any sample is read.
Dealing samples instead would give each worker a short batch of its own at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sliced:
    """A level whose items are some items of the level below, selected by `start`, `stop` and `step` as in a slice."""

    start: int
    stop: int | None
    step: int

    def count(self, below: int) -> int:
        """Return the number of items of this level, given that of the level below."""
        return len(range(below)[self.start : self.stop : self.step])

    def items(self, numbers: Any, below: int) -> Any:
        """Return the numbers, in the level below, of these items of this level; a number or an array."""
        return self.start + numbers * self.step


@dataclass(frozen=True)
class Batched:
    """A level whose items are groups of `size` consecutive items of the level below. With `partial`, the last may be smaller."""

    size: int
    partial: bool

    def count(self, below: int) -> int:
        """Return the number of items of this level, given that of the level below."""
        return -(-below // self.size) if self.partial else below // self.size

    def items(self, numbers: NDArray[np.int64], below: int) -> NDArray[np.int64]:
        """Return the numbers, in the level below, of the items that make up these items of this level.

        `below` is the number of items of the level below.
        """
        found = (numbers[:, None] * self.size + np.arange(self.size)).reshape(-1)
        return found[found < below]


@dataclass(frozen=True)
class Units:
    """The levels above the samples of a rank's epoch, the lowest first."""

    levels: tuple[Sliced | Batched, ...] = ()

    def counts(self, num_samples: int) -> list[int]:
        """Return the number of items at each level, the samples first."""
        found = [num_samples]
        for level in self.levels:
            found.append(level.count(found[-1]))
        return found

    def count(self, num_samples: int) -> int:
        """Return the number of units, given the number of samples."""
        return self.counts(num_samples)[-1]

    def samples(self, unit: int, num_samples: int) -> NDArray[np.int64]:
        """Return the numbers of the samples that make up a unit, among the `num_samples` samples of the rank."""
        found = np.array([unit], np.int64)
        counts = self.counts(num_samples)
        for level, below in zip(reversed(self.levels), reversed(counts[:-1]), strict=True):
            found = level.items(found, below)
        return found
