"""Permutation: a bijection for every n, keyed by all of (seed, epoch, stream, n), equal on every instruction set."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload._core.permutation import ISAS, KeyedPermutation
from shmload.schedule.permutation import MAX_N, Permutation, sample_key, sample_key_pair

AROUND_POWERS = sorted({n for k in range(1, 17) for n in (2**k - 1, 2**k, 2**k + 1)})
LARGE = sorted({n for k in range(17, 63) for n in (2**k - 1, 2**k, 2**k + 1) if n <= MAX_N})
uint64s = st.integers(0, 2**64 - 1)


def filled(keyed, start, count):
    out = np.empty(count, np.int64)
    keyed.fill(start, out)
    return out


def philox(counter, key):
    """Computes numpy's Philox4x64-10, which increments its counter before it answers."""
    number = (sum(word << (64 * i) for i, word in enumerate(counter)) - 1) % 2**256
    words = [number >> (64 * i) & (2**64 - 1) for i in range(4)]
    return np.random.Philox(key=np.array(key, np.uint64), counter=np.array(words, np.uint64)).random_raw(4).tolist()


def network_value(n, position, *, seed, epoch, stream):
    """Computes one value of the Feistel network as permutation.h describes it."""
    right_bits = ((n - 1).bit_length() + 1) // 2
    size = ((n - 1) >> right_bits) + 1
    words = [word for block in range(2) for word in philox([block, epoch, stream, 1], [seed, n])]

    def mix(x, word):
        x = (x ^ (word & 0xFFFFFFFF)) * 0x7FEB352D % 2**32
        x ^= x >> 15
        return (x ^ (word >> 32)) * 0x846CA68B % 2**32

    value = position
    while True:
        left, right = value >> right_bits, value % (1 << right_bits)
        for even, odd in zip(words[::2], words[1::2], strict=True):
            left = (left + (mix(right, even) * size >> 32)) % size
            right ^= mix(left, odd) >> (32 - right_bits)
        value = left << right_bits | right
        if value < n:
            return value


@pytest.mark.parametrize("table_max_n", [0, 65536], ids=["network", "table"])
@pytest.mark.parametrize("n", AROUND_POWERS)
def test_every_index_occurs_once_and_inverts(n, table_max_n):
    keyed = KeyedPermutation(n, seed=n, epoch=1, table_max_n=table_max_n)
    values = filled(keyed, 0, n)
    assert np.array_equal(np.arange(n), np.sort(values))
    positions = np.empty(n, np.int64)
    keyed.inverse(values, positions)
    assert np.array_equal(np.arange(n), positions)


@pytest.mark.parametrize("n", LARGE)
def test_windows_of_a_large_order_are_in_range_distinct_and_invertible(n):
    order = Permutation(n, seed=3, epoch=4)
    rng = np.random.default_rng(n)
    positions = np.unique(np.concatenate([np.arange(700), n - 700 + np.arange(700), rng.integers(0, n, 1000)]))
    values = order.take(positions)
    assert values.min() >= 0
    assert values.max() < n
    assert len(positions) == len(np.unique(values))
    assert np.array_equal(positions, order.inverse(values))
    assert np.array_equal(positions, order.take(order.inverse(positions)))


@settings(deadline=None)
@given(n=st.integers(1, MAX_N) | st.integers(1, 200_000), seed=uint64s, epoch=uint64s, stream=uint64s, data=st.data())
def test_any_n_and_key_map_into_range_and_back(n, seed, epoch, stream, data):
    order = Permutation(n, seed=seed, epoch=epoch, stream=stream)
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
    values = order.take(positions)
    assert len(positions) == len(set(values.tolist()))
    assert all(0 <= value < n for value in values.tolist())
    assert np.array_equal(positions, order.inverse(values))


@settings(deadline=None)
@given(n=st.integers(65_537, MAX_N), seed=uint64s, epoch=uint64s, stream=uint64s, data=st.data())
def test_network_equals_its_description(n, seed, epoch, stream, data):
    position = data.draw(st.integers(0, n - 1))
    order = Permutation(n, seed=seed, epoch=epoch, stream=stream)
    assert network_value(n, position, seed=seed, epoch=epoch, stream=stream) == order[position]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 2, 1000, 65_537, 10**6, 2**31 + 1, 2**40 + 1, 2**62])
def test_instruction_sets_agree(n, isa):
    base = KeyedPermutation(n, seed=9, epoch=2, table_max_n=0, isa="base")
    other = KeyedPermutation(n, seed=9, epoch=2, table_max_n=0, isa=isa)
    values = filled(base, 0, min(n, 1500))
    assert np.array_equal(values, filled(other, 0, len(values)))
    positions = np.empty_like(values)
    other.inverse(values, positions)
    assert np.array_equal(np.arange(len(values)), positions)


@settings(deadline=None)
@given(n=st.sampled_from([7, 3000, 65_537, 10**9]), data=st.data())
def test_range_positions_fill_and_item_read_the_same_order(n, data):
    order = Permutation(n, seed=11, epoch=12)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, min(n, start + 1600)))
    values = order.take(start, stop)
    assert np.array_equal(values, order.take(np.arange(start, stop)))
    out = np.full(stop - start + 2, -1)
    order.fill(start, out[1:-1])
    assert [-1, *values.tolist(), -1] == out.tolist()
    assert values[:5].tolist() == [order[position] for position in range(start, min(stop, start + 5))]


