"""Quantiles of durations in constant memory."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shmload.modes.passes import Waits


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_is_right_to_three_per_cent(durations: list[int], q: float) -> None:
    waits = Waits()
    for ns in durations:
        waits.add(ns)
    exact = sorted(durations)[max(0, math.ceil(q * len(durations)) - 1)]
    assert abs(waits.quantile(q) - exact) <= exact / 32
    assert (waits.count, waits.total_ns) == (len(durations), sum(durations))


def test_short_durations_are_exact() -> None:
    waits = Waits()
    for ns in range(32):
        waits.add(ns)
    assert [waits.quantile((ns + 1) / 32) for ns in range(32)] == list(range(32))


def test_without_any_there_is_none() -> None:
    assert Waits().quantile(0.5) == 0


def test_memory_does_not_grow_with_their_number() -> None:
    waits = Waits()
    for ns in range(1, 200_000, 7):
        waits.add(ns)
    assert len(waits._counts) <= 16 * 20
