"""The draws of a Join: position -> member, by the mixture of weights."""

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
    """Which member each draw of an epoch is of; the same in every epoch.

    Args:
        sizes: draws that each member has in an epoch of its own; MAX_N: it has no end.
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
        """Whose the draw at a position is."""
        block = self.drawn.block_at(position)
        return int(block.members[position - block.start])

    def blocks(self, start: int, stop: int) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.int64]]]:
        """The draws of [start, stop), part by part: whose they are, and what each member had been drawn before."""
        while start < stop:
            block = self.drawn.block_at(start)
            end = min(stop, block.stop)
            yield block.members[start - block.start : end - block.start], self.drawn.counters_at(start)
            start = end

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, self._made_of  # a copy begins without what was worked out
