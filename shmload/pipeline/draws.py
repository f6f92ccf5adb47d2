"""A Join's turns, and its members' items as one source of keys: position -> member, by shmload's mixture of weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import StateMismatch
from shmload.pipeline.plan import Plan
from shmload.pipeline.program import RowProgram
from shmload.pipeline.stream import Keys
from shmload.schedule.checks import digest
from shmload.schedule.drawn import Drawn
from shmload.schedule.mix_order import Stop, length
from shmload.schedule.permutation import MAX_N
from shmload.schedule.shares import Shares


class Draws:
    """Which member each draw is of.

    Args:
        sizes: draws that each member has in an epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[Any], stop: Stop) -> None:
        self.shares = Shares.of([list(weights)])
        self.n = length(sizes, self.shares, stop)
        self.is_endless = self.n >= MAX_N
        self._drawn = Drawn(self.shares, self.n)
        made_of = f"{list(sizes)}, {[float(weight) for weight in weights]}, {stop}"
        self.mark = digest(np.frombuffer(made_of.encode(), np.uint8))

    def members(self, position: int) -> int:
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

    def go_on_at(self, position: int, counters: Sequence[int]) -> None:
        """Takes over what `counters_at` gave for that position.

        Raises:
            StateMismatch: it cannot have.
        """
        total = self.shares.total
        if (
            len(counters) != self.shares.num_members
            or sum(counters) != position
            or position > self.n
            or any(
                abs(count * total - self.shares.cumulative(member, position)) >= total
                for member, count in enumerate(counters)
            )
        ):
            raise StateMismatch(
                f"counters must be the draws of {self.shares.num_members} members before position {position}, each within one of "
                f"its share; got {list(counters)}. Load what state() returned"
            )
        self._drawn.learn(position, counters)


class JoinSource:
    """The items of several pipelines as one source. key = the member's own key * members + the member's number."""

    def __init__(self, plans: Sequence[Plan], weights: Sequence[Any], stop: Stop, seed: int) -> None:
        self._sources: list[Keys] = [plan.source for plan in plans]
        self._programs = [RowProgram(plan.source, plan.functions) for plan in plans]
        self._draws = Draws([_num_items(source) for source in self._sources], weights, stop)
        self.seed = seed
        self.repeating = self._draws.is_endless
        self.n = sum(source.n for source in self._sources) if self.repeating else self._draws.n

    @property
    def identity(self) -> str:
        """Which order this is; a state saved under another is refused."""
        members = ", ".join(source.identity for source in self._sources)
        if len(members) > 200:
            members = f"{len(self._sources)} members, {digest(np.frombuffer(members.encode(), np.uint8))}"
        return f"Join({members}; {self._draws.mark})"

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """The keys at positions [start, stop); beyond n, of the epochs that follow."""
        parts = []
        while start < stop:
            epoch, place = (0, start) if self.repeating else divmod(start, self.n)
            end = stop if self.repeating else min(stop, (epoch + 1) * self.n)
            before = np.array(self._draws.counters_at(self.n), np.int64) * epoch if epoch else 0
            parts += [
                self._keys(members, counters + before)
                for members, counters in self._draws.blocks(place, place + end - start)
            ]
            start = end
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _keys(self, members: NDArray[np.uint16], counters: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = np.empty(len(members), np.int64)
        for member in np.unique(members).tolist():
            its = members == member
            first = int(counters[member])
            keys[its] = self._sources[member].take(first, first + int(its.sum())) * len(self._sources) + member
        return keys

    def item(self, key: int) -> Any:
        """What a key stands for: the member's item, behind the member's functions."""
        key, member = divmod(key, len(self._sources))
        return self._programs[member][key]

    def counters_at(self, position: int) -> list[int]:
        """Draws of each member before a position."""
        return self._draws.counters_at(position)

    def go_on_at(self, position: int, counters: Sequence[int]) -> None:
        """Takes over what `counters_at` gave for that position."""
        self._draws.go_on_at(position, counters)


def _num_items(source: Keys) -> int:
    return MAX_N if source.repeating else source.n
