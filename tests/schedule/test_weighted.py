"""Weighted sampling: shares equal the weights, zeros are never drawn, and without replacement the distribution is
torch.multinomial's.
"""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import Weighted
from shmload._core.draws import AliasTable, fill_words
from shmload.schedule.weighted import _logarithm

LIMIT = 4.5  # z score; seeds are fixed, so results are reproducible


def chi_square_z(counts: Any, expected: Any) -> float:
    counts, expected = np.asarray(counts)[np.asarray(expected) > 0], np.asarray(expected)[np.asarray(expected) > 0]
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


SHAPES = {
    "even": np.ones(97),
    "few": np.array([1.0, 2.0, 0.0, 5.0]),
    "steep": 1.3 ** np.arange(40),
    "one heavy": np.r_[1e4, np.ones(50)],
    "sparse": (np.arange(1000) % 10 == 3) * 1.0,
    "log-normal": np.exp(np.random.default_rng(0).normal(0, 2, 500)),
    "tiny": np.array([3.0, 1.0, 2.0]) * 1e-310,
    "huge": np.array([3.0, 1.0, 2.0]) * 5e307,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_shares_equal_the_weights(shape: str, seed: int) -> None:
    weights = SHAPES[shape]
    order = Weighted(weights, num_samples=200_000)
    counts = np.bincount(order.take(0, order.n, seed=seed, epoch=1), minlength=len(weights))
    shares = weights / weights.max() / (weights / weights.max()).sum()
    keep = shares * order.n >= 5  # required by the chi-square test
    pooled = np.append(counts[keep], counts[~keep].sum()), np.append(shares[keep], shares[~keep].sum()) * order.n
    assert abs(chi_square_z(*pooled)) < LIMIT


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-300, 0.1, 1.0, 7.0, 1e18, 1e300]), min_size=1, max_size=60).filter(any))
def test_zeros_are_never_drawn(weights: list[float]) -> None:
    drawn = set(Weighted(weights, num_samples=3000).take(0, 3000, seed=1, epoch=0).tolist())
    assert all(weights[index] > 0 for index in drawn)
    raced = Weighted(weights, replacement=False)
    indices = raced.take(0, raced.n, seed=1, epoch=0).tolist()
    assert len(indices) == len(set(indices))
    assert all(weights[index] > 0 for index in indices)


def test_draws_at_neighboring_positions_are_independent() -> None:
    draws = Weighted(np.ones(8), num_samples=100_001).take(0, 100_001, seed=1, epoch=0)
    for lag in range(1, 6):
        pairs = np.bincount(draws[:-lag] * 8 + draws[lag:], minlength=64)
        assert abs(chi_square_z(pairs, np.full(64, pairs.sum() / 64))) < LIMIT


def test_first_draws_are_uniform_over_epochs_and_seeds() -> None:
    order = Weighted(np.ones(16))
    for keys in ([(1, epoch) for epoch in range(8000)], [(seed, 1) for seed in range(8000)]):
        first = [int(order.take(0, 1, seed=seed, epoch=epoch)[0]) for seed, epoch in keys]
        assert abs(chi_square_z(np.bincount(first, minlength=16), np.full(16, 500.0))) < LIMIT


def test_orders_without_replacement_are_as_frequent_as_sequential_draws() -> None:
    weights, count = np.array([1.0, 2.0, 5.0, 2.0]), 6000
    order = Weighted(weights, num_samples=3, replacement=False)
    got = [tuple(order.take(0, 3, seed=4, epoch=epoch).tolist()) for epoch in range(count)]
    expected = {}
    for drawn in permutations(range(4), 3):
        left, share = 10.0, 1.0
        for index in drawn:
            share, left = share * weights[index] / left, left - weights[index]
        expected[drawn] = share * count
    assert sum(expected.values()) == pytest.approx(count)
    assert abs(chi_square_z([got.count(drawn) for drawn in expected], list(expected.values()))) < LIMIT


