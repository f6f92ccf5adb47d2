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

Weighted sampling: with replacement a formula, without replacement one sort an epoch.

With replacement a position's random word goes through an alias table (src/draws.h): constant time, whatever the weights.
Without replacement every index runs a race: its time is an exponential variable of rate weight, keyed by (seed, epoch,
index), and the epoch is the indices by time of arrival (Efraimidis and Spirakis 2006, whose u^(1/w) is exp(-time)). That
is the distribution of drawing one by one and taking the drawn away, as in torch.multinomial.

Batches of samples of similar length: what LengthBuckets and TokenBudget have in common.

    shuffle     all samples, by the keyed permutation
    sort        by length within windows of many batches, upwards and downwards in turn, so that neighbours are alike across
                windows too; equal lengths stay in shuffled order. At least four windows an epoch, lest the same samples always meet
    cut         into batches: the one step in which the two differ
    shuffle     groups of a few neighbouring batches over the whole epoch, and the batches within each group

The ranks of a step read neighbours of the sequence, which are of one group and so of similar cost; the steps are in random
order. The one short group, any of them, comes last and shifts no other.

Rejected: fixed boundaries between buckets (TensorFlow's bucket_by_sequence_length: what is left in each bucket depends on all
that came before, and rare lengths wait an epoch for their batch); sorting the whole epoch (the same samples meet in every epoch).

Batches of a fixed size whose samples have similar lengths.

Batches of any number of samples whose padded size stays within a budget.
"""

import zlib
from abc import abstractmethod
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload._core.cutting import cut
from shmload._core.draws import AliasTable, fill_words
from shmload.schedule import schedule
from shmload.schedule.schedule import MAX_N, EpochCache, KeyedBatches, KeyedOrder, Permutation, digest, whole_number


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
    return _Window(start, Permutation(size, seed=seed, epoch=epoch, stream=schedule.WINDOWS + number), shifts)


@lru_cache(maxsize=4)
def _blocks(num_blocks: int, seed: int, epoch: int) -> Permutation:
    return Permutation(num_blocks, seed=seed, epoch=epoch, stream=schedule.BLOCKS)


@lru_cache(maxsize=16)
def _place_of_last(num_blocks: int, seed: int, epoch: int) -> int:
    """Where the last block, the one that may be short, stands in the epoch's order of blocks."""
    return int(_blocks(num_blocks, seed, epoch).inverse([num_blocks - 1])[0])


MAX_WINDOWS = 4  # of an epoch that are kept


class _Epoch(NamedTuple):
    """The shards of an epoch."""

    shards: NDArray[np.int64]  # those with samples, in the order they are read
    places: NDArray[np.int64]  # of each shard in it; -1: it has no samples
    begins: NDArray[np.int64]  # position at which each window begins, and the end
    windows: dict[int, tuple[Permutation, NDArray[np.int64], NDArray[np.int64]]]  # the newest, made when they are looked at


