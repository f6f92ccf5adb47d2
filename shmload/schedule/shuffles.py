"""A shuffle that reads blocks whole: for shards in an object store, chunks of a file, pages of a disk.

    dataset    block 0 | block 1 | block 2 | ... | last (may be short)
    epoch      the blocks in random order, cut into windows of a few; each window's samples in random order

Both orders are keyed permutations, so the index at a position is a formula. A window's samples are numbered with a short
block at the window's end, wherever it stood in the order: then block and place are quotient and remainder everywhere.

Rejected: the sliding buffer of webdataset and tf.data (its content depends on all that came before, so it can neither be
entered in the middle nor shared by ranks); shuffled blocks read in their own order (neighbours fill whole batches).

A shuffle that reads shards whole, for shards of any sizes.

    dataset    shard 0 | shard 1 | shard 2 | ...            of so many samples each
    epoch      the shards in random order, cut into windows of a few; each window's samples in random order

`BlockShuffle` with the blocks' own sizes: what costs it a formula costs here one word a shard and epoch, the position at which each
shard's window begins. In return a window is exactly some shards, whatever they hold, so a reader knows what it needs next, and what
no more.
"""

import zlib
from functools import lru_cache
from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload.schedule.permutation import BLOCKS, MAX_N, WINDOWS, Permutation, whole_number
from shmload.schedule.schedule import KeyedOrder


class BlockShuffle(KeyedOrder):
    """Random order of [0, n) in which every block of consecutive indices is read within one window.

    With s = block_size, w = window and B = n / s blocks, and batches within a window:

    | measure | here | plain shuffle |
    |---|---|---|
    | two samples of a batch are of one block | (s - 1) / (w s - 1), about 1 / w | (s - 1) / (n - 1), about 1 / B |
    | distinct blocks in a batch of b | about w (1 - (1 - 1 / w)^b); w = 16, b = 64: 15.7 | about B (1 - (1 - 1 / B)^b) |
    | mean distance between two samples of one block | w s / 3 positions | n / 3 |
    | mean distance of a sample from its place in the dataset | n / 3, for B >> 1 | n / 3 |
    | blocks a reader must hold | w, and each is read once an epoch | all, or each batch reads b of them |

    A batch that straddles two windows touches the blocks of both. If the dataset is sorted by class, take blocks that hold
    few samples and many blocks a window: a batch sees w blocks, not b.

    Args:
        n: number of samples, 1 to 2^62.
        block_size: samples that are read together: of a shard, a chunk, a page.
        window: blocks whose samples are mixed; at least the blocks that a batch should come from.
    Raises:
        TypeError, ValueError: an argument is no integer, or outside its bounds.
    Cost: 5 to 7 ns an index in windows of 16,000 samples, 12 in windows of 1,000, 2.5 us at least a batch; O(1) to seek. Held:
        8 bytes a block of a window, and at most 16 tables of 128 KiB.
    Example:
        >>> order = BlockShuffle(10, block_size=3, window=2)
        >>> sorted(order.take(0, 10, seed=7, epoch=0).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, n: SupportsIndex, *, block_size: SupportsIndex, window: SupportsIndex = 16) -> None:
        self._n = whole_number("BlockShuffle: n", n, at_least=1, at_most=MAX_N, remedy="give len(dataset)")
        self.block_size = whole_number(
            "BlockShuffle: block_size", block_size, at_least=1, at_most=MAX_N, remedy="give the samples of one shard"
        )
        self.window = whole_number(
            "BlockShuffle: window", window, at_least=1, at_most=MAX_N, remedy="16 blocks suit most batches"
        )

    @property
    def n(self) -> int:
        return self._n

    @property
    def identity(self) -> str:
        return f"block_shuffle(n={self.n}, block_size={self.block_size}, window={self.window})"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        out = np.empty(stop - start, np.int64)
        done = 0
        while done < len(out):
            window = _window_at(self.n, self.block_size, self.window, seed, epoch, start + done)
            first = start + done - window.start
            part = out[done : done + window.order.n - first]
            window.order.fill(first, part)
            part += window.shifts[part // self.block_size]
            done += len(part)
        return out

    def __repr__(self) -> str:
        return f"BlockShuffle({self.n}, block_size={self.block_size}, window={self.window})"


class _Window(NamedTuple):
    """Blocks whose samples are mixed."""

    start: int  # its first position
    order: Permutation  # of its samples, numbered block by block
    shifts: NDArray[np.int64]  # per block: the index of a sample less its number


def _window_at(n: int, block_size: int, window: int, seed: int, epoch: int, position: int) -> _Window:
    """The window that holds a position. The one with the short block ends early, and so all behind it begin early."""
    missing = -n % block_size
    number = position // (window * block_size)
    if missing:
        number_of_short = _place_of_last(-(-n // block_size), seed, epoch) // window
        if position + missing >= (number_of_short + 1) * window * block_size:
            number = (position + missing) // (window * block_size)
    return _window(n, block_size, window, seed, epoch, number)


@lru_cache(maxsize=16)
def _window(n: int, block_size: int, window: int, seed: int, epoch: int, number: int) -> _Window:
    num_blocks, missing = -(-n // block_size), -n % block_size
    first = number * window
    blocks = _blocks(num_blocks, seed, epoch).take(first, min(first + window, num_blocks))
    size, start = len(blocks) * block_size, first * block_size
    if missing:
        is_short = blocks == num_blocks - 1
        if is_short.any():
            blocks = np.concatenate([blocks[~is_short], blocks[is_short]])
            size -= missing
        elif _place_of_last(num_blocks, seed, epoch) < first:
            start -= missing
    shifts = (blocks - np.arange(len(blocks))) * block_size
    return _Window(start, Permutation(size, seed=seed, epoch=epoch, stream=WINDOWS + number), shifts)


@lru_cache(maxsize=4)
def _blocks(num_blocks: int, seed: int, epoch: int) -> Permutation:
    return Permutation(num_blocks, seed=seed, epoch=epoch, stream=BLOCKS)


@lru_cache(maxsize=16)
def _place_of_last(num_blocks: int, seed: int, epoch: int) -> int:
    """Where the last block, the one that may be short, stands in the epoch's order of blocks."""
    return int(_blocks(num_blocks, seed, epoch).inverse([num_blocks - 1])[0])


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
