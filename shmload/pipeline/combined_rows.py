"""Rows made of several rows: zipped, concatenated, or interleaved."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shmload.pipeline.rows import Keys, Row, _short
from shmload.schedule.permutation import MAX_N


class Zipped(Row):
    """A row of tuples of several rows' items, up to the end of the shortest."""

    def __init__(self, rows: Sequence[Keys]) -> None:
        ending = [row.n for row in rows if not row.repeating]
        names = ", ".join(row.identity for row in rows)
        super().__init__(min(ending or [row.n for row in rows]), f"Zip({_short(names)})", repeating=not ending, seed=rows[0].seed)
        self._rows = self.parts = list(rows)
        self.is_fixed = _are_fixed(rows)

    def item(self, key: int) -> Any:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        return tuple([row.at(epoch * (self.n if row.repeating else row.n) + item) for row in self._rows])


class Chained(Row):
    """A row that concatenates the epochs of several rows."""

    def __init__(self, rows: Sequence[Keys]) -> None:
        if endless := [number for number, row in enumerate(rows[:-1]) if row.repeating]:
            raise ValueError(
                f"member {endless[0]} of the Chain repeats, so what follows it would never come: give it repeating=False"
            )
        names = ", ".join(row.identity for row in rows)
        super().__init__(sum(row.n for row in rows), f"Chain({_short(names)})", repeating=rows[-1].repeating, seed=rows[0].seed)
        self._rows = self.parts = list(rows)
        self.is_fixed = _are_fixed(rows)
        self._ends = np.cumsum([row.n for row in rows]).tolist()

    def item(self, key: int) -> Any:
        return self._found(key, lambda row, place: row.at(place))

    def name(self, key: int) -> str:
        found: str = self._found(key, lambda row, place: row.name(row.key(place)))
        return found

    def _found(self, key: int, look: Callable[[Keys, int], Any]) -> Any:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        which = min(bisect_right(self._ends, item), len(self._rows) - 1)
        row, first = self._rows[which], self._ends[which - 1] if which else 0
        return look(row, epoch * row.n + item - first)


class Interleaved(Row):
    """A row that takes `block_length` items of each row in turn, and leaves out rows that have ended."""

    def __init__(self, rows: Sequence[Keys], block_length: int) -> None:
        if len({row.repeating for row in rows}) > 1:
            raise ValueError("members of an Interleave repeat, and others end: give all of them the same `repeating`")
        names = ", ".join(row.identity for row in rows)
        is_endless = rows[0].repeating
        super().__init__(
            sum(row.n for row in rows), f"Interleave({_short(names)}, {block_length})", repeating=is_endless, seed=rows[0].seed
        )
        self._rows = self.parts = list(rows)
        self.is_fixed, self._length = _are_fixed(rows), block_length
        self._phases = list(self._made([MAX_N] * len(rows) if is_endless else [row.n for row in rows]))
        self._starts = [start for start, _, _, _ in self._phases]

    def _made(self, left: list[int]) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
        """Yield phases of equal rounds: (start, rows that take part, ends of their turns, items taken from each row before)."""
        start, had = 0, [0] * len(left)
        while active := [row for row, count in enumerate(left) if count]:
            num_rounds = min(left[row] // self._length for row in active) or 1
            counts = [min(self._length, left[row]) for row in active]
            yield start, active, [0, *np.cumsum(counts).tolist()], had.copy()
            for row, count in zip(active, counts, strict=True):
                left[row] -= count * num_rounds
                had[row] += count * num_rounds
            start += sum(counts) * num_rounds

    def _found(self, key: int) -> tuple[Keys, int]:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        start, active, ends, had = self._phases[bisect_right(self._starts, item) - 1]
        number, place = divmod(item - start, ends[-1])
        turn = bisect_right(ends, place) - 1
        row = active[turn]
        count = ends[turn + 1] - ends[turn]
        return self._rows[row], epoch * self._rows[row].n + had[row] + number * count + place - ends[turn]

    def item(self, key: int) -> Any:
        row, position = self._found(key)
        return row.at(position)

    def name(self, key: int) -> str:
        row, position = self._found(key)
        return row.name(row.key(position))


def _are_fixed(rows: Sequence[Keys]) -> bool:
    return all(row.is_fixed and not row.repeating for row in rows)
