"""Units: which samples make up the k-th item after slices and batches.

    samples of a rank     0 1 2 3 4 5 6 7 8 9 ...
    slice(2, None)        . . 0 1 2 3 4 5 6 7
    batched(3)                |  0  |  1  | 2        units

Workers take units in turn: worker w those of w, w + n, ... So every batch is whole whatever the number of workers, the batches are
the same ones in the same order (torch takes workers in turn, too), and their number is known before any sample is read. Dealing
samples instead would give each worker a short batch of its own at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sliced:
    """Some of the items below: start, stop and step as of a range."""

    start: int
    stop: int | None
    step: int

    def count(self, below: int) -> int:
        """Return the number of items made of so many."""
        return len(range(below)[self.start : self.stop : self.step])

    def items(self, numbers: Any, below: int) -> Any:
        """Return which of the items below these are, a number or an array."""
        return self.start + numbers * self.step


@dataclass(frozen=True)
class Batched:
    """Groups of `size` consecutive items below; `partial`: the last may be smaller."""

    size: int
    partial: bool

    def count(self, below: int) -> int:
        """Return the number of items made of so many."""
        return -(-below // self.size) if self.partial else below // self.size

    def items(self, numbers: NDArray[np.int64], below: int) -> NDArray[np.int64]:
        """Return which of the items below make up these."""
        found = (numbers[:, None] * self.size + np.arange(self.size)).reshape(-1)
        return found[found < below]


@dataclass(frozen=True)
class Units:
    """The levels, from the samples upward."""

    levels: tuple[Sliced | Batched, ...] = ()

    def counts(self, num_samples: int) -> list[int]:
        """Return the number of items at each level, the samples first."""
        found = [num_samples]
        for level in self.levels:
            found.append(level.count(found[-1]))
        return found

    def count(self, num_samples: int) -> int:
        """Return the number of units that so many samples make."""
        return self.counts(num_samples)[-1]

    def samples(self, unit: int, num_samples: int) -> NDArray[np.int64]:
        """Return the samples of a unit, numbered as the rank has them."""
        found = np.array([unit], np.int64)
        counts = self.counts(num_samples)
        for level, below in zip(reversed(self.levels), reversed(counts[:-1]), strict=True):
            found = level.items(found, below)
        return found
