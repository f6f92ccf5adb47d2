"""`ShardShuffle`: a shuffle that reads shards whole, for shards of any sizes.

    dataset    shard 0 | shard 1 | shard 2 | ...            each with its own number of samples
    epoch      the shards in random order, cut into windows of a few; the samples of each window in random order

It is `BlockShuffle` with blocks of any size: where `BlockShuffle` has a formula, this order keeps, for each epoch in use, the
order of the shards and the position at which each window begins. In return a window is exactly a few whole shards, so a reader
knows which shards it needs next and which it no longer needs.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload.schedule import key_streams
from shmload.schedule.checks import whole_number
from shmload.schedule.epoch_cache import EpochCache
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.permutation import Permutation

MAX_WINDOWS = 4  # cached windows of an epoch


class _Epoch(NamedTuple):
    """The shards of one epoch."""

    shards: NDArray[np.int64]  # shards that have samples, in the order they are read
    places: NDArray[np.int64]  # place of each shard in `shards`; -1: it has no samples
    begins: NDArray[np.int64]  # position at which each window begins, and the end of the last
    windows: dict[int, tuple[Permutation, NDArray[np.int64], NDArray[np.int64]]]  # results of `_window` for the newest windows


class ShardShuffle(KeyedOrder):
    """Random order of samples in which every shard is read within one window; shards may have any sizes.

    With w = window, B shards, and batches within a window: two samples of a batch come from one shard with probability about 1 / w
    (1 / B for a plain shuffle); a reader holds w shards and reads each once per epoch.

    Args:
        sizes: number of samples in each shard, in the dataset's order. Copied.
        window: number of shards whose samples are mixed; at least the number of shards that a batch should draw from.
        shuffle: False reads shards and samples in their own order.
    Raises:
        TypeError, ValueError: an argument is not an integer, or is out of bounds.
    Cost: about 15 ns per index; up to 24 bytes per shard for each epoch in use.
    Example:
        >>> order = ShardShuffle([3, 1, 4], window=2)
        >>> sorted(order.take(0, 8, seed=7, epoch=0).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(self, sizes: ArrayLike, *, window: int = 16, shuffle: bool = True) -> None:
        given = np.asarray(sizes)
        if given.size and given.dtype.kind not in "iu":
            raise TypeError(f"ShardShuffle: sizes must be integers, got dtype {given.dtype}; give the samples of each shard")
        self.sizes = np.array(given, np.int64)  # a copy, because the caller may change its array
        if self.sizes.ndim != 1 or (len(self.sizes) and self.sizes.min() < 0):
            raise ValueError(
                f"ShardShuffle: sizes are the samples of each shard, from 0 up; got {np.asarray(sizes).tolist()!r:.80}"
            )
        self._n = whole_number("ShardShuffle: the sum of sizes", int(self.sizes.sum()), remedy="an order needs samples")
        self.num_needed = self._n
        self.window = whole_number("ShardShuffle: window", window, remedy="16 shards suit most batches")
        self.shuffle = shuffle
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._epochs: EpochCache[_Epoch] = EpochCache()

    @property
    def n(self) -> int:
        return self._n

    @property
    def identity(self) -> str:
        sizes = zlib.crc32(self.sizes.astype("<i8").tobytes())
        way = f"window={self.window}" if self.shuffle else "in order"
        return f"shard_shuffle(n={self.n}, shards={len(self.sizes)}, sizes={sizes:08x}, {way})"

    @property
    def num_windows(self) -> int:
        """Return the number of windows in an epoch."""
        return -(-int(np.count_nonzero(self.sizes)) // self.window)

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(start, stop)
        of = self._epoch(seed, epoch)
        out = np.empty(stop - start, np.int64)
        done = 0
        while done < len(out):
            number = int(np.searchsorted(of.begins, start + done, "right")) - 1
            samples, begins, shifts = self._window(of, number, seed, epoch)
            first = start + done - int(of.begins[number])
            part = out[done : done + samples.n - first]
            samples.fill(first, part)
            part += shifts[np.searchsorted(begins, part, "right") - 1]
            done += len(part)
        return out

    def window_of(self, shard: int, *, seed: int, epoch: int) -> int:
        """Return the number of the window in which a shard is read.

        Args:
            shard: number of a shard that has samples.
            seed, epoch: as in `take`.
        """
        return int(self._epoch(seed, epoch).places[shard]) // self.window

    def shards_from(self, window: int, *, seed: int, epoch: int, num_windows: int = 2) -> list[list[int]]:
        """Return the shards of the next windows, continuing into the next epoch at the end of this one.

        Args:
            window: number of the first window.
            seed, epoch: as in `take`.
            num_windows: number of windows.
        """
        found: list[list[int]] = []
        while len(found) < num_windows:
            shards = self._epoch(seed, epoch).shards
            begins = range(window * self.window, len(shards), self.window)[: num_windows - len(found)]
            found += [shards[begin : begin + self.window].tolist() for begin in begins]
            window, epoch = 0, epoch + 1
        return found

    def _epoch(self, seed: int, epoch: int) -> _Epoch:
        return self._epochs.get(seed, epoch, self._made)

    def _made(self, seed: int, epoch: int) -> _Epoch:
        shards = np.flatnonzero(self.sizes)
        if self.shuffle:
            shards = shards[Permutation(len(shards), seed=seed, epoch=epoch, stream=key_streams.BLOCKS).take(0, len(shards))]
        places = np.full(len(self.sizes), -1, np.int64)
        places[shards] = np.arange(len(shards))
        ends = np.concatenate([[0], np.cumsum(self.sizes[shards])])
        return _Epoch(shards, places, np.append(ends[: -1 : self.window], ends[-1]), {})

    def _window(self, of: _Epoch, number: int, seed: int, epoch: int) -> tuple[Permutation, NDArray[np.int64], NDArray[np.int64]]:
        """Return (the order of a window's samples, numbered shard by shard; the first number of each shard; index minus number)."""
        found = of.windows.get(number)
        if found is None:
            shards = of.shards[number * self.window : (number + 1) * self.window]
            ends = np.cumsum(self.sizes[shards])
            begins = ends - self.sizes[shards]
            samples = Permutation(int(ends[-1]), seed=seed, epoch=epoch, stream=key_streams.WINDOWS + number)
            found = samples, begins, self._starts[shards] - begins
            while len(of.windows) >= MAX_WINDOWS:
                of.windows.pop(next(iter(of.windows)), None)
            of.windows[number] = found
        return found
