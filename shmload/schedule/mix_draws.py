"""`Drawn`: the member of a mixture at each position, computed in blocks from the nearest position whose counters are known.

Each draw depends on the draws before it (src/mix.h), so a distant position is reached by drawing from a known one, at 15 to 75 ns
per draw. Known are the start of the epoch, the position of a loaded state, the ends of blocks, and every position where each member
has exactly its share.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.mix import Draws
from shmload.errors import StateMismatch
from shmload.schedule.shares import Shares

BLOCK = 8192  # draws computed at a time: 0.15 ms for ten members
MAX_DRAWN = 256  # cached blocks, 16 KiB each: enough for two million positions in any order, as after a Shuffle
MAX_KNOWN = 1024  # positions whose counters are kept


@dataclass(frozen=True)
class Block:
    """The draws at consecutive positions, beginning at `start`."""

    start: int
    members: NDArray[np.uint16]
    counters: NDArray[np.int64]  # number of draws of each member before `start`

    @property
    def stop(self) -> int:
        return self.start + len(self.members)


class Drawn:
    """The draws of one mixture. They are the same in every epoch; the seed only decides which sample a draw selects.

    Args:
        shares: the share of each member.
        n: number of positions in an epoch, at most 2^62.
    Thread/process safety: none; the owner holds a lock.
    """

    def __init__(self, shares: Shares, n: int) -> None:
        self._shares, self._n = shares, n
        self._draws = Draws(np.array(shares.starts, np.uint64), np.array(shares.pieces, np.uint64))
        self._counters: dict[int, NDArray[np.int64]] = {0: np.zeros(shares.num_members, np.int64)}
        self._known = [0]  # the keys of `_counters`, sorted
        self._blocks: dict[int, Block] = {}  # by block number, oldest first

    def block_at(self, position: int) -> Block:
        """Return a block that contains `position` (below n). It ends at a multiple of BLOCK, or at n."""
        number = position // BLOCK
        block = self._blocks.get(number)
        if block is None or position < block.start:
            start, counters = self._nearest(position)
            block, _ = self._make(start, counters, min((number + 1) * BLOCK, self._n))
            self._blocks.pop(number, None)
            self._blocks[number] = block
            if len(self._blocks) > MAX_DRAWN:
                del self._blocks[next(iter(self._blocks))]
        return block

    def counters_at(self, position: int) -> NDArray[np.int64]:
        """Return the number of draws of each member before `position` (at most n)."""
        if position in self._counters:
            return self._counters[position]
        block = self.block_at(position - 1)
        taken = np.bincount(block.members[: position - block.start], minlength=self._shares.num_members)
        return block.counters + taken

    def check_at(self, position: int, counters: Sequence[Any]) -> None:
        """Check that `counters_at(position)` could return these counters.

        Raises:
            StateMismatch: it could not.
        """
        shares = self._shares
        is_whole = len(counters) == shares.num_members and all(type(count) is int for count in counters)
        if not (is_whole and sum(counters) == position <= self._n) or any(
            abs(count * shares.total - shares.cumulative(member, position)) >= shares.total for member, count in enumerate(counters)
        ):
            raise StateMismatch(
                f"counters must be the draws of {shares.num_members} members before position {position}, each within one of its "
                f"share; got {list(counters)!r:.200}. Load what the loader or pipeline gave as its state"
            )

    def learn(self, position: int, counters: Sequence[int]) -> None:
        """Remember the counters at `position`, which `check_at` has checked, so that draws can be computed from there."""
        self._keep(position, np.array(counters, np.int64))

    def _nearest(self, position: int) -> tuple[int, NDArray[np.int64]]:
        """Return the start of the block of `position` (its last known position, or a multiple of BLOCK) and the counters there."""
        aligned, known = position // BLOCK * BLOCK, self._known[bisect_right(self._known, position) - 1]
        if known < aligned and (even := self._shares.even_before(aligned)) is not None and even[0] > known:
            known = even[0]
            self._keep(known, np.array(even[1], np.int64))
        counters = self._counters[known]
        while known < aligned:
            stop = min(known // BLOCK * BLOCK + BLOCK, aligned)
            _, counters = self._make(known, counters, stop)
            known = stop
        return known, counters

    def _make(self, start: int, counters: NDArray[np.int64], stop: int) -> tuple[Block, NDArray[np.int64]]:
        """Compute the draws of [start, stop). Return them and the counters at `stop`."""
        members, moved = np.empty(stop - start, np.uint16), counters.copy()
        self._draws.run(start, moved, members)
        self._keep(stop, moved)
        return Block(start, members, counters), moved

    def _keep(self, position: int, counters: NDArray[np.int64]) -> None:
        if position not in self._counters:
            insort(self._known, position)
        self._counters[position] = counters
        if len(self._known) > MAX_KNOWN:  # thin out the older half: old positions end up far apart
            for forgotten in self._known[1 : MAX_KNOWN // 2 : 2]:
                del self._counters[forgotten]
            self._known = sorted(self._counters)
