"""`KeyedOrder`: the base class of orders that are pure functions of (seed, epoch, position).

Such an order needs no state, is divided among ranks like the plain shuffle, and resumes on other hardware by a division. Only a
mixture cannot be a formula: it has one counter for each member.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

READ_AHEAD = 8192  # indices that __iter__ computes at a time


class KeyedOrder(ABC):
    """Base class of orders that map each position of an epoch to an index. Subclass it to write your own.

    In seed mode, give it as `sampler=`; it is divided among ranks. Elsewhere it is an ordinary sampler: each `iter` draws a seed
    from torch's global generator, as torch's RandomSampler does. Seed mode calls `take` and `n`, and refuses a subclass that
    overrides only `__iter__` or `__len__`.

    Attributes:
        num_needed: the largest index plus one; a loader rejects a dataset with fewer samples. None accepts a dataset of any length.
    """

    num_needed: int | None = None

    @property
    @abstractmethod
    def n(self) -> int:
        """Return the number of positions in an epoch, which may differ from the number of samples."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Return a text that identifies this order and what it was made from. A state with another identity is rejected."""

    @abstractmethod
    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the indices at positions [start, stop).

        Args:
            start, stop: `0 <= start <= stop <= n`; not checked.
            seed, epoch: the run and the epoch; 0 to 2^64 - 1.
        Returns:
            a new int64 array, shape `(stop - start,)`.
        """

    @property
    def is_endless(self) -> bool:
        """Return True if an epoch never ends; the loader then has no len()."""
        return False

    def counters_at(self, position: int, *, seed: int, epoch: int) -> list[int] | None:
        """Return the counters that a resume at `position` needs, or None if it needs none.

        Args:
            position: from 0 to n.
            seed, epoch: as in `take`.
        """
        return None

    def go_on_at(self, position: int, counters: Sequence[int], *, epoch: int) -> None:  # noqa: B027  # most orders have no counters
        """Accept the counters that `counters_at` returned for `position`, so that they need not be computed again.

        Args:
            position, counters, epoch: from the state that is resumed.
        """

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"<{self.identity}>"

    def __iter__(self) -> Iterator[int]:
        import torch

        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        for start in range(0, self.n, READ_AHEAD):
            yield from self.take(start, min(start + READ_AHEAD, self.n), seed=seed, epoch=0).tolist()
