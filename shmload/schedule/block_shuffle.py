"""A shuffle that reads blocks of samples whole: shards in an object store, chunks of a file, pages of a disk.

    dataset    block 0 | block 1 | block 2 | ... | last (may be short)
    epoch      the blocks in random order, cut into windows of a few; the samples of each window in random order

Both orders are keyed permutations, so the index at a position is a formula. Within a window, samples are numbered with the short
block last, wherever it is in the random order: then block and offset are quotient and remainder everywhere.

Rejected: the sliding buffer of webdataset and tf.data (its content depends on everything before it, so it can be neither entered
in the middle nor shared by ranks); shuffled blocks read in their own order (neighbors fill whole batches).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from shmload.schedule import key_streams
from shmload.schedule.checks import whole_number
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.permutation import Permutation


class BlockShuffle(KeyedOrder):
    """Random order of [0, n) in which every block of consecutive indices is read within one window.

    With s = block_size, w = window and B = n / s blocks, and batches within a window:

    | measure | here | plain shuffle |
    |---|---|---|
    | chance that two samples of a batch come from one block | (s - 1) / (w s - 1), about 1 / w | (s - 1) / (n - 1), about 1 / B |
    | distinct blocks in a batch of b | about w (1 - (1 - 1 / w)^b); w = 16, b = 64: 15.7 | about B (1 - (1 - 1 / B)^b) |
    | mean distance between two samples of one block | w s / 3 positions | n / 3 |
    | mean distance of a sample from its place in the dataset | n / 3, for B >> 1 | n / 3 |
    | blocks a reader must hold | w, and each is read once an epoch | all, or each batch reads b of them |

    A batch that spans two windows touches the blocks of both. If the dataset is sorted by class, use small blocks and a large
    window: a batch sees w blocks, not b.

    Args:
        n: number of samples, 1 to 2^62.
        block_size: number of samples that are read together: a shard, a chunk, a page.
        window: number of blocks whose samples are mixed; at least the number of blocks that a batch should draw from.
    Raises:
        TypeError, ValueError: an argument is not an integer, or is out of bounds.
    Cost: 5 to 7 ns an index in windows of 16,000 samples, 12 in windows of 1,000, 2.5 us at least a batch; O(1) to seek. Memory: 8
        bytes for each block of a window, and at most 16 tables of 128 KiB.
    Example:
        >>> order = BlockShuffle(10, block_size=3, window=2)
        >>> sorted(order.take(0, 10, seed=7, epoch=0).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, n: SupportsIndex, *, block_size: SupportsIndex, window: SupportsIndex = 16) -> None:
        self.num_needed = self._n = whole_number("BlockShuffle: n", n, remedy="give len(dataset)")
        self.block_size = whole_number("BlockShuffle: block_size", block_size, remedy="give the samples of one shard")
        self.window = whole_number("BlockShuffle: window", window, remedy="16 blocks suit most batches")

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


class _Window(NamedTuple):
    """A group of blocks whose samples are mixed."""

    start: int  # its first position
    order: Permutation  # of its samples, numbered block by block within the window
    shifts: NDArray[np.int64]  # for each of its blocks: difference of a sample's index in the dataset and its number in the window


def _window_at(n: int, block_size: int, window: int, seed: int, epoch: int, position: int) -> _Window:
    """Return the window that contains a position. The window with the short block ends early, so all later ones start early."""
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
    return _Window(start, Permutation(size, seed=seed, epoch=epoch, stream=key_streams.WINDOWS + number), shifts)


@lru_cache(maxsize=4)
def _blocks(num_blocks: int, seed: int, epoch: int) -> Permutation:
    return Permutation(num_blocks, seed=seed, epoch=epoch, stream=key_streams.BLOCKS)


@lru_cache(maxsize=16)
def _place_of_last(num_blocks: int, seed: int, epoch: int) -> int:
    """Return the position of the dataset's last block, which may be short, in the epoch's order of blocks."""
    return int(_blocks(num_blocks, seed, epoch).inverse([num_blocks - 1])[0])
