"""The pipeline of stages that make more or fewer items: workers expand blocks; what these hold is dealt to ranks and batches here.

blocks ──a Conveyer of its own──▶ lists of items ──end to end──▶ steps ──this rank's part──▶ an item, or a batch of them

A step is the next global batch of the items, wherever the blocks' borders are. A place is the block that its first item lies in,
and how many of that block's items lie before it: the same on all ranks, whatever their number.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Self

from shmload.batch.ragged import ragged_of
from shmload.errors import StateMismatch
from shmload.modes.default_collate import collated
from shmload.pipeline.block_columns import Block, Piece, batch_of, items_of, length, part_of
from shmload.pipeline.blocks import FailedItem, MadeBatch, Scan, saved
from shmload.pipeline.conveyer import OF_BATCHES, Conveyer
from shmload.pipeline.stage_names import Where, places_of
from shmload.pipeline.stages import DistributedBatchedMap, ItemStream, Plan, StreamSchedule
from shmload.pipeline.streams import FedBlocks, StreamRow
from shmload.schedule.state import check_state, compare_state, make_state
from shmload.schedule.state_checksum import with_checksum
from shmload.schedule.state_codec import opened
from shmload.worker.failure import Failure
from shmload.worker.stage_engine import called


def same(item: Any) -> Any:
    """The item: blocks are made by their source."""
    return item


class PlacedBlocks:
    """The blocks of a row, which are read at any place: by a Conveyer of them."""

    def __init__(self, plan: Plan, options: Mapping[str, Any]) -> None:
        pool = plan.pool
        workers = [DistributedBatchedMap(same, pool.num_workers, timeout=pool.timeout_s)] if pool.num_workers else []
        self._source, self._pipeline = plan.source, Conveyer([plan.source, *workers], **options)

    def __call__(self) -> Block:
        """The next block; StopIteration at the end of the epoch."""
        block: Block = self._pipeline()
        return block

    @property
    def schedule(self) -> StreamSchedule:
        return self._pipeline._schedule

    @property
    def place(self) -> int:
        """The block that comes next."""
        return self._pipeline._position

    def go(self, epoch: int, block: int, own: str | None = None, *, has_moved: bool = False) -> None:
        """Goes on there."""
        (self._pipeline._move if has_moved else self._pipeline._go)(epoch, block)

    def state_at(self, block: int) -> str | None:
        """What the source needs to go on there: nothing."""
        return None

    def forget(self, block: int) -> None:
        """Nothing is kept for resumes."""

    def first(self, epoch: int) -> Generator[Block]:
        """The epoch's blocks from its start, read here, apart from those that are under way."""
        with Conveyer([self._source]) as blocks:
            blocks._move(epoch, 0)
            yield from blocks

    def show_as(self, about: Sequence[tuple[str, Where]]) -> None:
        """Says which stages it is shown as."""
        self._pipeline._about = about

    def stats(self) -> dict[str, Any]:
        return self._pipeline.stats()

    def close(self) -> None:
        self._pipeline.close()


def schedule_of_blocks(plan: Plan) -> StreamSchedule:
    """Blocks are the same for any number of ranks, and no rank is without one."""
    return ItemStream(plan.source, None).schedule(seed=plan.source.seed, uneven="pad", world_size=1)


