"""A custom order works in the schedule, the state and the loader as the built-in ones do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from shmload import Schedule, ShmLoader, StateMismatch
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.state import make_state, resume


class Backwards(KeyedOrder):
    """Reverse order rotated by the epoch, with a counter to save: it uses every feature of an order."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.told: tuple[int, int, list[int]] | None = None

    @property
    def n(self) -> int:
        return self._n

    @property
    def identity(self) -> str:
        return f"backwards(n={self._n})"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        return (self._n - 1 - np.arange(start, stop, dtype=np.int64) + epoch) % self._n

    def counters_at(self, position: int, *, seed: int, epoch: int) -> list[int]:
        return [position, seed, epoch]

    def go_on_at(self, position: int, counters: Sequence[int], *, epoch: int) -> None:
        self.told = (position, epoch, list(counters))


def schedule_of(n: int = 11, **options: int) -> Schedule:
    return Schedule(n, **{"batch_size": 2, "seed": 7, **options}, shuffle=False, order=Backwards(n))  # type: ignore[arg-type]  # options are of several types


def test_schedule_divides_it_into_batches_and_ranks() -> None:
    schedule = schedule_of(world_size=2)
    got = [[schedule.batch(1, step, rank).tolist() for rank in range(2)] for step in range(schedule.num_steps)]
    assert got == [[[0, 10], [9, 8]], [[7, 6], [5, 4]], [[3, 2], [1, 0]]]
    assert schedule.index_after(1, 0, 0, 1, 1) == 9


def test_its_n_is_that_of_the_schedule() -> None:
    with pytest.raises(ValueError, match=r"order=backwards\(n=5\) n must be 5 and shuffle False, got n=6"):
        Schedule(6, batch_size=1, seed=0, shuffle=False, order=Backwards(5))


def test_state_names_it_and_restores_its_counters() -> None:
    state = make_state(schedule_of(), epoch=3, step=2)
    assert (state["order"], state["counters"]) == ("backwards(n=11)", [4, 7, 3])
    again = schedule_of(batch_size=1, world_size=2)
    assert resume(state, again) == (3, 2)
    assert isinstance(again.order, Backwards)
    assert again.order.told == (4, 3, [4, 7, 3])


def test_state_of_another_order_is_refused() -> None:
    plain = Schedule(11, batch_size=2, seed=7, shuffle=False)
    with pytest.raises(StateMismatch, match=r"order: saved 'backwards\(n=11\)', now None"):
        resume(make_state(schedule_of(), epoch=0, step=0), plain)
    with pytest.raises(StateMismatch, match=r"order: saved None, now 'backwards\(n=11\)'"):
        resume(make_state(plain, epoch=0, step=0), schedule_of())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_is_sharded_and_resumed_as_a_sampler(num_workers: int) -> None:
    def loader(rank: int, world_size: int, batch_size: int) -> ShmLoader[int]:
        return ShmLoader(
            range(11),  # type: ignore[arg-type]  # a sequence is a dataset
            batch_size,
            sampler=Backwards(11),
            seed=7,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
        )

    with loader(0, 2, 2) as first, loader(1, 2, 2) as second, loader(0, 1, 4) as resumed:
        batches = [(a.tolist(), b.tolist()) for a, b in zip(first, second, strict=True)]
        assert batches == [([10, 9], [8, 7]), ([6, 5], [4, 3]), ([2, 1], [0, 10])]
        passing = iter(first)
        next(passing)
        resumed.load_state_dict(first.state_dict())
        assert [batch.tolist() for batch in resumed] == [[7, 6, 5, 4], [3, 2, 1]]
        assert len(resumed) == 3


def test_it_is_an_ordinary_sampler_elsewhere() -> None:
    torch.manual_seed(1)
    expected = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert expected == [int(x) for x in DataLoader(range(10), sampler=Backwards(10))]  # type: ignore[arg-type]  # as above
    assert expected == [int(x) for x in ShmLoader(range(10), sampler=Backwards(10))]  # type: ignore[arg-type]  # as above
