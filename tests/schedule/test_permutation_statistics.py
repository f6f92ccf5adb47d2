"""An order must look random, and the tests must detect one that does not.

Every statistic is a z score, roughly standard normal for a random order. Seeds are fixed, so results are reproducible; the limit
of 4.5 is one in 150,000. The planted defect is a network with too few rounds.
"""

from itertools import pairwise

import numpy as np
import pytest

from shmload._core.permutation import KeyedPermutation
from shmload.schedule.permutation import Permutation, sample_key

LIMIT = 4.5


def order_of(n, seed, *, num_rounds=8):
    out = np.empty(n, np.int64)
    KeyedPermutation(n, seed=seed, epoch=0, num_rounds=num_rounds).fill(0, out)
    return out


def chi_square_z(counts, expected):
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def followed_distance_z(order):
    """Measures whether positions with the same low half keep their distance. Four Feistel rounds cannot pass this test.

    Of pairs of positions with equal right halves, few rounds map too many to values whose left halves differ as the positions' do
    (J. Patarin, "New results on pseudorandom permutation generators based on the DES scheme", 1991).
    """
    n = len(order)
    right_bits = ((n - 1).bit_length() + 1) // 2
    size = ((n - 1) >> right_bits) + 1
    left = order >> right_bits
    hits = expected = 0.0
    for lag in range(1, 33):
        distances = (left[lag << right_bits :] - left[: n - (lag << right_bits)]) % size
        hits += np.count_nonzero(distances == lag)
        expected += len(distances) / size
    return (hits - expected) / expected**0.5


def ascents_z(order):
    """Counts how often an index is followed by a larger one: mean (n - 1) / 2, variance (n + 1) / 12."""
    n = len(order)
    return (np.count_nonzero(np.diff(order) > 0) - (n - 1) / 2) / ((n + 1) / 12) ** 0.5


def places_z(order):
    """Measures whether the indices of each 64th of the range spread evenly over the 64ths of the epoch."""
    counts, _, _ = np.histogram2d(np.arange(len(order)), order, bins=64)
    return chi_square_z(counts, len(order) / counts.size)


def low_bits_z(order):
    """Measures whether the low bits of an index are independent of the low bits of its position."""
    counts = np.bincount((np.arange(len(order)) % 64) * 64 + order % 64, minlength=64 * 64)
    return chi_square_z(counts, len(order) / counts.size)


STATISTICS = [followed_distance_z, ascents_z, places_z, low_bits_z]


@pytest.mark.parametrize("n", [65_537, 100_000, 131_073, 200_000])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_order_passes_all_statistics(statistic, n):
    assert max(abs(statistic(order_of(n, seed))) for seed in range(4)) < LIMIT


def test_order_from_a_table_passes_all_statistics():
    for statistic in (ascents_z, places_z, low_bits_z):
        assert max(abs(statistic(order_of(65_536, seed))) for seed in range(4)) < LIMIT


@pytest.mark.parametrize("n", [65_537, 100_000, 131_073, 200_000])
def test_four_rounds_are_detected(n):
    assert min(followed_distance_z(order_of(n, seed, num_rounds=4)) for seed in range(4)) > LIMIT


def test_two_rounds_are_detected_by_simple_statistics():
    assert min(abs(low_bits_z(order_of(100_000, seed, num_rounds=2))) for seed in range(4)) > LIMIT


def test_all_orders_of_five_are_equally_likely():
    orders = [tuple(Permutation(5, seed=0, epoch=epoch).take(0, 5).tolist()) for epoch in range(12_000)]
    counts = np.array([orders.count(order) for order in sorted(set(orders))])
    assert counts.size == 120
    assert abs(chi_square_z(counts, 100)) < LIMIT


@pytest.mark.parametrize("n", [64, 65_536, 70_000, 10**12])
@pytest.mark.parametrize("changing", ["seed", "epoch", "stream"])
def test_first_index_is_uniform_over_neighboring_keys(n, changing):
    count = 6400 if n != 65_536 else 640
    firsts = [Permutation(n, **{"seed": 1, changing: value})[0] * 64 // n for value in range(count)]
    assert abs(chi_square_z(np.bincount(firsts, minlength=64), count / 64)) < LIMIT


def test_two_epochs_agree_at_one_position_on_average():
    orders = [Permutation(100_000, seed=0, epoch=epoch).take(0, 100_000) for epoch in range(21)]
    matches = sum(np.count_nonzero(a == b) for a, b in pairwise(orders))
    assert abs(matches - 20) / 20**0.5 < LIMIT


@pytest.mark.parametrize("place", range(3))
def test_neighboring_sample_keys_differ_in_half_of_their_bits(place):
    numbers = np.array([[5, 5, 5]] * 4096)
    numbers[:, place] = np.arange(4096)
    keys = np.array([sample_key(*row) for row in numbers.tolist()], np.uint64)
    assert len(set(keys.tolist())) == 4096
    flipped = np.unpackbits((keys[1:] ^ keys[:-1]).view(np.uint8)).sum()
    total = 64 * 4095
    assert abs(flipped - total / 2) / (total / 4) ** 0.5 < LIMIT
