"""The contract of all computed orders; add a new one to ORDERS."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shmload import BlockShuffle, Weighted
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.schedule import Schedule

WEIGHTS = np.arange(300) % 7
ORDERS: dict[str, Callable[[], KeyedOrder]] = {
    "blocks": lambda: BlockShuffle(1000, block_size=30, window=4),
    "one window": lambda: BlockShuffle(1000, block_size=64, window=16),
    "large windows": lambda: BlockShuffle(100_000, block_size=9000, window=8),
    "weighted": lambda: Weighted(WEIGHTS),
    "weighted, longer": lambda: Weighted(WEIGHTS, num_samples=5000),
    "without replacement": lambda: Weighted(WEIGHTS, replacement=False),
    "a part without replacement": lambda: Weighted(WEIGHTS, num_samples=100, replacement=False),
}
OTHERS: dict[str, Callable[[], KeyedOrder]] = {
    **ORDERS,
    "fewer": lambda: BlockShuffle(999, block_size=30, window=4),
    "larger blocks": lambda: BlockShuffle(1000, block_size=31, window=4),
    "larger window": lambda: BlockShuffle(1000, block_size=30, window=5),
    "other weights": lambda: Weighted(WEIGHTS + 1),
}


def whole(order: KeyedOrder, *, seed: int = 7, epoch: int = 0) -> list[int]:
    return order.take(0, order.n, seed=seed, epoch=epoch).tolist()


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> KeyedOrder:
    return ORDERS[request.param]()


def test_any_part_equals_that_part_of_the_whole(order: KeyedOrder) -> None:
    expected = np.array(whole(order))
    rng = np.random.default_rng(1)
    for start, stop in np.sort(rng.integers(0, order.n + 1, (50, 2))).tolist():
        got = order.take(start, stop, seed=7, epoch=0)
        assert got.dtype == np.int64
        assert expected[start:stop].tolist() == got.tolist()


def test_returned_array_belongs_to_the_caller(order: KeyedOrder) -> None:
    expected = whole(order)
    order.take(0, order.n, seed=7, epoch=0)[:] = -1
    assert expected == whole(order)


def test_epochs_and_seeds_differ_and_are_reproducible(order: KeyedOrder) -> None:
    keys = [(seed, epoch) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1, 2)]
    first = [whole(order, seed=seed, epoch=epoch) for seed, epoch in keys]
    assert len({tuple(each) for each in first}) == len(keys)
    assert first == [whole(order, seed=seed, epoch=epoch) for seed, epoch in keys]


def test_copy_is_the_same_order(order: KeyedOrder) -> None:
    expected = whole(order)
    copy = pickle.loads(pickle.dumps(order))
    assert expected == whole(copy)
    assert order.identity == copy.identity


def test_identities_distinguish_orders_and_fit_a_state() -> None:
    identities = {make().identity for make in OTHERS.values()}
    assert len(OTHERS) == len(identities)
    assert max(map(len, identities)) < 200


def test_ranks_and_steps_make_up_the_order(order: KeyedOrder) -> None:
    schedule = Schedule(order.n, batch_size=7, seed=7, shuffle=False, world_size=3, order=order)
    rows = [schedule.batch(0, step, rank) for step in range(schedule.num_steps) for rank in range(3)]
    assert whole(order) == np.concatenate(rows)[: order.n].tolist()


@pytest.mark.parametrize("kind", [kind for kind in ORDERS if kind != "large windows"])
def test_torchs_loader_accepts_it_as_a_sampler(kind: str) -> None:
    order = ORDERS[kind]()

    def epoch(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return [int(i) for batch in DataLoader(range(1000), batch_size=64, sampler=order) for i in batch]  # type: ignore[arg-type]  # a range is a dataset

    assert epoch(1) == epoch(1) != epoch(2)
    assert order.n == len(order) == len(epoch(1))
