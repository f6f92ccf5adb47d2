"""The draws of a Join: map a position to a member, in proportion to weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.schedule.digest import digest
from shmload.schedule.mix_draws import Drawn
from shmload.schedule.mix_order import Stop, length
from shmload.schedule.permutation import MAX_N
from shmload.schedule.shares import Shares, exact_weight


class Draws:
    """The sequence of members that an epoch of a Join draws from; the same in every epoch.

    Args:
        sizes: number of items of each member's own epoch; MAX_N if it is endless.
        weights, stop: as for Join.

    Attributes:
        n: number of draws in an epoch.
        is_endless: whether the epoch never ends.
        drawn: computes the draws and the counts of each member.
        mark: identifies sizes, weights and stop rule in states.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[Any], stop: Stop) -> None:
        self._made_of = (sizes, weights, stop)
        self.shares = Shares.of([list(weights)])
        is_never_whole = stop == "all" and max(sizes) >= MAX_N
        self.n = length(sizes, self.shares, "repeat" if is_never_whole else stop)
        self.is_endless = self.n >= MAX_N
        self.drawn = Drawn(self.shares, self.n)
        made_of = f"{list(sizes)}, {[str(exact_weight(weight)) for weight in weights]}, {stop}"
        self.mark = digest(np.frombuffer(made_of.encode(), np.uint8))

    def member_at(self, position: int) -> int:
        """Return the member drawn at a position."""
        block = self.drawn.block_at(position)
        return int(block.members[position - block.start])

    def blocks(self, start: int, stop: int) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.int64]]]:
        """Yield the draws of [start, stop) in parts: the members drawn, and the counts of each member before the part."""
        while start < stop:
            block = self.drawn.block_at(start)
            end = min(stop, block.stop)
            yield block.members[start - block.start : end - block.start], self.drawn.counters_at(start)
            start = end

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, self._made_of  # a copy starts with an empty cache