def test_take_keeps_the_shape_and_accepts_any_integers():
    order = Permutation(100_000, seed=0)
    flat = order.take(0, 6)
    assert np.array_equal(flat.reshape(2, 3), order.take(np.arange(6, dtype=np.uint16).reshape(2, 3)))
    assert np.array_equal(flat[::2], order.take(np.arange(6)[::2]))
    assert np.array_equal(flat, order.take(list(range(6))))
    assert order.take([]).shape == (0,)
    assert np.int64 == order.take([]).dtype


def test_each_part_of_the_key_changes_the_order():
    orders = [
        Permutation(n, **{"seed": 1, "epoch": 1, "stream": 1, **change}).take(0, 64).tolist()
        for n in (4096, 10**6)
        for change in ({}, {"seed": 2}, {"epoch": 2}, {"stream": 2}, {"seed": 2, "epoch": 0}, {"seed": 0, "epoch": 2})
    ]
    assert len(orders) == len({tuple(order) for order in orders})


def test_one_more_sample_gives_an_unrelated_order():
    a, b = Permutation(10**6, seed=1).take(0, 10_000), Permutation(10**6 + 1, seed=1).take(0, 10_000)
    assert (a == b).sum() < 5


def test_threads_may_share_an_unused_order():
    for seed in range(20):
        order = Permutation(5000, seed=seed)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _, order=order: order.take(0, 5000), range(4)))
        assert all(np.array_equal(Permutation(5000, seed=seed).take(0, 5000), result) for result in results)


def test_equality_hash_repr_and_pickle_follow_the_key():
    order = Permutation(np.int32(1000), seed=2**64 - 1, epoch=5)
    assert repr(order) == f"Permutation(1000, seed={2**64 - 1}, epoch=5, stream=0)"
    copy = pickle.loads(pickle.dumps(order))
    assert (order, hash(order)) == (copy, hash(copy))
    assert np.array_equal(order.take(0, 1000), copy.take(0, 1000))
    assert order != Permutation(1000, seed=0, epoch=5)
    assert order != 1000
    assert len(order) == 1000


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 0, "seed": 0}, ValueError, r"n must be in \[1, 2\^62\], got 0; an empty order has no permutation"),
        ({"n": MAX_N + 1, "seed": 0}, ValueError, r"n must be in \[1, 2\^62\], got 4611686018427387905"),
        ({"n": 5.0, "seed": 0}, TypeError, "n must be an integer, got 5.0 of type float"),
        ({"n": 5, "seed": -1}, ValueError, r"seed must be in \[0, 2\^64 - 1\], got -1; seed % 2\*\*64 is in range"),
        ({"n": 5, "seed": 1 << 64}, ValueError, "seed must be in"),
        ({"n": 5, "seed": None}, TypeError, "seed must be an integer, got None"),
        ({"n": 5, "seed": 0, "epoch": -1}, ValueError, "epoch must be in"),
        ({"n": 5, "seed": 0, "stream": -1}, ValueError, "stream must be in"),
    ],
)
def test_invalid_keys_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Permutation(**arguments)


@pytest.mark.parametrize("n", [100, 100_000])
def test_positions_outside_are_refused(n):
    order = Permutation(n, seed=0)
    for call in (lambda: order[n], lambda: order.take([0, n]), lambda: order.take(n - 1, n + 1)):
        with pytest.raises(IndexError, match=f"{n}"):
            call()
    with pytest.raises(IndexError, match=rf"position -1 is outside \[0, {n}\)"):
        order[-1]
    with pytest.raises(IndexError, match=rf"value {n} is outside \[0, {n}\)"):
        order.inverse([n])
    with pytest.raises(IndexError, match="got start=-1"):
        order.take(-1, 3)


def test_arrays_of_other_dtypes_are_refused():
    order = Permutation(100, seed=0)
    with pytest.raises(TypeError, match="positions must be integers that fit int64, got dtype float64"):
        order.take([0.5])
    with pytest.raises(TypeError, match="indices must be integers that fit int64, got dtype uint64"):
        order.inverse(np.zeros(1, np.uint64))
    for out in (np.empty(3, np.int32), np.empty((3, 1), np.int64), np.empty(6, np.int64)[::2]):
        with pytest.raises(TypeError, match="out must be a contiguous int64 array of one dimension"):
            order.fill(0, out)


@settings(deadline=None)
@given(seed=uint64s, epoch=uint64s, index=uint64s, stream=uint64s)
def test_sample_key_is_philox_of_its_four_numbers(seed, epoch, index, stream):
    words = philox([index, epoch, stream, 2], [seed, 0])
    assert words[0] == sample_key(seed, epoch, index, stream)
    assert tuple(words[:2]) == sample_key_pair(seed, epoch, index, stream)
    assert sample_key(seed, epoch, index, 0) == sample_key(seed, epoch, index)


def test_sample_key_refuses_values_outside_uint64():
    with pytest.raises(ValueError, match=r"seed must be an integer in \[0, 2\^64\), got -1; value % 2\*\*64 is one"):
        sample_key(-1, 0, 0)
    with pytest.raises(ValueError, match="index must be an integer"):
        sample_key_pair(0, 0, 1 << 64)
    with pytest.raises(TypeError):
        sample_key(0, "epoch", 0)
