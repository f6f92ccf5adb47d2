"""BlockSource: the protocol of a BlockEngine's source of blocks, and the source for sequences that can be read at any position."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

from shmload.pipeline.block_columns import Block
from shmload.pipeline.keyed_engine import KeyedEngine
from shmload.pipeline.pipeline_engine import PipelinePlace
from shmload.pipeline.plan import Plan, PoolOptions
from shmload.pipeline.stages import Partition


class BlockSource(Protocol):
    """Delivers the blocks of a sequence, from any block on.

    Attributes:
        next_block: the block to deliver next, if blocks arrive in order.
        number: the block delivered last.
    """

    @property
    def next_block(self) -> int: ...
    @property
    def number(self) -> int: ...
    def __call__(self) -> Block:
        """Return the next block; raise StopIteration at the end of the epoch."""

    def restart(self, epoch: int) -> None:
        """Go to the start of an epoch."""

    def go(self, epoch: int, block: int, own: str | None, consumed: set[int]) -> None:
        """Continue at a block.

        Args:
            epoch: the epoch.
            block: number of the block in it.
            own: the result of `state_at` there.
            consumed: blocks not to deliver again.
        """

    def state_at(self, block: int) -> str | None:
        """Return what the source needs to continue at a block besides its number, or None."""

    def forget(self, block: int) -> None:
        """Drop data that only a resume before that block would need."""

    def first(self, epoch: int) -> Generator[Block]:
        """Yield the blocks of an epoch from its start. They are read in this process; blocks in progress are not affected."""

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the loader that makes the blocks."""

    def close(self) -> None:
        """End the workers."""


class KeyedBlocks:
    """A BlockSource for sequences that can be read at any position: the single items of a KeyedEngine.

    Args:
        plan: plan of the pipeline.
        options: arguments for ShmLoader.
        stage_places: the stages, for displays.
    """

    def __init__(self, plan: Plan, options: Mapping[str, Any], stage_places: Sequence[tuple[str, str]]) -> None:
        pool = replace(plan.pool, buffer_size=None)
        self._plan = replace(
            plan,
            item_stages=[],
            tail=[],
            worker_batch_stages=[],
            trainer_batch_stages=[],
            collate=None,
            partition=Partition(0, 1),
            pool=pool,
        )
        self._engine = KeyedEngine(self._plan, options, stage_places)
        self.number = 0

    def __call__(self) -> Block:
        self.number = self._engine.position
        block: Block = self._engine.pull()
        return block

    @property
    def next_block(self) -> int:
        return self._engine.position

    def restart(self, epoch: int) -> None:
        self._engine.restart(epoch)

    def go(self, epoch: int, block: int, own: str | None, consumed: set[int]) -> None:
        self._engine.go(PipelinePlace(epoch, block))

    def state_at(self, block: int) -> str | None:
        return None

    def forget(self, block: int) -> None:
        pass

    def first(self, epoch: int) -> Generator[Block]:
        with closing(KeyedEngine(replace(self._plan, pool=PoolOptions()), {}, ())) as blocks:
            blocks.restart(epoch)
            try:
                while True:
                    yield blocks.pull()
            except StopIteration:
                return

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()
