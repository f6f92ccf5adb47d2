"""Traces: what the recorders of a ring hold is kept (`Tape`), made sense of (`Timeline`), and written as a file (`write`).

A recorder keeps the last few hundred events of its owner (src/events.h). What it holds is copied before it is overwritten, and what
was missed is counted, so whoever wants more reads often enough. Within the program, `with loader.trace("trace.json"):`, that is
after each delivery, without a thread, if a recorder is filling up: between two deliveries workers can do no more than what is
ordered, which a recorder holds unless a worker has hundreds of chunks on order. From outside it is `shmload trace`.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from shmload._core.events import EVENT_NBYTES, KINDS, RESULTS, Recorders
from shmload._core.mapping import Mapping

if TYPE_CHECKING:
    from shmload.engine.batch_source import BatchSource
    from shmload.engine.builder import EngineBuilder

log = logging.getLogger("shmload")

# One event, as shml_event in src/events.h. `place` is a chunk, or of an order's publication the number of its chunks.
_WORDS = ("begin_ns", "end_ns", "order", "epoch", "step", "kind", "slot", "place", "rows", "amount")
EVENT = np.dtype(list(zip(_WORDS, ["<u8", "<u8", "<u8", "<i8", "<i8", "<u4", "<u4", "<u4", "<u4", "<u8"], strict=True)))
assert EVENT.itemsize == EVENT_NBYTES
FULL_SHARE = 4  # a recorder is read when one in so many of its places is taken


class Tape:
    """What one ring's recorders have recorded since a moment.

    Args:
        control: mapping of its control block.
        with_history: begin with what they hold already, else with what comes from now on.
    Attributes:
        num_lost: events that were overwritten before they were read.
    """

    def __init__(self, control: Mapping, *, with_history: bool) -> None:
        self._recorders = recorders = Recorders(control)
        self.owner_pid = recorders.owner_pid
        self.num_workers, self.capacity = recorders.num_workers, recorders.capacity
        self._next = [0] * (recorders.num_workers + 1) if with_history else recorders.heads()
        self._raw: list[list[bytes]] = [[] for _ in self._next]
        self._due = max(1, recorders.capacity // FULL_SHARE)
        self.num_lost = 0
        if with_history:
            self.drain()
            self.num_lost = 0  # what was before all memory is not missed

    def pids(self) -> list[int]:
        """Each worker's process, as it knows its number; 0: it has not started."""
        return self._recorders.pids()

    def drain_if_due(self) -> None:
        """Reads if a recorder is filling up. Cost: some 50 ns and 10 for each worker if none is."""
        if self._recorders.most_unread(self._next) >= self._due:
            self.drain()

    def drain(self) -> int:
        """Reads what is new. Returns the most that any one recorder had."""
        most = 0
        for owner, since in enumerate(self._next):
            first, raw = self._recorders.read(owner, since)
            self._next[owner] = first + len(raw) // EVENT_NBYTES
            self.num_lost += first - since
            most = max(most, self._next[owner] - since)
            if raw:
                self._raw[owner].append(raw)
        return most

    def events(self, owner: int) -> NDArray[np.void]:
        """What was read of one owner, in the order it was written; the last owner is the trainer. Fields as EVENT."""
        return np.frombuffer(b"".join(self._raw[owner]), EVENT)


TRAINER = "trainer"


@dataclass(frozen=True)
class Span:
    """Something that lasted, or a moment (`end_ns == begin_ns`). `kind` is one word of this module's docstring."""

    kind: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any]

    @property
    def name(self) -> str:
        """The kind and, if it is about one, the batch."""
        return f"{self.kind} {self.args['step']}" if "step" in self.args else self.kind


@dataclass
class _Life:
    """One order's way through its slot."""

    about: dict[str, Any]
    slot: int
    rows: int
    published_ns: int
    done: dict[int, tuple[int, int]] = field(default_factory=dict)  # chunk -> its end, its rows
    delivered_ns: int = 0
    held_ns: tuple[int, int] | None = None
    end_ns: int = 0  # its slot was given up, or ordered anew

    @property
    def ready_ns(self) -> int:
        """When its last row was in place; 0: not all of them are."""
        if not self.done or sum(rows for _, rows in self.done.values()) < self.rows:
            return 0
        return max(end for end, _ in self.done.values())


