"""Which batch a rank reads at a step, where an order makes the batches itself.

    sequence   0 | 1 | 2 | 3 | 4 | 5 | 6 | 7      the epoch's batches, of any sizes, the same for all ranks
    step 0       0   1   2                        batch step + rank
    step 3                   3   4   5
    step 6                               6   7

A step goes by the number of batches that all ranks have read before it, which is also the position in a state. So a run on
another number of ranks goes on at any step, with exactly the batches that are left, and needs no division.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.schedule import SCHEDULE_VERSION, Uneven

__all__ = ["BatchSchedule"]


@dataclass(frozen=True)
class BatchSchedule:
    """Pure map (epoch, step, rank) -> sample indices over a sequence of batches; its arguments are checked by the loader.

    What `uneven` says of a last step with fewer batches than ranks:

    - "pad": the ranks without one get the epoch's first batches, round and round, none of whose rows counts as valid.
    - "drop": no rank gets any.
    - "exact": the ranks without one have no such step.

    Example:
        >>> from shmload.schedule.length_buckets import LengthBuckets
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
    def stream(self) -> dict[str, Any] | None:
        """What positions and keys mean where they number the items of a stream, as a pipeline's do; else None."""
        return None

    @property
    def rest_rule(self) -> Uneven:
        """What happens to a last step with fewer batches than ranks."""
        return self.uneven

    def end_of(self, epoch: int, rank: int) -> int:
        """Steps from here on do not exist in that epoch, for that rank."""
        num_batches = self.order.num_batches(seed=self.seed, epoch=epoch)
        if self.uneven == "drop":
            return max(num_batches - self.world_size + 1, 0)
        return max(num_batches - rank, 0) if self.uneven == "exact" else num_batches

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        """The sample indices of a rank's step, as a new array."""
        number = (step + rank) % self.order.num_batches(seed=self.seed, epoch=epoch)
        return self.order.batch(number, seed=self.seed, epoch=epoch)

    def behind(self, step: int) -> int:
        """The step that follows one."""
        return step + self.stride

    def number(self, step: int) -> int:
        """How many steps came before it, for a record of them."""
        return -(-step // self.stride)

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

    # ------------------------------------------------------------ datasets that grow: each epoch has a length of its own

    @property
    def grows(self) -> bool:
        """Whether an epoch's samples are settled only shortly before it begins: nothing is ordered ahead of the next one's end."""
        return False

    def begins(self, epoch: int) -> None:
        """Says that a pass over an epoch begins; those before it are over."""

    def ended(self) -> None:
        """Says that no pass runs any more."""

    def children(self, epoch: int) -> dict[str, Any] | None:
        """What a state in that epoch says besides its position."""
        return None

    def go_on_from(self, children: Mapping[str, Any], epoch: int) -> None:
        """Takes over what `children` gave, before a resume in that epoch."""
