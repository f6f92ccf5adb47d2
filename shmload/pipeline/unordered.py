"""Pipelines whose items come as they are done: an item that takes long holds up nobody.

    blocks      0 1 2 3 4 5 ...          ordered in turn
    they come   0 2 3 1 5 ...            as workers have made them
    place       low 4, and 5 had         all blocks below 4, and of those above each that was had, or how many of its items

What is in a block, and what is drawn for it, is as ever; only when it comes is chance. So a place names the blocks that have been
had beyond the first that has not, in runs: there is one more of these at the most than workers have blocks under way. Ranks with an
order each of their own could not agree who has what, so such a pipeline is one rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import torch

from shmload.loader import ShmLoader
from shmload.pipeline.block_columns import Block
from shmload.pipeline.blocks import BlockRow
from shmload.pipeline.expanded import ExpandedConveyer, schedule_of_blocks
from shmload.pipeline.stages import Plan
from shmload.pipeline.streams import BlockKey, FedBlocks, StreamProgram
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import sample_info, sample_of

ANY_NUMBER = 1 << 30  # of workers may be replaced


class BlockProgram:
    """A dataset whose keys are blocks of a row that is read at any place."""

    def __init__(self, row: BlockRow) -> None:
        self._row = row

    def __len__(self) -> int:
        return self._row.n

    @cached_property
    def _own(self) -> OwnGenerators:
        return OwnGenerators(self._row)

    def __getitem__(self, key: BlockKey) -> tuple[int, Block]:
        epoch, block, _ = key
        at = block if self._row.repeating else epoch * self._row.n + block
        with sample_of(self._row.seed, epoch, at, sample_info().worker, own=self._own):
            return block, self._row.item(at)

    def __getstate__(self) -> dict[str, Any]:
        return {"_row": self._row}


class Missing:
    """The blocks that have not been had, in their order: the loader's sampler.

    Args:
        blocks: from the lowest of them on, and which epoch it is.
    """

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self.had: set[int] = set()

    def __iter__(self) -> Iterator[BlockKey]:
        return (key for key in self._blocks if key.block not in self.had)


class PlacedFeed:
    """Numbers of a row's blocks, from a place on."""

    def __init__(self, row: BlockRow) -> None:
        self._row = row
        self.epoch = self.block = 0
        self.own: dict[int, str] = {}
        self.pristine = ""

    def __iter__(self) -> Iterator[BlockKey]:
        numbers = count(self.block) if self._row.repeating else range(self.block, self._row.n)
        return (BlockKey(self.epoch, number, None) for number in numbers)


class UnorderedBlocks(FedBlocks):
    """Blocks as they are done."""

    def __init__(self, plan: Plan, options: Mapping[str, Any]) -> None:
        super().__init__(plan.source, plan.pool, options, schedule_of_blocks(plan))
        self.missing = Missing(self.feed)

    def _made_feed(self) -> Any:
        return PlacedFeed(self.row) if isinstance(self.row, BlockRow) else super()._made_feed()

    def _made(self) -> ShmLoader[Any]:
        program = BlockProgram(self.row) if isinstance(self.row, BlockRow) else StreamProgram(self.row)
        generator = torch.Generator().manual_seed(self.row.seed % (1 << 63))  # what else is drawn is drawn from the program's own
        return self._loader_of(program, self.missing, in_order=False, generator=generator, max_restarts=ANY_NUMBER)


class UnorderedConveyer(ExpandedConveyer):
    """See DistributedBatchedMap(in_order=False)."""

    _blocks: UnorderedBlocks

    def __init__(self, stages: Any, **options: Any) -> None:
        self._low = 0  # all blocks before it have been had
        self._had: set[int] = set()  # blocks behind it that have been had, too
        self._partial: dict[int, int] = {}  # of others that have not come yet: how many of their items had been had before a resume
        super().__init__(stages, **options)
        if self.plan.partition.n_ranks > 1:
            raise ValueError(
                "with in_order=False items come in another order on each rank, so ranks cannot share them out: leave Partition "
                "out, or give each rank items of its own"
            )
        if self.plan.tail:
            raise ValueError("with in_order=False a Scan would carry another state each time: it needs an order")

    def _blocks_of(self, plan: Plan, options: Mapping[str, Any]) -> UnorderedBlocks:
        return UnorderedBlocks(plan, options)

    def _arrived(self) -> Block:
        block = self._blocks()
        self._block = self._blocks.number
        self._offset = self._partial.pop(self._block, 0)
        return block

    def _leave(self) -> None:
        self._had.add(self._block)
        while self._low in self._had:
            self._had.remove(self._low)
            self._low += 1
        self._offset, self._current = 0, None
        self._blocks.forget(self._low)

    def _counted(self) -> tuple[int, list[int]]:
        partial = dict(self._partial)
        if self._current is not None and self._offset:
            partial[self._block] = self._offset
        counters = [0, len(partial)]
        for block, offset in sorted(partial.items()):
            counters += [block - self._low, offset]
        for first, length in _runs(sorted(self._had)):
            counters += [first - self._low, length]
        return self._low, counters

    def _are_counters(self, counters: list[Any]) -> bool:
        are_whole = all(type(number) is int for number in counters)
        return are_whole and (len(counters) == 1 or (len(counters) % 2 == 0 and 2 * counters[1] <= len(counters) - 2))

    def _place(self, epoch: int, block: int, counters: Sequence[int]) -> None:
        super()._place(epoch, block, counters)
        self._low, self._offset = block, 0
        offset, num_partial, *rest = [*counters, 0] if len(counters) == 1 else counters
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        self._partial = {block + number: had for number, had in pairs[:num_partial]}
        if offset:  # of a pipeline that keeps the order
            self._partial[block] = offset
        self._had = {number for first, length in pairs[num_partial:] for number in range(block + first, block + first + length)}
        self._blocks.missing.had = self._had.copy()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of ascending numbers, where those that follow each other begin, and how many they are."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[first], at - first
            first = at