@dataclass
class Timeline:
    """One ring's tape, made sense of.

    Attributes:
        tracks: by name, the trainer first: what was done there, in order.
        slots: by number: filling, ready, held.
        moments: publications and abandoned orders, on the trainer's track.
        ready: (when, how many slots are ready from then on).
        links: (worker's track, end of a chunk, begin of the delivery of its batch).
    """

    owner_pid: int
    num_lost: int
    tracks: dict[str, list[Span]] = field(default_factory=dict)
    slots: dict[int, list[Span]] = field(default_factory=dict)
    moments: list[Span] = field(default_factory=list)
    ready: list[tuple[int, int]] = field(default_factory=list)
    links: list[tuple[str, int, int]] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def spans(self) -> list[Span]:
        """Everything the processes did."""
        return [span for track in self.tracks.values() for span in track]

    @property
    def has_content(self) -> bool:
        """Whether anything was done."""
        return bool(self.moments) or any(self.tracks.values())

    @property
    def num_batches(self) -> int:
        """Batches delivered."""
        return sum(span.kind == "deliver" for span in self.tracks[TRAINER])


def timelines_of(tapes: Iterable[Tape]) -> list[Timeline]:
    """What was recorded, ring by ring; without those that did nothing."""
    return [timeline for timeline in map(timeline_of, tapes) if timeline.has_content]


def timeline_of(tape: Tape) -> Timeline:
    """Makes sense of a tape."""
    timeline = Timeline(tape.owner_pid, tape.num_lost)
    timeline.tracks[TRAINER] = []
    leases: list[Span] = []
    for span in _spans(tape, tape.num_workers):
        if span.kind == "lease":
            leases.append(span)
        elif span.kind in ("publish", "abandon"):
            timeline.moments.append(span)
        else:
            timeline.tracks[TRAINER].append(span)
    for worker, pid in enumerate(tape.pids()):
        track = f"worker {worker}"
        timeline.tracks[track] = _worker_track(_spans(tape, worker))
        timeline.pids[track] = pid
    lives = _lives(timeline, leases)
    if timeline.has_content:
        _add_slots(timeline, lives.values())
        _add_links(timeline)
    return timeline


def _spans(tape: Tape, owner: int) -> list[Span]:
    found = []
    for event in tape.events(owner).tolist():
        begin, end, order, epoch, step, number, slot, place, rows, amount = event
        kind = KINDS.get(number)
        if kind is None:  # of a newer writer
            continue
        args = {"epoch": epoch, "step": step, "order": order, "slot": slot, "rows": rows} if order else {}
        if kind == "chunk":
            kind = "fill"
            args |= {"chunk": place, "result": RESULTS.get(amount, str(amount))}
        elif kind == "deliver":
            args["nbytes"] = amount
        elif kind == "publish":
            args["chunks"] = place
        found.append(Span(kind, begin, end, args))
    return sorted(found, key=lambda span: (span.begin_ns, -span.end_ns))


def _worker_track(spans: list[Span]) -> list[Span]:
    """One wait for orders is one span, though it was written in pieces; a process begins when the one it replaces has ended."""
    track: list[Span] = []
    end = 0
    for span in spans:
        if span.kind == "idle" and track and track[-1].kind == "idle" and track[-1].end_ns == span.begin_ns:
            track[-1] = Span("idle", track[-1].begin_ns, span.end_ns, {})
        elif span.kind == "start" and span.begin_ns < end:  # a process's begin is known to 10 ms
            track.append(Span("start", min(end, span.end_ns), span.end_ns, {}))
        else:
            track.append(span)
        end = max(end, span.end_ns)
    return track


def _lives(timeline: Timeline, leases: Iterable[Span]) -> dict[int, _Life]:
    lives: dict[int, _Life] = {}
    in_slot: dict[int, _Life] = {}
    for moment in timeline.moments:
        if moment.kind == "abandon":
            for life in in_slot.values():
                life.end_ns = life.end_ns or moment.begin_ns
            continue
        args = moment.args
        slot = args["slot"]
        if slot in in_slot:
            in_slot[slot].end_ns = in_slot[slot].end_ns or moment.begin_ns
        about = {name: args[name] for name in ("epoch", "step", "order", "rows")}
        lives[args["order"]] = in_slot[slot] = _Life(about, slot, args["rows"], moment.begin_ns)
    for name, track in timeline.tracks.items():
        for span in track:
            life_of = lives.get(span.args.get("order", 0))
            if life_of is None:
                continue
            if name == TRAINER and span.kind == "deliver":
                life_of.delivered_ns = span.begin_ns
            elif span.kind == "fill" and span.args["result"] == "done":
                life_of.done[span.args["chunk"]] = (span.end_ns, span.args["rows"])
    for lease in leases:
        if (held := lives.get(lease.args["order"])) is not None:
            held.held_ns = (lease.begin_ns, lease.end_ns)
    return lives


