"""Batches by length: every sample once, within the budget, with little padding, similar among neighboring batches."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shmload import LengthBuckets, TokenBudget
from shmload._core.cutting import cut
from shmload.schedule.bucketed import Bucketed, _grouped, _sorted

LOG_NORMAL = np.clip(np.random.default_rng(0).lognormal(4.5, 0.8, 20_000), 1, 2048).astype(np.int64)


def epoch_of(order: Bucketed, *, seed: int = 7, epoch: int = 0) -> list[list[int]]:
    return [order.batch(k, seed=seed, epoch=epoch).tolist() for k in range(order.num_batches(seed=seed, epoch=epoch))]


lengths_of = st.lists(st.integers(0, 30), min_size=1, max_size=120)
sizes = {"window": st.integers(1, 6), "group": st.integers(1, 5), "epoch": st.integers(0, 2**64 - 1)}


@settings(deadline=None)
@given(lengths=lengths_of, batch_size=st.integers(1, 9), **sizes)
@example(lengths=[3], batch_size=8, window=1, group=8, epoch=0)
def test_buckets_hold_every_sample_once(lengths: list[int], batch_size: int, window: int, group: int, epoch: int) -> None:
    order = LengthBuckets(lengths, batch_size=batch_size, window=window, group=group)
    batches = epoch_of(order, epoch=epoch)
    assert list(range(len(lengths))) == sorted(i for batch in batches for i in batch)
    whole, rest = divmod(len(lengths), batch_size)
    assert sorted([batch_size] * whole + [rest] * (rest > 0)) == sorted(map(len, batches))


@settings(deadline=None)
@given(lengths=lengths_of, batch_size=st.integers(1, 9), **sizes)
def test_drop_last_drops_the_rest_regardless_of_lengths(
    lengths: list[int], batch_size: int, window: int, group: int, epoch: int
) -> None:
    order = LengthBuckets(lengths, batch_size=batch_size, window=window, group=group, drop_last=True)
    batches = epoch_of(order, epoch=epoch)
    assert [batch_size] * (len(lengths) // batch_size) == list(map(len, batches))
    assert len({i for batch in batches for i in batch}) == len(lengths) // batch_size * batch_size


def test_dropped_samples_vary_and_are_not_the_longest() -> None:
    order = LengthBuckets(np.arange(1005), batch_size=10, drop_last=True)
    left = [set(range(1005)) - {i for b in epoch_of(order, epoch=e) for i in b} for e in range(20)]
    assert len(set().union(*left)) > 60
    assert 350 < np.mean([i for each in left for i in each]) < 650


@settings(deadline=None)
@given(lengths=lengths_of, max_tokens=st.integers(1, 90), max_samples=st.none() | st.integers(1, 9), **sizes)
@example(lengths=[0, 0, 0], max_tokens=2, max_samples=None, window=1, group=1, epoch=0)
def test_budgeted_batches_hold_every_sample_once_within_the_budget(
    lengths: list[int], max_tokens: int, max_samples: int | None, window: int, group: int, epoch: int
) -> None:
    order = TokenBudget(lengths, max_tokens=max_tokens, max_samples=max_samples, window=window, group=group, oversized="alone")
    batches = epoch_of(order, epoch=epoch)
    assert list(range(len(lengths))) == sorted(i for batch in batches for i in batch)
    for batch in batches:
        longest = max(1, *(lengths[i] for i in batch))
        assert longest * len(batch) <= max_tokens or len(batch) == 1
        assert max_samples is None or len(batch) <= max_samples


def test_batch_ends_no_sooner_than_needed() -> None:
    starts = np.empty(7, np.int64)
    assert cut(np.array([2, 3, 3, 0, 9, 4, 4]), 9, 3, starts) == 4
    assert starts[:4].tolist() == [0, 3, 4, 5]
    assert cut(np.array([1] * 7), 100, 3, starts) == 3
    assert starts[:3].tolist() == [0, 3, 6]
    with pytest.raises(ValueError, match="starts must have 7 elements, got 6"):
        cut(np.array([1] * 7), 100, 3, starts[:6])


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=60), per_window=st.integers(1, 70))
def test_windows_are_sorted_up_and_down_alternately(lengths: list[int], per_window: int) -> None:
    places = _sorted(np.array(lengths, np.int32), per_window).tolist()
    expected: list[int] = []
    for number, start in enumerate(range(0, len(lengths), per_window)):
        window = range(start, min(start + per_window, len(lengths)))
        expected += sorted(window, key=lambda i: (-lengths[i] if number % 2 else lengths[i], i))
    assert expected == places


def test_sorting_works_beyond_one_machine_word() -> None:
    lengths = np.random.default_rng(0).integers(0, 300, 500).astype(np.int32)
    assert _sorted(lengths, 60).tolist() == _sorted(lengths, 60, max_bits=15).tolist()
    long = np.array([2**31 - 1, 5, 2**31 - 2, 0], np.int32)
    assert _sorted(long, 2**62).tolist() == [3, 1, 2, 0]


ORDERS = {
    "buckets": lambda lengths, **more: LengthBuckets(lengths, batch_size=16, **more),
    "budget": lambda lengths, **more: TokenBudget(lengths, max_tokens=4096, **more),
}


@pytest.fixture(params=ORDERS)
def make(request: pytest.FixtureRequest) -> Any:
    return ORDERS[request.param]


def test_epochs_and_seeds_differ_and_are_reproducible(make: Any) -> None:
    order = make(LOG_NORMAL[:2000])
    keys = [(seed, epoch) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1, 2)]
    first = [epoch_of(order, seed=seed, epoch=epoch) for seed, epoch in keys]
    assert len({str(each) for each in first}) == len(keys)
    assert first == [epoch_of(order, seed=seed, epoch=epoch) for seed, epoch in keys]


def test_copy_is_the_same_order(make: Any) -> None:
    order = make(LOG_NORMAL[:500])
    copy = pickle.loads(pickle.dumps(order))
    assert epoch_of(order) == epoch_of(copy)
    assert order.identity == copy.identity
    order.batch(0, seed=7, epoch=0)[:] = -1
    assert epoch_of(order) == epoch_of(copy)


def test_identities_distinguish_orders_and_fit_a_state(make: Any) -> None:
    lengths = LOG_NORMAL[:500]
    others = [make(lengths), make(lengths, window=99), make(lengths, group=7), make(lengths[1:]), make(lengths + 1)]
    others += [LengthBuckets(lengths, batch_size=15), LengthBuckets(lengths, batch_size=16, drop_last=True)]
    others += [TokenBudget(lengths, max_tokens=4000), TokenBudget(lengths, max_tokens=4096, max_samples=9)]
    others += [TokenBudget(lengths, max_tokens=4096, oversized="alone")]
    assert len(others) == len({order.identity for order in others})
    assert max(len(order.identity) for order in others) < 300


def test_sorting_removes_most_padding() -> None:
    """Figures of docs/batches.md: log-normal lengths, mean 123."""
    buckets = LengthBuckets(LOG_NORMAL, batch_size=32).padding()
    assert buckets.share < 0.12 < 0.74 < buckets.share_shuffled < 0.78
    budget = TokenBudget(LOG_NORMAL, max_tokens=4096).padding()
    assert budget.share < 0.06 < 0.55 < budget.share_shuffled < 0.65


def test_reported_padding_equals_the_actual_padding() -> None:
    order = LengthBuckets(LOG_NORMAL[:500], batch_size=16)
    padded = sum(LOG_NORMAL[batch].max() * len(batch) for batch in epoch_of(order, seed=1, epoch=3))
    assert order.padding(seed=1, epoch=3).share == pytest.approx(1 - LOG_NORMAL[:500].sum() / padded)
    assert LengthBuckets([5, 5], batch_size=3, drop_last=True).padding() == (0.0, 0.0)
    assert LengthBuckets([0, 0], batch_size=2).padding() == (0.0, 0.0)


def imbalance(order: Bucketed, world_size: int) -> float:
    """Returns the padded tokens of the busiest rank over the mean, summed over the steps: the factor by which a run is too long."""
    costs = [LOG_NORMAL[batch].max() * len(batch) for batch in epoch_of(order)]
    steps = np.array(costs[: len(costs) // world_size * world_size]).reshape(-1, world_size)
    return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())


def test_ranks_are_balanced_by_groups_or_by_the_budget() -> None:
    grouped, single = (LengthBuckets(LOG_NORMAL, batch_size=16, group=group) for group in (8, 1))
    assert imbalance(grouped, 8) < 1.5 < 2.2 < imbalance(single, 8)
    assert imbalance(grouped, 4) < 1.4
    assert imbalance(TokenBudget(LOG_NORMAL, max_tokens=4096), 8) < 1.06


def test_groups_are_in_random_order_with_the_short_one_last() -> None:
    short = set()
    for epoch in range(30):
        order = _grouped(50, 8, 1, epoch).tolist()
        assert list(range(50)) == sorted(order)
        groups = [sorted(order[i : i + 8]) for i in range(0, 50, 8)]
        assert all(group == list(range(group[0], group[0] + len(group))) for group in groups)
        assert groups != sorted(groups)
        short.add(groups[-1][0])
    assert {0, 8, 16, 24, 32, 40, 48} == short


@pytest.mark.parametrize(("num_batches", "group"), [(64, 4), (64, 1), (30, 64)])
def test_every_batch_may_be_anywhere(num_batches: int, group: int) -> None:
    counts = np.zeros((num_batches, num_batches))
    for epoch in range(50 * num_batches):
        counts[np.arange(num_batches), _grouped(num_batches, group, 1, epoch)] += 1
    freedom = (num_batches - 1) ** 2
    assert (
        abs((((counts - 50) ** 2 / 50).sum() - freedom) / (2 * freedom) ** 0.5) < 4.5 * (group if group < num_batches else 1) ** 0.5
    )


def test_same_samples_do_not_meet_again_for_any_window() -> None:
    order = LengthBuckets(np.arange(800), batch_size=8, window=10_000)
    first, second = ({frozenset(batch) for batch in epoch_of(order, epoch=epoch)} for epoch in (0, 1))
    assert not first & second


@pytest.mark.parametrize("kind", [list, np.uint8, np.int64, torch.tensor])
def test_lengths_are_accepted_in_any_form_and_copied(kind: Any) -> None:
    given = kind([5, 1, 7, 3]) if kind in (list, torch.tensor) else np.array([5, 1, 7, 3], kind)
    order, expected = LengthBuckets(given, batch_size=2), LengthBuckets([5, 1, 7, 3], batch_size=2)
    given[1] = 9
    assert epoch_of(expected) == epoch_of(order)
    assert expected.identity == order.identity


def test_torchs_loader_accepts_it_as_a_batch_sampler(make: Any) -> None:
    order = make(LOG_NORMAL[:500])

    def epoch(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        loader: Any = DataLoader(range(500), batch_sampler=order)  # type: ignore[arg-type]  # a range is a dataset
        got = [batch.tolist() for batch in loader]
        assert len(got) == len(loader)
        return got

    assert epoch(1) == epoch(1) != epoch(2)
    assert list(range(500)) == sorted(i for batch in epoch(3) for i in batch)


def buckets(**options: Any) -> Any:
    return LengthBuckets(**{"lengths": [1, 2], "batch_size": 2, **options})


def budget(**options: Any) -> Any:
    return TokenBudget(**{"lengths": [1, 2], "max_tokens": 8, **options})


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (buckets, {"lengths": []}, ValueError, r"LengthBuckets: lengths must be .* got shape \(0,\); give one for each"),
        (budget, {"lengths": [[1]]}, ValueError, r"TokenBudget: lengths must be .* got shape \(1, 1\)"),
        (buckets, {"lengths": [1.5]}, TypeError, "lengths must be integers, got dtype float64; round them up"),
        (buckets, {"lengths": [1, -1, 2**31]}, ValueError, r"\[0, 2\^31 - 1\], got -1 at index 1 \(2 such of 3\); count"),
        (buckets, {"batch_size": 0}, ValueError, "LengthBuckets: batch_size must be in .* got 0; a batch has at least"),
        (buckets, {"window": 0}, ValueError, "LengthBuckets: window must be in .* got 0; 100 batches leave little"),
        (budget, {"group": 0}, ValueError, "TokenBudget: group must be in .* got 0; the number of ranks suits most"),
        (buckets, {"drop_last": 1}, TypeError, "drop_last must be True or False, got 1"),
        (budget, {"max_tokens": 0}, ValueError, r"max_tokens must be in \[1, 2\^62\], got 0; give what a batch may hold"),
        (budget, {"max_samples": 0}, ValueError, "max_samples must be in .* got 0; None leaves it to max_tokens"),
        (budget, {"oversized": "skip"}, ValueError, "oversized must be 'raise' or 'alone', got 'skip'"),
        (
            budget,
            {"lengths": [3, 9, 12, 1]},
            ValueError,
            r"longer than max_tokens=8, sample 2 has length 12 \(2 such of 4\); truncate .* oversized='alone'",
        ),
    ],
)
def test_invalid_arguments_raise_explanatory_errors(make: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_repr_names_lengths_and_options() -> None:
    assert repr(buckets()) == f"<{buckets().identity}>"
    assert repr(budget()) == f"<{budget().identity}>"
