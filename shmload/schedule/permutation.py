"""`Permutation`: a seeded permutation of [0, n) that is computed at the position where it is read.

A permutation of 10^12 samples is never stored: each position is mapped by itself, so seeking is free, memory does not grow with
n, and any process can compute any part. Up to n = 65,536 a shuffled table (128 KiB) is better mixed and faster; above that a
Feistel network with cycle walking does the work (`src/permutation.h`, which names its sources).

Rejected: `numpy.random.Generator.permutation` (8 n bytes, and the whole shuffle before the first batch); a linear congruence
(a * i + b) mod n (fast, but neighbors stay neighbors); sorting by a hash of each index (memory, and ties).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload._core.permutation import MAX_N as MAX_N
from shmload._core.permutation import KeyedPermutation
from shmload._core.permutation import sample_key as sample_key
from shmload._core.permutation import sample_key_pair as sample_key_pair
from shmload.schedule.checks import MAX_UINT64, whole_number


class Permutation:
    """A random permutation of [0, n) chosen by (seed, epoch, stream). Equal keys give equal permutations on every machine.

    `permutation[p]` is the index at position p; `inverse` finds the position of an index. Nothing is computed in advance, except
    for n <= 65,536, where the first read shuffles a table.

    Args:
        n: number of indices, 1 to 2^62.
        seed: 0 to 2^64 - 1; seeds and epochs are mixed by a block cipher, so consecutive ones are unrelated.
        epoch: 0 to 2^64 - 1.
        stream: separates permutations under one (seed, epoch), such as those of two datasets, or of shards and their rows.
    Raises:
        TypeError, ValueError: an argument is not an integer, or is out of bounds.
    Cost: 2 to 4 ns per index for any n above 65,536, 0.2 ns below; GIL released. benchmarks/permutation.py measures it.
    Thread/process safety: immutable; may be used by any number of threads, and pickled.
    Source: Luby and Rackoff 1988; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002; Durstenfeld 1964
        for the table; keys by Philox, Salmon et al. 2011.
    Example:
        >>> order = Permutation(10, seed=7)
        >>> sorted(order.take(0, 10).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> order.inverse([order[3], order[4]]).tolist()
        [3, 4]
    """

    __slots__ = ("_keyed", "epoch", "n", "seed", "stream")

    def __init__(self, n: SupportsIndex, *, seed: SupportsIndex, epoch: SupportsIndex = 0, stream: SupportsIndex = 0) -> None:
        self.n = whole_number("Permutation: n", n, remedy="an empty order has no permutation")
        self.seed = _uint64("seed", seed)
        self.epoch = _uint64("epoch", epoch)
        self.stream = _uint64("stream", stream)
        self._keyed = KeyedPermutation(self.n, seed=self.seed, epoch=self.epoch, stream=self.stream)

    def take(self, positions: Any, stop: int | None = None, /) -> NDArray[np.int64]:
        """Return the indices at the given positions, or at a range of positions.

        Args:
            positions: integers in [0, n), an array of any shape; with `stop`, the first position of a range.
            stop: the end of the range (exclusive).
        Returns:
            a new int64 array of the positions' shape.
        Raises:
            IndexError: a position is outside [0, n).
            TypeError: the positions are not integers.
        """
        if stop is not None:
            out = np.empty(max(stop - positions, 0), np.int64)
            self.fill(positions, out)
            return out
        return _each(positions, "positions", self._keyed.take)

    def fill(self, start: int, out: NDArray[np.int64]) -> None:
        """Write the indices at positions [start, start + len(out)) into `out`.

        Args:
            start: the first position, 0 or more.
            out: int64, one dimension, contiguous.
        Raises:
            IndexError: a position is outside [0, n).
            TypeError: `out` is another kind of array.
        """
        if start < 0:
            raise IndexError(f"Permutation: positions are counted from 0 to n={self.n}, got start={start}")
        try:
            self._keyed.fill(start, out)
        except ValueError as error:
            raise TypeError(f"Permutation.fill: out must be a contiguous int64 array of one dimension: {error}") from error

    def inverse(self, indices: ArrayLike, /) -> NDArray[np.int64]:
        """Return the positions of the given indices; `inverse(take(positions))` equals `positions`.

        Args:
            indices: integers in [0, n), an array of any shape.
        Returns:
            a new int64 array of the indices' shape.
        Raises:
            IndexError: an index is outside [0, n).
            TypeError: the indices are not integers.
        """
        return _each(indices, "indices", self._keyed.inverse)

    def __getitem__(self, position: SupportsIndex) -> int:
        number = operator.index(position)
        try:
            return self._keyed.at(number)
        except OverflowError:
            return int(self.take([number])[0])  # which raises the error

    def __len__(self) -> int:
        return self.n

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Permutation):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"Permutation({self.n}, seed={self.seed}, epoch={self.epoch}, stream={self.stream})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Permutation, seed=self.seed, epoch=self.epoch, stream=self.stream), (self.n,)

    def _identity(self) -> tuple[int, int, int, int]:
        return self.n, self.seed, self.epoch, self.stream


def _uint64(name: str, value: SupportsIndex) -> int:
    remedy = f"{name} % 2**64 is in range"
    return whole_number(f"Permutation: {name}", value, at_least=0, at_most=MAX_UINT64, remedy=remedy)


def _each(given: ArrayLike, what: str, run: Callable[[NDArray[np.int64], NDArray[np.int64]], None]) -> NDArray[np.int64]:
    """Apply `run` to the integers of an array. Return an int64 array of the same shape."""
    array = np.asarray(given)
    out = np.empty(array.shape, np.int64)
    if array.size:
        if not np.can_cast(array.dtype, np.int64, "safe"):
            raise TypeError(f"Permutation: {what} must be integers that fit int64, got dtype {array.dtype}")
        run(np.ascontiguousarray(array, np.int64).reshape(-1), out.reshape(-1))
    return out
