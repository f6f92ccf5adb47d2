"""The grammar of pipelines: compile a list of stages into a Plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmload.batch.ragged import AsTorchOrList
from shmload.pipeline.block_sequence import BLOCK, BlockSequence, Expansion, columned
from shmload.pipeline.buckets import Batches, Bucket
from shmload.pipeline.caching import number_caches
from shmload.pipeline.item_sequence import ItemSequence, Mapped
from shmload.pipeline.plan import Plan, PoolOptions
from shmload.pipeline.position_stages import Shuffle
from shmload.pipeline.scan import Scan
from shmload.pipeline.stages import TIMEOUT_S, BatchMap, Collate, DistributedBatchedMap, Map, Partition
from shmload.pipeline.stream_sequence import StreamItems, StreamSequence
from shmload.worker.decoding_protocol import is_decoder
from shmload.worker.item_stages import BufferedShuffle
from shmload.worker.stage_engine import Each, Expanding


def buffered(buffer_size: int) -> BufferedShuffle:
    """Return the stage for Shuffle(buffer_size): it draws one of the items in the full buffer, so a buffer of 1 keeps the order."""
    return BufferedShuffle(buffer_size, initial=buffer_size)


def compose(stages: Sequence[Any], block_size: int = BLOCK) -> Plan:
    """Compile stages.

    Args:
        stages: in order.
        block_size: number of items expanded together, if stages make more or fewer items.
    Raises:
        TypeError, ValueError: the stages do not make a pipeline; the message names the stage and the reason.
    """
    if not stages:
        raise ValueError(f"a pipeline begins with {_SOURCES}; got no stages")
    source, *rest = stages
    if not _is_source(source):
        raise TypeError(f"a pipeline begins with {_SOURCES}; stage 0 is {_name(source)}")
    composition = _Composition(source.as_source() if hasattr(source, "as_source") else source)
    for number, stage in enumerate(rest, 1):
        composition.add(number, stage)
    return composition.plan(block_size)


class _Composition:
    """A pipeline that is being composed: what each stage so far does, and so which stages may follow.

    A stage is in one of four parts of the pipeline:

        source and position stages, functions of items ─▶ from the first stage that makes more or fewer items
                                                        ─▶ from the first Scan ─▶ after Collate

    Attributes:
        source: the sequence of items after the last position stage.
        item_stages: the functions of its items.
        expanding: the first stage that makes more or fewer items, and all after it, with their names.
        tail: the first Scan, and the stages after it, with their names.
        worker_batch_stages: functions of batches, in workers (BatchMap).
        trainer_batch_stages: functions of batches, in the trainer (Map after Collate).
        pools: the stages that request workers.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.stream = source if isinstance(source, StreamItems) else None
        self.joined = list(source.pools)
        if source.n_workers:
            self.joined.append(PoolOptions(source.n_workers, None, TIMEOUT_S))
        self.item_stages: list[Each] = []
        self.expanding: list[tuple[str, Any]] = []
        self.tail: list[tuple[str, Any]] = []
        self.collate: Collate | None = None
        self.is_bucketed = False
        self.worker_batch_stages: list[Each] = []
        self.trainer_batch_stages: list[Each] = []
        self.partition: Partition | None = None
        self.pools: list[DistributedBatchedMap] = []

    def add(self, number: int, stage: Any) -> None:
        """Add a stage, or raise TypeError or ValueError if it cannot follow those before it."""
        where, name = f"stage {number}, {_name(stage)},", f"stage {number} ({_name(stage)})"
        if _is_source(stage):
            raise ValueError(f"{where} gives items of its own, so it can only be the first")
        if not isinstance(stage, _STAGES) and not hasattr(stage, "over"):
            raise TypeError(f"{where} is not a stage: for a function, give Map(function)")
        if isinstance(stage, Shuffle) and stage.buffer_size is not None:
            stage = buffered(stage.buffer_size)
        if self.collate is not None:
            self._add_after_collate(stage, where, name)
        elif isinstance(stage, BatchMap):
            raise ValueError(f"{where} {_NO_WHOLE_BATCHES if self._is_by_blocks else _NO_BATCHES}")
        elif isinstance(stage, Partition):
            if self.partition is not None:
                raise ValueError(f"{where} is the second of its kind: items are divided among ranks only once")
            self.partition = stage
        elif isinstance(stage, Collate):
            self.collate = stage
        elif self.tail:
            self._add_after_scan(stage, where, name)
        else:
            self._add_to_items(stage, where, name)

    @property
    def _is_by_blocks(self) -> bool:
        """Return whether items are made in blocks, because their positions are not known."""
        return bool(self.expanding or self.tail or self.stream)

    def _add_to_items(self, stage: Any, where: str, name: str) -> None:
        """Add a stage before Collate and before any Scan."""
        if self.item_stages and is_decoder(self.item_stages[-1].function):
            raise ValueError(f"{where} follows one that decodes into the batch (read_into): that must be the last before Collate")
        if isinstance(stage, Scan):
            self.tail.append((name, stage))
        elif isinstance(stage, Map):
            self._add_function(Each(name, stage.fn))
        elif isinstance(stage, DistributedBatchedMap):
            if self._is_by_blocks and not callable(stage.mapping_fn):
                before = self.expanding[0][0] if self.expanding else "a Stream"
                raise ValueError(f"{where} decodes into a batch's row (read_into), which is not known after {before}")
            self._add_function(Each(name, stage.mapping_fn))
            self.pools.append(stage)
        elif isinstance(stage, Expanding):
            if not self.expanding:
                self._close_functions()
            self.expanding.append((name, stage))
            if isinstance(stage, Bucket):
                self.collate, self.is_bucketed = Collate(1, ragged=stage.ragged), True
        else:
            self._add_position_stage(stage, where)

    def _add_function(self, each: Each) -> None:
        if self._is_by_blocks:
            self.expanding.append((each.name, each))
        else:
            self.item_stages.append(each)

    def _close_functions(self) -> None:
        """Make the items after the functions so far the source of the next stages."""
        if self.item_stages:
            self.source, self.item_stages = Mapped(self.source, self.item_stages), []

    def _add_position_stage(self, stage: Any, where: str) -> None:
        if self.expanding:
            raise ValueError(
                f"{where} needs the position of each item, which is not known after {self.expanding[0][0]}: put it before that"
            )
        if self.stream is not None:
            self.stream = _over(stage, where, self.stream)
            return
        if self.partition is not None:
            raise ValueError(f"{where} comes after Partition: choose items before the ranks share them")
        self._close_functions()
        self.source = _over(stage, where, self.source)

    def _add_after_scan(self, stage: Any, where: str, name: str) -> None:
        if isinstance(stage, Map):
            self.tail.append((name, Each(name, stage.fn)))
        elif isinstance(stage, Scan):
            self.tail.append((name, stage))
        else:
            raise ValueError(
                f"{where} comes after {self.tail[0][0]}, where only Scan, Map, Partition and Collate can be: put it before that"
            )

    def _add_after_collate(self, stage: Any, where: str, name: str) -> None:
        if isinstance(stage, Map):
            self.trainer_batch_stages.append(Each(name, stage.fn))
        elif not isinstance(stage, BatchMap):
            maker = "Bucket" if self.is_bucketed else "Collate"
            why = _NOT_AFTER_COLLATE.get(type(stage), _NO_POSITIONS).format(maker=maker)
            raise ValueError(f"{where} comes after {maker}, where only Map can be: {why}")
        elif self.trainer_batch_stages or self._is_by_blocks:
            raise ValueError(f"{where} {_NO_WHOLE_BATCHES if self._is_by_blocks else _NO_BATCHES}")
        else:
            self.worker_batch_stages.append(Each(name, stage.fn))

    def plan(self, block_size: int) -> Plan:
        """Return the plan of the stages added, or raise ValueError if they do not go together."""
        is_in_order = all(stage.in_order for stage in self.pools)
        self._check_decoder()
        if not is_in_order:
            self._check_any_order()
        if self.stream is None:
            number_caches(self.source)
        source, item_stages = self.source, self.item_stages
        if self._is_by_blocks or not is_in_order:
            expanding = [(each.name, each) for each in item_stages] or self.expanding  # with functions, there is no expanding stage
            finish = None if self.tail else _finish_of(self.collate, self.is_bucketed)
            expansion, item_stages = Expansion(expanding, finish, [stage for _, stage in self.tail]), []
            if self.stream is None:
                source = BlockSequence(source, expansion, block_size)
            else:
                source = StreamSequence(self.stream, expansion, block_size)
        pool, partition = PoolOptions.of(self.pools, self.joined), self.partition or Partition(0, 1)
        return Plan(
            source=source,
            item_stages=item_stages,
            tail=self.tail,
            worker_batch_stages=self.worker_batch_stages,
            trainer_batch_stages=self.trainer_batch_stages,
            collate=self.collate,
            partition=partition,
            pool=pool,
            is_in_order=is_in_order,
        )

    @property
    def _is_decoded(self) -> bool:
        """Return whether the last function of items decodes into the batch's row."""
        return bool(self.item_stages) and not callable(self.item_stages[-1].function)

    def _check_decoder(self) -> None:
        if self._is_decoded and self.worker_batch_stages:
            name = self.worker_batch_stages[0].name
            raise ValueError(f"{name} follows items that are decoded into the batch's row (read_into): use Map, in the trainer")
        if self._is_decoded and self.collate is None:
            raise ValueError("a mapping_fn with read_into decodes into a batch's row: add Collate, or give a plain function")

    def _check_any_order(self) -> None:
        """Check the stages if workers deliver items as they are finished."""
        if self.worker_batch_stages or self._is_decoded:
            raise ValueError(
                "with in_order=False workers make blocks of items: leave out BatchMap, and a mapping_fn with read_into"
            )
        if self.partition is not None and self.partition.n_ranks > 1:
            raise ValueError(
                "with in_order=False items come in another order on each rank, so ranks cannot share them out: leave Partition "
                "out, or give each rank items of its own"
            )
        if self.tail:
            raise ValueError("with in_order=False a Scan would carry another state each time: it needs an order")