def _add_slots(timeline: Timeline, lives: Iterable[_Life]) -> None:
    last = max(span.end_ns for span in (*timeline.spans, *timeline.moments))
    changes: list[tuple[int, int]] = []
    for life in lives:
        track = timeline.slots.setdefault(life.slot, [])
        end = life.delivered_ns or life.end_ns or last
        ready = min(life.ready_ns or end, end)
        track.append(Span("filling", life.published_ns, max(ready, life.published_ns), life.about))
        if life.ready_ns:
            track.append(Span("ready", ready, end, life.about))
            changes += [(ready, 1), (end, -1)] if end < last else [(ready, 1)]
        if life.delivered_ns:
            begin, over = life.held_ns or (life.delivered_ns, max(life.end_ns, last))
            about = life.about if life.held_ns else {**life.about, "is_held_still": True}
            track.append(Span("held", begin, over, about))
    count = 0
    for at, change in sorted(changes):
        count += change
        timeline.ready.append((at, count))


def _add_links(timeline: Timeline) -> None:
    begins = {span.args["order"]: span.begin_ns for span in timeline.tracks[TRAINER] if span.kind == "deliver"}
    for name, track in timeline.tracks.items():
        for span in track:
            if span.kind == "fill" and span.args["result"] == "done" and span.args["order"] in begins:
                timeline.links.append((name, span.end_ns, begins[span.args["order"]]))


# ------------------------------------------------------------ a block of the program that is traced


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
            raise RuntimeError(f"this loader is being traced already, to {other.path}: one trace at a time; leave that block first")
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

    def __exit__(self, *exc: object) -> None:
        self._builder.trace = None
        for engine in self._engines:
            engine.on_delivery = None
        for tape in self._tapes:
            tape.drain()
        timelines = timelines_of(self._tapes)
        self._tapes.clear()
        write(timelines, self.path)
        self.num_lost = sum(timeline.num_lost for timeline in timelines)
        self.num_batches = sum(timeline.num_batches for timeline in timelines)
        if self.num_lost:
            log.warning(
                "%s: %d events are not in the trace: they were overwritten before the next batch was asked for",
                self.path,
                self.num_lost,
            )


# ------------------------------------------------------------ the file

Event = dict[str, Any]


def write(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes a trace. A file that is there is replaced when the new one is whole; into a pipe or a device it is written."""
    about = {
        "tool": "shmload",
        "begin_ns": begin_of(timelines),  # CLOCK_MONOTONIC of the trace's zero
        "lost_events": sum(timeline.num_lost for timeline in timelines),
        "pids": [timeline.owner_pid for timeline in timelines],
    }
    trace = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(events(timelines))}
    text = json.dumps(trace, separators=(",", ":"))
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()  # /dev/stdout is a link to what it is
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def begin_of(timelines: Sequence[Timeline]) -> int:
    """When the first event began, in ns of CLOCK_MONOTONIC; 0 if there is none."""
    every = [
        span for timeline in timelines for track in (timeline.spans, timeline.moments, *timeline.slots.values()) for span in track
    ]
    return min((span.begin_ns for span in every), default=0)


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
    tracks = [(doers, threads[track], spans) for track, spans in timeline.tracks.items()]
    tracks += [(slots, slot, spans) for slot, spans in timeline.slots.items()]
    for process, thread, spans in tracks:
        for span in spans:
            begin, end = _us(span.begin_ns, zero), _us(span.end_ns, zero)
            placed = {"pid": process, "tid": thread, "ts": begin, "dur": round(end - begin, 3)}
            yield {"ph": "X", "name": span.name, "cat": span.kind, **placed, "args": span.args}
    place = {"pid": doers, "tid": threads[TRAINER]}
    for moment in timeline.moments:
        at = _us(moment.begin_ns, zero)
        yield {"ph": "i", "s": "t", "name": moment.name, "cat": moment.kind, "ts": at, "args": moment.args, **place}
    for at, count in timeline.ready:
        yield {"ph": "C", "name": "ready slots", "pid": doers, "ts": _us(at, zero), "args": {"slots": count}}
    for link, (track, filled, delivered) in enumerate(timeline.links):
        arrow = {"name": "batch", "cat": "batch", "id": f"{number}-{link}", "pid": doers}
        yield {"ph": "s", "tid": threads[track], "ts": _us(filled, zero), **arrow}
        yield {"ph": "f", "bp": "e", "tid": threads[TRAINER], "ts": _us(delivered, zero), **arrow}


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _us(at_ns: int, zero: int) -> float:
    return (at_ns - zero) / 1000
