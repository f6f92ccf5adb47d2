"""A trace that the program takes itself, `with loader.trace("trace.json"):`, and the file that a trace is.

There is no thread for it. After each delivery the recorders are read if one of them is filling up; between two deliveries workers
can do no more than what is ordered, which a recorder holds unless a worker has hundreds of chunks on order.

The file is what Perfetto (https://ui.perfetto.dev) and chrome://tracing open. Each ring is two processes there: its trainer and
workers as threads, and its slots. Times count from the first event.

Source: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: X complete events, i moments,
C counters, s and f the ends of an arrow, M names.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shmload.engine.timeline import TRAINER, Span, Tape, Timeline, timeline_of

if TYPE_CHECKING:
    from shmload.engine.builder import EngineBuilder
    from shmload.engine.orders import BatchSource

log = logging.getLogger("shmload")


class Trace:
    """What `ShmLoader.trace` gives: a context manager that records within its block and writes the file at its end.

    Attributes:
        path: the file.
        num_lost: events that were overwritten before they were read; known at the end.
        num_batches: batches delivered in the block; known at the end.
    """

    def __init__(self, builder: EngineBuilder, num_workers: int, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if num_workers == 0:
            raise ValueError(
                "trace() needs num_workers > 0: without workers the samples are read in next() itself, and there is nothing to "
                "record. torch.profiler shows where that time goes"
            )
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.path}: trace() needs an existing folder to write to")
        self._builder = builder
        self._tapes: list[Tape] = []
        self._engines: weakref.WeakSet[BatchSource] = weakref.WeakSet()
        self.num_lost = self.num_batches = 0

    def __enter__(self) -> Self:
        builder = self._builder
        if (other := builder.trace) is not None:
            raise RuntimeError(
                f"this loader is being traced already, to {other.path}: one trace at a time; leave that block first"
            )
        builder.trace = self
        for engine in builder.engines:
            self.follow(engine, with_history=False)
        return self

    def follow(self, engine: BatchSource, *, with_history: bool = True) -> None:
        """Records a ring of the loader's, too."""
        tape = Tape(engine.control, with_history=with_history)
        self._tapes.append(tape)
        self._engines.add(engine)
        engine.on_delivery = tape.drain_if_due

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._builder.trace = None
        for engine in self._engines:
            engine.on_delivery = None
        for tape in self._tapes:
            tape.drain()
        told = [timeline_of(tape) for tape in self._tapes]
        timelines = [timeline for timeline in told if timeline.has_content]
        self._tapes.clear()
        write(timelines, self.path)
        self._tell(timelines)

    def _tell(self, timelines: list[Timeline]) -> None:
        self.num_lost = sum(timeline.num_lost for timeline in timelines)
        self.num_batches = sum(timeline.num_batches for timeline in timelines)
        if self.num_lost:
            log.warning(
                "%s: %d events are not in the trace: they were overwritten before the next batch was asked for",
                self.path,
                self.num_lost,
            )


Event = dict[str, Any]


def write(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes a trace. A file that is there is replaced when the new one is whole."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("w") as file:
            file.write('{"displayTimeUnit": "ms",\n"otherData": ')
            json.dump(about(timelines), file)
            file.write(',\n"traceEvents": [')
            for number, event in enumerate(events(timelines)):
                file.write(",\n" if number else "\n")
                json.dump(event, file, separators=(",", ":"))
            file.write("\n]}\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def about(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """What holds for all of it. `begin_ns` is CLOCK_MONOTONIC of the trace's zero."""
    return {
        "tool": "shmload",
        "begin_ns": begin_of(timelines),
        "lost_events": sum(timeline.num_lost for timeline in timelines),
        "pids": [timeline.owner_pid for timeline in timelines],
    }


def begin_of(timelines: Sequence[Timeline]) -> int:
    """When the first event began, in ns of CLOCK_MONOTONIC; 0 if there is none."""
    spans = [span for timeline in timelines for span in (*timeline.spans, *timeline.moments)]
    slots = [span for timeline in timelines for track in timeline.slots.values() for span in track]
    return min((span.begin_ns for span in (*spans, *slots)), default=0)


def events(timelines: Sequence[Timeline]) -> Iterator[Event]:
    """All events of a trace."""
    zero = begin_of(timelines)
    for number, timeline in enumerate(timelines):
        yield from _events_of(timeline, number, zero)


def _events_of(timeline: Timeline, number: int, zero: int) -> Iterator[Event]:
    doers, slots = 2 * number + 1, 2 * number + 2
    ring = f"process {timeline.owner_pid}" + (f", ring {number + 1}" if number else "")
    yield _name("process_name", doers, 0, f"shmload, {ring}")
    yield _name("process_name", slots, 0, f"slots, {ring}")
    threads = {track: thread for thread, track in enumerate(timeline.tracks)}
    for track, thread in threads.items():
        pid = timeline.pids.get(track, 0)
        yield _name("thread_name", doers, thread, f"{track} (pid {pid})" if pid else track)
        yield {"ph": "M", "name": "thread_sort_index", "pid": doers, "tid": thread, "args": {"sort_index": thread}}
    for slot in sorted(timeline.slots):
        yield _name("thread_name", slots, slot, f"slot {slot}")
    for track, spans in timeline.tracks.items():
        for span in spans:
            yield _complete(span, doers, threads[track], zero)
    for slot, spans in timeline.slots.items():
        for span in spans:
            yield _complete(span, slots, slot, zero)
    place = {"pid": doers, "tid": threads[TRAINER]}
    for moment in timeline.moments:
        at = _us(moment.begin_ns, zero)
        yield {"ph": "i", "s": "t", "name": moment.name, "cat": moment.kind, "ts": at, "args": moment.args, **place}
    for at, count in timeline.ready:
        yield {"ph": "C", "name": "ready slots", "pid": doers, "ts": _us(at, zero), "args": {"slots": count}}
    for at, rate in timeline.rate:
        value = {"samples/s": round(rate, 3)}
        yield {"ph": "C", "name": "samples/s", "pid": doers, "ts": _us(at, zero), "args": value}
    for link, (track, filled, delivered) in enumerate(timeline.links):
        arrow = {"name": "batch", "cat": "batch", "id": f"{number}-{link}", "pid": doers}
        yield {"ph": "s", "tid": threads[track], "ts": _us(filled, zero), **arrow}
        yield {"ph": "f", "bp": "e", "tid": threads[TRAINER], "ts": _us(delivered, zero), **arrow}


def _complete(span: Span, process: int, thread: int, zero: int) -> Event:
    begin, end = _us(span.begin_ns, zero), _us(span.end_ns, zero)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": process,
        "tid": thread,
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": span.args,
    }


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _us(at_ns: int, zero: int) -> float:
    return (at_ns - zero) / 1000
