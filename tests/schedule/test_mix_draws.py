"""The draws of a mixture: in every prefix, each member is drawn in proportion to its weight, within Tijdeman's bound."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload._core.mix import SCAN_MAX, Draws
from shmload.schedule.shares import Shares
from tests.schedule.mix_kit import IdealCounts, bound_of, draws_of

ROUNDING = Fraction(1, 10**6)  # for weights without a common unit, over far more draws than here
weights = st.one_of(
    st.integers(0, 2**40), st.floats(0, 1e308, allow_nan=False), st.sampled_from([1e-300, 1, math.pi, 0.1, 5e-324, 2**59])
)
mixtures = st.lists(weights, min_size=2, max_size=12).filter(any)

AWKWARD: dict[str, list[Any]] = {
    "next to nothing": [1, 1e-300],
    "smallest float": [5e-324, 1],
    "largest floats": [1e308, 1e308, 1.7e308],
    "irrational": [math.pi, math.e, math.sqrt(2), math.log(2)],
    "one of 2^59": [2**59, 1],
    "one in 2^60": [2**60 - 1, 1],
    "decimals": [0.1, 0.2, 0.7],
    "thirds": [1 / 3, 2 / 3],
    "with zeros": [0, 3, 0, 0, 1, 0],
    "200 alike": [1] * 200,
    "200, one large": [1e6] + [1] * 199,
    "200, falling": [1 / (i + 1) ** 2 for i in range(200)],
    "200, halved": [2.0**-i for i in range(200)],
    "200 primes": [p for p in range(2, 1224) if all(p % q for q in range(2, math.isqrt(p) + 1))],
    "greedy's trouble": [100, 1, 1, 1, 1, 1, 1, 1, 1, 1],
}


def greedy(given: list[Any], count: int) -> list[int]:
    """Draws the largest deficit first, which shmload does not do."""
    counts, members = [0] * len(given), []
    for n in range(1, count + 1):
        member = max(range(len(given)), key=lambda i: (given[i] * n - counts[i] * sum(given), -i))
        counts[member] += 1
        members.append(member)
    return members


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_weights_keep_the_bound_at_every_prefix(kind: str) -> None:
    given = AWKWARD[kind]
    members = draws_of(Shares.of([given]), 2000)
    assert IdealCounts([given]).worst(members) <= bound_of(sum(map(bool, given))) + ROUNDING


@pytest.mark.slow(reason="draws 500 places of each of 199 mixtures and checks every prefix")
@pytest.mark.parametrize("shape", ["random", "falling", "wild"])
def test_2_to_200_members_keep_the_bound_at_every_prefix(shape: str) -> None:
    draw = random.Random(shape)
    for num_members in range(2, 201):
        given: list[Any] = {
            "random": [draw.randrange(1, 10**6) for _ in range(num_members)],
            "falling": [round(1 / (i + 1), 4) for i in range(num_members)],
            "wild": [float(f"{10.0 ** draw.uniform(-12, 12):.2g}") for _ in range(num_members)],
        }[shape]
        members = draws_of(Shares.of([given]), 500)
        assert IdealCounts([given]).worst(members) <= bound_of(num_members) + ROUNDING, num_members


def test_measure_detects_that_largest_deficit_first_breaks_the_bound() -> None:
    given = [202, 161, 68, 25, 3, 3, 2, 1, 1, 1]
    assert Fraction(13, 10) < IdealCounts([given]).worst(greedy(given, sum(given)))
    assert IdealCounts([given]).worst(draws_of(Shares.of([given]), sum(given))) <= bound_of(10)


@settings(deadline=None)
@given(mixtures)
def test_any_weights_keep_the_bound(given: list[Any]) -> None:
    members = draws_of(Shares.of([given]), 200)
    assert IdealCounts([given]).worst(members) <= bound_of(max(sum(map(bool, given)), 2)) + ROUNDING


@settings(deadline=None)
@given(st.data(), st.integers(2, 6), st.integers(1, 4))
def test_changing_weights_keep_the_bound_of_their_sum(data: Any, num_members: int, num_pieces: int) -> None:
    one = st.lists(st.sampled_from([0, 1, 2, 7, 0.3, 1e-9, math.pi]), min_size=num_members, max_size=num_members)
    pieces = [data.draw(one.filter(any)) for _ in range(num_pieces)]
    gaps = data.draw(st.lists(st.integers(1, 60), min_size=num_pieces - 1, max_size=num_pieces - 1))
    starts = [0, *np.cumsum(gaps, dtype=int).tolist()]
    members = draws_of(Shares.of(pieces, starts=starts), 300)
    drawn = sum(any(piece[i] for piece in pieces) for i in range(num_members))
    assert IdealCounts(pieces, starts).worst(members) <= bound_of(max(drawn, 2)) + ROUNDING


def test_member_may_be_drawn_after_its_weight_ends_to_make_up_a_deficit() -> None:
    pieces, starts = [[0, 1, 1], [1, 0, 0]], [0, 1]
    assert draws_of(Shares.of(pieces, starts=starts), 5) == [1, 0, 0, 0, 0]
    assert draws_of(Shares.of(pieces, starts=starts), 5, scan_max=0) == [1, 0, 0, 0, 0]


@settings(deadline=None)
@given(mixtures, st.integers(0, 300))
def test_linear_search_and_trees_draw_the_same(given: list[Any], count: int) -> None:
    shares = Shares.of([given])
    assert draws_of(shares, count, scan_max=0) == draws_of(shares, count, scan_max=1000)


@pytest.mark.parametrize("num_members", [1, 2, SCAN_MAX, SCAN_MAX + 1, 64, 65, 200])
def test_both_methods_agree_for_any_number_of_members(num_members: int) -> None:
    shares = Shares.of([[1 + i * i % 17 for i in range(num_members)]])
    assert draws_of(shares, 2000, scan_max=0) == draws_of(shares, 2000, scan_max=1000) == draws_of(shares, 2000)


@settings(deadline=None)
@given(mixtures, st.integers(0, 200), st.integers(0, 200))
def test_run_resumes_from_its_counters(given: list[Any], first: int, second: int) -> None:
    shares = Shares.of([given])
    whole = draws_of(shares, first + second)
    counters = np.bincount(whole[:first], minlength=len(given))
    assert whole[first:] == draws_of(shares, second, position=first, counters=counters)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_sizes_as_weights_draw_each_member_as_often_as_its_size(sizes: list[int]) -> None:
    members = draws_of(Shares.of([sizes]), sum(sizes))
    assert sizes == np.bincount(members, minlength=len(sizes)).tolist()


@pytest.mark.parametrize("given", [[2**39 - 7, 5, 2], [2**30, 1, 1], [3, 1]])
@pytest.mark.parametrize("scan_max", [0, 48])
def test_distant_draws_repeat_those_at_the_start(given: list[int], scan_max: int) -> None:
    shares = Shares.of([given])
    times = 2**61 // shares.total
    counters = [share * times for share in shares.pieces[0]]
    far = draws_of(shares, 5000, position=shares.total * times, counters=counters, scan_max=scan_max)
    assert draws_of(shares, 5000, scan_max=scan_max) == far


def test_member_of_weight_zero_is_never_drawn() -> None:
    assert {1, 3} == set(draws_of(Shares.of([[0, 1, 0, 1e-3]]), 5000))


def test_counters_of_another_position_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong to position 0: no member may be drawn at 0"):
        draws_of(Shares.of([[1, 1]]), 10, counters=[5, 5])
    with pytest.raises(ValueError, match="2 counters and a position of at most 2\\^62 are required, got 3 counters and position 0"):
        draws_of(Shares.of([[1, 1]]), 10, counters=[0, 0, 0])


@pytest.mark.parametrize(
    ("starts", "shares", "message"),
    [
        (
            [0],
            [[]],
            "each of the 1 pieces must have shares of 1 to 65535 members, and the first must start at 0, got 1 pieces of 0 members",
        ),
        ([1], [[1]], "the first must start at 0"),
        ([0], [[0, 0]], "add up to the same positive total, got 0 and 0"),
        ([0, 5], [[1, 1], [1, 2]], "add up to the same positive total, got 2 and 3"),
        ([0], [[2**60, 1]], "at most 2\\^60, got more in piece 0"),
        ([0, 5, 5], [[1], [1], [1]], "increase and be at most 2\\^62, got 5 after 5"),
    ],
)
def test_invalid_shares_are_refused(starts: list[int], shares: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Draws(np.array(starts, np.uint64), np.array(shares, np.uint64))
