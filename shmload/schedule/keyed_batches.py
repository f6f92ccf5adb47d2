"""Orders that say themselves which samples each batch of an epoch holds: what seed mode takes as `batch_sampler=`.

The batches of an epoch are one sequence for all ranks, a pure function of (seed, epoch, number): see batch_schedule.py for who
reads which. There may be another number of them in each epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shmload.schedule.batch_schedule import BatchSchedule
    from shmload.schedule.schedule import Uneven

__all__ = ["KeyedBatches"]


class KeyedBatches(ABC):
    """Which samples each batch of an epoch holds: the base of orders by batches, for one of your own.

    In seed mode it is given as `batch_sampler=`, and its batches are dealt to the ranks. Anywhere else it is an ordinary batch
    sampler: each `iter` draws a seed from torch's global generator, as torch's RandomSampler does.
    """

    _newest_seed = 0  # of `iter`: only its epoch has a length outside seed mode

    @property
    @abstractmethod
    def n(self) -> int:
        """Samples of an epoch."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Which batches these are, with what they were made of; a state saved under others is refused."""

    @abstractmethod
    def num_batches(self, *, seed: int, epoch: int) -> int:
        """Batches of an epoch, over all ranks.

        Args:
            seed, epoch: which epoch of which run; 0 to 2^64 - 1.
        """

    @abstractmethod
    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices of one of an epoch's batches.

        Args:
            number: `0 <= number < num_batches`.
            seed, epoch: as of `num_batches`.
        Returns:
            a new int64 array.
        """

    def schedule(self, *, seed: int, uneven: "Uneven", world_size: int) -> "BatchSchedule":
        """Which of its batches each rank reads."""
        from shmload.schedule.batch_schedule import BatchSchedule

        return BatchSchedule(self, seed=seed, uneven=uneven, world_size=world_size)

    def __len__(self) -> int:
        """Batches of the newest `iter`; before the first, those of another epoch, which may have a few more or less."""
        return self.num_batches(seed=self._newest_seed, epoch=0)

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        seed = self._newest_seed = int(torch.empty((), dtype=torch.int64).random_().item())
        for number in range(self.num_batches(seed=seed, epoch=0)):
            yield self.batch(number, seed=seed, epoch=0).tolist()
