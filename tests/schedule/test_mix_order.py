"""Mixtures: every prefix keeps to the weights, samples come as rounds of permutations, and counters are all the state there is."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmload import Schedule, StateMismatch
from shmload._core.mix import Apportionment
from shmload.schedule.mix_order import RUN, MixOrder
from shmload.schedule.state import make_state, resume

AWKWARD: dict[str, list[float]] = {
    "one": [5],
    "two alike": [1, 1],
    "two unlike": [1e-300, 1],
    "greedy's worst": [7, 1, 1, 1],
    "thirds": [1 / 3, 1 / 3, 1 / 3],
    "one that rules": [1000, *[1] * 9],
    "one that waits": [*[1] * 9, 1e-9],
    "pi": [math.pi, math.e, math.sqrt(2), 1, 1e-6],
    "powers": [2.0**-k for k in range(40)],
    "alike, 200": [1] * 200,
    "ascending, 200": list(range(1, 201)),
    "random, 200": np.random.default_rng(1).random(200).tolist(),
    "spread, 57": (10.0 ** np.random.default_rng(2).uniform(-12, 3, 57)).tolist(),
    "some never": [0, 3, 0, 1],
}


def members_of(order: MixOrder, stop: int) -> np.ndarray[Any, Any]:
    """Whose each draw is, from the order's indices."""
    indices = np.concatenate([order.take(at, min(at + 1000, stop), seed=0, epoch=0) for at in range(0, stop, 1000)])
    return np.searchsorted(order._offsets, indices, side="right") - 1


def assert_within_bound(members: np.ndarray[Any, Any], weights: list[float]) -> None:
    """Every prefix's counts against exact shares: nowhere further apart than Tijdeman's bound."""
    weights = [Fraction(repr(float(weight))) for weight in weights]  # type: ignore[misc]  # as they are written
    total = sum(weights)
    bound = 1 - 1 / Fraction(max(2 * len(weights) - 2, 1))
    for member, weight in enumerate(weights):
        drawn = np.cumsum(members == member)
        share = float(weight / total) * np.arange(1, len(members) + 1)
        off = np.abs(drawn - share)
        worst = int(off.argmax())
        exact = abs(int(drawn[worst]) - weight / total * (worst + 1))
        assert exact <= bound + Fraction(1, 10**6), (member, worst + 1, float(exact))


@pytest.mark.parametrize("name", AWKWARD)
def test_every_prefix_is_within_the_bound(name: str) -> None:
    weights = AWKWARD[name]
    order = MixOrder([10**9] * len(weights), {0: weights}, stop="repeat", shuffle=False)
    assert_within_bound(members_of(order, 6000), weights)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.lists(st.floats(1e-12, 1e12), min_size=2, max_size=30),
        st.lists(st.integers(1, 10**9), min_size=2, max_size=30),
    )
)
def test_any_weights_keep_it(weights: list[float]) -> None:
    order = MixOrder([10**9] * len(weights), {0: weights}, stop="repeat", shuffle=False)
    assert_within_bound(members_of(order, 1500), weights)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 12).flatmap(
        lambda k: st.lists(
            st.tuples(st.integers(1, 400), st.lists(st.integers(0, 50), min_size=k, max_size=k).filter(any)), max_size=4
        ).map(lambda rest: [(0, list(range(1, k + 1))), *rest])
    )
)
def test_changing_weights_keep_it_too(steps: list[tuple[int, list[int]]]) -> None:
    starts = list(itertools.accumulate(length for length, _ in steps))
    pieces = dict(zip(starts, (weights for _, weights in steps), strict=True))
    num_members = len(steps[0][1])
    order = MixOrder([10**9] * num_members, pieces, stop="repeat", shuffle=False)
    members = members_of(order, 2000)
    targets = np.zeros((2001, num_members))
    ends = [*starts[1:], 2000]
    for start, end, weights in zip(starts, ends, pieces.values(), strict=True):
        share = np.array(weights) / sum(weights)
        targets[start : end + 1] = targets[start] + share * np.arange(max(end - start, -1) + 1)[:, None]
    drawn = np.cumsum(np.eye(num_members)[members], axis=0)
    assert np.abs(drawn - targets[1:]).max() <= 1 - 1 / (2 * num_members - 2) + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.booleans())
