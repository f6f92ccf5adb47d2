"""The pipeline of stages that make more or fewer items: workers expand blocks; what these hold is dealt to ranks and batches here.

blocks ──a Conveyer of its own──▶ lists of items ──end to end──▶ steps ──this rank's part──▶ an item, or a batch of them

A step is the next global batch of the items, wherever the blocks' borders are. A place is the block that its first item lies in,
and how many of that block's items lie before it: the same on all ranks, whatever their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from shmload.batch.ragged import ragged_of
from shmload.errors import StateMismatch
from shmload.modes.passes import collated
from shmload.pipeline.blocks import FailedItem, MadeBatch
from shmload.pipeline.columns import Block, Piece, batch_of, items_of, length, part_of
from shmload.pipeline.conveyer import OF_BATCHES, Conveyer
from shmload.pipeline.stages import DistributedBatchedMap
from shmload.schedule.state import check_state, compare_state, make_state, with_checksum


def same(item: Any) -> Any:
    """The item: blocks are made by their source."""
    return item


class ExpandedConveyer(Conveyer):
    """See Conveyer, which makes it where a stage makes more or fewer items."""

    def __init__(self, stages: Any, **options: Any) -> None:
        super().__init__(stages, **options)
        if unkept := sorted({*OF_BATCHES, "audit"} & options.keys()):
            raise ValueError(
                f"{', '.join(unkept)}: workers make blocks of items here, and not the batches that this is for: leave it out "
                "behind a stage that makes more or fewer items"
            )
        plan, pool = self.plan, self.plan.pool
        workers = [DistributedBatchedMap(same, pool.num_workers, timeout=pool.timeout_s)] if pool.num_workers else []
        inner = {name: value for name, value in options.items() if name != "block_size"}
        self._blocks = Conveyer([plan.source, *workers], **inner)
        self._size = 1 if plan.collate is None else plan.collate.batch_size
        self._ragged = None if plan.collate is None else ragged_of(plan.collate.ragged, None, is_torch_mode=False)
        self._current: Block | None = None  # the items of the block at the place, once it has come
        self._block = self._offset = 0  # the place: a block of this epoch, and how many of its items all ranks have had
        self._over = False  # whether the epoch has ended for this rank
        self._has_begun = False  # whether anything was asked for of this epoch
        self._valid: int | None = None

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
                pieces += self._first(each * world - num_real)
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
            pieces.append((self._current, self._offset, stop))
            num_taken += stop - self._offset
            self._offset = stop
        return pieces, num_taken

    def _has_more(self) -> bool:
        """Whether an item is left; then it is in the block at the place."""
        while not self._over:
            if self._current is None:
                try:
                    self._current = self._blocks()
                except StopIteration:
                    self._over = True
                    break
                if self._offset > (found := length(self._current)):
                    raise StateMismatch(
                        f"the state stands behind item {self._offset} of block {self._block}, which has {found}: what the stages "
                        "make of an item has changed since it was saved"
                    )
            if self._offset < length(self._current):
                return True
            self._block, self._offset, self._current = self._block + 1, 0, None
        return False

    def _first(self, count: int) -> list[Piece]:
        """The epoch's first items, over and over, which fill up its last step."""
        found: list[Piece] = []
        with Conveyer([self.plan.source]) as blocks:
            blocks._move(self._epoch, 0)
            for block in blocks:
                found.append((block, 0, length(block)))
                if sum(stop for _, _, stop in found) >= count:
                    break
        had = sum(stop for _, _, stop in found)
        return part_of(found * -(-count // had), 0, count)

    def _where(self) -> str:
        return f"a batch that ends with item {self._offset} of block {self._block} of epoch {self._epoch}"

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        schedule = self._blocks._schedule
        state = dict(make_state(schedule, epoch=self._epoch, step=schedule.n if self._over else self._block))
        if self.is_endless:
            state["epoch"], state["position"] = divmod(self._block, schedule.n)
        return with_checksum({**state, "counters": [0 if self._over else self._offset]})

    def _place_of(self, state: Mapping[str, Any]) -> tuple[int, int, int]:  # type: ignore[override]  # one number more
        checked = check_state(state)
        schedule = self._blocks._schedule
        compare_state(checked, schedule)
        counters: Any = checked.get("counters")
        if not (isinstance(counters, list) and len(counters) == 1 and type(counters[0]) is int and counters[0] >= 0):
            raise StateMismatch(f"the state of a pipeline that expands blocks has one counter, from 0 on; got {counters!r:.200}")
        epoch, block = checked["epoch"], checked["position"]
        return (0, epoch * schedule.n + block, counters[0]) if self.is_endless else (epoch, block, counters[0])

    def _move(self, epoch: int, block: int, offset: int = 0) -> None:
        self._go(epoch, block, offset)
        self._blocks._move(epoch, block)

    def _go(self, epoch: int, block: int, offset: int = 0) -> None:
        self._epoch, self._block, self._offset, self._current = epoch, block, offset, None
        self._over, self._has_begun = False, (block, offset) != (0, 0)
        self._blocks._go(epoch, block)

    def _end(self) -> None:
        self._over = self._has_begun = True

    @property
    def is_ended(self) -> bool:
        return not self._has_more()

    @property
    def _is_over(self) -> bool:
        return self._over

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "place": (self._epoch, self._block, self._offset)}

    # ------------------------------------------------------------ ends

    def stats(self) -> dict[str, Any]:
        return self._blocks.stats()

    def close(self) -> None:
        super().close()
        self._blocks.close()
