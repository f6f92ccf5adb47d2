"""`KeyedBatches`: orders that decide which samples each batch contains; and `BatchSchedule`, which deals their batches to ranks.

Seed mode accepts such an order as `batch_sampler=`. The batches of an epoch are one sequence for all ranks, a pure function of
(seed, epoch, number); epochs may have different numbers of batches.

    sequence   0 | 1 | 2 | 3 | 4 | 5 | 6 | 7      the epoch's batches, of any sizes, the same for all ranks
    step 0       0   1   2                        rank r reads batch step + r; here 3 ranks
    step 3                   3   4   5
    step 6                               6   7

A step is identified by the number of batches that all ranks have read before it, which is also the position in a state. So a run on
another number of ranks can continue at any step with exactly the remaining batches, without a division.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from shmload.schedule.any_schedule import SCHEDULE_VERSION, AnySchedule, Uneven
from shmload.schedule.stream_positions import stream_end


class KeyedBatches(ABC):
    """Base class of orders that decide which samples each batch contains. Subclass it to write your own.

    In seed mode, give it as `batch_sampler=`; its batches are dealt to the ranks. Anywhere else it is an ordinary batch sampler:
    each `iter` draws a seed from torch's global generator, as torch's RandomSampler does. Seed mode calls `batch` and
    `num_batches`, and refuses a subclass that overrides only `__iter__` or `__len__`.

    Attributes:
        num_needed: as in KeyedOrder.
    """

    num_needed: int | None = None
    _newest_seed = 0  # of the newest `iter`, whose epoch `len` describes outside seed mode

    @property
    @abstractmethod
    def n(self) -> int:
        """Return the number of samples in an epoch."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Return a text that identifies these batches and what they were made from. A state with another identity is rejected."""

    @abstractmethod
    def num_batches(self, *, seed: int, epoch: int) -> int:
        """Return the number of batches in an epoch, over all ranks.

        Args:
            seed, epoch: the run and the epoch; 0 to 2^64 - 1.
        """

    @abstractmethod
    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the indices of one batch of an epoch.

        Args:
            number: `0 <= number < num_batches`.
            seed, epoch: as in `num_batches`.
        Returns:
            a new int64 array.
        """

    def schedule(self, *, seed: int, uneven: Uneven, world_size: int) -> BatchSchedule:
        """Return the schedule that deals these batches to ranks. The loader calls this.

        Args:
            seed: the loader's seed.
            uneven: as for `BatchSchedule`.
            world_size: number of ranks.
        """
        return BatchSchedule(self, seed=seed, uneven=uneven, world_size=world_size)

    def __len__(self) -> int:
        """Return the number of batches of the newest `iter`. Before the first `iter` it may differ by a few."""
        return self.num_batches(seed=self._newest_seed, epoch=0)

    def __repr__(self) -> str:
        return f"<{self.identity}>"

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        seed = self._newest_seed = int(torch.empty((), dtype=torch.int64).random_().item())
        for number in range(self.num_batches(seed=seed, epoch=0)):
            yield self.batch(number, seed=seed, epoch=0).tolist()


@dataclass(frozen=True)
class BatchSchedule(AnySchedule):
    """The schedule of an order that makes batches: a pure map (epoch, step, rank) -> indices. The loader checks the arguments.

    `uneven` decides a last step with fewer batches than ranks:

    - "pad": ranks without a batch get the first batches of the epoch again, and none of their rows counts as valid.
    - "drop": no rank gets a batch.
    - "exact": ranks without a batch do not have this step.

    Example:
        >>> from shmload import LengthBuckets
        >>> batches = LengthBuckets([3, 1, 4, 1, 5], batch_size=1)
        >>> schedule = BatchSchedule(batches, seed=7, world_size=2)
        >>> steps = range(0, schedule.end_of(0, rank=1), schedule.stride)
        >>> [schedule.num_valid(0, step, rank=1) for step in steps]
        [1, 1, 0]
    """

    order: KeyedBatches
    _: KW_ONLY
    seed: int
    uneven: Uneven = "pad"
    world_size: int = 1
    version: int = SCHEDULE_VERSION

    @property
    def n(self) -> int:
        """Return the number of samples in an epoch."""
        return self.order.n

    @property
    def stride(self) -> int:
        """Return the difference between two consecutive steps."""
        return self.world_size

    @property
    def global_batch(self) -> int:
        """Return 0: batches have different sizes, and each rank reads a whole batch."""
        return 0

    @property
    def shuffle(self) -> bool:
        """Return False: the order shuffles."""
        return False

    @property
    def rows_per_rank(self) -> int | None:
        """Return None, because batches have different sizes."""
        return None

    @property
    def rest_rule(self) -> Uneven:
        """Return the rule for a last step with fewer batches than ranks."""
        return self.uneven

    def end_of(self, epoch: int, rank: int) -> int:
        """Return the first step that does not exist in `epoch` for `rank`."""
        num_batches = self.order.num_batches(seed=self.seed, epoch=epoch)
        return stream_end(num_batches, rank, uneven=self.uneven, stride=self.world_size)

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        """Return the sample indices of a rank's step as a new int64 array."""
        number = (step + rank) % self.order.num_batches(seed=self.seed, epoch=epoch)
        return self.order.batch(number, seed=self.seed, epoch=epoch)

    def batches(self, epoch: int, step: int, rank: int, most: int) -> NDArray[np.int64]:
        """Return an array without batches, because they differ in size; the caller then uses `batch`. See Schedule.batches."""
        return np.empty((0, 0), np.int64)

    def num_valid(self, epoch: int, step: int, rank: int) -> int:
        """Return the number of rows of a rank's step that are not padding: all or none."""
        is_padding = step + rank >= self.order.num_batches(seed=self.seed, epoch=epoch)
        return 0 if is_padding else len(self.batch(epoch, step, rank))

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """Return the index `distance` places after a row in the sequence of the epoch's batches, wrapping around at the end."""
        place = row + distance
        while place >= len(batch := self.batch(epoch, step, rank)):
            place -= len(batch)
            step += 1
        return int(batch[place])

    def position(self, step: int) -> int:
        """Return the number of batches that all ranks have consumed before `step`: the step itself."""
        return step

    def step_at(self, position: int) -> int:
        """Return the step that starts at `position`: the position itself."""
        return position

    def counters(self, epoch: int, step: int) -> None:
        """Return None: a resume needs only the position."""
