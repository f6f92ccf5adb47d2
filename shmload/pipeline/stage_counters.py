"""Counters of stages: items in, items out, and nanoseconds without those of inner stages.

    Map(fn)   ──counted──▶   the same Map, whose `fn` is counted   ──compose──▶   a Plan like any other

Counting is a property of the stages from which a Plan is compiled, so a pipeline without counters does not pay for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

from shmload.pipeline.block_columns import length
from shmload.pipeline.block_sequence import Expansion
from shmload.pipeline.compose import buffered
from shmload.pipeline.item_sequence import ItemSequence, PositionSequence
from shmload.pipeline.scan import Scan
from shmload.pipeline.stages import BatchMap, DistributedBatchedMap, Map
from shmload.worker.decoding_protocol import is_decoder
from shmload.worker.stage_engine import Expanding, StageContext


class EnoughError(BaseException):
    """Raised when the time for counting is over. It is not an Exception, so no handler mistakes it for an error of an item."""


@dataclass
class StageCount:
    """The time that a stage has taken, and the numbers of items that it has received and made."""

    ns: int = 0
    num_in: int = 0
    num_out: int = 0


class StageCounters:
    """Counters of a pipeline's stages.

    Args:
        num_stages: number of stages of the pipeline.
        end_ns: time of `perf_counter_ns` after which functions raise EnoughError, except for their first items.

    Attributes:
        counts: one for each stage, and one for the conversion of blocks to the form in which they are sent: blocks in, items out.
        others: the time that is not spent in any stage.
    """

    def __init__(self, num_stages: int, end_ns: int) -> None:
        self.counts = [StageCount() for _ in range(num_stages + 1)]
        self.others = StageCount()
        self._inner = [0]  # per running function, outermost first: time spent in other functions it called
        self._own_ns = self._around_ns = 0  # overhead of counting on the function, and on its caller
        self._end_ns = 1 << 63
        self._own_ns, self._around_ns = self._overhead()
        self._end_ns = end_ns

    def _overhead(self) -> tuple[int, int]:
        least = (1 << 63, 1 << 63)
        for _ in range(20):
            count = StageCount()
            function, begin = self.timed(abs, count, count), perf_counter_ns()
            for number in range(50):
                function(number)
            least = min(least, ((perf_counter_ns() - begin) // 50, count.ns // 50))
        return least[1], least[0] - least[1]

    def timed(self, function: Callable[..., Any], count: StageCount, flow: StageCount) -> Callable[..., Any]:
        """Return a function that calls `function`, adds its own time to `count`, and its calls and results to `flow`."""
        inner = self._inner

        def counted(*arguments: Any) -> Any:
            begin = perf_counter_ns()
            if begin > self._end_ns and count.num_in > 1:  # the first item is always finished, however long it takes
                raise EnoughError
            flow.num_in += 1
            inner.append(0)
            try:
                made = function(*arguments)
            finally:
                took = perf_counter_ns() - begin
                count.ns += max(took - inner.pop() - self._own_ns, 0)
                inner[-1] += took + self._around_ns
            flow.num_out += 1
            return made

        return counted

    # ------------------------------------------------------------ stages with counters

    def counted(self, stages: Sequence[Any]) -> list[Any]:
        """Return copies of the pipeline's stages that count."""
        return [self._stage(count, stage) for count, stage in zip(self.counts, stages, strict=False)]

    def count_blocks(self, expansion: Expansion) -> None:
        """Count the blocks that an Expansion makes."""
        count, finish = self.counts[-1], self.timed(expansion.finish or _as_they_are, self.counts[-1], StageCount())

        def counted(items: list[Any], context: StageContext) -> Any:
            made = finish(items, context)
            count.num_in, count.num_out = count.num_in + 1, count.num_out + length(made)
            return made

        expansion.finish = counted

    def _stage(self, count: StageCount, stage: Any) -> Any:
        if getattr(stage, "is_buffered", False):
            stage = buffered(stage.buffer_size)
        if isinstance(stage, Map | BatchMap | Scan):
            return _changed(stage, fn=self._function(count, stage.fn))
        if isinstance(stage, DistributedBatchedMap):
            return _changed(stage, mapping_fn=self._function(count, stage.mapping_fn))
        if isinstance(stage, Expanding):
            return _changed(stage, run=partial(self._expanded, count, stage.run))
        if isinstance(stage, ItemSequence):
            return self._sequence(count, stage)
        if hasattr(stage, "iterable"):
            return _changed(stage, iterable=partial(self._streamed, count, stage.iterable))
        if hasattr(stage, "as_source"):
            return _changed(stage, as_source=lambda: self._sequence(count, stage.as_source()))
        if hasattr(stage, "over"):
            return _changed(stage, over=lambda below: self._sequence(count, stage.over(below)))
        return stage

    def _function(self, count: StageCount, function: Any) -> Any:
        counted: Any = self.timed(function, count, count)
        counted.uncounted = function  # the original function identifies the pipeline
        if is_decoder(function):
            counted.schema, counted.batch_type = function.schema, getattr(function, "batch_type", None)
            counted.read_into = self.timed(function.read_into, count, count)
        return counted

    def _sequence(self, count: StageCount, sequence: ItemSequence) -> Any:
        item = self.timed(sequence.item, count, count)
        return _changed(sequence, item=item, at=item) if isinstance(sequence, PositionSequence) else _changed(sequence, item=item)

    def _expanded(self, count: StageCount, run: Any, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        def received() -> Iterator[Any]:
            for item in self._iterated(self.others, items):  # the time of earlier stages besides their functions
                count.num_in += 1
                yield item

        for item in self._iterated(count, run(received(), name, context)):
            count.num_out += 1
            yield item

    def _streamed(self, count: StageCount, iterable: Any) -> Iterator[Any]:
        for item in self._iterated(count, iter(iterable) if hasattr(iterable, "__iter__") else iterable()):
            count.num_in, count.num_out = count.num_in + 1, count.num_out + 1
            yield item

    def _iterated(self, count: StageCount, items: Iterator[Any]) -> Iterator[Any]:
        """Yield items, and add the time of making each one to a count."""
        following = self.timed(items.__next__, count, StageCount())
        while True:
            try:
                item = following()
            except StopIteration:
                return
            yield item


def _changed(stage: Any, **attributes: Any) -> Any:
    """Return a copy of a stage or a sequence with other attributes."""
    made = copy.copy(stage)
    vars(made).update(attributes)
    return made


def _as_they_are(items: list[Any], context: StageContext) -> list[Any]:
    return items