def test_equal_weights_without_replacement_shuffle() -> None:
    got = Weighted(np.ones(1000), replacement=False).take(0, 1000, seed=0, epoch=0)
    assert list(range(1000)) == sorted(got.tolist()) != got.tolist()


def test_order_without_replacement_is_computed_once_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Weighted([1.0, 2.0, 3.0], replacement=False)
    races: list[int] = []
    race = order._race
    monkeypatch.setattr(order, "_race", lambda seed, epoch: races.append(epoch) or race(seed, epoch))
    for epoch in (0, 0, 1, 0, 1, 2, 1, 0):
        order.take(0, 3, seed=1, epoch=epoch)
    assert races == [0, 1, 2, 0]


@pytest.mark.parametrize("kind", [list, np.float32, np.float64, np.int64, torch.tensor])
def test_weights_are_accepted_in_any_form_and_copied(kind: Any) -> None:
    given = kind([1, 0, 3]) if kind in (list, torch.tensor) else np.array([1, 0, 3], kind)
    order = Weighted(given, num_samples=50)
    expected = Weighted([1.0, 0.0, 3.0], num_samples=50)
    given[1] = 100
    assert expected.take(0, 50, seed=1, epoch=1).tolist() == order.take(0, 50, seed=1, epoch=1).tolist()
    assert expected.identity == order.identity


@settings(deadline=None)
@given(st.floats(2.0**-54, 1.0, exclude_max=True))
def test_logarithm_is_accurate(x: float) -> None:
    assert float(_logarithm(np.array([x]))[0]) == pytest.approx(math.log(x), rel=1e-15)


@pytest.mark.parametrize(
    ("weights", "options", "error", "message"),
    [
        ([], {}, ValueError, r"weights must be one-dimensional, .* got shape \(0,\); give one for each sample"),
        ([[1.0]], {}, ValueError, r"got shape \(1, 1\)"),
        (["a"], {}, TypeError, "weights must be numbers, one for each sample: could not convert"),
        ([1.0, -2.0, -3.0], {}, ValueError, r"got -2.0 at index 1 \(2 such of 3\); 0 leaves a sample out"),
        ([1.0, math.nan], {}, ValueError, r"finite and not negative, got nan at index 1 \(1 such of 2\)"),
        ([math.inf], {}, ValueError, "got inf at index 0"),
        ([0.0, 0.0], {}, ValueError, "one weight must be above 0, got 2 zeros; nothing could be drawn"),
        ([1.0], {"num_samples": 0}, ValueError, r"num_samples must be in \[1, 2\^62\], got 0; an epoch has at least"),
        ([1.0], {"num_samples": 1.5}, TypeError, "num_samples must be an integer, got 1.5"),
        (
            [1.0, 0.0, 2.0],
            {"num_samples": 3, "replacement": False},
            ValueError,
            r"num_samples must be in \[1, 2\], got 3; draw with replacement to have more",
        ),
        ([1.0], {"replacement": 1}, TypeError, "replacement must be True or False, got 1"),
    ],
)
def test_invalid_arguments_raise_explanatory_errors(weights: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"Weighted: .*{message}"):
        Weighted(weights, **options)


def test_repr_names_weights_and_options() -> None:
    order = Weighted([1.0, 2.0])
    assert repr(order) == f"<{order.identity}>"


def test_table_refuses_other_scales() -> None:
    with pytest.raises(ValueError, match=r"at least one must be 2\^63, got 2 weights without one"):
        AliasTable(np.array([1, 2], np.uint64))
    with pytest.raises(ValueError, match=r"at most 2\^63, got 9223372036854775809 at index 1"):
        AliasTable(np.array([1, 2**63 + 1], np.uint64))


def test_words_of_positions_do_not_depend_on_the_start() -> None:
    whole = np.empty(40, np.uint64)
    fill_words(whole, seed=1, epoch=2, stream=3, n=4)
    for start in range(9):
        part = np.empty(7, np.uint64)
        fill_words(part, seed=1, epoch=2, stream=3, n=4, start=start)
        assert whole[start : start + 7].tolist() == part.tolist()
    assert len(set(whole.tolist())) == 40
