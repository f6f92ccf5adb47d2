"""The timeline of a ring: the activities of the trainer, the workers and the slots, derived from recorded events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shmload._core.events import KINDS, RESULTS
from shmload.engine.tracing.event_log import EventLog

TRAINER = "trainer"


@dataclass(frozen=True)
class Span:
    """An activity, or a moment (`end_ns == begin_ns`).

    Attributes:
        kind: the activity, such as "fill" or "deliver".
        begin_ns, end_ns: times of CLOCK_MONOTONIC.
        args: details such as "epoch", "step", "slot" and "rows", as shown in trace files.
    """

    kind: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the kind, with the number of the batch if there is one."""
        return f"{self.kind} {self.args['step']}" if "step" in self.args else self.kind


@dataclass
class _Life:
    """The life of one order in its slot."""

    about: dict[str, Any]
    slot: int
    rows: int
    published_ns: int
    done: dict[int, tuple[int, int]] = field(default_factory=dict)  # chunk -> its end, its rows
    delivered_ns: int = 0
    held_ns: tuple[int, int] | None = None
    end_ns: int = 0  # time when its slot was freed or ordered again

    @property
    def ready_ns(self) -> int:
        """Return the time when its last row was finished; 0 if rows are missing."""
        if not self.done or sum(rows for _, rows in self.done.values()) < self.rows:
            return 0
        return max(end for end, _ in self.done.values())


@dataclass
class Timeline:
    """The activities of the processes of one ring. All times are in ns of CLOCK_MONOTONIC.

    Attributes:
        owner_pid: pid of the trainer.
        num_lost: number of events that were overwritten before they were read.
        tracks: activities in order, by name of the process, the trainer first.
        slots: states by number of the slot: filling, ready, held.
        moments: publications and abandoned orders, on the trainer's track.
        ready: (time, number of slots that are ready from then on).
        links: (worker's track, end of a chunk, beginning of the delivery of its batch).
        pids: pid of each worker, by its track.
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
        """Return the activities of all processes."""
        return [span for track in self.tracks.values() for span in track]

    @property
    def has_content(self) -> bool:
        """Return whether there was any activity."""
        return bool(self.moments) or any(self.tracks.values())

    @property
    def num_batches(self) -> int:
        """Return the number of delivered batches."""
        return sum(span.kind == "deliver" for span in self.tracks[TRAINER])


def timelines_of(event_logs: Iterable[EventLog]) -> list[Timeline]:
    """Return the timelines of all rings that had any activity."""
    return [timeline for timeline in map(timeline_of, event_logs) if timeline.has_content]


def timeline_of(event_log: EventLog) -> Timeline:
    """Derive the timeline from recorded events."""
    timeline = Timeline(event_log.owner_pid, event_log.num_lost)
    timeline.tracks[TRAINER] = []
    leases: list[Span] = []
    for span in _spans(event_log, event_log.num_workers):
        if span.kind == "lease":
            leases.append(span)
        elif span.kind in ("publish", "abandon"):
            timeline.moments.append(span)
        else:
            timeline.tracks[TRAINER].append(span)
    for worker, pid in enumerate(event_log.pids()):
        track = f"worker {worker}"
        timeline.tracks[track] = _worker_track(_spans(event_log, worker))
        timeline.pids[track] = pid
    lives = _lives(timeline, leases)
    if timeline.has_content:
        _add_slots(timeline, lives.values())
        _add_links(timeline)
    return timeline


def _spans(event_log: EventLog, owner: int) -> list[Span]:
    """Return the recorded spans of a process, in order of their beginnings."""
    found = []
    for event in event_log.events(owner).tolist():
        begin, end, order, epoch, step, number, slot, place, rows, amount = event
        kind = KINDS.get(number)
        if kind is None:  # recorded by a newer version
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
    """Return a worker's spans, with the recorded parts of a wait joined, and no process begun before the end of its predecessor."""
    track: list[Span] = []
    end = 0
    for span in spans:
        if span.kind == "idle" and track and track[-1].kind == "idle" and track[-1].end_ns == span.begin_ns:
            track[-1] = Span("idle", track[-1].begin_ns, span.end_ns, {})
        elif span.kind == "start" and span.begin_ns < end:  # the start time of a process is known to 10 ms
            track.append(Span("start", min(end, span.end_ns), span.end_ns, {}))
        else:
            track.append(span)
        end = max(end, span.end_ns)
    return track


def _lives(timeline: Timeline, leases: Iterable[Span]) -> dict[int, _Life]:
    """Return the history of each order by its number: when it was published, filled, delivered and released."""
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
    """Add the tracks of slots and the number of ready slots over time to the timeline."""
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
