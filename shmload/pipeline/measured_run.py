"""Run a pipeline in this process for a limited time, from its current place, with counters on its stages.

The engine is the one that runs the pipeline without workers, so items are made, and draw random numbers, as in a worker. Time of a
batch that is not spent in any stage is attributed to Collate, or to the source if a dataset decodes into the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

from shmload.pipeline.compose import compose
from shmload.pipeline.engines import engine_of
from shmload.pipeline.in_place import ChosenProgram
from shmload.pipeline.pipeline_engine import PipelinePlace
from shmload.pipeline.plan import Plan, PoolOptions
from shmload.pipeline.stage_counters import EnoughError, StageCount, StageCounters
from shmload.pipeline.stages import Collate

_MOST_FAILED = 8  # failed items allowed per wanted item
FIRST_SHARE = 0.6  # share of the time for batches of the pipeline's own size; smaller ones get the rest if none was finished


class MeasuredRun:
    """A run of an engine without workers, over a pipeline's stages with counters.

    Args:
        stages: stages of the pipeline.
        end_ns: time of `perf_counter_ns` at which to stop.
        batch_size, block_size: used instead of the pipeline's own.

    Attributes:
        counts: as in StageCounters, up to the last batch that was finished.
        num_rows: number of items that were delivered.
        error: the first error of an item.
        is_whole: whether the run ended before its time was over.
    """

    def __init__(self, stages: Sequence[Any], end_ns: int, batch_size: int, block_size: int) -> None:
        self._end_ns, self._counters = end_ns, StageCounters(len(stages), end_ns)
        plan: Any = compose(self._counters.counted(stages), block_size)
        if plan.is_expanding:
            self._counters.count_blocks(plan.source.expansion)
        collate = plan.collate and replace(plan.collate, batch_size=batch_size)
        self._engine = engine_of(replace(plan, pool=PoolOptions(), collate=collate, is_in_order=True), {}, ())
        self.counts = counts = self._counters.counts
        self._of_source = counts[0] if isinstance(plan.program, ChosenProgram) else None  # its dataset decodes into the batch
        self._of_collate = next((counts[number] for number, stage in enumerate(stages) if isinstance(stage, Collate)), None)
        self._rest = self._of_source or self._of_collate or self._counters.others  # gets the time that is not spent in any stage
        self._pull = self._counters.timed(self._engine.pull, self._rest, StageCount())
        self.num_rows, self._num_reads, self._first_ns = 0, 0, 0
        self.error: Exception | None = None
        self.is_whole = True

    def make(self, place: PipelinePlace, items: int) -> None:
        """Make items from a place on. If the place is at the end of its epoch, begin at the start of that epoch."""
        num_failed = 0
        with closing(self._engine):
            self._engine.go(place)
            while (
                self.num_rows < items
                and num_failed < _MOST_FAILED * items
                and (perf_counter_ns() < self._end_ns or not self.num_rows)
            ):
                try:
                    self._read()
                except StopIteration:
                    if self.num_rows or not (place.position or any(place.counters or ())):
                        break
                    place = PipelinePlace(place.epoch, 0)
                    self._engine.go(place)
                except Exception as error:
                    num_failed, self.error = num_failed + 1, self.error or error
                except EnoughError:
                    self.is_whole = False
                    break

    def _read(self) -> None:
        """Make the next batch or item."""
        self._pull()
        num_rows = 1 if self._engine.plan.collate is None else self._engine.valid or 1
        for count, num_made in ((self._of_source, num_rows), (self._of_collate, 1)):
            if count is not None:
                count.num_in, count.num_out = count.num_in + num_rows, count.num_out + num_made
        self.num_rows, self._num_reads = self.num_rows + num_rows, self._num_reads + 1
        self._first_ns = self._first_ns or self._rest.ns
        self.counts = [replace(count, ns=self._ns(count)) for count in self._counters.counts]

    def _ns(self, count: StageCount) -> int:
        """Return the time of a count. The engine's own time excludes the first batch, which starts the loader."""
        if count is not self._rest or self._num_reads == 1:
            return count.ns
        return (count.ns - self._first_ns) * self._num_reads // (self._num_reads - 1)


def measure(stages: Sequence[Any], plan: Plan, block_size: int, place: PipelinePlace, items: int, seconds: float) -> MeasuredRun:
    """Make some items with the pipeline as it is, or with smaller batches and blocks if these take too long.

    Args:
        stages, plan, block_size: of the Conveyer.
        place: where to begin.
        items, seconds: as for Conveyer.explain.
    """
    begin, whole_ns, whole_block = perf_counter_ns(), int(seconds * 1e9), block_size
    batch_size = min(plan.collate.batch_size, items) if plan.collate is not None else 1
    end_ns = begin + int(FIRST_SHARE * whole_ns)
    while True:
        is_like = block_size == whole_block and plan.is_in_order and not plan.is_streamed
        run = MeasuredRun(stages, end_ns, batch_size, block_size)
        run.make(place if is_like else PipelinePlace(place.epoch, 0), items)
        if run.num_rows or run.is_whole or max(batch_size, block_size if plan.is_expanding else 1) == 1:
            return run
        fewer = max(max(count.num_out for count in run.counts) // 4, 1) if perf_counter_ns() < begin + whole_ns else 1
        batch_size, block_size, end_ns = min(batch_size, fewer), min(block_size, fewer), begin + whole_ns
