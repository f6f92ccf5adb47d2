"""Orders that decide themselves which samples each batch contains, and the schedule that deals their batches to ranks.

Seed mode accepts such an order as `batch_sampler=`. The batches of an epoch are one sequence for all ranks, a pure function of
(seed, epoch, number); epochs may have different numbers of batches.

    sequence   0 | 1 | 2 | 3 | 4 | 5 | 6 | 7      the epoch's batches, of any sizes, the same for all ranks
    step 0       0   1   2                        rank r reads batch step + r; here 3 ranks
    step 3                   3   4   5
    step 6                               6   7

A step is named by the number of batches that all ranks have read before it, which is also the position in a state. So a run on
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
    """Which samples each batch of an epoch holds: the base of orders by batches, for one of your own.

    In seed mode it is given as `batch_sampler=`, and its batches are dealt to the ranks. Anywhere else it is an ordinary batch
    sampler: each `iter` draws a seed from torch's global generator, as torch's RandomSampler does.

    Attributes:
        num_needed: as of KeyedOrder.
    """

    num_needed: int | None = None
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

    def schedule(self, *, seed: int, uneven: Uneven, world_size: int) -> BatchSchedule:
        """Which of its batches each rank reads."""
        return BatchSchedule(self, seed=seed, uneven=uneven, world_size=world_size)

    def __len__(self) -> int:
        """Batches of the newest `iter`; before the first, those of another epoch, which may have a few more or less."""
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
    """Pure map (epoch, step, rank) -> sample indices over a sequence of batches; its arguments are checked by the loader.

    What `uneven` says of a last step with fewer batches than ranks:

    - "pad": the ranks without one get the epoch's first batches, round and round, none of whose rows counts as valid.
    - "drop": no rank gets any.
    - "exact": the ranks without one have no such step.

    Example:
        >>> from shmload.schedule.samplers import LengthBuckets
        >>> batches = LengthBuckets([3, 1, 4, 1, 5], batch_size=1)
        >>> schedule = BatchSchedule(batches, seed=7, world_size=2)
        >>> [schedule.num_valid(0, step, rank=1) for step in range(0, schedule.end_of(0, rank=1), schedule.stride)]
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
        """Samples of an epoch."""
        return self.order.n

    @property
    def stride(self) -> int:
        """From one step to the next."""
        return self.world_size

    @property
    def global_batch(self) -> int:
        """Not known: batches differ, and ranks read whole ones."""
        return 0

    @property
    def shuffle(self) -> bool:
        """The order says how."""
        return False

    @property
    def rows_per_rank(self) -> int | None:
        """Of a rank's step; None where batches differ."""
        return None

    @property
    def rest_rule(self) -> Uneven:
        """What happens to a last step with fewer batches than ranks."""
        return self.uneven

    def end_of(self, epoch: int, rank: int) -> int:
        """Steps from here on do not exist in that epoch, for that rank."""
        num_batches = self.order.num_batches(seed=self.seed, epoch=epoch)
        return stream_end(num_batches, rank, uneven=self.uneven, stride=self.world_size)

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        """The sample indices of a rank's step, as a new array."""
        number = (step + rank) % self.order.num_batches(seed=self.seed, epoch=epoch)
        return self.order.batch(number, seed=self.seed, epoch=epoch)

    def batches(self, epoch: int, step: int, rank: int, most: int) -> NDArray[np.int64]:
        """As of Schedule; none where they are worked out one by one."""
        return np.empty((0, 0), np.int64)

    def num_valid(self, epoch: int, step: int, rank: int) -> int:
        """Rows of the batch that are not padding: all or none."""
        is_padding = step + rank >= self.order.num_batches(seed=self.seed, epoch=epoch)
        return 0 if is_padding else len(self.batch(epoch, step, rank))

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """The index so many places behind that of a row, in the epoch's batches laid end to end, and round their end."""
        place = row + distance
        while place >= len(batch := self.batch(epoch, step, rank)):
            place -= len(batch)
            step += 1
        return int(batch[place])

    def position(self, step: int) -> int:
        """Batches of the epoch that all ranks have consumed before `step`: the step itself."""
        return step

    def step_at(self, position: int) -> int:
        """The step that starts at `position`; there is one everywhere."""
        return position

    def counters(self, epoch: int, step: int) -> None:
        """A resume needs nothing besides its position."""
