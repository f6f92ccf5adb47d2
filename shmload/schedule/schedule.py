"""The plain schedule: which samples a rank reads at a step of an epoch. A pure function, so there is nothing to save.

    position   0 .......... global_batch .......... 2 * global_batch ...... n
    step       |     0      |           1           |       2 (rest)       |
    rank       | 0 | 1 | 2  |  0  |   1   |   2     | 0 | 1 | 2 |

An epoch is one permutation of [0, n). Its positions are cut into global batches, and each global batch into one contiguous slice
for each rank. So the sequence of global batches depends on batch_size * world_size only: the same samples come in the same order
for 1, 2 or 8 ranks and any number of workers, and a resume on other hardware is a division.

Rejected: strided ranks (DistributedSampler's order), because global batches then change with the number of ranks; ranks that each
shuffle their own part, because samples are lost or repeated when ranks join or leave.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from shmload._core.permutation import MAX_N
from shmload.schedule.any_schedule import SCHEDULE_VERSION, AnySchedule, Uneven
from shmload.schedule.checks import MAX_UINT64, whole_number
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.permutation import Permutation
from shmload.schedule.stream_positions import rows_of


@dataclass(frozen=True)
class Schedule(AnySchedule):
    """Pure map (epoch, step, rank) -> sample indices, with O(1) memory and time to seek.

    What `uneven` says of the rest, the positions after the last whole global batch:

    - "pad": every rank gets ceil(rest / world_size) rows; what is missing is taken from the epoch's start (round and
      round if n is smaller than that). With one rank nothing is missing, and the last batch is short as torch's.
    - "drop": no rank gets any.
    - "exact": contiguous slices whose sizes differ by at most one, the first ranks having the longer ones.

    With "exact" and rest < world_size the last ranks have no rows: their last step does not exist (`num_steps_of`), and its batch
    is empty.

    Args:
        n: number of samples, 0 to 2^62.
        batch_size: samples of one rank's step.
        seed: 0 to 2^64 - 1.
        shuffle: False takes the samples in their own order.
        drop_last: the same as uneven="drop".
        world_size: number of ranks.
        order: what to take the samples in instead, with its own n and shuffle=False.
        version: version of the order, for repeating an old run.
    Raises:
        TypeError, ValueError: an argument is of another type, or outside its bounds.
    Example:
        >>> schedule = Schedule(10, batch_size=2, seed=0, shuffle=False, world_size=2)
        >>> [schedule.batch(0, step, rank=1).tolist() for step in range(schedule.num_steps)]
        [[2, 3], [6, 7], [9]]
    """

    n: int
    _: KW_ONLY
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool = False
    uneven: Uneven = "pad"
    world_size: int = 1
    order: KeyedOrder | None = None
    version: int = SCHEDULE_VERSION

    def __post_init__(self) -> None:
        def check(name: str, at_least: int, at_most: int, remedy: str) -> None:
            value = whole_number(f"Schedule: {name}", getattr(self, name), at_least=at_least, at_most=at_most, remedy=remedy)
            object.__setattr__(self, name, value)

        check("n", 0, MAX_N, "give the number of samples, len(dataset)")
        check("batch_size", 1, 1 << 31, "a batch has at least one sample")
        check("seed", 0, MAX_UINT64, "seed % 2**64 is in range")
        check("world_size", 1, 1 << 31, "without torch.distributed world_size is 1")
        for name in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Schedule: {name} must be True or False, got {getattr(self, name)!r}")
        if self.uneven not in get_args(Uneven):
            raise ValueError(
                f"Schedule: uneven must be one of {', '.join(map(repr, get_args(Uneven)))}, got {self.uneven!r}; "
                '"pad" suits training, "exact" evaluation'
            )
        if self.order is not None and (self.shuffle or self.order.n != self.n):
            raise ValueError(
                f"Schedule: with order={self.order.identity} n must be {self.order.n} and shuffle False, got n={self.n}, "
                f"shuffle={self.shuffle}; the order says both"
            )
        if self.version != SCHEDULE_VERSION:
            raise ValueError(
                f"Schedule: version must be {SCHEDULE_VERSION}, the only one this shmload knows, got {self.version!r}; "
                "a newer one needs a newer shmload"
            )

    @cached_property
    def global_batch(self) -> int:
        """Samples of one step over all ranks."""
        return self.batch_size * self.world_size

    @cached_property
    def rest_rule(self) -> Uneven:
        """What happens to the rest: `uneven`, or "drop" if `drop_last` says so."""
        return "drop" if self.drop_last else self.uneven

    @cached_property
    def num_steps(self) -> int:
        """Steps of an epoch: the largest number that any rank has."""
        whole, rest = divmod(self.n, self.global_batch)
        return whole + (rest > 0 and self.rest_rule != "drop")

    def num_steps_of(self, rank: int) -> int:
        """Steps in which `rank` has rows: `num_steps`, or one less where "exact" leaves it none.

        Args:
            rank: from 0 to `world_size - 1`.
        """
        steps = self.num_steps
        return steps - (rank > 0 and steps > 0 and self.num_rows(steps - 1, rank) == 0)

    def end_of(self, epoch: int, rank: int) -> int:
        """Steps from here on do not exist for that rank, in any epoch."""
        return self.num_steps_of(rank)

    def num_rows(self, step: int, rank: int) -> int:
        """Rows of the batch of a `step` and a `rank`, padding included.

        Raises:
            IndexError: there is no such step or rank.
        """
        start, stop = self._span(step, rank)
        return stop - start

    def num_valid(self, step: int, rank: int) -> int:
        """Rows of the batch of a `step` and a `rank` that are not padding; they come first.

        Raises:
            IndexError: there is no such step or rank.
        """
        start, stop = self._span(step, rank)
        return max(min(stop, self.n) - start, 0)

    def position(self, step: int) -> int:
        """Samples of the epoch that all ranks have consumed before `step`; at `num_steps`, by the epoch's end.

        Raises:
            IndexError: there is no such step.
        """
        if not 0 <= step <= self.num_steps:
            raise IndexError(f"Schedule: step must be in [0, {self.num_steps}], got {step}")
        return min(step * self.global_batch, self.n)

    def step_at(self, position: int) -> int:
        """The step that starts at `position`: the inverse of `position`.

        Raises:
            ValueError: no step starts there.
        """
        step = -(-position // self.global_batch)
        if not 0 <= step <= self.num_steps or self.position(step) != position:
            raise ValueError(
                f"Schedule: no step starts at position {position}; steps start at the multiples of global_batch="
                f"{self.global_batch} and end at {self.position(self.num_steps)}: resume with the same global batch"
            )
        return step

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        """The sample indices of a rank's step.

        Args:
            epoch: 0 to 2^64 - 1.
            step: from 0 to `num_steps - 1`.
            rank: from 0 to `world_size - 1`.
        Returns:
            a new int64 array, shape `(num_rows(step, rank),)`: empty where "exact" leaves the rank no rows.
        Raises:
            IndexError: there is no such step or rank.
        """
        start, stop = self._span(step, rank)
        out = np.empty(stop - start, np.int64)
        done = 0
        while done < len(out):  # once, unless padding wraps round the epoch
            position = (start + done) % self.n
            part = out[done : done + self.n - position]
            self._take(epoch, position, part)
            done += len(part)
        return out

    def batches(self, epoch: int, step: int, rank: int, most: int) -> NDArray[np.int64]:
        """The sample indices of several of a rank's steps, at less cost than one by one; none beyond the last whole step.

        Args:
            epoch, rank: as of `batch`.
            step: the first of them.
            most: how many are wanted; less than one is one.
        Returns:
            a new int64 array, shape `(steps, batch_size)`; `steps` is 0 where `step` has not `batch_size` rows in every rank.
        Raises:
            IndexError: there is no such rank.
        """
        count = max(min(max(most, 1), self.n // self.global_batch - step), 0)
        out = np.empty((count, self.batch_size), np.int64)
        if self.world_size == 1 and count:  # the steps lie end to end
            self._take(epoch, self._span(step, rank)[0], out.reshape(-1))
        else:
            for number, row in enumerate(out, step):
                self._take(epoch, self._span(number, rank)[0], row)
        return out

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """The index so many places behind that of a row, in the epoch's order and round its end.

        Args:
            epoch, step, rank: as of `batch`.
            row: of the batch.
            distance: how many places; 1 is the next.
        """
        position = (self._span(step, rank)[0] + row + distance) % self.n
        out = np.empty(1, np.int64)
        self._take(epoch, position, out)
        return int(out[0])

    def counters(self, epoch: int, step: int) -> list[int] | None:
        """What a resume at a `step` of an `epoch` needs besides its position: a mixture's draws so far; None of other orders."""
        if self.order is None:
            return None
        return self.order.counters_at(self.position(step), seed=self.seed, epoch=epoch)

    def _take(self, epoch: int, position: int, out: NDArray[np.int64]) -> None:
        """The indices from that position of the epoch's order on."""
        if self.order is not None:
            out[:] = self.order.take(position, position + len(out), seed=self.seed, epoch=epoch)
        elif self.shuffle:
            _permutation(self.n, self.seed, epoch).fill(position, out)
        else:
            out[:] = np.arange(position, position + len(out))

    def _span(self, step: int, rank: int) -> tuple[int, int]:
        """Positions of a rank's step, from start to stop; padding stands at n and beyond."""
        if not (0 <= step < self.num_steps and 0 <= rank < self.world_size):
            raise IndexError(
                f"Schedule: step must be in [0, {self.num_steps}) and rank in [0, {self.world_size}), got step={step}, rank={rank}"
            )
        first = step * self.global_batch
        return rows_of(first, rank, self.n - first, self.rest_rule, self.world_size, self.batch_size)


@lru_cache(maxsize=16)
def _permutation(n: int, seed: int, epoch: int) -> Permutation:
    """Epochs in use: a small n's table (up to 128 KiB) is shuffled once per epoch, not per batch."""
    return Permutation(n, seed=seed, epoch=epoch)
