"""The schedule of a pipeline: the items that each rank receives at each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.pipeline.item_sequence import ItemSequence
from shmload.schedule.any_schedule import Uneven
from shmload.schedule.keyed_batches import BatchSchedule, KeyedBatches
from shmload.schedule.stream_positions import stream_end, stream_positions


class ItemStream(KeyedBatches):
    """The order of a pipeline's items, as a batch sampler of the loader.

    Args:
        source: sequence of keys.
        batch_size: items of a rank's batch, or None for single items, which are fetched in groups.
    """

    n, identity = 0, ""

    def __init__(self, source: ItemSequence, batch_size: int | None) -> None:
        self.source, self.batch_size = source, batch_size
        self.n, self.identity = source.n, f"pipeline({source.identity})"
        self.rounds = 1  # single items fetched together, from the next ordered step on
        self.rounds_at: dict[int, int] = {}  # step -> rounds, for ordered steps that were not delivered yet, if more than one
        self.epoch = 0  # the current epoch of a source that does not repeat

    def schedule(self, *, seed: int, uneven: Uneven, world_size: int) -> StreamSchedule:
        """Return the schedule, which assigns items to ranks."""
        return StreamSchedule(self, seed=seed, uneven=uneven, world_size=world_size)

    def num_batches(self, *, seed: int, epoch: int) -> int:
        """Return the number of batches of an ordinary batch sampler for one rank."""
        return -(-self.n // (self.batch_size or 1))

    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        size = self.batch_size or 1
        return self.source.keys_at(number * size, min((number + 1) * size, self.n))


@dataclass(frozen=True)
class StreamSchedule(BatchSchedule):
    """Maps (step, rank) to keys. A step is the position of its first item over all ranks.

    The keys of a position never change. The number of a step's positions depends on the order's `rounds` at the call of `batch`,
    which records it in `rounds_at`.
    """

    order: Any  # an ItemStream

    @cached_property
    def stride(self) -> int:
        """Return the number of items in one step, over all ranks."""
        return int(self.order.batch_size or 1) * self.world_size

    @property
    def rows_per_rank(self) -> int | None:
        size: int | None = self.order.batch_size
        return size

    @cached_property
    def is_endless(self) -> bool:
        return bool(self.order.source.repeating)

    @property
    def stream(self) -> dict[str, Any]:
        """Return a description of keys and positions, for the header of an audit."""
        return {"members": self.order.source.members, "is_endless": self.is_endless}

    def number(self, step: int) -> int:
        """Return a step's number in audit records: its position, which does not depend on the number of ranks."""
        return step

    def next_step(self, step: int) -> int:
        """Return the step after this one."""
        rounds: int = self.order.rounds_at.get(step, 1)
        return step + self.stride * rounds

    def end_of(self, epoch: int, rank: int) -> int:
        if not self.is_endless and epoch != self.order.epoch:
            return 0  # nothing is ordered beyond the end of the current epoch
        return stream_end(None if self.is_endless else self.n, rank, uneven=self.uneven, stride=self.stride)

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        if self.order.rounds > 1:
            self.order.rounds_at[step] = self.order.rounds
        else:
            self.order.rounds_at.pop(step, None)
        return self._keys(epoch, self.positions(step, rank))

    def batches(self, epoch: int, step: int, rank: int, most: int) -> NDArray[np.int64]:
        source, size = self.order.source, self.order.batch_size
        left = most if self.is_endless else (self.n - step) // self.stride
        count, first = max(min(max(most, 1), left), 0), self._at(epoch, step)
        if self.world_size == 1:  # the steps are contiguous
            keys: NDArray[np.int64] = source.keys_at(first, first + count * size)
            return keys.reshape(count, size)
        out = np.empty((count, size), np.int64)
        for number, row in enumerate(out):
            start = first + number * self.stride + rank * size
            row[:] = source.keys_at(start, start + size)
        return out

    def positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank's items in a step; n and above are padding, unless the source repeats."""
        return stream_positions(
            step,
            rank,
            n=None if self.is_endless else self.n,
            uneven=self.uneven,
            world_size=self.world_size,
            batch_size=self.order.batch_size,
            num_rounds=self.order.rounds_at.get(step, 1),
        )

    def position(self, step: int) -> int:
        """Return the number of items that all ranks have consumed before a step."""
        return step if self.is_endless else min(step, self.n)

    def num_valid(self, epoch: int, step: int, rank: int) -> int:
        positions = self.positions(step, rank)
        return len(positions) if self.is_endless else int((positions < self.n).sum())

    def counters(self, epoch: int, step: int) -> Any:
        """Return the counters that a resume needs besides the position: for a Join, the number of items drawn from each member."""
        return self.order.source.counters_at(self._at(epoch, self.position(step))) or None

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """Return the key at a distance after the key of a row."""
        return int(self._keys(epoch, self.positions(step, rank)[row : row + 1] + distance)[0])

    def _at(self, epoch: int, position: int) -> int:
        """Convert a position of an epoch to a position of the source."""
        return position if self.is_endless else epoch * self.n + position

    def _keys(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(positions):
            return np.empty(0, np.int64)
        source: ItemSequence = self.order.source
        if not self.is_endless:
            positions = positions % self.n + epoch * self.n
        if len(positions) == 1:
            return source.keys_at(at := int(positions[0]), at + 1)
        first, last = int(positions.min()), int(positions.max())
        if last - first < 64 * len(positions):
            return source.keys_at(first, last + 1)[positions - first]
        return np.concatenate([source.keys_at(at, at + 1) for at in positions.tolist()])  # padding is far from the rest
