"""Rounds into figures: medians, their spread, and ratios that are paired within a round.

The machine's load changes from minute to minute. A ratio is therefore taken between runs of the same round, which
stood next to each other in time, and only then the median over rounds.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WAIT_SHARES = (0.0, 0.01, 0.05, *(number / 20 for number in range(2, 20)), 0.98, 0.99, 0.995, 0.999, 1.0)


@dataclass(frozen=True)
class Spread:
    """Median and extremes of the same figure over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            raise ValueError("a spread needs at least one value, given none")
        return cls(statistics.median(values), min(values), max(values))


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank): always one that was measured."""
    if not ascending:
        raise ValueError("a quantile needs at least one value, given none")
    rank = -(-len(ascending) * share // 1)  # ceiling
    return ascending[min(len(ascending), max(1, int(rank))) - 1]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread | None:
    """Spread of the ratios of runs of equal rounds; None where no round has both."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=False) if b > 0]
    return Spread.of(ratios) if ratios else None
