"""Weighted sampling: with replacement a formula, without replacement one sort an epoch.

With replacement a position's random word goes through an alias table (src/draws.h): constant time, whatever the weights.
Without replacement every index runs a race: its time is an exponential variable of rate weight, keyed by (seed, epoch,
index), and the epoch is the indices by time of arrival (Efraimidis and Spirakis 2006, whose u^(1/w) is exp(-time)). That
is the distribution of drawing one by one and taking the drawn away, as in torch.multinomial.
"""

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload._core.draws import AliasTable, fill_words
from shmload.schedule.permutation import DRAWS, MAX_N, RACES, EpochCache, digest, whole_number
from shmload.schedule.schedule import KeyedOrder

__all__ = ["Weighted"]

MAX_WEIGHTS = (1 << 31) - 1


class Weighted(KeyedOrder):
    """Indices drawn in proportion to weights, as torch's WeightedRandomSampler draws them.

    Args:
        weights: one for each sample, finite, not negative, not all zero; an array, a list or a tensor. Those below 2^-63 of the
            largest count as zero, and what is zero is never drawn. Copied.
        num_samples: positions of an epoch. None: as many as weights; without replacement as many as can be drawn.
        replacement: False draws no index twice in an epoch.
    Raises:
        TypeError, ValueError: the weights cannot be drawn from, or an argument is outside its bounds.
    Cost: with replacement 7 ns an index for 10^4 weights, 22 ns for 10^7 (memory), O(1) to seek; 24 bytes a weight held, 24
        more while it is made. Without: O(n log n) at an epoch's first index, 0.15 s for 10^6 weights; 8 bytes a weight held,
        and 8 for each position of the two newest epochs.
    Example:
        >>> order = Weighted([0.0, 3.0, 1.0], num_samples=8)
        >>> set(order.take(0, 8, seed=7, epoch=0).tolist()) <= {1, 2}
        True
    """

    def __init__(
        self, weights: ArrayLike, *, num_samples: SupportsIndex | None = None, replacement: bool = True
    ) -> None:
        if not isinstance(replacement, bool):
            raise TypeError(f"Weighted: replacement must be True or False, got {replacement!r}")
        given = _checked(weights)
        scaled = np.ldexp(given / given.max(), 63).astype(np.uint64)
        drawable = int(np.count_nonzero(scaled))
        most = MAX_N if replacement else drawable
        remedy = "draw with replacement to have more" if not replacement else "an epoch has at least one sample"
        self.replacement = replacement
        self.num_weights = len(given)
        self._n = whole_number(
            "Weighted: num_samples",
            (len(given) if replacement else drawable) if num_samples is None else num_samples,
            at_least=1,
            at_most=most,
            remedy=remedy,
        )
        self._digest = digest(given)
        self._scaled = scaled  # the table is made of them, and remade in a copy
        self._table = AliasTable(scaled) if replacement else None
        self._epochs: EpochCache[NDArray[np.int64]] = EpochCache()

    @property
    def n(self) -> int:
        return self._n

    @property
    def identity(self) -> str:
        return f"weighted(n={self.n}, weights={self._digest}, replacement={self.replacement})"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        if self._table is None:
            return self._epochs.get(seed, epoch, self._race)[start:stop].copy()
        out = np.empty(stop - start, np.int64)
        self._table.fill(start, out, seed=seed, epoch=epoch, stream=DRAWS)
        return out

    def _race(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices by time of arrival. Ties, which one pair in 2^53 makes, go to the lower index."""
        words = np.empty(self.num_weights, np.uint64)
        fill_words(words, seed=seed, epoch=epoch, stream=RACES, n=self.num_weights)
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore"):
            times = -_logarithm(uniform) / self._scaled  # infinite where there is no weight
        return np.argsort(times, kind="stable")[: self.n]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.replacement:
            self._table = AliasTable(self._scaled)

    def __repr__(self) -> str:
        return f"Weighted({self.num_weights:,} weights, num_samples={self.n}, replacement={self.replacement})"


def _checked(weights: ArrayLike) -> NDArray[np.float64]:
    try:
        given = np.asarray(weights).astype(np.float64)  # a copy: the caller's array may change
    except (TypeError, ValueError) as error:
        raise TypeError(f"Weighted: weights must be numbers, one for each sample: {error}") from error
    if given.ndim != 1 or not 1 <= len(given) <= MAX_WEIGHTS:
        raise ValueError(
            f"Weighted: weights must be one-dimensional, 1 to 2^31 - 1 of them, got shape {given.shape}; give one for each sample"
        )
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if len(wrong):
        raise ValueError(
            f"Weighted: weights must be finite and not negative, got {given[wrong[0]]} at index {wrong[0]} "
            f"({len(wrong)} such of {len(given)}); 0 leaves a sample out"
        )
    if not given.any():
        raise ValueError(
            f"Weighted: one weight must be above 0, got {len(given)} zeros; nothing could be drawn from them"
        )
    return given


def _logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The natural logarithm by additions and multiplications alone, which give the same bits on every machine.

    numpy's log takes another routine for each instruction set, and one bit could exchange two samples between ranks. With
    m in [sqrt(1/2), sqrt(2)) and z = (m - 1) / (m + 1), log m is 2 (z + z^3/3 + z^5/5 + ...); |z| < 0.172, so 12 terms do.
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.5**0.5
    mantissa = np.where(low, mantissa * 2, mantissa)
    z = (mantissa - 1) / (mantissa + 1)
    squared = z * z
    series = np.full_like(z, 1 / 23)
    for odd in range(21, 0, -2):
        series = series * squared + 1 / odd
    return np.asarray(2 * z * series + (exponent - low) * 0.6931471805599453)
