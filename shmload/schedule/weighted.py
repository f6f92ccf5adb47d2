"""Weighted sampling: with replacement by a formula, without replacement by one sort for each epoch.

With replacement, a position's random word is looked up in an alias table (src/draws.h): constant time for any weights. Without
replacement, each index gets a time of arrival: an exponential variable whose rate is the weight, keyed by (seed, epoch, index).
The epoch is the indices by time of arrival (Efraimidis and Spirakis 2006, whose u^(1/w) is exp(-time)). This is the distribution of
drawing one by one and removing what was drawn, as torch.multinomial does.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload._core.draws import AliasTable, fill_words
from shmload._core.permutation import MAX_N
from shmload.schedule import key_streams
from shmload.schedule.checks import refuse_where, whole_number
from shmload.schedule.digest import digest
from shmload.schedule.epoch_cache import EpochCache
from shmload.schedule.keyed_order import KeyedOrder

MAX_WEIGHTS = (1 << 31) - 1


class Weighted(KeyedOrder):
    """Indices drawn in proportion to weights, like torch's WeightedRandomSampler.

    Args:
        weights: one for each sample, finite, not negative, not all zero; an array, a list or a tensor. A weight below 2^-63 of the
            largest counts as zero; an index with weight zero is never drawn. Copied.
        num_samples: number of positions in an epoch. The default is the number of weights; without replacement, only of those that
            can be drawn.
        replacement: if False, no index is drawn twice in an epoch.
    Raises:
        TypeError, ValueError: the weights are invalid, or an argument is out of bounds.
    Cost: with replacement 7 ns per index for 10^4 weights, 22 ns for 10^7 (memory bound), O(1) to seek; 24 bytes per weight, and 24
        more during construction. Without replacement: O(n log n) at an epoch's first index (0.15 s for 10^6 weights); 8 bytes per
        weight, and 8 for each position of the two newest epochs.
    Example:
        >>> order = Weighted([0.0, 3.0, 1.0], num_samples=8)
        >>> set(order.take(0, 8, seed=7, epoch=0).tolist()) <= {1, 2}
        True
    """

    def __init__(self, weights: ArrayLike, *, num_samples: SupportsIndex | None = None, replacement: bool = True) -> None:
        if not isinstance(replacement, bool):
            raise TypeError(f"Weighted: replacement must be True or False, got {replacement!r}")
        given = _checked_weights(weights)
        scaled = np.ldexp(given / given.max(), 63).astype(np.uint64)
        drawable = int(np.count_nonzero(scaled))
        most = MAX_N if replacement else drawable
        remedy = "draw with replacement to have more" if not replacement else "an epoch has at least one sample"
        self.replacement = replacement
        self.num_weights, self.num_needed = len(given), int(np.flatnonzero(scaled)[-1]) + 1
        self._n = whole_number(
            "Weighted: num_samples",
            (len(given) if replacement else drawable) if num_samples is None else num_samples,
            at_most=most,
            remedy=remedy,
        )
        self._digest = digest(given)
        self._scaled = scaled  # the alias table is built from them on first use
        self._epochs: EpochCache[NDArray[np.int64]] = EpochCache()

    @property
    def n(self) -> int:
        return self._n

    @property
    def identity(self) -> str:
        return f"weighted(n={self.n}, weights={self._digest}, replacement={self.replacement})"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        if not self.replacement:
            return self._epochs.get(seed, epoch, self._race)[start:stop].copy()
        out = np.empty(stop - start, np.int64)
        self._table.fill(start, out, seed=seed, epoch=epoch, stream=key_streams.DRAWS)
        return out

    def _race(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the indices by time of arrival. In a tie (one pair in 2^53) the lower index comes first."""
        words = np.empty(self.num_weights, np.uint64)
        fill_words(words, seed=seed, epoch=epoch, stream=key_streams.RACES, n=self.num_weights)
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore"):
            times = -_logarithm(uniform) / self._scaled  # infinite if the weight is 0
        return np.argsort(times, kind="stable")[: self.n]

    @cached_property
    def _table(self) -> AliasTable:
        return AliasTable(self._scaled)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_table"}


def _checked_weights(weights: ArrayLike) -> NDArray[np.float64]:
    try:
        given = np.asarray(weights).astype(np.float64)  # a copy, because the caller may change its array
    except (TypeError, ValueError) as error:
        raise TypeError(f"Weighted: weights must be numbers, one for each sample: {error}") from error
    if given.ndim != 1 or not 1 <= len(given) <= MAX_WEIGHTS:
        raise ValueError(
            f"Weighted: weights must be one-dimensional, 1 to 2^31 - 1 of them, got shape {given.shape}; give one for each sample"
        )
    refuse_where(
        "Weighted: weights must be finite and not negative", given, ~(np.isfinite(given) & (given >= 0)), "0 leaves a sample out"
    )
    if not given.any():
        raise ValueError(f"Weighted: one weight must be above 0, got {len(given)} zeros; nothing could be drawn from them")
    return given


def _logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the natural logarithm with additions and multiplications only, which give the same bits on every machine.

    numpy's log uses a different routine for each instruction set, and one bit could swap two samples between ranks. With
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