def _finish_of(collate: Collate | None, is_bucketed: bool) -> Any:
    """Return the function that converts a block's items to the form in which they are sent, so workers do most of the collating."""
    if collate is None:
        return None
    if is_bucketed:
        return Batches(collate.ragged)
    return columned if isinstance(collate.ragged, AsTorchOrList) else None


def _over(stage: Any, where: str, source: Any) -> Any:
    """Apply a position stage to a sequence."""
    try:
        made = source.with_step(stage) if isinstance(source, StreamItems) else stage.over(source)
    except ValueError as error:
        raise ValueError(f"{where} cannot follow the stages before it: {error}") from None
    return made


def _is_source(stage: Any) -> bool:
    return isinstance(stage, ItemSequence) or hasattr(stage, "as_source")


_SOURCES = "a Range, a Permutation, Items, a Generate, a Stream, a Zip, a Chain, an Interleave or a Join"
_NO_BATCHES = "is a function of batches where they are made: it follows Collate, before any Map of whole batches"
_NO_WHOLE_BATCHES = (
    "needs batches that workers make whole, which run across blocks after a stage that makes more or fewer items: use Map"
)
_NO_POSITIONS = "batches have no positions of items; put it before {maker}"
_NOT_AFTER_COLLATE = {
    Partition: "each rank has whole batches already; put it before {maker}",
    DistributedBatchedMap: "workers make whole batches; put it before {maker}",
    Collate: "a batch is not an item",
    Scan: "it carries a state from item to item; put it before {maker}",
}
_STAGES = (Map, BatchMap, DistributedBatchedMap, Scan, Expanding, Partition, Collate)  # position stages have `over` instead


def _name(stage: Any) -> str:
    return type(stage).__name__
