"""A Join as the first stage of a pipeline: the items of its members as one sequence of keys.

    key = the member's own key * number of members + the member's number

Members continue where they are when an epoch of the Join ends. So the items drawn from a member are always a prefix of its own
sequence: each of its epochs is delivered completely before the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import StateMismatch
from shmload.pipeline.draws import Draws
from shmload.pipeline.item_sequence import ItemSequence
from shmload.pipeline.plan import Plan, PoolOptions
from shmload.pipeline.programs import RowProgram
from shmload.schedule.digest import digest
from shmload.schedule.mix_draws import Drawn
from shmload.schedule.mix_order import Stop
from shmload.schedule.permutation import MAX_N

READ_AHEAD = 1024  # keys computed at a time, because one batch has only a few keys of each member


class JoinSource(ItemSequence):
    """The items of several pipelines as one sequence.

    Args:
        plans: plans of the members.
        weights, stop, seed: as for Join.
    Raises:
        ValueError: the members are too large for 62-bit keys.
    """

    def __init__(self, plans: Sequence[Plan], weights: Sequence[Any], stop: Stop, seed: int) -> None:
        self._sources: list[ItemSequence] = [plan.source for plan in plans]
        self.parts = self._sources
        self._programs = [
            RowProgram(plan.source, [replace(stage, name=f"{stage.name} of member {number}") for stage in plan.item_stages])
            for number, plan in enumerate(plans)
        ]
        self._draws = Draws([MAX_N if source.repeating else source.n for source in self._sources], weights, stop)
        self._newest = (0, np.empty(0, np.int64))  # (position, keys from there on)
        self.pools: list[PoolOptions] = [plan.pool for plan in plans]
        self.seed = seed
        self.repeating = self._draws.is_endless
        self.n = sum(source.n for source in self._sources) if self.repeating else self._draws.n
        self.members = [source.members for source in self._sources]
        # one for each member, at every depth
        self.num_counters = len(self._sources) + sum(source.num_counters for source in self._sources)
        members = ", ".join(source.identity for source in self._sources)
        if len(members) > 200:
            members = f"{len(self._sources)} members, {digest(np.frombuffer(members.encode(), np.uint8))}"
        self.identity = f"Join({members}; {self._draws.mark})"
        if (largest := _num_keys(self.members)) > MAX_N:
            raise ValueError(
                f"an epoch of the Join's members has keys up to {largest}, which counts a member's items times the number of "
                f"members, and at most 2^62 can be told apart: join fewer items"
            )

    def keys_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the keys at positions [start, stop), which may extend into later epochs."""
        first, keys = self._newest
        if not first <= start <= stop <= first + len(keys):
            ahead = stop
            if start == first + len(keys):  # in order, and not at the places of a Shuffle
                ahead = min(start + READ_AHEAD, MAX_N if self.repeating else (start // self.n + 1) * self.n)
            self._newest = first, keys = start, self._take(start, max(stop, ahead))
        return keys[start - first : stop - first].copy()

    def _take(self, start: int, stop: int) -> NDArray[np.int64]:
        parts = []
        while start < stop:
            epoch, number = self._split(start)
            end = stop if self.repeating else min(stop, (epoch + 1) * self.n)
            before = self._before(epoch)
            parts += [
                self._keys(members, counters + before) for members, counters in self._draws.blocks(number, number + end - start)
            ]
            start = end
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _keys(self, members: NDArray[np.uint16], counters: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = np.empty(len(members), np.int64)
        for member in np.unique(members).tolist():
            its = members == member
            first = int(counters[member])
            keys[its] = self._sources[member].keys_at(first, first + int(its.sum())) * len(self._sources) + member
        return keys

    def _split(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the number of items before it in the epoch."""
        return (0, position) if self.repeating else divmod(position, self.n)

    def _before(self, epoch: int) -> NDArray[np.int64]:
        """Return the number of draws of each member in earlier epochs."""
        return self._draws.drawn.counters_at(self.n if epoch else 0) * epoch

    def item(self, key: int) -> Any:
        """Return a member's item, after the member's functions."""
        key, member = divmod(key, len(self._sources))
        return self._programs[member][key]

    def name(self, key: int) -> str:
        """Return the name of a key's item, for error messages."""
        key, member = divmod(key, len(self._sources))
        return f"{self._sources[member].name(key)} of member {member}"

    # ------------------------------------------------------------ position

    def counters_at(self, position: int) -> list[int]:
        """Return the draws of each member in its epoch before a position, followed by those of members that are Joins."""
        epoch, number = self._split(position)
        counters = self._draws.drawn.counters_at(number)
        had = self._before(epoch) + counters
        return [
            *counters.tolist(),
            *(c for s, count in zip(self._sources, had.tolist(), strict=True) for c in s.counters_at(count)),
        ]

    def go_on_at(self, position: int, counters: Sequence[int]) -> None:
        """Continue at a position, with the counters that `counters_at` returned for it.

        Raises:
            StateMismatch: these counters are impossible there. Nothing is changed then.
        """
        if len(counters) != self.num_counters:
            raise StateMismatch(
                f"the state of this Join has {self.num_counters} counters, one for each member; got {len(counters)}. Load what "
                "state() returned"
            )
        for drawn, number, its in list(self._checked(position, counters)):
            drawn.learn(number, its)

    def _checked(self, position: int, counters: Sequence[int]) -> Iterator[tuple[Drawn, int, Sequence[int]]]:
        """Yield the counters of each Join at every depth, with the position to which they belong."""
        epoch, number = self._split(position)
        done = len(self._sources)
        self._draws.drawn.check_at(number, counters[:done])
        yield self._draws.drawn, number, counters[:done]
        before = self._before(epoch).tolist()
        for source, whole, count in zip(self._sources, before, counters[:done], strict=True):
            its, done = counters[done : done + source.num_counters], done + source.num_counters
            if isinstance(source, JoinSource):
                yield from source._checked(whole + count, its)


def _num_keys(members: Any) -> int:
    """Return an upper bound on the keys of an epoch."""
    return members if isinstance(members, int) else len(members) * max(map(_num_keys, members))
