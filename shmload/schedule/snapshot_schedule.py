"""`SnapshotSchedule`: the schedule of a growing dataset, in which each epoch reads a snapshot with its own length.

Within an epoch it is the plain schedule over the records of the snapshot. A step is named by its first position, which is also the
position in a state, so any number of ranks with the same global batch can continue from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.schedule.any_schedule import Uneven
from shmload.schedule.keyed_batches import BatchSchedule
from shmload.schedule.schedule import Schedule

_plain = lru_cache(maxsize=8)(Schedule)


@dataclass(frozen=True)
class SnapshotSchedule(BatchSchedule):
    """The schedule of a growing dataset: a pure map (snapshot of the epoch, step, rank) -> indices.

    Args:
        order: an `EpochSnapshots`, which knows the snapshot of each epoch.
        batch_size: samples in one step of one rank.
        is_shuffled: use a new random order in each epoch.
    """

    order: Any
    _: KW_ONLY
    batch_size: int
    is_shuffled: bool

    grows = True

    def of(self, epoch: int) -> Schedule:
        """Return the plain schedule over the records of an epoch's snapshot, which is settled if necessary."""
        uneven: Uneven = self.uneven
        return _plain(
            self.order.snapshot(epoch).n,
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=self.is_shuffled,
            uneven=uneven,
            world_size=self.world_size,
        )

    @property
    def stride(self) -> int:
        return self.batch_size * self.world_size

    @property
    def global_batch(self) -> int:
        return self.stride

    @property
    def shuffle(self) -> bool:
        return self.is_shuffled

    @property
    def rows_per_rank(self) -> int | None:
        return self.batch_size

    def end_of(self, epoch: int, rank: int) -> int:
        return self.of(epoch).num_steps_of(rank) * self.stride if self.order.is_settled(epoch) else 0

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        return self.order.keys(epoch, self.of(epoch).batch(epoch, step // self.stride, rank))  # type: ignore[no-any-return]

    def num_valid(self, epoch: int, step: int, rank: int) -> int:
        plain, number = self.of(epoch), step // self.stride
        num_real = plain.num_valid(number, rank)
        return (
            int(self.order.num_kept(epoch, plain.batch(epoch, number, rank)[:num_real])) if self.order.has_lost(epoch) else num_real
        )

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        record = self.of(epoch).index_after(epoch, step // self.stride, rank, row, distance)
        return int(self.order.keys(epoch, np.array([record], np.int64))[0])

    def step_at(self, position: int) -> int:
        """Return the step that starts at `position`.

        Raises:
            ValueError: no step starts there.
        """
        if position % self.stride:
            raise ValueError(
                f"no step starts at position {position}; steps start at the multiples of global_batch={self.stride}: resume with "
                "the same global batch"
            )
        return position

    def begins(self, epoch: int) -> None:
        self.order.begins(epoch)

    def ended(self) -> None:
        self.order.ended()

    def children(self, epoch: int) -> dict[str, Any] | None:
        named = self.order.state(epoch)
        return None if named is None else {"snapshot": named}

    def go_on_from(self, children: Mapping[str, Any], epoch: int) -> None:
        self.order.go_on_from(children.get("snapshot"), epoch)
