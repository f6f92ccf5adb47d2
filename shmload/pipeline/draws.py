"""A Join's turns: position -> member, by shmload's mixture of weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import StateMismatch
from shmload.schedule.mix import Drawn, Shares, Stop, exact_weight, length
from shmload.schedule.permutation import MAX_N, digest


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
        self._drawn = Drawn(self.shares, self.n)
        made_of = f"{list(sizes)}, {[str(exact_weight(weight)) for weight in weights]}, {stop}"
        self.mark = digest(np.frombuffer(made_of.encode(), np.uint8))

    def member_at(self, position: int) -> int:
        """Whose the draw at a position is."""
        block = self._drawn.block_at(position)
        return int(block.members[position - block.start])

    def blocks(self, start: int, stop: int) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.int64]]]:
        """The draws of [start, stop), part by part: whose they are, and what each member had been drawn before."""
        while start < stop:
            block = self._drawn.block_at(start)
            end = min(stop, block.stop)
            yield block.members[start - block.start : end - block.start], self._drawn.counters_at(start)
            start = end

    def counters_at(self, position: int) -> list[int]:
        """Draws of each member before a position."""
        counters: list[int] = self._drawn.counters_at(position).tolist()
        return counters

    def check_at(self, position: int, counters: Sequence[Any]) -> None:
        """Returns if these may be what `counters_at` gives for that position.

        Raises:
            StateMismatch: they cannot be.
        """
        total = self.shares.total
        if (
            len(counters) != self.shares.num_members
            or any(type(count) is not int for count in counters)
            or sum(counters) != position
            or position > self.n
            or any(
                abs(count * total - self.shares.cumulative(member, position)) >= total
                for member, count in enumerate(counters)
            )
        ):
            raise StateMismatch(
                f"counters must be the draws of {self.shares.num_members} members before position {position}, each within one of "
                f"its share; got {list(counters)!r:.200}. Load what state() returned"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, self._made_of  # a copy begins without what was worked out

    def learn(self, position: int, counters: Sequence[int]) -> None:
        """Takes over what has been checked, so that it need not be worked out anew."""
        self._drawn.learn(position, counters)
