"""Statistics of rounds."""

from hypothesis import given
from hypothesis import strategies as st

from shmload.tools.bench.spread import Spread, paired_ratio, quantile

rates = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50)


def test_spread_has_the_median_and_both_extremes():
    assert Spread(median=3.0, low=1.0, high=9.0) == Spread.of([9.0, 1.0, 3.0])


def test_quantile_is_the_nearest_rank():
    hundred = [float(n) for n in range(1, 101)]
    assert quantile(hundred, 0.50) == 50.0
    assert quantile(hundred, 0.99) == 99.0
    assert quantile(hundred, 1.0) == 100.0
    assert quantile(hundred, 0.0) == 1.0
    assert quantile([7.0], 0.99) == 7.0


@given(rates, st.floats(0, 1))
def test_at_least_the_requested_share_of_values_is_below_the_quantile(values, share):
    found = quantile(sorted(values), share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9


def test_ratios_are_computed_per_round_so_that_a_slow_round_cancels():
    fast_then_slow, half_of_it = [100.0, 10.0, 60.0], [50.0, 5.0, 30.0]
    assert Spread(2.0, 2.0, 2.0) == paired_ratio(fast_then_slow, half_of_it)


def test_ratio_without_a_common_round_is_none():
    assert paired_ratio([1.0], []) is None
    assert paired_ratio([1.0], [0.0]) is None
