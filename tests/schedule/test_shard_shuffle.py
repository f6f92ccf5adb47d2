from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload.schedule.node_shuffle import NodeShuffle
from shmload.schedule.shard_shuffle import ShardShuffle

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


@given(SIZES, st.integers(1, 5), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_epoch_has_every_sample_once_and_each_shard_in_one_window(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    order = ShardShuffle(sizes, window=window)
    shard_of = [shard for shard, size in enumerate(sizes) for _ in range(size)]
    found = order.take(0, order.n, seed=seed, epoch=epoch).tolist()
    assert list(range(sum(sizes))) == sorted(found)
    at = 0
    windows = order.shards_from(0, seed=seed, epoch=epoch, num_windows=order.num_windows)
    for number, shards in enumerate(windows):
        samples = sum(sizes[shard] for shard in shards)
        assert set(shards) == {shard_of[index] for index in found[at : at + samples]}
        assert {number} == {order.window_of(shard, seed=seed, epoch=epoch) for shard in shards}
        at += samples
    assert at == order.n


@given(SIZES, st.integers(1, 5), st.data())
def test_any_part_equals_that_part_of_the_epoch(sizes: list[int], window: int, data: st.DataObject) -> None:
    order = ShardShuffle(sizes, window=window)
    start = data.draw(st.integers(0, order.n))
    stop = data.draw(st.integers(start, order.n))
    whole = order.take(0, order.n, seed=1, epoch=2)
    assert whole[start:stop].tolist() == order.take(start, stop, seed=1, epoch=2).tolist()


def test_epochs_and_seeds_differ_and_a_pickle_has_the_same_order() -> None:
    order = ShardShuffle([50] * 20, window=4)
    of = {(seed, epoch): tuple(order.take(0, 1000, seed=seed, epoch=epoch).tolist()) for seed in (1, 2) for epoch in (0, 1)}
    assert len(set(of.values())) == 4
    again = pickle.loads(pickle.dumps(order))
    assert of[2, 1] == tuple(again.take(0, 1000, seed=2, epoch=1).tolist())


def test_windows_continue_into_the_next_epoch() -> None:
    order = ShardShuffle([1, 1, 1, 1], window=3)
    last, first = order.shards_from(1, seed=0, epoch=0, num_windows=2)
    assert (len(last), len(first)) == (1, 3)
    assert first == order.shards_from(0, seed=0, epoch=1, num_windows=1)[0]


def test_shuffle_false_keeps_the_order() -> None:
    order = ShardShuffle([2, 0, 3, 1, 1, 1, 1, 1], window=1, shuffle=False)
    assert order.take(0, 10, seed=3, epoch=1).tolist() == list(range(10))
    assert order.shards_from(0, seed=3, epoch=1, num_windows=7) == [[0], [2], [3], [4], [5], [6], [7]]


def test_neighbors_share_a_shard_as_often_as_the_window_implies() -> None:
    order = ShardShuffle([1000] * 64, window=16)
    shards = order.take(0, order.n, seed=5, epoch=0) // 1000
    assert np.mean(shards[1:] == shards[:-1]) == pytest.approx(1 / 16, abs=0.005)


def test_identity_contains_sizes_and_window() -> None:
    first = ShardShuffle([3, 4], window=2).identity
    assert "shard_shuffle(n=7, shards=2, sizes=" in first
    assert len({first, ShardShuffle([4, 3], window=2).identity, ShardShuffle([3, 4], window=1).identity}) == 3


def test_sizes_are_copied() -> None:
    sizes = np.array([3, 4, 5, 6])
    orders = [ShardShuffle(sizes), NodeShuffle(sizes, nodes=2, global_batch=2)]
    before = [order.identity for order in orders]
    sizes[:] = 1
    assert [order.identity for order in orders] == before
    assert [sorted(order.take(0, 18, seed=1, epoch=0).tolist()) for order in orders] == [list(range(18))] * 2


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes are the samples of each shard, from 0 up"):
        ShardShuffle([3, -1])
    with pytest.raises(ValueError, match=r"the sum of sizes .*an order needs samples"):
        ShardShuffle([0, 0])
    for make in (ShardShuffle, lambda sizes: NodeShuffle(sizes, nodes=1, global_batch=1)):
        with pytest.raises(TypeError, match="sizes must be integers, got dtype float64; give the samples of each shard"):
            make([2.5, 3.0])
