"""Write trace files for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

Each ring appears as two processes: its trainer and workers as threads, and its slots. Times count from the first event.

Source: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: X complete events, i moments,
C counters, s and f the ends of an arrow, M names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shmload.engine.tracing.ring_timeline import TRAINER, Timeline

Event = dict[str, Any]


def write(timelines: Sequence[Timeline], path: Path) -> None:
    """Write a trace. An existing file is replaced once the new one is complete; a pipe or a device is written to directly."""
    about = {
        "tool": "shmload",
        "begin_ns": begin_of(timelines),  # CLOCK_MONOTONIC at the trace's time 0
        "lost_events": sum(timeline.num_lost for timeline in timelines),
        "pids": [timeline.owner_pid for timeline in timelines],
    }
    trace = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(events(timelines))}
    text = json.dumps(trace, separators=(",", ":"))
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()  # /dev/stdout is a link
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def begin_of(timelines: Sequence[Timeline]) -> int:
    """Return the time at which the first event begins, in ns of CLOCK_MONOTONIC; 0 without events."""
    every = [
        span for timeline in timelines for track in (timeline.spans, timeline.moments, *timeline.slots.values()) for span in track
    ]
    return min((span.begin_ns for span in every), default=0)


def events(timelines: Sequence[Timeline]) -> Iterator[Event]:
    """Yield all events of a trace in the Trace Event Format, as JSON objects."""
    zero = begin_of(timelines)
    for number, timeline in enumerate(timelines):
        yield from _events_of(timeline, number, zero)


def _events_of(timeline: Timeline, number: int, zero: int) -> Iterator[Event]:
    """Yield the trace events of a ring. Times are relative to `zero`, in nanoseconds."""
    activities, slots = 2 * number + 1, 2 * number + 2
    ring = f"process {timeline.owner_pid}" + (f", ring {number + 1}" if number else "")
    yield _name("process_name", activities, 0, f"shmload, {ring}")
    yield _name("process_name", slots, 0, f"slots, {ring}")
    threads = {track: thread for thread, track in enumerate(timeline.tracks)}
    for track, thread in threads.items():
        pid = timeline.pids.get(track, 0)
        yield _name("thread_name", activities, thread, f"{track} (pid {pid})" if pid else track)
        yield {"ph": "M", "name": "thread_sort_index", "pid": activities, "tid": thread, "args": {"sort_index": thread}}
    for slot in sorted(timeline.slots):
        yield _name("thread_name", slots, slot, f"slot {slot}")
    tracks = [(activities, threads[track], spans) for track, spans in timeline.tracks.items()]
    tracks += [(slots, slot, spans) for slot, spans in timeline.slots.items()]
    for process, thread, spans in tracks:
        for span in spans:
            begin, end = _us(span.begin_ns, zero), _us(span.end_ns, zero)
            placed = {"pid": process, "tid": thread, "ts": begin, "dur": round(end - begin, 3)}
            yield {"ph": "X", "name": span.name, "cat": span.kind, **placed, "args": span.args}
    place = {"pid": activities, "tid": threads[TRAINER]}
    for moment in timeline.moments:
        at = _us(moment.begin_ns, zero)
        yield {"ph": "i", "s": "t", "name": moment.name, "cat": moment.kind, "ts": at, "args": moment.args, **place}
    for at, count in timeline.ready:
        yield {"ph": "C", "name": "ready slots", "pid": activities, "ts": _us(at, zero), "args": {"slots": count}}
    for link, (track, filled, delivered) in enumerate(timeline.links):
        arrow = {"name": "batch", "cat": "batch", "id": f"{number}-{link}", "pid": activities}
        yield {"ph": "s", "tid": threads[track], "ts": _us(filled, zero), **arrow}
        yield {"ph": "f", "bp": "e", "tid": threads[TRAINER], "ts": _us(delivered, zero), **arrow}


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _us(at_ns: int, zero: int) -> float:
    return (at_ns - zero) / 1000