class ShardShuffle(KeyedOrder):
    """Random order of samples in which every shard is read within one window, with shards of any sizes.

    With w = window, B shards and batches within a window: two samples of a batch are of one shard about 1 / w of the time (a plain
    shuffle: 1 / B); a reader holds w shards and reads each once an epoch.

    Args:
        sizes: samples of each shard, in the dataset's order. Copied.
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
        self.sizes = np.array(sizes, np.int64)  # a copy: the caller's may change
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
            begins = range(window * self.window, len(shards), self.window)[: num_windows - len(found)]
            found += [shards[begin : begin + self.window].tolist() for begin in begins]
            window, epoch = 0, epoch + 1
        return found

    def _epoch(self, seed: int, epoch: int) -> _Epoch:
        return self._epochs.get(seed, epoch, self._made)

    def _made(self, seed: int, epoch: int) -> _Epoch:
        shards = np.flatnonzero(self.sizes)
        if self.shuffle:
            shards = shards[Permutation(len(shards), seed=seed, epoch=epoch, stream=schedule.BLOCKS).take(0, len(shards))]
        places = np.full(len(self.sizes), -1, np.int64)
        places[shards] = np.arange(len(shards))
        ends = np.concatenate([[0], np.cumsum(self.sizes[shards])])
        return _Epoch(shards, places, np.append(ends[: -1 : self.window], ends[-1]), {})

    def _window(self, of: _Epoch, number: int, seed: int, epoch: int) -> tuple[Permutation, NDArray[np.int64], NDArray[np.int64]]:
        """(the order of a window's samples numbered shard by shard, the first number of each shard, index less number)."""
        found = of.windows.get(number)
        if found is None:
            shards = of.shards[number * self.window : (number + 1) * self.window]
            ends = np.cumsum(self.sizes[shards])
            begins = ends - self.sizes[shards]
            samples = Permutation(int(ends[-1]), seed=seed, epoch=epoch, stream=schedule.WINDOWS + number)
            found = samples, begins, self._starts[shards] - begins
            while len(of.windows) >= MAX_WINDOWS:
                of.windows.pop(next(iter(of.windows)), None)
            of.windows[number] = found
        return found


class _Share(NamedTuple):
    """A node's samples: pieces of shards, numbered one after the other."""

    begins: NDArray[np.int64]  # the number of each piece's first sample
    firsts: NDArray[np.int64]  # its index in the dataset
    shards: NDArray[np.int64]  # that each piece is of
    order: ShardShuffle  # of the pieces


class NodeShuffle(KeyedOrder):
    """A ShardShuffle in each node's share of the samples, so that a node needs no shards but its own.

    Shards in an order that the seed chooses are cut into equal shares, one a node; where two meet, both have a part of the shard.
    Shares are the same in each epoch, so what a node's cache holds it need not fetch again; samples do not move between nodes.

        position     0 ............ global_batch | ............ 2 * global_batch     as the schedule cuts it: one slice a rank
        node         0 | 0 | 1 | 1 |             | 0 | 0 | 1 | 1 |                   here 4 ranks on 2 nodes

    The samples of the last, short step are what the shares have left, node by node. The order depends on `nodes` and
    `global_batch`, and not on how many ranks there are, so a resume on another number of ranks is exact.

    Args:
        sizes: samples of each shard, in the dataset's order. Copied.
        nodes: of the job; ranks of a node follow each other, as launchers number them. On another number of machines the order
            stays, and each fetches what its ranks need.
        global_batch: samples of one step over all ranks, a multiple of `nodes`.
        window, shuffle: as of ShardShuffle.
    Raises:
        TypeError, ValueError: an argument is no integer, or outside its bounds.
    Cost: as of ShardShuffle, for each node whose positions are looked at.
    Example:
        >>> order = NodeShuffle([4, 4, 4, 4], nodes=2, global_batch=4, window=1)
        >>> halves = [set(order.take(p, p + 2, seed=7, epoch=0) // 4) for p in range(0, 16, 2)]
        >>> set.union(*halves[::2]).isdisjoint(set.union(*halves[1::2]))
        True
    """

    def __init__(
        self, sizes: ArrayLike, *, nodes: SupportsIndex, global_batch: SupportsIndex, window: int = 16, shuffle: bool = True
    ) -> None:
        self._whole = ShardShuffle(sizes, window=window, shuffle=shuffle)  # checks, and finds shards
        self.nodes = whole_number("NodeShuffle: nodes", nodes, remedy="1 is one share for all")
        self.global_batch = whole_number("NodeShuffle: global_batch", global_batch, remedy="give batch_size times world_size")
        if self.global_batch % self.nodes or self.n < self.nodes:
            raise ValueError(
                f"NodeShuffle: global_batch is a multiple of nodes, and each node has a sample; got "
                f"global_batch={self.global_batch}, nodes={self.nodes} and {self.n} samples"
            )
        self.window, self.shuffle, self.num_needed = self._whole.window, shuffle, self.n
        self._shares: tuple[int, list[_Share], NDArray[np.int64]] | None = None  # of a seed

    @property
    def n(self) -> int:
        return self._whole.n

    @property
    def identity(self) -> str:
        return f"node_shuffle(nodes={self.nodes}, global_batch={self.global_batch}, {self._whole.identity})"

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, of the node that has most."""
        return -(-len(self._whole.sizes) // self.window)

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        shares, each = self._shares_of(seed), self.global_batch // self.nodes
        num_steps = self.n // self.global_batch
        step, place = np.divmod(positions, self.global_batch)
        node, local = place // each, step * each + place % each
        rest = step >= num_steps
        if rest.any():
            left = np.cumsum([0, *(share.order.n - num_steps * each for share in shares)])
            behind = positions[rest] - num_steps * self.global_batch
            node[rest] = np.searchsorted(left, behind, "right") - 1
            local[rest] = num_steps * each + behind - left[node[rest]]
        out = np.empty(stop - start, np.int64)
        for number in np.unique(node).tolist():
            share, mine = shares[number], node == number
            begin, end = int(local[mine].min()), int(local[mine].max()) + 1
            order = share.order.take(begin, end, seed=_of_node(seed, number), epoch=epoch)[local[mine] - begin]
            piece = np.searchsorted(share.begins, order, "right") - 1
            out[mine] = share.firsts[piece] + order - share.begins[piece]
        return out

    def _shares_of(self, seed: int) -> list[_Share]:
        """Each node's."""
        return self._of(seed)[1]

    def _of(self, seed: int) -> tuple[int, list[_Share], NDArray[np.int64]]:
        """(seed, each node's share, of each shard the first node that has some of it and which piece of that one's it is)."""
        if self._shares is None or self._shares[0] != seed:
            shares, pieces = self._made(seed), np.full((len(self._whole.sizes), 2), -1)
            for node in reversed(range(self.nodes)):
                mine = shares[node].shards
                pieces[mine, 0], pieces[mine, 1] = node, np.arange(len(mine))
            self._shares = seed, shares, pieces
        return self._shares

    def _made(self, seed: int) -> list[_Share]:
        sizes = self._whole.sizes
        shards = np.flatnonzero(sizes)
        if self.shuffle:
            shards = shards[Permutation(len(shards), seed=seed, stream=schedule.NODES).take(0, len(shards))]
        ends = np.cumsum(sizes[shards])
        starts = np.concatenate([[0], np.cumsum(sizes)])
        shares = []
        for node in range(self.nodes):
            low, high = self.n * node // self.nodes, self.n * (node + 1) // self.nodes
            first, last = np.searchsorted(ends, [low, high - 1], "right")
            mine = shards[first : last + 1]
            begins = np.maximum(ends[first : last + 1] - sizes[mine], low)  # where each piece begins, in the order of all shards
            counts = np.minimum(ends[first : last + 1], high) - begins
            within = begins - (ends[first : last + 1] - sizes[mine])
            order = ShardShuffle(counts, window=self.window, shuffle=self.shuffle)
            shares.append(_Share(np.cumsum(counts) - counts, starts[mine] + within, mine, order))
        return shares

    def window_of(self, shard: int, *, seed: int, epoch: int) -> int:
        """The number of the window in which a shard is read, larger ones for each further node.

        Args:
            shard: its number.
            seed, epoch: as of `take`.
        Raises:
            ValueError: it has no samples.
        """
        _, shares, pieces = self._of(seed)
        node, piece = pieces[shard].tolist()
        if node < 0:
            raise ValueError(f"shard {shard} has no samples")
        return int(node * _NODE + shares[node].order.window_of(piece, seed=_of_node(seed, node), epoch=epoch))

    def shards_from(self, window: int, *, seed: int, epoch: int, num_windows: int = 2) -> list[list[int]]:
        """The shards of a node's windows from one on, into the next epoch where this one ends.

        Args:
            window: number of the first, as of `window_of`.
            seed, epoch: as of `take`.
            num_windows: how many.
        """
        node, first = divmod(window, _NODE)
        share = self._shares_of(seed)[node]
        pieces = share.order.shards_from(first, seed=_of_node(seed, node), epoch=epoch, num_windows=num_windows)
        return [share.shards[each].tolist() for each in pieces]


_NODE = 1 << 32  # windows of a node, at most


def _of_node(seed: int, node: int) -> int:
    """A seed of each node's own."""
    return (seed + node * 0x9E37_79B9_7F4A_7C15) % (1 << 64)


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
        self._scaled = scaled  # the table is made of them, where it is needed
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
        self._table.fill(start, out, seed=seed, epoch=epoch, stream=schedule.DRAWS)
        return out

    def _race(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices by time of arrival. Ties, which one pair in 2^53 makes, go to the lower index."""
        words = np.empty(self.num_weights, np.uint64)
        fill_words(words, seed=seed, epoch=epoch, stream=schedule.RACES, n=self.num_weights)
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        with np.errstate(divide="ignore"):
            times = -_logarithm(uniform) / self._scaled  # infinite where there is no weight
        return np.argsort(times, kind="stable")[: self.n]

    @cached_property
    def _table(self) -> AliasTable:
        return AliasTable(self._scaled)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_table"}


def _checked_weights(weights: ArrayLike) -> NDArray[np.float64]:
    try:
        given = np.asarray(weights).astype(np.float64)  # a copy: the caller's array may change
    except (TypeError, ValueError) as error:
        raise TypeError(f"Weighted: weights must be numbers, one for each sample: {error}") from error
    if given.ndim != 1 or not 1 <= len(given) <= MAX_WEIGHTS:
        raise ValueError(
            f"Weighted: weights must be one-dimensional, 1 to 2^31 - 1 of them, got shape {given.shape}; give one for each sample"
        )
    _refuse(
        "Weighted: weights must be finite and not negative", given, ~(np.isfinite(given) & (given >= 0)), "0 leaves a sample out"
    )
    if not given.any():
        raise ValueError(f"Weighted: one weight must be above 0, got {len(given)} zeros; nothing could be drawn from them")
    return given


def _refuse(needed: str, given: NDArray[Any], wrong: NDArray[np.bool_], remedy: str) -> None:
    """Raises ValueError for the first value that is wrong."""
    if wrong.any():
        first = int(wrong.argmax())
        number = np.count_nonzero(wrong)
        raise ValueError(f"{needed}, got {given[first]} at index {first} ({number} such of {len(given)}); {remedy}")


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


MAX_LENGTH = (1 << 31) - 1
MAX_SIZE = 1 << 31
MIN_WINDOWS = 4


class Padding(NamedTuple):
    """Share of padding in the rows of an epoch, each batch padded to its longest sample."""

    share: float
    share_shuffled: float  # if the same samples were cut into batches in shuffled order


class Epoch(NamedTuple):
    """One epoch, worked out."""

    samples: NDArray[np.int64]  # indices, batch after batch as cut
    starts: NDArray[np.int64]  # of each batch in `samples`, and their end
    order: NDArray[np.int64]  # which of these batches comes when


class Bucketed(KeyedBatches):
    """Batches cut from samples that were sorted by length within windows.

    Thread/process safety: as EpochCache's.
    """

    def __init__(self, lengths: ArrayLike, *, window: SupportsIndex, group: SupportsIndex) -> None:
        self.lengths = _checked(type(self).__name__, lengths)
        self.num_needed = len(self.lengths)
        self.window = self._size("window", window, remedy="100 batches leave little padding")
        self.group = self._size("group", group, remedy="the number of ranks suits most; 1 shuffles single batches")
        self._digest = digest(self.lengths)
        self._epochs: EpochCache[Epoch] = EpochCache()

    def _size(self, name: str, value: SupportsIndex, *, remedy: str) -> int:
        return whole_number(f"{type(self).__name__}: {name}", value, at_most=MAX_SIZE, remedy=remedy)

    @property
    def n(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def _samples_per_batch(self) -> int:
        """How many samples a batch has, or has on average."""

    @abstractmethod
    def _cut(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where batches of these samples, in this order, start; and their end."""

    def _kept(self, shuffled: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples that the epoch reads."""
        return shuffled

    def num_batches(self, *, seed: int, epoch: int) -> int:
        return len(self._epochs.get(seed, epoch, self._make).order)

    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        made = self._epochs.get(seed, epoch, self._make)
        place = made.order[number]
        return made.samples[made.starts[place] : made.starts[place + 1]].copy()

    def padding(self, *, seed: int = 0, epoch: int = 0) -> Padding:
        """How much of an epoch's batches is padding, and how much it would be without sorting.

        Args:
            seed, epoch: which epoch of which run.
        Returns:
            (share, share_shuffled), both from 0 to 1, of rows padded to the longest of their batch.
        """
        made = self._epochs.get(seed, epoch, self._make)
        shuffled = self._shuffled(seed, epoch)
        return Padding(self._share(made.samples, made.starts), self._share(shuffled, self._cut(shuffled)))

    def _share(self, samples: NDArray[np.int64], starts: NDArray[np.int64]) -> float:
        lengths = self.lengths[samples].astype(np.int64)
        padded = int((np.maximum.reduceat(lengths, starts[:-1]) * np.diff(starts)).sum()) if len(starts) > 1 else 0
        return 1 - int(lengths.sum()) / padded if padded else 0.0

    def _shuffled(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return self._kept(Permutation(self.n, seed=seed, epoch=epoch, stream=schedule.SAMPLES).take(0, self.n))

    def _make(self, seed: int, epoch: int) -> Epoch:
        samples = self._shuffled(seed, epoch)
        per_batch = self._samples_per_batch()
        window = min(self.window, max(len(samples) // (MIN_WINDOWS * per_batch), 1))
        samples = samples[_sorted(self.lengths[samples], window * per_batch)]
        starts = self._cut(samples)
        return Epoch(samples, starts, _grouped(len(starts) - 1, self.group, seed, epoch))


def _sorted(lengths: NDArray[np.int32], per_window: int, *, max_bits: int = 63) -> NDArray[np.int64]:
    """The places of samples sorted by length within windows, upwards in even ones; equal lengths in their given order.

    Window, length and place are sorted as one number where `max_bits` hold them, at a fraction of the cost of a stable sort.
    """
    places = np.arange(len(lengths))
    windows = places // per_window
    rising = np.where(windows % 2, int(lengths.max(initial=0)) - lengths.astype(np.int64), lengths)
    length_bits, place_bits = int(rising.max(initial=0)).bit_length(), min(per_window, len(lengths)).bit_length()
    if int(windows.max(initial=0)).bit_length() + length_bits + place_bits > max_bits:
        return np.lexsort((rising, windows))
    windows <<= length_bits + place_bits
    windows |= rising << place_bits
    windows |= places % per_window
    windows.sort()
    return (windows & ((1 << place_bits) - 1)) + places // per_window * per_window


def _grouped(num_batches: int, group: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Which batch comes when: groups of neighbours in random order, the short group last, each shuffled within."""
    num_full, num_short = divmod(num_batches, group)
    groups, turn = np.arange(num_batches), np.arange(num_full + 1)  # the short group's turn is the last
    if num_full and num_short:
        before = Permutation(num_full + 1, seed=seed, epoch=epoch, stream=schedule.SHORT_GROUP)[0] * group
        groups[before : before + num_short] = num_full * group
        groups[before + num_short :] -= num_short
    groups //= group
    if num_full:
        Permutation(num_full, seed=seed, epoch=epoch, stream=schedule.GROUPS).fill(0, turn[:num_full])
    words = np.empty(num_batches, np.uint64)
    fill_words(words, seed=seed, epoch=epoch, stream=schedule.BATCHES_IN_GROUPS, n=num_batches)
    return np.lexsort((words, turn[groups]))


def _checked(name: str, lengths: ArrayLike) -> NDArray[np.int32]:
    given = np.asarray(lengths)
    if given.ndim != 1 or not len(given):
        raise ValueError(
            f"{name}: lengths must be one-dimensional and not empty, got shape {given.shape}; give one for each sample"
        )
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"{name}: lengths must be integers, got dtype {given.dtype}; round them up")
    wrong = (given < 0) | (given > MAX_LENGTH)
    _refuse(f"{name}: lengths must be in [0, 2^31 - 1]", given, wrong, "count in a larger unit")
    return given.astype(np.int32)


class LengthBuckets(Bucketed):
    """Shuffled batches of `batch_size` samples of similar length: little padding, and every sample once an epoch.

    `window` batches are sorted together: more of them leave less padding, fewer let more samples meet. `group` batches of
    similar length stand next to each other in the epoch, for the ranks of one step; take a multiple of the world size, or 1
    with a single rank.

    Args:
        lengths: one for each sample, 0 to 2^31 - 1; an array, a list or a tensor. Copied.
        batch_size: samples of a batch; one batch an epoch may be shorter.
        window: batches whose samples are sorted together; a quarter of the epoch at most.
        group: batches of similar length that follow each other.
        drop_last: leave out n % batch_size samples, others in each epoch, instead of the shorter batch.
    Raises:
        TypeError, ValueError: the lengths are no lengths, or an argument is outside its bounds.
    Cost: O(n log n) at an epoch's first batch, 0.05 s for 10^6 samples, then 1 us a batch. Held: 4 bytes a sample, and 8 a
        sample and 16 a batch for each of the two newest epochs.
    Example:
        >>> order = LengthBuckets(range(1, 1001), batch_size=10)
        >>> len(order.batch(0, seed=7, epoch=0))
        10
        >>> [round(share, 2) for share in order.padding()]
        [0.03, 0.45]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        batch_size: SupportsIndex,
        window: SupportsIndex = 100,
        group: SupportsIndex = 8,
        drop_last: bool = False,
    ) -> None:
        super().__init__(lengths, window=window, group=group)
        self.batch_size = self._size("batch_size", batch_size, remedy="a batch has at least one sample")
        if not isinstance(drop_last, bool):
            raise TypeError(f"LengthBuckets: drop_last must be True or False, got {drop_last!r}")
        self.drop_last = drop_last

    @property
    def identity(self) -> str:
        return (
            f"length_buckets(n={self.n}, lengths={self._digest}, batch_size={self.batch_size}, window={self.window}, "
            f"group={self.group}, drop_last={self.drop_last})"
        )

    def num_batches(self, *, seed: int, epoch: int) -> int:
        return self.n // self.batch_size if self.drop_last else -(-self.n // self.batch_size)

    def _samples_per_batch(self) -> int:
        return self.batch_size

    def _kept(self, shuffled: NDArray[np.int64]) -> NDArray[np.int64]:
        return shuffled[: self.n - self.n % self.batch_size] if self.drop_last else shuffled

    def _cut(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.append(np.arange(0, len(samples), self.batch_size), len(samples))


Oversized = Literal["raise", "alone"]


class TokenBudget(Bucketed):
    """Shuffled batches of samples of similar length, each with as many as fit: longest * samples <= max_tokens.

    So every batch costs about the same, whatever its lengths, and ranks stay balanced. Every sample comes once an epoch. The
    number of batches may differ by a few from epoch to epoch, `len(loader)` says the current one's.

    Args:
        lengths: one for each sample, 0 to 2^31 - 1, 0 counting as 1; an array, a list or a tensor. Copied.
        max_tokens: the most that a batch may hold, padding included.
        max_samples: the most samples of a batch; None: any number.
        window: about how many batches are sorted together, a quarter of the epoch at most. More leave less padding, fewer let
            more samples meet.
        group: batches of similar length that follow each other: their samples are about equally many.
        oversized: what a sample longer than max_tokens means: "raise", an error here and now; "alone", a batch of its own.
    Raises:
        TypeError, ValueError: the lengths are no lengths, or an argument is outside its bounds, or a sample is too long.
    Cost: as LengthBuckets.
    Example:
        >>> order = TokenBudget(range(1, 1001), max_tokens=2000)
        >>> batch = order.batch(0, seed=7, epoch=0) + 1  # here a sample is as long as its number
        >>> int(batch.max()) * len(batch) <= 2000
        True
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        max_tokens: SupportsIndex,
        max_samples: SupportsIndex | None = None,
        window: SupportsIndex = 100,
        group: SupportsIndex = 8,
        oversized: Oversized = "raise",
    ) -> None:
        super().__init__(lengths, window=window, group=group)
        self.max_tokens = whole_number("TokenBudget: max_tokens", max_tokens, remedy="give what a batch may hold")
        self.max_samples = (
            None if max_samples is None else self._size("max_samples", max_samples, remedy="None leaves it to max_tokens")
        )
        if oversized not in get_args(Oversized):
            raise ValueError(f"TokenBudget: oversized must be 'raise' or 'alone', got {oversized!r}")
        self.oversized = oversized
        longest = int(self.lengths.argmax())
        if oversized == "raise" and self.lengths[longest] > self.max_tokens:
            raise ValueError(
                f"TokenBudget: no sample may be longer than max_tokens={self.max_tokens}, sample {longest} has length "
                f"{self.lengths[longest]} ({np.count_nonzero(self.lengths > self.max_tokens)} such of {self.n}); truncate or "
                "leave out, raise max_tokens, or give oversized='alone' for a batch of its own"
            )
        mean = max(int(self.lengths.sum(dtype=np.int64)) // self.n, 1)
        self._mean_samples = min(max(self.max_tokens // mean, 1), self.max_samples or MAX_SIZE)

    @property
    def identity(self) -> str:
        return (
            f"token_budget(n={self.n}, lengths={self._digest}, max_tokens={self.max_tokens}, max_samples={self.max_samples}, "
            f"window={self.window}, group={self.group}, oversized={self.oversized})"
        )

    def _samples_per_batch(self) -> int:
        return self._mean_samples

    def _cut(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = np.empty(len(samples) + 1, np.int64)
        num_batches = cut(self.lengths[samples].astype(np.int64), self.max_tokens, self.max_samples or MAX_SIZE, starts)
        starts[num_batches] = len(samples)
        return starts[: num_batches + 1].copy()
