"""Shares: weights as whole multiples of one unit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.schedule.shares import MAX_TOTAL, Shares, check_weights

positive = st.one_of(st.integers(1, 2**70), st.floats(1e-300, 1e300), st.fractions(Fraction(1, 1000), 1000))
small_pieces = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.integers(0, 9), min_size=k, max_size=k).filter(any), min_size=1, max_size=4)
)


@pytest.mark.parametrize(
    ("weights", "total", "shares"),
    [
        ([3, 1], 4, (3, 1)),
        ([0.1, 0.2, 0.7], 10, (1, 2, 7)),
        ([np.float32(0.1), np.float64(0.9)], 10, (1, 9)),
        ([np.int64(2**62), np.int64(2**62)], 2, (1, 1)),
        ([Fraction(1, 3), Fraction(2, 3)], 3, (1, 2)),
        ([300, 200, 0], 5, (3, 2, 0)),
        ([5], 1, (1,)),
        ([1e-300, 1e300], MAX_TOTAL, (0, MAX_TOTAL)),
        ([1, 1, 2**60], MAX_TOTAL, (1, 1, MAX_TOTAL - 2)),
    ],
    ids=str,
)
def test_weights_become_whole_numbers(weights: list[Any], total: int, shares: tuple[int, ...]) -> None:
    found = Shares.of([weights])
    assert (total, (shares,)) == (found.total, found.pieces)


@settings(deadline=None)
@given(st.lists(positive, min_size=1, max_size=8))
def test_shares_add_up_and_are_within_a_unit_of_the_weights(weights: list[Any]) -> None:
    found = Shares.of([weights])
    exact = [Fraction(str(weight)) for weight in weights]
    assert sum(found.pieces[0]) == found.total <= MAX_TOTAL
    for share, weight in zip(found.pieces[0], exact, strict=True):
        assert abs(share - weight / sum(exact) * found.total) < 1


def test_pieces_have_one_unit() -> None:
    found = Shares.of([[1, 1], [1, 2], [0, 1]], starts=[0, 10, 20])
    assert (found.total, found.pieces) == (6, ((3, 3), (2, 4), (0, 6)))
    assert found.is_drawn == [True, True]


def test_weights_too_small_for_a_unit_are_named() -> None:
    assert Shares.of([[1, 1e-300, 0]]).vanishing == (1,)
    assert Shares.of([[1, 1e-300, 0], [0, 1, 0]], starts=[0, 5]).vanishing == ()


@settings(deadline=None)
@given(small_pieces, st.integers(1, 9), st.integers(0, 60), st.integers(1, 60))
def test_position_of_a_target_is_the_first_that_reaches_it(
    pieces: list[list[int]], length: int, position: int, target: int
) -> None:
    shares = Shares.of(pieces, starts=[length * i for i in range(len(pieces))])
    for member in range(shares.num_members):
        assert shares.cumulative(member, position) == sum(
            shares.pieces[min(n // length, len(pieces) - 1)][member] for n in range(position)
        )
        at = shares.reaches(member, target)
        if at is None:
            assert shares.pieces[-1][member] == 0
            assert shares.cumulative(member, 10**9) < target
        else:
            assert shares.cumulative(member, at - 1) < target <= shares.cumulative(member, at)


@settings(deadline=None)
@given(small_pieces, st.integers(1, 9), st.integers(0, 500))
def test_every_member_has_exactly_its_share_at_an_even_position(pieces: list[list[int]], length: int, position: int) -> None:
    shares = Shares.of(pieces, starts=[length * i for i in range(len(pieces))])
    found = shares.even_before(position)
    if found is None:
        start = max(s for s in shares.starts if s <= position)
        assert any(shares.cumulative(member, start) % shares.total for member in range(shares.num_members))
        return
    even, counters = found
    assert even <= position
    assert sum(counters) == even
    assert [count * shares.total for count in counters] == [shares.cumulative(member, even) for member in range(shares.num_members)]


def test_even_position_is_the_last_one() -> None:
    shares = Shares.of([[3, 1]])
    assert shares.even_before(11) == (8, [6, 2])
    assert shares.even_before(12) == (12, [9, 3])
    assert shares.even_before(10**15 + 3) == (10**15, [10**15 * 3 // 4, 10**15 // 4])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5], "W needs finite weights of 0 or more; got -0.5"),
        ([math.nan, 1], "W needs finite weights of 0 or more; got nan"),
        ([1, np.float32("inf")], "W needs finite weights of 0 or more; got .*inf"),
        ([0, 0.0], "W needs a weight above 0; all 2 are 0"),
        ([1, "2"], "W needs finite weights of 0 or more; got '2'"),
        ([1, None], "W needs finite weights of 0 or more; got None"),
        ([1], "W needs 2 weights, one for each member; got 1"),
    ],
)
def test_invalid_weights_are_refused(weights: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_weights(weights, 2, "W")


@pytest.mark.parametrize("weight", [1, 2**70, 0.5, Fraction(1, 3), np.float32(0.5), np.int64(3)], ids=repr)
def test_any_real_number_type_is_accepted_as_a_weight(weight: Any) -> None:
    check_weights([weight, 0], 2, "W")
