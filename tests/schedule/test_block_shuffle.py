"""Block shuffle: every sample once, every block within one window, and as random as documented."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shmload import BlockShuffle

LIMIT = 4.5  # z score; seeds are fixed, so results are reproducible


def whole(order: BlockShuffle, *, seed: int = 3, epoch: int = 0) -> NDArray[np.int64]:
    return order.take(0, order.n, seed=seed, epoch=epoch)


@settings(deadline=None)
@given(n=st.integers(1, 400), block_size=st.integers(1, 60), window=st.integers(1, 20), epoch=st.integers(0, 2**64 - 1))
@example(n=1, block_size=1, window=1, epoch=0)
@example(n=1, block_size=2**62, window=2**62, epoch=0)
@example(n=7, block_size=8, window=1, epoch=0)
@example(n=9, block_size=8, window=1, epoch=0)
@example(n=65_537, block_size=1000, window=3, epoch=1)
@example(n=200_001, block_size=10_000, window=7, epoch=0)
def test_every_sample_is_read_once_at_any_size(n: int, block_size: int, window: int, epoch: int) -> None:
    order = BlockShuffle(n, block_size=block_size, window=window)
    assert np.array_equal(np.arange(n), np.sort(whole(order, epoch=epoch)))


@settings(deadline=None)
@given(n=st.integers(1, 400), block_size=st.integers(1, 60), window=st.integers(1, 20), epoch=st.integers(0, 99))
def test_every_block_is_within_one_window(n: int, block_size: int, window: int, epoch: int) -> None:
    """Cuts the order after each `window` complete blocks: each part has only whole blocks, and all parts but the last are full."""
    blocks = whole(BlockShuffle(n, block_size=block_size, window=window), epoch=epoch) // block_size
    num_blocks = -(-n // block_size)
    sizes = np.bincount(np.arange(n) // block_size)
    start, windows = 0, []
    while start < n:
        stop = start + 1
        while stop < n and (np.bincount(blocks[start:stop], minlength=num_blocks) % sizes).any():
            stop += 1
        while stop < n and len(set(blocks[start:stop].tolist())) < window:
            stop += 1
            while stop < n and (np.bincount(blocks[start:stop], minlength=num_blocks) % sizes).any():
                stop += 1
        windows.append(len(set(blocks[start:stop].tolist())))
        start = stop
    assert [window] * (num_blocks // window) + [num_blocks % window] * (num_blocks % window > 0) == windows


def test_short_block_may_be_anywhere() -> None:
    places = set()
    for epoch in range(60):
        blocks = whole(BlockShuffle(52, block_size=10, window=2), epoch=epoch) // 10
        places.add(int(np.flatnonzero(blocks == 5).min()) // 20)
    assert places == {0, 1, 2}


def z_of(hits: float, expected: float) -> float:
    return (hits - expected) / expected**0.5


def test_pairs_within_a_batch_share_a_block_as_often_as_documented() -> None:
    size, window, batch = 50, 8, 40  # one window contains ten batches
    hits = pairs = 0
    for epoch in range(5):
        blocks = whole(BlockShuffle(20_000, block_size=size, window=window), epoch=epoch) // size
        for members in blocks.reshape(-1, batch):
            hits += ((np.bincount(members) ** 2).sum() - batch) / 2
            pairs += batch * (batch - 1) / 2
    assert abs(z_of(hits, pairs * (size - 1) / (window * size - 1))) < LIMIT


def test_batch_contains_as_many_blocks_as_documented() -> None:
    blocks = whole(BlockShuffle(1_024_000, block_size=1000, window=16)) // 1000
    seen = np.array([len(set(batch.tolist())) for batch in blocks.reshape(-1, 64)])
    assert abs(seen.mean() - 16 * (1 - (15 / 16) ** 64)) < LIMIT * seen.std() / len(seen) ** 0.5 + 0.01
    assert round(16 * (1 - (15 / 16) ** 64), 1) == 15.7


def test_distances_are_as_documented() -> None:
    n, size, window = 100_000, 100, 10
    of_block, from_place = [], []
    for epoch in range(30):
        positions = np.argsort(whole(BlockShuffle(n, block_size=size, window=window), epoch=epoch))
        of_block.append(np.abs(np.diff(positions.reshape(-1, size)[:, ::7], axis=1)).mean())
        from_place.append(np.abs(positions - np.arange(n)).mean())
    assert np.mean(of_block) == pytest.approx(window * size / 3, rel=0.01)
    assert np.mean(from_place) == pytest.approx(n / 3, rel=0.02)


def test_positions_within_windows_are_uniform() -> None:
    """Checks that a sample's number in its window does not predict its position there."""
    counts = np.zeros((16, 16))
    for epoch in range(20):
        order = whole(BlockShuffle(32_000, block_size=100, window=16), epoch=epoch)
        within = np.argsort(np.argsort(order.reshape(20, 1600), axis=1), axis=1)
        counts += np.histogram2d(np.tile(np.arange(1600), 20), within.ravel(), bins=16)[0]
    expected = counts.sum() / counts.size
    assert abs((((counts - expected) ** 2 / expected).sum() - 225) / 450**0.5) < LIMIT


@pytest.mark.parametrize("n", [10**9, 10**12, 2**62])
def test_positions_of_huge_datasets_are_found_at_once(n: int) -> None:
    order = BlockShuffle(n, block_size=10_000, window=16)
    for start in (0, n // 2, n - 64):
        got = order.take(start, start + 64, seed=1, epoch=5)
        assert len(set(got.tolist())) == 64
        assert 0 <= got.min() <= got.max() < n


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 0}, ValueError, r"BlockShuffle: n must be in \[1, 2\^62\], got 0; give len\(dataset\)"),
        ({"n": 5.0}, TypeError, "BlockShuffle: n must be an integer, got 5.0 of type float"),
        ({"block_size": 0}, ValueError, r"block_size must be in \[1, 2\^62\], got 0; give the samples of one shard"),
        ({"window": 0}, ValueError, r"window must be in \[1, 2\^62\], got 0; 16 blocks suit most batches"),
    ],
)
def test_invalid_arguments_raise_explanatory_errors(arguments: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockShuffle(**{"n": 10, "block_size": 2, **arguments})


def test_repr_is_the_call() -> None:
    assert repr(BlockShuffle(10, block_size=2)) == "<block_shuffle(n=10, block_size=2, window=16)>"
