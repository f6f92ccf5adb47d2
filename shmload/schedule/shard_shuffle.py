"""A shuffle that reads shards whole, for shards of any sizes.

    dataset    shard 0 | shard 1 | shard 2 | ...            of so many samples each
    epoch      the shards in random order, cut into windows of a few; each window's samples in random order

`BlockShuffle` with the blocks' own sizes: what costs it a formula costs here one word a shard and epoch, the position at which each
shard's window begins. In return a window is exactly some shards, whatever they hold, so a reader knows what it needs next, and what
no more.
"""

import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload.schedule.checks import whole_number
from shmload.schedule.keyed import KeyedOrder
from shmload.schedule.permutation import MAX_N, Permutation
from shmload.schedule.streams import BLOCKS, WINDOWS

__all__ = ["ShardShuffle"]

_EPOCHS_KEPT = 4


class _Epoch(NamedTuple):
    """The shards of an epoch."""

    shards: NDArray[np.int64]  # those with samples, in the order they are read
    places: NDArray[np.int64]  # of each shard in it; -1: it has no samples
    begins: NDArray[np.int64]  # position at which each window begins, and the end
    windows: dict[int, tuple[Permutation, NDArray[np.int64], NDArray[np.int64]]]  # made when they are looked at


class ShardShuffle(KeyedOrder):
    """Random order of samples in which every shard is read within one window, with shards of any sizes.

    With w = window, B shards and batches within a window: two samples of a batch are of one shard about 1 / w of the time (a plain
    shuffle: 1 / B); a reader holds w shards and reads each once an epoch.

    Args:
        sizes: samples of each shard, in the dataset's order.
        window: shards whose samples are mixed; at least the shards that a batch should come from.
        shuffle: False reads shards and samples in their own order.
    Raises:
        TypeError, ValueError: an argument is no integer, or outside its bounds.
    Cost: about 15 ns an index; 24 bytes a shard for each epoch in use.
    Example:
        >>> order = ShardShuffle([3, 1, 4], window=2)
        >>> sorted(order.take(0, 8, seed=7, epoch=0).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(self, sizes: ArrayLike, *, window: int = 16, shuffle: bool = True) -> None:
        self.sizes = np.ascontiguousarray(sizes, np.int64)
        if self.sizes.ndim != 1 or (len(self.sizes) and self.sizes.min() < 0):
            raise ValueError(
                f"ShardShuffle: sizes are the samples of each shard, from 0 up; got {np.asarray(sizes).tolist()!r:.80}"
            )
        self._n = whole_number(
            "ShardShuffle: the sum of sizes",
            int(self.sizes.sum()),
            at_least=1,
            at_most=MAX_N,
            remedy="an order needs samples",
        )
        self.window = whole_number(
            "ShardShuffle: window", window, at_least=1, at_most=MAX_N, remedy="16 shards suit most batches"
        )
        self.shuffle = shuffle
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._epochs: dict[tuple[int, int], _Epoch] = {}

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
        """Windows of an epoch."""
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

    def shard_of(self, index: int) -> int:
        """The shard that holds a sample.

        Args:
            index: of the sample.
        """
        return int(np.searchsorted(self._starts, index, "right")) - 1

    def window_of(self, shard: int, *, seed: int, epoch: int) -> int:
        """The number of the window in which a shard is read.

        Args:
            shard: its number; it has samples.
            seed, epoch: as of `take`.
        """
        return int(self._epoch(seed, epoch).places[shard]) // self.window

    def shards_from(self, window: int, *, seed: int, epoch: int, num_windows: int = 2) -> list[list[int]]:
        """The shards of windows from one on, into the next epoch where this one ends.

        Args:
            window: number of the first.
            seed, epoch: as of `take`.
            num_windows: how many.
        """
        found: list[list[int]] = []
        while len(found) < num_windows:
            shards = self._epoch(seed, epoch).shards
            begins = range(window * self.window, len(shards), self.window)
            found += [shards[begin : begin + self.window].tolist() for begin in begins]
            window, epoch = 0, epoch + 1
        return found[:num_windows]

    def _epoch(self, seed: int, epoch: int) -> _Epoch:
        found = self._epochs.get((seed, epoch))
        if found is None:
            full = np.flatnonzero(self.sizes)
            shards = full[Permutation(len(full), seed=seed, epoch=epoch, stream=BLOCKS).take(0, len(full))]
            if not self.shuffle:
                shards = full
            places = np.full(len(self.sizes), -1, np.int64)
            places[shards] = np.arange(len(shards))
            ends = np.concatenate([[0], np.cumsum(self.sizes[shards])])
            begins = np.append(ends[: -1 : self.window], ends[-1])
            found = _Epoch(shards, places, begins, {})
            while len(self._epochs) >= _EPOCHS_KEPT:
                self._epochs.pop(next(iter(self._epochs)), None)
            self._epochs[seed, epoch] = found
        return found

    def _window(
        self, of: _Epoch, number: int, seed: int, epoch: int
    ) -> tuple[Permutation, NDArray[np.int64], NDArray[np.int64]]:
        """(the order of a window's samples numbered shard by shard, the first number of each shard, index less number)."""
        found = of.windows.get(number)
        if found is None:
            shards = of.shards[number * self.window : (number + 1) * self.window]
            ends = np.cumsum(self.sizes[shards])
            begins = ends - self.sizes[shards]
            samples = Permutation(int(ends[-1]), seed=seed, epoch=epoch, stream=WINDOWS + number)
            found = samples, begins, self._starts[shards] - begins
            while len(of.windows) >= _EPOCHS_KEPT:
                of.windows.pop(next(iter(of.windows)), None)
            of.windows[number] = found
        return found

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_epochs": {}}

    def __repr__(self) -> str:
        return f"ShardShuffle(<{len(self.sizes)} shards of {self.n} samples>, window={self.window}, shuffle={self.shuffle})"
