"""`NodeShuffle`: a shard shuffle in which each node reads only its own share of the shards."""

from __future__ import annotations

from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmload.schedule import key_streams
from shmload.schedule.checks import whole_number
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.permutation import Permutation
from shmload.schedule.shard_shuffle import ShardShuffle


class _Share(NamedTuple):
    """The samples of one node: pieces of shards, numbered consecutively."""

    begins: NDArray[np.int64]  # number of the first sample of each piece
    firsts: NDArray[np.int64]  # index of that sample in the dataset
    shards: NDArray[np.int64]  # the shard that each piece belongs to
    order: ShardShuffle  # the order in which the pieces are read


class NodeShuffle(KeyedOrder):
    """A ShardShuffle within each node's share of the samples, so that a node fetches only its own shards.

    The seed chooses an order of the shards, which is cut into equal shares, one for each node; a shard at a boundary belongs to
    two nodes in part. Shares are the same in each epoch, so a node never fetches again what its cache holds. Samples do not move
    between nodes.

        position     0 ............ global_batch | ............ 2 * global_batch     as the schedule cuts it: one slice a rank
        node         0 | 0 | 1 | 1 |             | 0 | 0 | 1 | 1 |                   here 4 ranks on 2 nodes

    The last, short step contains what remains in the shares, node by node. The order depends on `nodes` and `global_batch`, not
    on the number of ranks, so a resume on another number of ranks is exact.

    Args:
        sizes: number of samples in each shard, in the dataset's order. Copied.
        nodes: number of nodes in the job; the ranks of a node are consecutive, as launchers number them. On another number of
            machines the order stays the same, and each machine fetches what its ranks need.
        global_batch: samples of one step over all ranks, a multiple of `nodes`.
        window, shuffle: as in ShardShuffle.
    Raises:
        TypeError, ValueError: an argument is not an integer, or is out of bounds.
    Cost: as ShardShuffle, for each node whose positions are read.
    Example:
        >>> order = NodeShuffle([4, 4, 4, 4], nodes=2, global_batch=4, window=1)
        >>> halves = [set(order.take(p, p + 2, seed=7, epoch=0) // 4) for p in range(0, 16, 2)]
        >>> set.union(*halves[::2]).isdisjoint(set.union(*halves[1::2]))
        True
    """

    def __init__(
        self, sizes: ArrayLike, *, nodes: SupportsIndex, global_batch: SupportsIndex, window: int = 16, shuffle: bool = True
    ) -> None:
        self._whole = ShardShuffle(sizes, window=window, shuffle=shuffle)  # checks the arguments
        self.nodes = whole_number("NodeShuffle: nodes", nodes, remedy="1 is one share for all")
        self.global_batch = whole_number("NodeShuffle: global_batch", global_batch, remedy="give batch_size times world_size")
        if self.global_batch % self.nodes or self.n < self.nodes:
            raise ValueError(
                f"NodeShuffle: global_batch is a multiple of nodes, and each node has a sample; got "
                f"global_batch={self.global_batch}, nodes={self.nodes} and {self.n} samples"
            )
        self.window, self.shuffle, self.num_needed = self._whole.window, shuffle, self.n
        self._shares: tuple[int, list[_Share], NDArray[np.int64]] | None = None  # of the newest seed

    @property
    def n(self) -> int:
        return self._whole.n

    @property
    def identity(self) -> str:
        return f"node_shuffle(nodes={self.nodes}, global_batch={self.global_batch}, {self._whole.identity})"

    @property
    def num_windows(self) -> int:
        """Return a number of windows that no node exceeds in an epoch; it is reached if one node reads all shards."""
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
            beyond = positions[rest] - num_steps * self.global_batch
            node[rest] = np.searchsorted(left, beyond, "right") - 1
            local[rest] = num_steps * each + beyond - left[node[rest]]
        out = np.empty(stop - start, np.int64)
        for number in np.unique(node).tolist():
            share, mine = shares[number], node == number
            begin, end = int(local[mine].min()), int(local[mine].max()) + 1
            order = share.order.take(begin, end, seed=_of_node(seed, number), epoch=epoch)[local[mine] - begin]
            piece = np.searchsorted(share.begins, order, "right") - 1
            out[mine] = share.firsts[piece] + order - share.begins[piece]
        return out

    def _shares_of(self, seed: int) -> list[_Share]:
        """Return the share of each node."""
        return self._of(seed)[1]

    def _of(self, seed: int) -> tuple[int, list[_Share], NDArray[np.int64]]:
        """Return (seed, the share of each node, for each shard the first node with a part of it and the number of that piece)."""
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
            shards = shards[Permutation(len(shards), seed=seed, stream=key_streams.NODES).take(0, len(shards))]
        ends = np.cumsum(sizes[shards])
        starts = np.concatenate([[0], np.cumsum(sizes)])
        shares = []
        for node in range(self.nodes):
            low, high = self.n * node // self.nodes, self.n * (node + 1) // self.nodes
            first, last = np.searchsorted(ends, [low, high - 1], "right")
            mine = shards[first : last + 1]
            begins = np.maximum(ends[first : last + 1] - sizes[mine], low)  # start of each piece in the order of all shards
            counts = np.minimum(ends[first : last + 1], high) - begins
            within = begins - (ends[first : last + 1] - sizes[mine])
            order = ShardShuffle(counts, window=self.window, shuffle=self.shuffle)
            shares.append(_Share(np.cumsum(counts) - counts, starts[mine] + within, mine, order))
        return shares

    def window_of(self, shard: int, *, seed: int, epoch: int) -> int:
        """Return the number of the window in which a shard is read. Windows of different nodes have different numbers.

        Args:
            shard: number of the shard.
            seed, epoch: as in `take`.
        Raises:
            ValueError: the shard has no samples.
        """
        _, shares, pieces = self._of(seed)
        node, piece = pieces[shard].tolist()
        if node < 0:
            raise ValueError(f"shard {shard} has no samples")
        return int(node * _NODE + shares[node].order.window_of(piece, seed=_of_node(seed, node), epoch=epoch))

    def shards_from(self, window: int, *, seed: int, epoch: int, num_windows: int = 2) -> list[list[int]]:
        """Return the shards of a node's next windows, continuing into the next epoch at the end of this one.

        Args:
            window: number of the first window, as from `window_of`.
            seed, epoch: as in `take`.
            num_windows: number of windows.
        """
        node, first = divmod(window, _NODE)
        share = self._shares_of(seed)[node]
        pieces = share.order.shards_from(first, seed=_of_node(seed, node), epoch=epoch, num_windows=num_windows)
        return [share.shards[each].tolist() for each in pieces]


_NODE = 1 << 32  # a window's number is that of its node times this, plus its number within the node


def _of_node(seed: int, node: int) -> int:
    """Return the seed of one node, so that no two nodes shuffle alike."""
    return (seed + node * 0x9E37_79B9_7F4A_7C15) % (1 << 64)