def test_sizes_as_weights_read_each_sample_once(sizes: list[int], shuffle: bool) -> None:
    for stop in ("first", "all"):
        order = MixOrder(sizes, {0: sizes}, stop=stop, shuffle=shuffle)  # type: ignore[arg-type]  # one of the rules
        assert order.n == sum(sizes)
        assert sorted(order.take(0, order.n, seed=3, epoch=1).tolist()) == list(range(sum(sizes)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 100)), min_size=1, max_size=6))
@example([(1, 1.0), (60, 0.011)])
def test_the_rules_for_an_epochs_end_hold(members: list[tuple[int, float]]) -> None:
    sizes, weights = [size for size, _ in members], [weight for _, weight in members]
    first = MixOrder(sizes, {0: weights}, stop="first", shuffle=True)
    once = first.take(0, first.n, seed=0, epoch=0)
    assert len(set(once.tolist())) == len(once), "a sample was repeated"
    total = sum(map(Fraction, weights))
    assert any(Fraction(w) / total * (first.n + 1) > s - Fraction(1, 10**6) for s, w in members), (
        "it could have gone on"
    )
    whole = MixOrder(sizes, {0: weights}, stop="all", shuffle=True)
    if whole.n < 200_000:
        assert set(whole.take(0, whole.n, seed=0, epoch=0).tolist()) == set(range(sum(sizes)))


def test_numpys_numbers_are_weights() -> None:
    expected = MixOrder([100, 100], {0: [0.25, 0.75]}, stop="first", shuffle=False).take(0, 100, seed=0, epoch=0)
    for kind in (np.float32, np.float64):
        order = MixOrder([100, 100], {0: [kind(0.25), kind(0.75)]}, stop="first", shuffle=False)
        assert np.array_equal(expected, order.take(0, 100, seed=0, epoch=0))
    order = MixOrder([100, 100], {0: [np.int64(1), np.int64(3)]}, stop="first", shuffle=False)
    assert np.array_equal(expected, order.take(0, 100, seed=0, epoch=0))


def test_a_member_begins_again_in_a_new_order() -> None:
    order = MixOrder([50, 7], {0: [1, 1]}, stop="repeat", shuffle=True)
    second = [i - 50 for i in order.take(0, 140, seed=0, epoch=0).tolist() if i >= 50]
    rounds = [second[at : at + 7] for at in range(0, 70, 7)]
    assert all(sorted(one) == list(range(7)) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 5
    again = [i - 50 for i in order.take(0, 140, seed=0, epoch=1).tolist() if i >= 50]
    assert second != again


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3 * RUN), st.integers(1, 700), st.integers(0, 2))
def test_a_state_goes_on_anywhere_bit_for_bit(position: int, count: int, epoch: int) -> None:
    def made() -> MixOrder:
        return MixOrder([9000, 123, 40], {0: [0.6, 0.3, 0.1], 5000: [0.1, 0.1, 0.8]}, stop="repeat", shuffle=True)

    straight, resumed = made(), made()
    expected = straight.take(position, position + count, seed=5, epoch=epoch)
    counters = straight.counters_at(position, seed=5, epoch=epoch)
    assert sum(counters) == position
    resumed.go_on_at(position, counters, epoch=epoch)
    assert np.array_equal(expected, resumed.take(position, position + count, seed=5, epoch=epoch))
    before = max(position - 500, 0)  # a look back, as after a break
    assert np.array_equal(
        straight.take(before, position, seed=5, epoch=epoch), resumed.take(before, position, seed=5, epoch=epoch)
    )


def test_how_it_is_asked_changes_nothing() -> None:
    order = MixOrder([1000, 100], {0: [0.9, 0.1]}, stop="repeat", shuffle=True)
    whole = order.take(0, 5 * RUN, seed=1, epoch=0)
    fresh = MixOrder([1000, 100], {0: [0.9, 0.1]}, stop="repeat", shuffle=True)
    for start, stop in [(4 * RUN + 7, 4 * RUN + 9), (0, 10), (2 * RUN - 5, 2 * RUN + 5), (0, 5 * RUN), (17, 17)]:
        assert np.array_equal(whole[start:stop], fresh.take(start, stop, seed=1, epoch=0))


