"""Sequences made of several sequences: zipped, concatenated, or interleaved."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shmload.pipeline.item_sequence import ItemSequence, PositionSequence, shortened
from shmload.schedule.permutation import MAX_N


class Zipped(PositionSequence):
    """A sequence of tuples of several sequences' items, up to the end of the shortest."""

    def __init__(self, parts: Sequence[ItemSequence]) -> None:
        ending = [part.n for part in parts if not part.repeating]
        names = ", ".join(part.identity for part in parts)
        super().__init__(
            min(ending or [part.n for part in parts]), f"Zip({shortened(names)})", repeating=not ending, seed=parts[0].seed
        )
        self.parts = list(parts)
        self.is_fixed = _are_fixed(parts)

    def item(self, key: int) -> Any:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        return tuple([part.at(epoch * (self.n if part.repeating else part.n) + item) for part in self.parts])


class Chained(PositionSequence):
    """A sequence that concatenates the epochs of several sequences."""

    def __init__(self, parts: Sequence[ItemSequence]) -> None:
        if endless := [number for number, part in enumerate(parts[:-1]) if part.repeating]:
            raise ValueError(
                f"member {endless[0]} of the Chain repeats, so what follows it would never come: give it repeating=False"
            )
        names = ", ".join(part.identity for part in parts)
        super().__init__(
            sum(part.n for part in parts), f"Chain({shortened(names)})", repeating=parts[-1].repeating, seed=parts[0].seed
        )
        self.parts = list(parts)
        self.is_fixed = _are_fixed(parts)
        self._ends = np.cumsum([part.n for part in parts]).tolist()

    def item(self, key: int) -> Any:
        return self._found(key, lambda part, position: part.at(position))

    def name(self, key: int) -> str:
        found: str = self._found(key, lambda part, position: part.name(part.key(position)))
        return found

    def _found(self, key: int, look: Callable[[ItemSequence, int], Any]) -> Any:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        which = min(bisect_right(self._ends, item), len(self.parts) - 1)
        part, first = self.parts[which], self._ends[which - 1] if which else 0
        return look(part, epoch * part.n + item - first)


class Interleaved(PositionSequence):
    """A sequence that takes `block_length` items of each part in turn, and leaves out parts that have ended."""

    def __init__(self, parts: Sequence[ItemSequence], block_length: int) -> None:
        if len({part.repeating for part in parts}) > 1:
            raise ValueError("members of an Interleave repeat, and others end: give all of them the same `repeating`")
        names = ", ".join(part.identity for part in parts)
        is_endless = parts[0].repeating
        super().__init__(
            sum(part.n for part in parts),
            f"Interleave({shortened(names)}, {block_length})",
            repeating=is_endless,
            seed=parts[0].seed,
        )
        self.parts = list(parts)
        self.is_fixed, self._length = _are_fixed(parts), block_length
        self._phases = list(self._made([MAX_N] * len(parts) if is_endless else [part.n for part in parts]))
        self._starts = [start for start, _, _, _ in self._phases]

    def _made(self, left: list[int]) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
        """Yield phases of equal rounds: (start, parts that take part, ends of their turns, items taken from each part before)."""
        start, had = 0, [0] * len(left)
        while active := [part for part, count in enumerate(left) if count]:
            num_rounds = min(left[part] // self._length for part in active) or 1
            counts = [min(self._length, left[part]) for part in active]
            yield start, active, [0, *np.cumsum(counts).tolist()], had.copy()
            for part, count in zip(active, counts, strict=True):
                left[part] -= count * num_rounds
                had[part] += count * num_rounds
            start += sum(counts) * num_rounds

    def _found(self, key: int) -> tuple[ItemSequence, int]:
        epoch, item = (0, key) if self.repeating else divmod(key, self.n)
        start, active, ends, had = self._phases[bisect_right(self._starts, item) - 1]
        number, rest = divmod(item - start, ends[-1])
        turn = bisect_right(ends, rest) - 1
        part = active[turn]
        count = ends[turn + 1] - ends[turn]
        return self.parts[part], epoch * self.parts[part].n + had[part] + number * count + rest - ends[turn]

    def item(self, key: int) -> Any:
        part, position = self._found(key)
        return part.at(position)

    def name(self, key: int) -> str:
        part, position = self._found(key)
        return part.name(part.key(position))


def _are_fixed(parts: Sequence[ItemSequence]) -> bool:
    return all(part.is_fixed and not part.repeating for part in parts)
