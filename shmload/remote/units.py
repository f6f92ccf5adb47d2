"""Which samples make up the k-th item of a pipeline, as long as that can be said without reading any.

    samples of a rank     0 1 2 3 4 5 6 7 8 9 ...
    slice(2, None)        . . 0 1 2 3 4 5 6 7
    batched(3)                |  0  |  1  | 2        units

Workers take units in turn: worker w those of w, w + n, ... So every batch is whole whatever the number of workers, the batches are
the same ones in the same order (torch takes workers in turn, too), and their number is known before any sample is read. Dealing
samples instead would give each worker a short batch of its own at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batched", "Sliced", "Units"]


@dataclass(frozen=True)
class Sliced:
    """Some of the items below, as range says: start, stop, step."""

    start: int
    stop: int | None
    step: int

    def count(self, below: int) -> int:
        return len(self._range(below))

    def items(self, numbers: NDArray[np.int64], below: int) -> NDArray[np.int64]:
        return self.start + numbers * self.step

    def _range(self, below: int) -> range:
        return range(below)[self.start : self.stop : self.step]


@dataclass(frozen=True)
class Batched:
    """So many items below in each."""

    size: int
    partial: bool

    def count(self, below: int) -> int:
        return -(-below // self.size) if self.partial else below // self.size

    def items(self, numbers: NDArray[np.int64], below: int) -> NDArray[np.int64]:
        found = (numbers[:, None] * self.size + np.arange(self.size)).reshape(-1)
        return found[found < below]


@dataclass(frozen=True)
class Units:
    """The levels, from the samples upward."""

    levels: tuple[Sliced | Batched, ...] = ()

    def counts(self, num_samples: int) -> list[int]:
        """Items at each level, the samples first."""
        found = [num_samples]
        for level in self.levels:
            found.append(level.count(found[-1]))
        return found

    def count(self, num_samples: int) -> int:
        """Units that so many samples make."""
        return self.counts(num_samples)[-1]

    def samples(self, unit: int, num_samples: int) -> NDArray[np.int64]:
        """The samples of a unit, numbered as the rank has them."""
        found = np.array([unit], np.int64)
        counts = self.counts(num_samples)
        for level, below in zip(reversed(self.levels), reversed(counts[:-1]), strict=True):
            found = level.items(found, below)
        return found

    def with_level(self, level: Sliced | Batched) -> Units:
        return Units((*self.levels, level))
