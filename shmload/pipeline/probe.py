"""A copy of a pipeline with a clock: each stage is timed without the stages that it calls, in this process, without workers.

It is another engine for the same stages, whose plan contains timed copies of rows and functions. So items are made, and draw, as
in a worker. Time of a batch that no stage takes is attributed to Collate, or to the source if a dataset decodes into the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns
from typing import Any

from shmload.pipeline.block_columns import length
from shmload.pipeline.block_rows import BlockRow, Expansion, Finish
from shmload.pipeline.compose import compose
from shmload.pipeline.engines import engine_of
from shmload.pipeline.in_place import ChosenProgram
from shmload.pipeline.pipeline_engine import PipelinePlace
from shmload.pipeline.plan import PoolOptions
from shmload.pipeline.rows import Keys, Mapped, Row
from shmload.pipeline.scan import Scan
from shmload.pipeline.stages import Collate
from shmload.pipeline.stream_rows import StreamItems, StreamRow
from shmload.worker.decoding_protocol import is_decoder
from shmload.worker.stage_engine import Each, Expanding, StageContext


class EnoughError(BaseException):
    """The time for measuring is over. It is no Exception, so no handler mistakes it for an error of an item."""


@dataclass
class Tally:
    """The time that a stage has taken, and the numbers of items it has received and made."""

    ns: int = 0
    num_in: int = 0
    num_out: int = 0


class _Clock:
    """Times functions of stages, each without the functions of other stages that it calls."""

    def __init__(self, end_ns: int) -> None:
        self._inner = [0]  # per running function, outermost first: time spent in other functions it called
        self._own_ns = self._around_ns = 0  # overhead of timing on the function, and on its caller
        self._end_ns = 1 << 63
        self._own_ns, self._around_ns = self._added()
        self._end_ns = end_ns

    def _added(self) -> tuple[int, int]:
        tally, least = Tally(), (1 << 63, 1 << 63)
        for _ in range(5):
            tally.ns, begin = 0, perf_counter_ns()
            for _ in range(100):
                self.run(tally, int)
            whole = (perf_counter_ns() - begin) // 100
            least = min(least, (whole, tally.ns // 100))
        return least[1], least[0] - least[1]

    def run(self, tally: Tally, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function and add its own time to a tally."""
        begin = perf_counter_ns()
        if begin > self._end_ns and tally.num_in > 1:  # the first item goes all the way, however long it takes
            raise EnoughError
        self._inner.append(0)
        try:
            return function(*arguments)
        finally:
            took = perf_counter_ns() - begin
            tally.ns += max(took - self._inner.pop() - self._own_ns, 0)
            self._inner[-1] += took + self._around_ns

    def each(self, tally: Tally, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a timed version of a function of an item."""

        def timed(*arguments: Any) -> Any:
            tally.num_in += 1
            made = self.run(tally, function, *arguments)
            tally.num_out += 1
            return made

        return timed


class _TimedDecoder:
    """A timed decoder into rows of the batch."""

    def __init__(self, clock: _Clock, tally: Tally, decoder: Any) -> None:
        self.schema, self.batch_type = decoder.schema, getattr(decoder, "batch_type", None)
        self.read_into, self._called = clock.each(tally, decoder.read_into), clock.each(tally, decoder)

    def __call__(self, item: Any) -> Any:
        return self._called(item)


@dataclass(frozen=True)
class _TimedStage(Expanding):
    """A timed stage that makes more or fewer items."""

    clock: _Clock
    tally: Tally
    stage: Expanding

    @property
    def kind(self) -> str:
        return self.stage.kind

    def run(self, items: Iterator[Any], name: str, context: StageContext) -> Iterator[Any]:
        made = self.stage.run(self._given(items), name, context)
        while True:
            try:
                item = self.clock.run(self.tally, next, made)
            except StopIteration:
                return
            self.tally.num_out += 1
            yield item

    def _given(self, items: Iterator[Any]) -> Iterator[Any]:
        others = Tally()  # time that earlier stages take besides their functions
        while True:
            try:
                item = self.clock.run(others, next, items)
            except StopIteration:
                return
            self.tally.num_in += 1
            yield item


class Probe:
    """A copy of a pipeline without workers and with a clock.

    Args:
        stages: of the pipeline.
        end_ns: when to stop.
        block_size: as of Conveyer.
    """

    def __init__(self, stages: Sequence[Any], end_ns: int, block_size: int) -> None:
        self.tallies = [Tally() for _ in stages]
        self.finishing = Tally()  # putting blocks into the form in which they travel
        self.num_blocks = self.num_made = 0  # blocks expanded, and their items
        self._num_reads = self._first_ns = 0
        self._others = Tally()
        self._stages, self._clock = stages, _Clock(end_ns)
        self._numbers = {f"stage {number} (a {type(stage).__name__})": number for number, stage in enumerate(stages)}
        plan = compose(stages, block_size)
        self._collate = next((number for number, stage in enumerate(stages) if isinstance(stage, Collate)), None)
        self.is_in_place = isinstance(plan.program, ChosenProgram)
        timed = replace(
            plan,
            pool=PoolOptions(),
            source=self._row(plan.source, self._row_tallies(plan.source)),
            item_stages=self._each(plan.item_stages),
            batch_stages=self._each(plan.batch_stages),
            made_batches=self._each(plan.made_batches),
            tail=[(name, self._behind(name, stage)) for name, stage in plan.tail],
        )
        self.engine = engine_of(timed, {}, ())

    def read(self) -> int:
        """Make the next batch or item; return the number of items.

        Raises:
            StopIteration: at the end.
        """
        rest = self._rest()
        self._clock.run(rest, self.engine.pull)
        self._num_reads += 1
        self._first_ns = self._first_ns or rest.ns
        num_rows = 1 if self.engine.plan.collate is None else self.engine.valid or 1
        if self._collate is not None:
            tally = self.tallies[self._collate]
            tally.num_in += num_rows
            tally.num_out += 1
        if self.is_in_place:
            self.tallies[0].num_in += num_rows
            self.tallies[0].num_out += num_rows
        return num_rows

    def seen(self) -> list[Tally]:
        """Return the tallies so far. The loader's own time excludes the first batch, which starts the loader."""
        rest = self._rest()
        made = [replace(tally) for tally in self.tallies]
        for tally, counted in zip(made, self.tallies, strict=True):
            if counted is rest and self._num_reads > 1:
                tally.ns = (rest.ns - self._first_ns) * self._num_reads // (self._num_reads - 1)
        return made

    def _rest(self) -> Tally:
        """Return the tally for time that no stage takes."""
        if self.is_in_place:
            return self.tallies[0]
        return self._others if self._collate is None else self.tallies[self._collate]

    # ------------------------------------------------------------ what is timed

    def _row_tallies(self, source: Any) -> dict[int, Tally]:
        """Return the tally of each row's stage, by the id of the row."""
        rows: list[Any] = []
        row = source.below if isinstance(source, BlockRow) else source
        while row is not None and not isinstance(row, StreamRow):
            if not isinstance(row, Mapped):
                rows.append(row)
            row = getattr(row, "below", None)
        numbers = [0] + [
            number
            for number, stage in enumerate(self._stages)
            if number and hasattr(stage, "over") and not getattr(stage, "is_buffered", False)
        ]
        return {id(row): self.tallies[number] for row, number in zip(reversed(rows), numbers, strict=False)}

    def _row(self, row: Any, tallies: Mapping[int, Tally]) -> Any:
        """Return a copy of a row in which its items, and those of the rows below, are timed."""
        made = copy.copy(row)
        held = vars(made)
        if isinstance(row, StreamRow):
            held["expansion"] = self._expansion(row.expansion)
            held["stream"] = self._stream(row.stream)
            return made
        if isinstance(getattr(row, "below", None), Keys):
            held["below"] = self._row(row.below, tallies)
        if isinstance(row, BlockRow):
            return made.with_expansion(self._expansion(row.expansion))
        if isinstance(row, Mapped):
            return made.with_functions(self._each(row.functions))
        if id(row) in tallies and not self.is_in_place:
            held["item"] = self._clock.each(tallies[id(row)], made.item)
            held |= {"at": held["item"]} if isinstance(row, Row) else {}
        return made

    def _stream(self, stream: StreamItems) -> StreamItems:
        source = stream.iterable

        def items() -> Iterator[Any]:
            iterator = iter(source) if hasattr(source, "__iter__") else source()
            tally = self.tallies[0]
            while True:
                try:
                    item = self._clock.run(tally, next, iterator)
                except StopIteration:
                    return
                tally.num_in += 1
                tally.num_out += 1
                yield item

        return replace(stream, iterable=items)

    def _each(self, stages: Sequence[Each]) -> list[Each]:
        return [replace(each, function=self._function(self.tallies[self._numbers[each.name]], each.function)) for each in stages]

    def _function(self, tally: Tally, function: Any) -> Any:
        if is_decoder(function):
            return _TimedDecoder(self._clock, tally, function)
        return self._clock.each(tally, function)

    def _behind(self, name: str, stage: Any) -> Any:
        tally = self.tallies[self._numbers[name]]
        if isinstance(stage, Scan):
            return replace(stage, fn=self._clock.each(tally, stage.fn))
        return replace(stage, function=self._clock.each(tally, stage.function))

    def _expansion(self, expansion: Expansion) -> Expansion:
        return expansion.wrapped(
            lambda name, stage: _TimedStage(self._clock, self.tallies[self._numbers[name]], stage),
            self._each,
            lambda finish: partial(self._finished, finish),
        )

    def _finished(self, finish: Finish | None, items: list[Any], context: StageContext) -> Any:
        """Time putting a block into the form in which it travels, which is part of collating."""
        made = items if finish is None else self._clock.run(self.finishing, finish, items, context)
        self.num_blocks, self.num_made = self.num_blocks + 1, self.num_made + length(made)
        return made


_MOST_FAILED = 8  # failed items allowed per wanted item
FIRST_SHARE = 0.6  # share of the time for batches of the pipeline's own size; smaller ones get the rest if none was finished


@dataclass(frozen=True)
class Measured:
    """The result of a measurement.

    Attributes:
        tallies: of each stage.
        finishing_ns: time for putting blocks into the form in which they travel.
        num_rows: items that were delivered.
        num_blocks, num_made: blocks that were expanded, and their items.
        error: the first error of an item.
        is_whole: whether it ended before the time was over.
    """

    tallies: list[Tally]
    finishing_ns: int
    num_rows: int
    num_blocks: int
    num_made: int
    error: BaseException | None
    is_whole: bool


def measure(stages: Sequence[Any], block_size: int, place: PipelinePlace, items: int, seconds: float) -> Measured:
    """Make some items with the pipeline as it is, or with smaller batches and blocks if these take too long.

    Args:
        stages, block_size: of the Conveyer.
        place: where to begin.
        items, seconds: as of Conveyer.explain.
    """
    begin, whole_ns = perf_counter_ns(), int(seconds * 1e9)
    plan, whole_block = compose(stages, block_size), block_size
    batch_size = min(plan.collate.batch_size, items) if plan.collate is not None else 1
    end_ns = begin + int(FIRST_SHARE * whole_ns)
    while True:
        is_like = block_size == whole_block and plan.is_in_order and not plan.is_streamed
        found = _probed(stages, place if is_like else PipelinePlace(place.epoch, 0), items, end_ns, batch_size, block_size)
        size = max(batch_size, block_size if plan.is_expanding else 1)
        if found.num_rows or found.is_whole or size == 1:
            return found
        fewer = max(max(tally.num_out for tally in found.tallies) // 4, 1) if perf_counter_ns() < begin + whole_ns else 1
        batch_size, block_size, end_ns = min(batch_size, fewer), min(block_size, fewer), begin + whole_ns


def _probed(stages: Sequence[Any], place: PipelinePlace, items: int, end_ns: int, batch_size: int, block_size: int) -> Measured:
    stages = [replace(stage, batch_size=batch_size) if isinstance(stage, Collate) else stage for stage in stages]
    stages = [replace(stage, in_order=True) if not getattr(stage, "in_order", True) else stage for stage in stages]
    probe = Probe(stages, end_ns, block_size)
    num_rows, num_failed = 0, 0
    error: BaseException | None = None
    is_whole = True
    seen = probe.tallies, 0, 0, 0
    with closing(probe.engine) as engine:
        engine.go(place)
        try:
            while num_rows < items and num_failed < _MOST_FAILED * items and (perf_counter_ns() < end_ns or not num_rows):
                try:
                    num_rows += probe.read()
                    seen = probe.seen(), probe.finishing.ns, probe.num_blocks, probe.num_made
                except StopIteration:
                    if num_rows or not (place.position or any(place.counters or ())):
                        break
                    place = PipelinePlace(place.epoch, 0)  # it is at the end of its epoch, so take the beginning
                    engine.go(place)
                except Exception as failure:
                    num_failed, error = num_failed + 1, error or failure
        except EnoughError:
            is_whole = False
    tallies, finishing_ns, num_blocks, num_made = seen
    return Measured(tallies, finishing_ns, num_rows, num_blocks, num_made, error, is_whole)
