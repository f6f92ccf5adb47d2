"""Positions in a sequence of blocks: which block is being consumed, and how many of its items have been consumed.

    in order       block 5, 3 of its items             all blocks before it have been consumed
    unordered      low 4, partial {7: 3}, also 5       all blocks below 4, 3 items of block 7, and all of block 5

The contents of a block are the same either way; only the time of its arrival varies. An unordered position therefore lists the
blocks after the first missing one that have been consumed, as runs. There is at most one more run than the workers have blocks in
progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class OrderedPosition:
    """A position among blocks that arrive in order.

    Attributes:
        block: the block whose items come next.
        offset: number of its items already consumed.
    """

    def __init__(self) -> None:
        self.block = self.offset = 0

    def go(self, block: int, counters: Sequence[int]) -> set[int]:
        """Move to a saved position; return the blocks after it that have been consumed."""
        self.block, (self.offset,) = block, counters
        return set()

    def arrive(self, number: int) -> None:
        """Record which block has arrived."""

    def lose(self, number: int) -> None:
        """Record that a block was lost; `number` comes next."""
        self.block, self.offset = number, 0

    def finish(self) -> int:
        """Record that the block is consumed; return the first block that a resume may need."""
        self.block, self.offset = self.block + 1, 0
        return self.block

    def saved(self, *, is_over: bool, is_open: bool) -> tuple[int, list[int]]:
        """Return the position as (block, counters).

        Args:
            is_over: whether the epoch has ended.
            is_open: whether the block that comes next has arrived.
        """
        return self.block, [0 if is_over else self.offset]

    @staticmethod
    def are_counters(counters: Sequence[int]) -> bool:
        """Return whether the counters are those of such a position."""
        return len(counters) == 1


class UnorderedPosition:
    """A position among blocks that arrive as they are finished; see OrderedPosition."""

    def __init__(self) -> None:
        self.block = self.offset = 0
        self._low = 0  # all blocks before it are consumed
        self._consumed: set[int] = set()  # blocks after it
        self._partial: dict[int, int] = {}  # blocks still to arrive -> number of items consumed before the resume

    def go(self, block: int, counters: Sequence[int]) -> set[int]:
        self.block = self._low = block
        self.offset = 0
        offset, num_partial, *rest = [*counters, 0] if len(counters) == 1 else counters
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        self._partial = {block + number: consumed for number, consumed in pairs[:num_partial]}
        if offset:  # the state of a pipeline that keeps the order
            self._partial[block] = offset
        runs = pairs[num_partial:]
        self._consumed = {number for first, length in runs for number in range(block + first, block + first + length)}
        return self._consumed.copy()

    def arrive(self, number: int) -> None:
        self.block, self.offset = number, self._partial.pop(number, 0)

    def lose(self, number: int) -> None:
        self.block, self.offset = number, 0

    def finish(self) -> int:
        self._consumed.add(self.block)
        while self._low in self._consumed:
            self._consumed.remove(self._low)
            self._low += 1
        self.offset = 0
        return self._low

    def saved(self, *, is_over: bool, is_open: bool) -> tuple[int, list[int]]:
        partial = dict(self._partial)
        if is_open and self.offset:
            partial[self.block] = self.offset
        counters = [0, len(partial)]
        for block, offset in sorted(partial.items()):
            counters += [block - self._low, offset]
        for first, length in _runs(sorted(self._consumed)):
            counters += [first - self._low, length]
        return self._low, counters

    @staticmethod
    def are_counters(counters: Sequence[int]) -> bool:
        return len(counters) == 1 or (len(counters) % 2 == 0 and 2 * counters[1] <= len(counters) - 2)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each run of consecutive numbers in an ascending sequence, as (first, length)."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[first], at - first
            first = at
