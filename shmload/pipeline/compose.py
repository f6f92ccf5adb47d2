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
    joined: list[PoolOptions] = []
    if hasattr(source, "as_source"):
        source = source.as_source()
        joined = list(source.pools)
    stream = source if isinstance(source, StreamItems) else None
    if source.n_workers:
        joined.append(PoolOptions(source.n_workers, None, TIMEOUT_S))
    of_items: list[Each] = []  # functions of items, before Collate
    of_batches: list[Each] = []  # Maps after Collate
    of_made: list[Each] = []  # BatchMaps
    partition: Partition | None = None
    collate: Collate | None = None
    is_bucketed = False
    expanding: list[tuple[str, Any]] = []  # the first stage that makes more or fewer items, and all after it
    tail: list[tuple[str, Any]] = []  # the first Scan before Collate, and the stages after it
    pools: list[DistributedBatchedMap] = []  # the stages that request workers
    for number, stage in enumerate(rest, 1):
        where, name = f"stage {number}, {_name(stage)},", f"stage {number} ({_name(stage)})"
        if _is_source(stage):
            raise ValueError(f"{where} gives items of its own, so it can only be the first")
        is_decoded = of_items and is_decoder(of_items[-1].function) and collate is None
        if is_decoded and (isinstance(stage, Map | DistributedBatchedMap | Scan | Expanding) or hasattr(stage, "over")):
            raise ValueError(f"{where} follows one that decodes into the batch (read_into): that must be the last before Collate")
        if isinstance(stage, Shuffle) and stage.buffer_size is not None:
            stage = buffered(stage.buffer_size)
        if isinstance(stage, Map):
            if tail and collate is None:
                tail.append((name, Each(name, stage.fn)))
            elif (expanding or stream) and collate is None:
                expanding.append((name, Each(name, stage.fn)))
            else:
                (of_items if collate is None else of_batches).append(Each(name, stage.fn))
        elif tail and collate is None and not isinstance(stage, Scan | Partition | Collate):
            raise ValueError(
                f"{where} comes after {tail[0][0]}, where only Scan, Map, Partition and Collate can be: put it before that"
            )
        elif isinstance(stage, Scan) and collate is None:
            tail.append((name, stage))
        elif isinstance(stage, Expanding) and collate is None:
            if not expanding:
                source, of_items = Mapped(source, of_items) if of_items else source, []
            expanding.append((name, stage))
            if isinstance(stage, Bucket):
                collate, is_bucketed = Collate(1, ragged=stage.ragged), True
        elif hasattr(stage, "over") and collate is None and stream is not None and not expanding:
            stream = _over(stage, where, stream)
        elif hasattr(stage, "over") and collate is None:
            if expanding:
                raise ValueError(
                    f"{where} needs the position of each item, which is not known after {expanding[0][0]}: put it before that"
                )
            if partition is not None:
                raise ValueError(f"{where} comes after Partition: choose items before the ranks share them")
            source, of_items = _over(stage, where, Mapped(source, of_items) if of_items else source), []
        elif collate is not None and (hasattr(stage, "over") or isinstance(stage, Expanding) or type(stage) in _NOT_AFTER_COLLATE):
            raise ValueError(
                f"{where} comes after Collate, where only Map can be: {_NOT_AFTER_COLLATE.get(type(stage), _NO_PLACES)}"
            )
        elif isinstance(stage, DistributedBatchedMap):
            if (expanding or stream) and not callable(stage.mapping_fn):
                expanding_stage = expanding[0][0] if expanding else "a Stream"
                raise ValueError(f"{where} decodes into a batch's row (read_into), which is not known after {expanding_stage}")
            each = Each(name, stage.mapping_fn)
            if expanding or stream:
                expanding.append((name, each))
            else:
                of_items.append(each)
            pools.append(stage)
        elif isinstance(stage, Partition):
            if partition is not None:
                raise ValueError(f"{where} is the second of its kind: items are divided among ranks only once")
            partition = stage
        elif isinstance(stage, Collate):
            collate = stage
        elif isinstance(stage, BatchMap):
            by_blocks = expanding or tail or stream
            if collate is None or of_batches or by_blocks:
                raise ValueError(f"{where} {_NO_WHOLE_BATCHES if by_blocks else _NO_BATCHES}")
            of_made.append(Each(name, stage.fn))
        else:
            raise TypeError(f"{where} is not a stage: for a function, give Map(function)")
    if of_made and of_items and not callable(of_items[-1].function):
        raise ValueError(
            f"{of_made[0].name} follows items that are decoded into the batch's row (read_into): use Map, in the trainer"
        )
    if of_items and collate is None and not callable(of_items[-1].function):
        raise ValueError("a mapping_fn with read_into decodes into a batch's row: add Collate, or give a plain function")
    is_unordered = not all(stage.in_order for stage in pools)
    if is_unordered and (of_made or (of_items and not callable(of_items[-1].function))):
        raise ValueError("with in_order=False workers make blocks of items: leave out BatchMap, and a mapping_fn with read_into")
    if is_unordered and partition is not None and partition.n_ranks > 1:
        raise ValueError(
            "with in_order=False items come in another order on each rank, so ranks cannot share them out: leave Partition out, or "
            "give each rank items of its own"
        )
    if is_unordered and tail:
        raise ValueError("with in_order=False a Scan would carry another state each time: it needs an order")
    if stream is None:
        number_caches(source)
    if expanding or tail or stream or is_unordered:
        if of_items:  # no earlier stage made more or fewer items
            expanding, of_items = [(each.name, each) for each in of_items], []
        expansion = Expansion(expanding, None if tail else _finish_of(collate, is_bucketed), [stage for _, stage in tail])
        source = BlockSequence(source, expansion, block_size) if stream is None else StreamSequence(stream, expansion, block_size)
    pool = PoolOptions.of(pools, joined)
    return Plan(source, of_items, of_batches, partition or Partition(0, 1), collate, pool, of_made, tail, not is_unordered)


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
_NO_PLACES = "batches have no places of items; put it before Collate"
_NOT_AFTER_COLLATE = {
    Partition: "whole batches are dealt to the ranks already; put it before Collate",
    DistributedBatchedMap: "workers make whole batches; put it before Collate",
    Collate: "a batch is not an item",
}


def _name(stage: Any) -> str:
    return type(stage).__name__
