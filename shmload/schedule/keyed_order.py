"""The base class of orders that are pure functions of (seed, epoch, position).

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
    """Which index stands at each position of an epoch: the base of orders, for one of your own.

    In seed mode it is given as `sampler=` and sharded over ranks. Anywhere else it is an ordinary sampler: each `iter` draws a
    seed from torch's global generator, as torch's RandomSampler does.

    Attributes:
        num_needed: samples that the dataset has to have, as an index may be one less; a loader refuses a shorter one. None: any.
    """

    num_needed: int | None = None

    @property
    @abstractmethod
    def n(self) -> int:
        """Positions of an epoch, which need not be the dataset's samples."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Which order this is, with what it was made of; a state saved under another is refused."""

    @abstractmethod
    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices at positions [start, stop).

        Args:
            start, stop: `0 <= start <= stop <= n`; not checked.
            seed, epoch: which epoch of which run; 0 to 2^64 - 1.
        Returns:
            a new int64 array, shape `(stop - start,)`.
        """

    @property
    def is_endless(self) -> bool:
        """Whether an epoch has no end: then a loader has no len()."""
        return False

    def counters_at(self, position: int, *, seed: int, epoch: int) -> list[int] | None:
        """What a resume at that position needs besides it; None: nothing.

        Args:
            position: from 0 to n.
            seed, epoch: as of `take`.
        """
        return None

    def go_on_at(self, position: int, counters: Sequence[int], *, epoch: int) -> None:  # noqa: B027  # most have none
        """Tells what `counters_at` gave for that position, so that it need not be worked out anew.

        Args:
            position, counters, epoch: of the state that is resumed.
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