def test_old_runs_are_forgotten() -> None:
    order = MixOrder([1000, 100], {0: [0.9, 0.1]}, stop="repeat", shuffle=True)
    for at in range(60):
        order.take(at * RUN, at * RUN + 1, seed=1, epoch=0)
    assert max(len(order._runs), len(order._mapped), len(order._known)) < 12


def test_global_batches_do_not_depend_on_the_number_of_ranks() -> None:
    def batches(world_size: int) -> list[list[int]]:
        order = MixOrder([300, 200], {0: [2, 1]}, stop="first", shuffle=True)
        schedule = Schedule(
            order.n, batch_size=12 // world_size, seed=4, shuffle=False, world_size=world_size, order=order
        )
        return [
            [int(i) for rank in range(world_size) for i in schedule.batch(2, step, rank)]
            for step in range(schedule.num_steps - 1)
        ]

    assert batches(1) == batches(2) == batches(3)


def test_a_state_of_other_counters_is_refused() -> None:
    order = MixOrder([300, 200], {0: [2, 1]}, stop="first", shuffle=True)
    schedule = Schedule(order.n, batch_size=10, seed=4, shuffle=False, order=order)
    state: Any = {**make_state(schedule, epoch=0, step=3)}
    assert resume(state, schedule) == (0, 3)
    for wrong in ([30, 0], [20, 11], [20, 10, 0]):
        with pytest.raises(StateMismatch, match="the state's counters are not of this mixture"):
            resume({**state, "counters": wrong}, schedule)
    with pytest.raises(StateMismatch, match=r"order: saved .mix\(sizes=\[300, 200\]"):
        other = MixOrder([300, 200], {0: [3, 1]}, stop="all", shuffle=True)
        resume(state, Schedule(other.n, batch_size=10, seed=4, shuffle=False, order=other))


def test_an_identity_is_short_whatever_the_number_of_members() -> None:
    one = MixOrder([10] * 200, {0: list(range(1, 201))}, stop="repeat", shuffle=True)
    other = MixOrder([10] * 200, {0: list(range(2, 202))}, stop="repeat", shuffle=True)
    assert len(one.identity) < 120
    assert one.identity != other.identity


def test_first_draws_are_frozen() -> None:
    """A change here is a change of every seeded mixture: it needs a new schedule version."""
    golden = json.loads((Path(__file__).parent / "golden" / "mix-1.json").read_text())
    order = MixOrder(golden["sizes"], {0: golden["weights"]}, stop="repeat", shuffle=True)
    assert order.take(0, 200, seed=golden["seed"], epoch=golden["epoch"]).tolist() == golden["indices"]


@pytest.mark.parametrize(
    ("starts", "weights", "denominator", "words"),
    [
        ([1], [[1, 1]], 2, "pieces begin at 0 and ascend"),
        ([0, 0], [[1, 1], [1, 1]], 2, "pieces begin at 0 and ascend"),
        ([0], [[1, 2]], 2, "add up to 3, not 2"),
        ([0], [[-1, 3]], 2, "weight -1 is outside 0 to 2"),
        ([0], [[1, 1]], 2**53, "add up to 1 to 2"),
        ([0], [[1, 1], [1, 1]], 2, "weights for 1 pieces"),
    ],
)
def test_shares_that_are_none_are_refused(
    starts: list[int], weights: list[list[int]], denominator: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Apportionment(np.array(starts, np.int64), np.array(weights, np.int64), denominator)


def test_counters_that_cannot_be_are_refused() -> None:
    draws = Apportionment(np.zeros(1, np.int64), np.array([[1, 1]], np.int64), 2)
    for counters, words in (
        ([3, 1], "not those of the weights"),
        ([3, 2], "add up to 5, at position 4"),
        ([4], "2 counters"),
    ):
        with pytest.raises(ValueError, match=words):
            draws.draw(4, np.array(counters, np.int64), np.empty(4, np.uint16))
