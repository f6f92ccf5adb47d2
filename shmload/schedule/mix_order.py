"""`MixOrder`: the order of a mixture, which decides from which member each position draws, and which of its samples.

    position       0   1   2   3   4   5   6  ...        the member: mix_draws.py, from the weights alone
    member         a   b   a   c   a   b   a
    its draw       0   0   1   0   2   1   3             draw k of a member: round k // size, offset k % size
    its sample     the round's own permutation of the member's samples, keyed by (seed, epoch, member, round)

An index counts the members' samples end to end. When a member has been read whole and starts again, its indices grow by
round * (number of samples of all members). So per-sample randomness, which is keyed by the index, is new when a sample repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.mix import Rounds
from shmload._core.permutation import MAX_N
from shmload.processes.fork_lock import ForkLock
from shmload.schedule.digest import digest
from shmload.schedule.epoch_cache import EpochCache
from shmload.schedule.key_streams import MIX
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.mix_draws import BLOCK, Drawn
from shmload.schedule.shares import Shares

Stop = Literal["first", "all", "repeat"]
MAX_BLOCKS = 8  # cached blocks of indices, 64 KiB each


class _Block(NamedTuple):
    """The indices at positions [start, stop) of an epoch."""

    seed: int
    epoch: int
    start: int
    stop: int
    indices: NDArray[np.int64]


class MixOrder(KeyedOrder):
    """Samples of several members in proportion to weights: every prefix of an epoch has each member's share to within one sample.

    Args:
        sizes: number of samples of each member.
        weights: maps a position to the weights from there on, one for each member; position 0 is required.
        stop: when an epoch ends. "first": when the first member is used up, before any sample would repeat; "all": when every
            member has been read whole, and members that run out start over; "repeat": never.
        shuffle: False keeps each member's samples in their own order.
    Raises:
        ValueError: sizes and weights do not fit together.
    Cost: 36 ns per position for 10 members, 115 for 200, in batches of 64. A position far from any known one costs 15 to 75 ns for
        each position in between. Memory: 8 bytes per member for each of up to 1,024 known positions, a few blocks of 8,192
        positions, and a table of up to 128 KiB for each member and each of two epochs.
    Thread/process safety: any number of threads may use it; a copy or a pickle starts with an empty cache.
    Example:
        >>> order = MixOrder([300, 100], {0: [3, 1]}, stop="first", shuffle=False)
        >>> order.n, order.take(0, 8, seed=7, epoch=0).tolist()
        (400, [0, 1, 300, 2, 3, 4, 301, 5])
    """

    n = 0

    def __init__(self, sizes: Sequence[int], weights: Mapping[int, Sequence[Any]], *, stop: Stop, shuffle: bool) -> None:
        self.sizes, self.stop, self.shuffle = tuple(sizes), stop, shuffle
        self.weights = {start: tuple(weights[start]) for start in sorted(weights)}
        self.shares = Shares.of(list(self.weights.values()), starts=list(self.weights))
        for member, (size, *of_member) in enumerate(zip(self.sizes, *self.weights.values(), strict=True)):
            if size == 0 and any(of_member):
                raise ValueError(f"member {member} of the mixture has a weight, but no samples: leave it out, or give it weight 0")
        self.n = length(self.sizes, self.shares, stop)
        self._offsets = [0, *accumulate(self.sizes)]
        self._num_laps = max((MAX_N - 1) // max(self._offsets[-1], 1), 1)
        self._drawn = Drawn(self.shares, self.n)
        self._rounds: EpochCache[list[Rounds | None]] = EpochCache()
        self._blocks: dict[tuple[int, int, int], _Block] = {}  # oldest first
        self._newest = _Block(-1, -1, 0, 0, np.empty(0, np.int64))
        self._lock = ForkLock()

    @property
    def is_endless(self) -> bool:
        return self.stop == "repeat"

    @property
    def identity(self) -> str:
        """Return sizes, weights and rules as text; for many members, a digest."""
        weights = {start: [float(weight) for weight in given] for start, given in self.weights.items()}
        made_of = f"sizes={list(self.sizes)}, weights={weights}"
        if len(made_of) > 200:
            made_of = f"members={len(self.sizes)}, digest={digest(np.frombuffer(made_of.encode(), np.uint8))}"
        return f"mix({made_of}, stop={self.stop!r}, shuffle={self.shuffle})"

    def take(self, start: int, stop: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        newest = self._newest
        if newest.seed == seed and newest.epoch == epoch and newest.start <= start and stop <= newest.stop:
            return newest.indices[start - newest.start : stop - newest.start].copy()
        out = np.empty(stop - start, np.int64)
        with self._lock:
            position = start
            while position < stop:
                block = self._block(position, seed, epoch)
                end = min(stop, block.stop)
                out[position - start : end - start] = block.indices[position - block.start : end - block.start]
                position = end
        return out

    def counters_at(self, position: int, *, seed: int, epoch: int) -> list[int]:
        """Return the number of draws of each member before `position`, which is the same for every seed and epoch."""
        with self._lock:
            return [int(count) for count in self._drawn.counters_at(position)]

    def go_on_at(self, position: int, counters: Sequence[int], *, epoch: int) -> None:
        """Accept counters from a state.

        Raises:
            StateMismatch: this mixture cannot have these counters at this position.
        """
        self._drawn.check_at(position, counters)
        with self._lock:
            self._drawn.learn(position, counters)

    def _block(self, position: int, seed: int, epoch: int) -> _Block:
        """Return the block of indices that contains the position."""
        key = (position // BLOCK, seed, epoch)
        known = self._blocks.get(key)
        if known is None or position < known.start:
            self._blocks.pop(key, None)
            known = self._blocks[key] = self._make(position, seed, epoch)
            if len(self._blocks) > MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._newest = known
        return known

    def _make(self, position: int, seed: int, epoch: int) -> _Block:
        """Compute a block. The draws of one member in it are consecutive, so they are made together and then put in place."""
        block = self._drawn.block_at(position)
        rounds = self._rounds.get(seed, epoch, self._new_rounds)
        together = np.empty(len(block.members), np.int64)
        counts = np.bincount(block.members)
        done = 0
        for member in np.flatnonzero(counts).tolist():
            part = together[done : done + int(counts[member])]
            of_member = rounds[member]
            assert of_member is not None
            of_member.fill(
                int(block.counters[member]), part, offset=self._offsets[member], lap=self._offsets[-1], num_laps=self._num_laps
            )
            done += len(part)
        out = np.empty_like(together)
        out[np.argsort(block.members, kind="stable")] = together
        return _Block(seed, epoch, block.start, block.stop, out)

    def _new_rounds(self, seed: int, epoch: int) -> list[Rounds | None]:
        return [
            Rounds(size, shuffle=self.shuffle, seed=seed, epoch=epoch, stream=MIX | member << 32, num_streams=1 << 32)
            if is_drawn
            else None
            for member, (size, is_drawn) in enumerate(zip(self.sizes, self.shares.is_drawn, strict=True))
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(MixOrder, stop=self.stop, shuffle=self.shuffle), (self.sizes, self.weights)


def length(sizes: Sequence[int], shares: Shares, stop: Stop) -> int:
    """Return the number of positions in an epoch of members with these sizes and shares, in closed form.

    A member's draws x stay within one of its exact share L. "first" ends while L <= size, so x < size + 1 and no sample repeats.
    "all" ends when L >= size, so x > size - 1 and no sample is missing.
    """
    if stop == "repeat":
        return MAX_N
    drawn = [member for member, is_drawn in enumerate(shares.is_drawn) if is_drawn]
    if stop == "first":
        beyond = [shares.reaches(member, sizes[member] * shares.total + 1) for member in drawn]
        return min(min(at for at in beyond if at is not None) - 1, MAX_N)
    ends = [shares.reaches(member, sizes[member] * shares.total) for member in drawn]
    late = [member for member, end in zip(drawn, ends, strict=True) if end is None or end > MAX_N]
    late += shares.vanishing
    if late:
        raise ValueError(
            f'stop="all" waits until every member has been read whole, which member {min(late)} never will with the weights that '
            'hold to the end: give it a larger one there, or use stop="first" or "repeat"'
        )
    return max(end for end in ends if end is not None)