class ExpandedConveyer(Conveyer):
    """See Conveyer, which makes it where a stage makes more or fewer items."""

    def __init__(self, stages: Any, **options: Any) -> None:
        super().__init__(stages, **options)
        if unkept := sorted({*OF_BATCHES, "audit"} & options.keys()):
            raise ValueError(
                f"{', '.join(unkept)}: workers make blocks of items here, and not the batches that this is for: leave it out "
                "behind a stage that makes more or fewer items"
            )
        plan = self.plan
        inner = {name: value for name, value in options.items() if name != "block_size"}
        self._blocks = self._blocks_of(plan, inner)
        self._blocks.show_as(places_of(self.stages, plan))
        self._is_streamed = isinstance(plan.source, StreamRow)
        self._scans = [stage for _, stage in plan.tail if isinstance(stage, Scan)]
        self._carried = self._initial()
        self._size = 1 if plan.collate is None else plan.collate.batch_size
        self._ragged = None if plan.collate is None else ragged_of(plan.collate.ragged, None, is_torch_mode=False)
        self._current: Block | None = None  # the items of the block at the place, once it has come
        self._block = self._offset = 0  # the place: a block of this epoch, and how many of its items all ranks have had
        self._over = False  # whether the epoch has ended for this rank
        self._has_begun = False  # whether anything was asked for of this epoch
        self._valid: int | None = None

    def _blocks_of(self, plan: Plan, options: Mapping[str, Any]) -> FedBlocks | PlacedBlocks:
        if isinstance(plan.source, StreamRow):
            return FedBlocks(plan.source, plan.pool, options, schedule_of_blocks(plan))
        return PlacedBlocks(plan, options)

    def __len__(self) -> int:
        raise TypeError("behind a stage that makes more or fewer items their number is not known before they are read")

    @property
    def valid(self) -> int | None:
        return self._valid

    # ------------------------------------------------------------ items

    def __iter__(self) -> Self:
        if self._has_begun and self.is_ended:  # an epoch may be empty, and then is one all the same
            self.begin_next_epoch()
        self._has_begun = True
        return self

    def _initial(self) -> list[Any]:
        return [copy.deepcopy(scan.initial) for scan in self._scans]

    def _behind_scans(self, items: list[Any], carried: list[Any]) -> list[Any]:
        """What the stages in the trainer make of some items, from these states on, which move."""
        return [item if type(item) is FailedItem else self._behind_scan(item, carried) for item in items]

    def _behind_scan(self, item: Any, carried: list[Any]) -> Any:
        which = 0
        for name, stage in self.plan.tail:
            try:
                if isinstance(stage, Scan):
                    carried[which], item = called(partial(stage, carried[which]), item, name)
                    which += 1
                else:
                    item = stage(item)
            except Exception as error:
                error.add_note(f"shmload: {name}, of an item of block {self._block} of epoch {self._epoch}")
                return FailedItem(Failure.of(error, "in the trainer", ""))
        return item

    def _next_batch(self) -> Any:
        pieces = self._step()
        if (batch := batch_of(pieces)) is not None:
            return batch
        items = items_of(pieces)
        for item in items:
            if type(item) is FailedItem:
                raise item.failure.exception()
        if type(items[0]) is MadeBatch:
            ((count, batch),) = items
            self._valid = count if self._valid else 0
            return batch
        return collated(items, self._ragged)

    def _next_item(self) -> Any:
        (item,) = items_of(self._step())
        if type(item) is FailedItem:
            raise item.failure.exception()
        return item

    def _step(self) -> list[Piece]:
        """This rank's items of the next step; StopIteration at the end of the epoch."""
        world, rule, each, longer = self.plan.partition.n_ranks, self.plan.uneven, self._size, 0
        self._has_begun = True
        pieces, num_real = self._take(each * world)
        if num_real < each * world:
            if not pieces or rule == "drop":
                self._end()
                raise StopIteration
            each, longer = divmod(num_real, world)
            if rule == "pad":
                each, longer = each + (longer > 0), 0
                if missing := each * world - num_real:
                    pieces += self._first(missing)
        first = self._rank * each + min(self._rank, longer)
        count = each + (self._rank < longer)
        if not count:
            self._end()
            raise StopIteration
        if self.plan.collate is not None:
            self._valid = min(count, max(num_real - first, 0))
        return pieces if world == 1 else part_of(pieces, first, first + count)

    def _take(self, count: int) -> tuple[list[Piece], int]:
        """So many items, or what is left of the epoch, and how many these are; the place moves behind them."""
        pieces: list[Piece] = []
        num_taken = 0
        while num_taken < count and self._has_more():
            assert self._current is not None
            stop = min(length(self._current), self._offset + count - num_taken)
            piece: Piece = (self._current, self._offset, stop)
            if self.plan.tail:
                piece = (self._behind_scans(items_of([piece]), self._carried), 0, stop - self._offset)
            pieces.append(piece)
            num_taken += stop - self._offset
            self._offset = stop
        return pieces, num_taken

    def _has_more(self) -> bool:
        """Whether an item is left; then it is in the block at the place."""
        while not self._over:
            if self._current is None:
                try:
                    self._current = self._arrived()
                except StopIteration:
                    self._over = True
                    break
                except Exception:  # the block is lost, and the next one comes
                    self._block, self._offset = self._blocks.place, 0
                    raise
                if self._offset > (found := length(self._current)):
                    raise StateMismatch(
                        f"the state stands behind item {self._offset} of block {self._block}, which has {found}: what the stages "
                        "make of an item has changed since it was saved"
                    )
            if self._offset < length(self._current):
                return True
            self._leave()
        return False

    def _arrived(self) -> Block:
        """The next block, which is the one at the place."""
        return self._blocks()

    def _leave(self) -> None:
        """All of the block at the place has been had."""
        self._block, self._offset, self._current = self._block + 1, 0, None
        self._blocks.forget(self._block)

    def _first(self, count: int) -> list[Piece]:
        """The epoch's first items, over and over, which fill up its last step."""
        found: list[Piece] = []
        carried = self._initial()
        with closing(self._blocks.first(self._epoch)) as blocks:
            for block in blocks:
                items = self._behind_scans(items_of([(block, 0, length(block))]), carried) if self.plan.tail else block
                found.append((items, 0, length(items)))
                if sum(stop for _, _, stop in found) >= count:
                    break
        had = sum(stop for _, _, stop in found)
        return part_of(found * -(-count // had), 0, count)

    def _where(self, _: int = 0) -> str:
        return f"a batch that ends with item {self._offset} of block {self._block} of epoch {self._epoch}"

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        schedule = self._blocks.schedule
        block, counters = self._counted()
        step = schedule.n if self._over and not self._is_streamed else block
        state = dict(make_state(schedule, epoch=self._epoch, step=step))
        if self.is_endless:
            state["epoch"], state["position"] = divmod(block, schedule.n)
        state["counters"] = counters
        if children := self._children():
            state["children"] = children
        return with_checksum(state)

    def _counted(self) -> tuple[int, list[int]]:
        """The place: a block, and how many of its items have been had."""
        return self._block, [0 if self._over else self._offset]

    def _children(self) -> dict[str, str]:
        """What a place needs besides the numbers."""
        found = {"scans": saved(self._carried, "what a Scan carries")} if self._scans else {}
        own = self._blocks.state_at(self._counted()[0])
        return found if own is None else {**found, "source": own}

    def _place_of(self, state: Mapping[str, Any]) -> tuple[int, int, list[int], dict[str, str]]:  # type: ignore[override]  # more
        checked = check_state(state)
        schedule = self._blocks.schedule
        compare_state(checked, schedule)
        counters: Any = checked.get("counters")
        if not (isinstance(counters, list) and self._are_counters(counters)):
            raise StateMismatch(f"the state of this pipeline has other counters than {counters!r:.200}")
        children = checked.get("children", {})
        if self._scans and len(self._opened(children)) != len(self._scans):
            raise StateMismatch(f"the state is of another number of Scans than {len(self._scans)}")
        epoch, block = checked["epoch"], checked["position"]
        return (0, epoch * schedule.n + block, counters, children) if self.is_endless else (epoch, block, counters, children)

    def _are_counters(self, counters: list[Any]) -> bool:
        return len(counters) == 1 and type(counters[0]) is int

    @staticmethod
    def _opened(children: Mapping[str, str]) -> list[Any]:
        """What the Scans carried."""
        try:
            carried = opened(children["scans"], is_trusted=False)
        except (KeyError, ValueError, TypeError) as error:
            raise StateMismatch(f"the state does not say what the pipeline's Scans carried ({error!r})") from error
        return carried if isinstance(carried, list) else []

    def _move(self, epoch: int, block: int, counters: Sequence[int] = (0,), children: Mapping[str, str] | None = None) -> None:
        children = children or {}
        self._place(epoch, block, counters)
        if self._scans and "scans" in children:
            self._carried = self._opened(children)
        self._blocks.go(epoch, block, children.get("source"), has_moved=True)

    def _go(self, epoch: int, block: int) -> None:
        self._place(epoch, block, (0,))
        self._blocks.go(epoch, block)

    def _place(self, epoch: int, block: int, counters: Sequence[int]) -> None:
        self._epoch, self._block, self._offset, self._current = epoch, block, counters[0], None
        self._over, self._has_begun = False, block > 0 or any(counters)
        self._carried = self._initial()

    def _end(self) -> None:
        self._over = self._has_begun = True

    @property
    def is_ended(self) -> bool:
        return not self._has_more()

    @property
    def _is_over(self) -> bool:
        return self._over

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "place": (self._epoch, *self._counted(), self._children())}

    # ------------------------------------------------------------ ends

    def stats(self) -> dict[str, Any]:
        return self._blocks.stats()

    def close(self) -> None:
        super().close()
        self._blocks.close()
