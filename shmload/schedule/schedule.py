"""`Schedule`: which samples a rank reads at a step of an epoch. A pure function, so there is nothing to save.

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
    """The schedule of the plain or shuffled order, or of a `KeyedOrder`: a pure map (epoch, step, rank) -> sample indices.

    It needs O(1) memory, and O(1) time to seek. Steps are numbered from 0.

    `uneven` decides the rest, the positions after the last whole global batch:

    - "pad": every rank gets ceil(rest / world_size) rows; missing rows repeat the start of the epoch (several times if n is
      smaller than that). With one rank nothing is missing, and the last batch is short, as in torch.
    - "drop": no rank gets any of it.
    - "exact": contiguous slices whose sizes differ by at most one; the first ranks have the longer ones.

    With "exact" and rest < world_size, the last ranks have no rows: their last step does not exist (`num_steps_of`), and its batch
    is empty.

    Args:
        n: number of samples, 0 to 2^62.
        batch_size: samples in one step of one rank.
        seed: 0 to 2^64 - 1.
        shuffle: False keeps the samples in their own order.
        drop_last: the same as uneven="drop".
        world_size: number of ranks.
        order: the order to read samples in, instead of the plain or shuffled one; requires its own n and shuffle=False.
        version: version of the order, to repeat an old run.
    Raises:
        TypeError, ValueError: an argument has the wrong type, or is out of bounds.
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
        """Return the samples of one step over all ranks."""
        return self.batch_size * self.world_size

    @cached_property
    def rest_rule(self) -> Uneven:
        """Return what happens to the rest: `uneven`, or "drop" if `drop_last` is set."""
        return "drop" if self.drop_last else self.uneven

    @cached_property
    def num_steps(self) -> int:
        """Return the number of steps in an epoch, for the rank with the most."""
        whole, rest = divmod(self.n, self.global_batch)
        return whole + (rest > 0 and self.rest_rule != "drop")

    def num_steps_of(self, rank: int) -> int:
        """Return the number of steps in which `rank` has rows: `num_steps`, or one less if "exact" leaves it no rows in the last.

        Args:
            rank: from 0 to `world_size - 1`.
        """
        steps = self.num_steps
        return steps - (rank > 0 and steps > 0 and self.num_rows(steps - 1, rank) == 0)

    def end_of(self, epoch: int, rank: int) -> int:
        """Return the first step that does not exist for `rank`, in any epoch."""
        return self.num_steps_of(rank)

    def num_rows(self, step: int, rank: int) -> int:
        """Return the number of rows in the batch of `step` and `rank`, including padding.

        Raises:
            IndexError: this step or rank does not exist.
        """
        start, stop = self._span(step, rank)
        return stop - start

    def num_valid(self, step: int, rank: int) -> int:
        """Return the number of rows in the batch of `step` and `rank` that are not padding; they come first.

        Raises:
            IndexError: this step or rank does not exist.
        """
        start, stop = self._span(step, rank)
        return max(min(stop, self.n) - start, 0)

    def position(self, step: int) -> int:
        """Return the number of samples of the epoch that all ranks have consumed before `step` (or in all, for `num_steps`).

        Raises:
            IndexError: this step does not exist.
        """
        if not 0 <= step <= self.num_steps:
            raise IndexError(f"Schedule: step must be in [0, {self.num_steps}], got {step}")
        return min(step * self.global_batch, self.n)

    def step_at(self, position: int) -> int:
        """Return the step that starts at `position`: the inverse of `position()`.

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
        """Return the sample indices of a rank's step.

        Args:
            epoch: 0 to 2^64 - 1.
            step: from 0 to `num_steps - 1`.
            rank: from 0 to `world_size - 1`.
        Returns:
            a new int64 array, shape `(num_rows(step, rank),)`; empty if "exact" leaves the rank no rows.
        Raises:
            IndexError: this step or rank does not exist.
        """
        start, stop = self._span(step, rank)
        out = np.empty(stop - start, np.int64)
        done = 0
        while done < len(out):  # once, unless padding wraps around the epoch
            position = (start + done) % self.n
            part = out[done : done + self.n - position]
            self._take(epoch, position, part)
            done += len(part)
        return out

    def batches(self, epoch: int, step: int, rank: int, most: int) -> NDArray[np.int64]:
        """Return the sample indices of several steps of a rank, up to the last whole step, faster than one by one.

        Args:
            epoch, rank: as in `batch`.
            step: the first step.
            most: the largest number of steps to return; at least 1 is assumed.
        Returns:
            a new int64 array, shape `(steps, batch_size)`; `steps` is 0 if some rank has fewer than `batch_size` rows in `step`.
        Raises:
            IndexError: this rank does not exist.
        """
        count = max(min(max(most, 1), self.n // self.global_batch - step), 0)
        out = np.empty((count, self.batch_size), np.int64)
        if self.world_size == 1 and count:  # consecutive steps are contiguous
            self._take(epoch, self._span(step, rank)[0], out.reshape(-1))
        else:
            for number, row in enumerate(out, step):
                self._take(epoch, self._span(number, rank)[0], row)
        return out

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """Return the index `distance` places after a row in the order of the epoch, wrapping around at the end.

        Args:
            epoch, step, rank: as in `batch`.
            row: a row of the batch.
            distance: number of places; 1 is the next.
        """
        position = (self._span(step, rank)[0] + row + distance) % self.n
        out = np.empty(1, np.int64)
        self._take(epoch, position, out)
        return int(out[0])

    def counters(self, epoch: int, step: int) -> list[int] | None:
        """Return the counters that a resume at `step` of an `epoch` needs (a mixture's draws so far), or None without counters."""
        if self.order is None:
            return None
        return self.order.counters_at(self.position(step), seed=self.seed, epoch=epoch)

    def _take(self, epoch: int, position: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the indices from `position` on."""
        if self.order is not None:
            out[:] = self.order.take(position, position + len(out), seed=self.seed, epoch=epoch)
        elif self.shuffle:
            _permutation(self.n, self.seed, epoch).fill(position, out)
        else:
            out[:] = np.arange(position, position + len(out))

    def _span(self, step: int, rank: int) -> tuple[int, int]:
        """Return the positions of a rank's step as (start, stop); positions of n and more are padding."""
        if not (0 <= step < self.num_steps and 0 <= rank < self.world_size):
            raise IndexError(
                f"Schedule: step must be in [0, {self.num_steps}) and rank in [0, {self.world_size}), got step={step}, rank={rank}"
            )
        first = step * self.global_batch
        return rows_of(first, rank, self.n - first, self.rest_rule, self.world_size, self.batch_size)


@lru_cache(maxsize=16)
def _permutation(n: int, seed: int, epoch: int) -> Permutation:
    """Cache permutations in use, so that the table of a small n (up to 128 KiB) is shuffled once per epoch, not once per batch."""
    return Permutation(n, seed=seed, epoch=epoch)
