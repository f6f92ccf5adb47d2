"""Plan: a compiled pipeline, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmload.pipeline.block_sequence import BlockSequence
from shmload.pipeline.in_place import Choice, ChosenProgram
from shmload.pipeline.item_sequence import ItemSequence
from shmload.pipeline.programs import BatchProgram, InPlaceProgram, ItemProgram, RowProgram
from shmload.pipeline.stages import Collate, DistributedBatchedMap, Partition
from shmload.pipeline.stream_sequence import StreamSequence
from shmload.worker.decoding_protocol import is_decoder
from shmload.worker.stage_engine import Each

PREFETCHED = 2  # minimum number of batches ordered ahead for each worker


@dataclass(frozen=True)
class PoolOptions:
    """The workers that a pipeline's stages request in total.

    Attributes:
        num_workers: number of processes of this rank; 0 if the trainer makes the items.
        buffer_size: number of items loaded ahead; None for the default.
        timeout_s: seconds that one item may take; None for no limit.
    """

    num_workers: int = 0
    buffer_size: int | None = None
    timeout_s: float | None = None

    @classmethod
    def of(cls, stages: Sequence[DistributedBatchedMap], joined: Sequence[PoolOptions]) -> PoolOptions:
        """Return the total of some stages and of the members of a source.

        Workers and buffers add up. An item passes through one member and then all stages, so its time limit is the longest of the
        members' plus those of the stages.

        Args:
            stages: the pipeline's own stages with workers.
            joined: the pools of the source and its members.
        """
        joined = [pool for pool in joined if pool.num_workers]
        sizes = [one.buffer_size for one in stages] + [one.buffer_size for one in joined]
        known = [size for size in sizes if size is not None]
        times = [stage.timeout for stage in stages]
        if joined:
            longest = [pool.timeout_s for pool in joined]
            times.append(None if None in longest else max(time for time in longest if time is not None))
        return cls(
            num_workers=sum(stage.n_workers for stage in stages) + sum(pool.num_workers for pool in joined),
            buffer_size=sum(known) if known else None,
            timeout_s=None if None in times or not times else sum(time for time in times if time is not None),
        )

    def prefetch_factor(self, rows: int) -> int:
        """Return the number of batches of `rows` items to order ahead for each worker."""
        return max(PREFETCHED, -(-(self.buffer_size or 0) // (rows * self.num_workers)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A compiled pipeline.

    Attributes:
        source: sequence of keys, or of blocks.
        item_stages: functions of items, before Collate.
        tail: Scans, and functions of an item after a Scan, which run in the trainer; each with its name.
        worker_batch_stages: functions of batches that run where the batches are made (BatchMap).
        trainer_batch_stages: functions of batches that the trainer applies (Map after Collate).
        collate: how batches are made; None for single items.
        partition: this rank's share.
        pool: the workers.
        is_in_order: whether items arrive in order, or as they are finished.
    """

    source: ItemSequence
    item_stages: list[Each]
    tail: list[tuple[str, Any]]
    worker_batch_stages: list[Each]
    trainer_batch_stages: list[Each]
    collate: Collate | None
    partition: Partition
    pool: PoolOptions
    is_in_order: bool = True

    @property
    def collate_fn(self) -> Any:
        """Return the loader's `collate_fn`."""
        if self.collate is None:
            return list
        return BatchProgram(self.collate.ragged, self.worker_batch_stages) if self.worker_batch_stages else None

    @property
    def is_expanding(self) -> bool:
        """Return whether items of the source are blocks of delivered items."""
        return isinstance(self.source, BlockSequence | StreamSequence)

    @property
    def is_streamed(self) -> bool:
        """Return whether the trainer reads the source item by item."""
        return isinstance(self.source, StreamSequence)

    @property
    def program(self) -> RowProgram:
        """Return the dataset that workers read."""
        kind = RowProgram
        is_chosen = self.collate is not None and not self.item_stages and not self.worker_batch_stages
        if is_chosen and Choice.of(self.source) is not None:
            return ChosenProgram(self.source)
        is_decoded = self.item_stages and is_decoder(self.item_stages[-1].function)
        if self.collate is not None and is_decoded and not self.worker_batch_stages:
            kind = InPlaceProgram
        elif self.collate is None and self.pool.num_workers:
            kind = ItemProgram
        return kind(self.source, self.item_stages)

    @property
    def uneven(self) -> Any:
        """Return the rule for the last step of a pipeline that does not repeat."""
        is_whole = self.collate is not None and not self.collate.return_partial_batch
        return "drop" if is_whole else self.partition.uneven
