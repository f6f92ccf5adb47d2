"""Which items a rank is given at a step: the pipeline's form of shmload's schedule.

    batches of 3, 2 ranks    position  0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 ...
                             rank      0 0 0 1 1 1 | 0 0 0 1  1  1 |
    items, 2 ranks           position  0 1 2 3 4 5   6 7 ...          fetched several at a time: here 3 rounds
                             rank      0 1 0 1 0 1 | 0 1 ...

Positions number the items of all epochs, end to end. A step goes by its first position, which is also what a state holds: the
items that all ranks have had are those before it. So any number of ranks goes on from any position, with exactly the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shmload.schedule.batch_schedule import BatchSchedule
from shmload.schedule.keyed import KeyedOrder
from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.permutation import MAX_N
from shmload.schedule.schedule import Uneven


class Keys(Protocol):
    """What a stream asks of a pipeline's first stage."""

    @property
    def n(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def repeating(self) -> bool: ...

    @property
    def identity(self) -> str: ...

    def take(self, start: int, stop: int) -> NDArray[np.int64]: ...

    def item(self, key: int) -> Any: ...

    def counters_at(self, position: int) -> list[int] | None: ...

    def go_on_at(self, position: int, counters: Sequence[int]) -> None: ...


class SourceOrder(KeyedOrder):
    """A source as the order of a ShmLoader's own: its epochs are the loader's."""

    def __init__(self, source: Keys) -> None:
        self._source = source

    @property
    def n(self) -> int:
        return self._source.n

    @property
    def identity(self) -> str:
        return f"pipeline({self._source.identity})"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        return self._source.take(epoch * self.n + start, epoch * self.n + stop)

    def counters_at(self, position: int, *, seed: int, epoch: int) -> list[int] | None:
        return self._source.counters_at(epoch * self.n + position if self._source.repeating else position)

    def go_on_at(self, position: int, counters: Sequence[int], *, epoch: int) -> None:
        self._source.go_on_at(epoch * self.n + position if self._source.repeating else position, counters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceOrder) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)


class Stream(KeyedBatches):
    """The steps of one pipeline.

    Args:
        batch_size: items of a rank's batch; None: items come singly, and are only fetched together.
    """

    def __init__(self, source: Keys, batch_size: int | None) -> None:
        self.source, self.batch_size = source, batch_size
        self.rounds = 1  # of single items that are fetched together, from the next step that is ordered on
        self.rounds_at: dict[int, int] = {}  # of the steps under way that were ordered with more than one
        self.epoch = 0  # of a source that does not repeat: the one that is delivered

    @property
    def n(self) -> int:
        return self.source.n

    @property
    def identity(self) -> str:
        return f"pipeline({self.source.identity})"

    def schedule(self, *, seed: int, uneven: Uneven, world_size: int) -> StreamSchedule:
        """Which of its items each rank is given."""
        return StreamSchedule(self, seed=seed, uneven=uneven, world_size=world_size)

    def num_batches(self, *, seed: int, epoch: int) -> int:
        """Of one rank alone, as an ordinary batch sampler."""
        return -(-self.n // (self.batch_size or 1))

    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        size = self.batch_size or 1
        return self.source.take(number * size, min((number + 1) * size, self.n))


@dataclass(frozen=True)
class StreamSchedule(BatchSchedule):
    """Pure map (position, rank) -> keys."""

    order: Any  # a Stream

    @property
    def stride(self) -> int:
        """Items of one step over all ranks."""
        return int(self.order.batch_size or 1) * self.world_size

    def behind(self, step: int) -> int:
        """The step that follows one."""
        rounds: int = self.order.rounds_at.get(step, 1)
        return step + self.stride * rounds

    def end_of(self, epoch: int, rank: int) -> int:
        if self.order.source.repeating:
            return int(MAX_N)
        if epoch != self.order.epoch:
            return 0  # nothing is ordered ahead of a pipeline that may have come to its end
        if self.uneven == "drop":
            return max(self.n - self.stride + 1, 0)
        return max(self.n - rank, 0) if self.uneven == "exact" else self.n

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        if self.order.batch_size is None and self.order.rounds > 1:
            self.order.rounds_at[step] = self.order.rounds
        return self._keys(epoch, self.positions(step, rank))

    def positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Of a rank's items at a step; at n and beyond, in a pipeline that does not repeat, stands padding."""
        size, world = self.order.batch_size, self.world_size
        left = MAX_N if self.order.source.repeating else self.n - step
        if size is None:
            first = step + world * np.arange(self.order.rounds_at.get(step, 1))
            if self.uneven == "exact":
                return first[first + rank < step + left] + rank
            return first[first + (world if self.uneven == "drop" else 1) <= step + left] + rank
        if left >= size * world:
            return np.arange(step + rank * size, step + (rank + 1) * size)
        if self.uneven == "pad":
            each = -(-left // world)
            return np.arange(step + rank * each, step + (rank + 1) * each)
        each, longer = divmod(left, world)
        start = step + rank * each + min(rank, longer)
        return np.arange(start, start + each + (rank < longer))

    def position(self, step: int) -> int:
        """Items that all ranks have had before a step."""
        return step if self.order.source.repeating else min(step, self.n)

    def num_valid(self, epoch: int, step: int, rank: int) -> int:
        positions = self.positions(step, rank)
        return len(positions) if self.order.source.repeating else int((positions < self.n).sum())

    def counters(self, epoch: int, step: int) -> Any:
        """What a resume needs besides its position: of a Join, what each member has had."""
        return self.order.source.counters_at(step)

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """The key so many places behind that of a row."""
        return int(self._keys(epoch, self.positions(step, rank)[row : row + 1] + distance)[0])

    def _keys(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(positions):
            return np.empty(0, np.int64)
        source: Keys = self.order.source
        n = self.n
        if not source.repeating:
            positions = positions % n + epoch * n
        first, last = int(positions.min()), int(positions.max())
        if last - first < 64 * len(positions):
            return source.take(first, last + 1)[positions - first]
        return np.concatenate([source.take(at, at + 1) for at in positions.tolist()])  # padding, far from the rest
