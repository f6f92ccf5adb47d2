"""Sequences of blocks: the results of stages on fixed-size blocks of a sequence.

After a Filter, it is unknown which source item becomes item 1,000 until the items before it have been read. So the sequence below
is cut into blocks of `size` items, and the result of a block depends on that block alone: stages start over with each block. A
position is (block, number of its items already consumed), and resuming reads at most one block again.

    sequence     0 1 2 3 | 4 5 6 7 | 8 9          blocks of 4
    Filter(odd)    1   3 |   5   7 |   9
    Collate(2)     1 - 3     5 - 7     9          batches run across the blocks
    position     (0, 0)    (1, 0)    (2, 0)

Workers expand blocks ahead, in order. Every rank expands all blocks, because only a rank that has counted the items knows which of
them are its own. So put expensive functions after the stages that drop items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shmload.pipeline.block_columns import Block, columns_of
from shmload.pipeline.block_context import BlockContext
from shmload.pipeline.item_sequence import ItemSequence, PositionSequence
from shmload.pipeline.scan import Scan
from shmload.worker.stage_engine import Expanding, StageContext, group_stages, run_stages

BLOCK = 256  # items of the sequence below that are expanded together


Finish = Callable[[list[Any], StageContext], Block]


def columned(items: list[Any], context: StageContext) -> Block:
    """Return the items as columns if possible.

    Args:
        items: items of a block.
        context: ignored.
    """
    return columns_of(items) or items


class Expansion:
    """A function that runs stages on the items of a block, and returns the form in which the block is sent to the trainer.

    Args:
        stages: pairs (name, stage); a stage is a function of an item, or Expanding.
        finish: (items, context) -> that form.
        trainer_stages: stages that the trainer runs afterward; only the number of Scans matters here, for the pipeline's identity.
    """

    def __init__(self, stages: Sequence[tuple[str, Any]], finish: Finish | None = None, trainer_stages: Sequence[Any] = ()) -> None:
        self._runs, self.finish = group_stages(stages), finish
        kinds = [stage.kind for _, stage in stages if isinstance(stage, Expanding)]
        self.kinds = ", ".join([*kinds, *("Scan" for stage in trainer_stages if isinstance(stage, Scan))]) or "items"

    def __call__(self, items: Iterator[Any], context: StageContext) -> Block:
        """Run the stages.

        Args:
            items: the items of the block.
            context: the context, whose origin is set while `items` is read.
        """
        made = list(run_stages(items, self._runs, context))
        return made if self.finish is None else self.finish(made, context)


class BlockSequence(PositionSequence):
    """A sequence of blocks: item b is the result of the stages on the b-th block of the sequence below.

    Args:
        below: the sequence that is cut into blocks.
        expansion: the stages that run on each block.
        size: items of the sequence below in each block; the last block of an epoch may have fewer.
    """

    def __init__(self, below: ItemSequence, expansion: Expansion, size: int) -> None:
        super().__init__(
            -(-below.n // size),
            f"{expansion.kinds} of blocks of {size} of {below.identity}",
            repeating=below.repeating,
            seed=below.seed,
        )
        self.below, self.size, self._expansion = below, size, expansion

    @property
    def expansion(self) -> Expansion:
        """Return the stages that run on each block."""
        return self._expansion

    def item(self, key: int) -> Block:
        start = key * self.size
        stop = start + self.size
        if not self.repeating:
            epoch, block = divmod(key, self.n)
            start = epoch * self.below.n + block * self.size
            stop = min(start + self.size, (epoch + 1) * self.below.n)
        context = BlockContext(self.below)
        return self._expansion(self._read(start, stop, context), context)

    def name(self, key: int) -> str:
        epoch, block = (0, key) if self.repeating else divmod(key, self.n)
        return f"block {block} of epoch {epoch}, of {self.size} items"

    def _read(self, start: int, stop: int, context: StageContext) -> Iterator[Any]:
        at = self.below.at
        for position in range(start, stop):
            context.origin = position
            try:
                item = at(position)
            except Exception as error:
                item = context.failed(error, "")
            yield item
