"""BlockEngine: runs a pipeline whose stages make more or fewer items, or whose items arrive as they are finished.

source of blocks ──▶ lists of items ──concatenated──▶ steps ──this rank's part──▶ an item, or a batch of items

A step is the next global batch of the items, regardless of where blocks end. A place is the block of its first item, and the number
of items before it in that block. It is the same on all ranks, for any number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from shmload.batch.ragged import ragged_of
from shmload.batch.uneven import Uneven
from shmload.errors import StateMismatch
from shmload.modes.default_collate import collated
from shmload.pipeline.block_columns import Block, Piece, batch_of, items_of, length, part_of
from shmload.pipeline.block_positions import OrderedPosition, UnorderedPosition
from shmload.pipeline.block_sources import BlockSource
from shmload.pipeline.buckets import MadeBatch
from shmload.pipeline.item_schedule import ItemStream
from shmload.pipeline.pipeline_engine import PipelineEngine, PipelinePlace
from shmload.pipeline.plan import Plan
from shmload.pipeline.trainer_stages import TrainerStages
from shmload.worker.stage_engine import FailedItem

log = logging.getLogger("shmload")


class BlockEngine(PipelineEngine):
    """Runs a plan whose source is a sequence of blocks.

    Args:
        plan: the plan to run.
        blocks: delivers the blocks.
        position: records the position, for blocks in order or as they are finished.
    """

    def __init__(self, plan: Plan, blocks: BlockSource, position: OrderedPosition | UnorderedPosition) -> None:
        # blocks are the same for any number of ranks, and every rank reads all of them
        super().__init__(plan, ItemStream(plan.source, None).schedule(seed=plan.source.seed, uneven="pad", world_size=1))
        self.blocks, self._at = blocks, position
        self._rank, self._is_batched = plan.partition.rank, plan.collate is not None
        self._tail = TrainerStages(plan.tail, plan.source.seed)
        self._size = 1 if plan.collate is None else plan.collate.batch_size
        self._ragged = None if plan.collate is None else ragged_of(plan.collate.ragged, None, is_torch_mode=False)
        self._current: Block | None = None  # the block at the position, once it has arrived
        self._is_over = False  # whether the epoch has ended for this rank
        self._has_begun = False  # whether anything was asked for in this epoch
        self._valid: int | None = None
        self._has_uneven = False  # whether a batch with a list in place of a tensor was reported
        self._num_empty = 0  # blocks without items since the last item
        self._taken: list[Piece] = []  # items of the step that is being made
        self._num_taken = 0
        # (block, counters, the source's own state, carried states) where that step begins; None between steps
        self._step_begin: tuple[int, list[int], str | None, list[Any]] | None = None

    @property
    def num_steps(self) -> int:
        raise TypeError("after a stage that makes more or fewer items their number is not known before they are read")

    @property
    def valid(self) -> int | None:
        return self._valid

    def where(self, _: int = 0) -> str:
        return f"a batch that ends with item {self._at.offset} of {self._block_name}"

    @property
    def _block_name(self) -> str:
        return f"block {self._at.block} of epoch {self.epoch}"

    # ------------------------------------------------------------ items

    def advance(self) -> Any:
        if self._step_begin is None:
            self._step_begin = self._now()
        try:
            made = self._next_step()
        except Exception:
            self._finish_step()
            raise
        # after an interrupt, which is not an Exception, the next call continues this step, and a state is that of its start
        self._finish_step()
        return made

    def _finish_step(self) -> None:
        self._taken, self._num_taken, self._step_begin = [], 0, None

    def _next_step(self) -> Any:
        pieces = self._step()
        if self._is_batched and (batch := batch_of(pieces)) is not None:
            return batch
        items = items_of(pieces)
        for item in items:
            if type(item) is FailedItem:
                raise item.failure.exception()
        if not self._is_batched:
            return items[0]
        if type(items[0]) is MadeBatch:
            ((count, batch),) = items
            self._valid = count if self._valid else 0
            return batch
        return collated(items, self._ragged, on_uneven=self._report_uneven)

    def _report_uneven(self, found: Uneven) -> None:
        """Log a warning about the first batch that has a list in place of a tensor, because its items differ."""
        if not self._has_uneven:
            self._has_uneven = True
            log.warning("%s", found.warning(self.where(), found.difference(None)))

    def _step(self) -> list[Piece]:
        """Return this rank's items of the next step; raise StopIteration at the end of the epoch."""
        world, rule, each, longer = self.plan.partition.n_ranks, self.plan.uneven, self._size, 0
        self._has_begun = True
        pieces, num_real = self._take(each * world)
        if num_real < each * world:
            if not pieces or rule == "drop":
                self.end()
                raise StopIteration
            each, longer = divmod(num_real, world)
            if rule == "pad":
                each, longer = each + (longer > 0), 0
                if missing := each * world - num_real:
                    pieces += self._first(missing)
        first = self._rank * each + min(self._rank, longer)
        count = each + (self._rank < longer)
        if not count:
            self.end()
            raise StopIteration
        self._valid = min(count, max(num_real - first, 0))
        return pieces if world == 1 else part_of(pieces, first, first + count)

    def _take(self, count: int) -> tuple[list[Piece], int]:
        """Consume `count` items, or the rest of the epoch; return them and their number."""
        while self._num_taken < count and self._has_more():
            assert self._current is not None
            stop = min(length(self._current), self._at.offset + count - self._num_taken)
            piece: Piece = (self._current, self._at.offset, stop)
            if self._tail:
                items = self._tail(items_of([piece]), self.epoch, self._at.block, self._at.offset)
                piece = (items, 0, stop - self._at.offset)
            self._taken.append(piece)
            self._num_taken += stop - self._at.offset
            self._at.offset = stop
        return self._taken.copy(), self._num_taken

    def _has_more(self) -> bool:
        """Return whether an item is left; if so, it is in the current block."""
        while not self._is_over:
            if self._current is None:
                try:
                    self._current = self.blocks()
                except StopIteration:
                    self._is_over = True
                    break
                except Exception:  # the block is lost, and the next one follows
                    self._at.lose(self.blocks.next_block)
                    raise
                self._at.arrive(self.blocks.number)
                if self.plan.is_streamed:
                    self._check_resumed(self._current)
                if self._at.offset > (found := length(self._current)):
                    raise StateMismatch(
                        f"the state is after item {self._at.offset} of block {self._at.block}, which has {found}: what the "
                        "stages make of an item has changed since it was saved"
                    )
            if self._at.offset < length(self._current):
                self._num_empty = 0
                return True
            if not length(self._current):
                self._count_empty()
            self._current = None
            self.blocks.forget(self._at.finish())
        return False

    def _check_resumed(self, block: Block) -> None:
        """Raise the error of reading the Stream if it hides items at which a resume continues. The next call reads them again."""
        if not self._at.offset or self._at.offset < length(block):
            return
        last = items_of([(block, length(block) - 1, length(block))])
        if last and type(last[0]) is FailedItem:
            begin, counters = self._at.saved(is_over=False, is_open=True)
            self._current = None
            self.blocks.go(self.epoch, begin, self.blocks.state_at(begin), self._at.go(begin, counters))
            raise last[0].failure.exception()

    def _count_empty(self) -> None:
        """Count a block without items. Log a warning when a repeating source has delivered a whole epoch of them."""
        source = self.plan.source
        self._num_empty += 1
        if self.is_endless and self._num_empty == source.n:
            log.warning(
                "a whole epoch has passed without any item after %s; the source repeats, so the pipeline reads on until an item "
                "comes: check what its stages drop, or give the source repeating=False",
                source.identity,
            )

    def _first(self, count: int) -> list[Piece]:
        """Return the first items of the epoch, repeated as necessary, to fill up its last step."""
        found: list[Piece] = []
        tail = self._tail.restarted()
        with closing(self.blocks.first(self.epoch)) as blocks:
            for number, block in enumerate(blocks):
                items = tail(items_of([(block, 0, length(block))]), self.epoch, number, 0) if tail else block
                found.append((items, 0, length(items)))
                if sum(stop for _, _, stop in found) >= count:
                    break
        num_found = sum(stop for _, _, stop in found)
        return part_of(found * -(-count // num_found), 0, count)

    # ------------------------------------------------------------ position

    def begin_pass(self) -> None:
        if self._has_begun and self.is_ended:  # an empty epoch counts as an epoch
            self.begin_next_epoch()
        self._has_begun = True

    @property
    def is_ended(self) -> bool:
        return not self._taken and not self._has_more()

    def end(self) -> None:
        self._is_over = self._has_begun = True

    def place_now(self) -> Callable[[], PipelinePlace]:
        epoch, (block, counters, own, carried) = self.epoch, self._step_begin or self._now()

        def place() -> PipelinePlace:
            children = self._tail.saved(carried)
            return PipelinePlace(epoch, block, counters, children if own is None else {**children, "source": own})

        return place

    def _now(self) -> tuple[int, list[int], str | None, list[Any]]:
        block, counters = self._at.saved(is_over=self._is_over, is_open=self._current is not None)
        return block, counters, self.blocks.state_at(block), self._tail.carried.copy()

    def go(self, place: PipelinePlace) -> None:
        consumed = self._move(place)
        self.blocks.go(self.epoch, place.position, place.children.get("source"), consumed)

    def restart(self, epoch: int) -> None:
        self._move(PipelinePlace(epoch, 0, [0]))
        self.blocks.restart(epoch)

    def _move(self, place: PipelinePlace) -> set[int]:
        counters: Sequence[int] = place.counters or [0]
        self.epoch, self._current = place.epoch, None
        self._finish_step()
        self._is_over, self._has_begun = False, place.position > 0 or any(counters)
        self._tail.load(place.children)
        return self._at.go(place.position, counters)

    def check(self, place: PipelinePlace) -> None:
        counters: Any = place.counters
        are_whole = isinstance(counters, list) and all(type(number) is int for number in counters)
        if not (are_whole and counters and self._at.are_counters(counters)):
            raise StateMismatch(f"the state of this pipeline has other counters than {counters!r:.200}")
        self._tail.check(place.children)

    # ------------------------------------------------------------ workers

    def stats(self) -> dict[str, Any]:
        return self.blocks.stats()

    def close(self) -> None:
        self.blocks.close()
