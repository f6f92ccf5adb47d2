"""Recording running loaders from outside (`Recording`), and a stretch of what was recorded as a picture (`save`).

Rings are found and mapped read-only, and their recorders are read at intervals: nothing is written to them. The picture has a row
for the trainer and each worker, one for each slot, and the ready slots below.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from shmload.engine.stats import RingReader
from shmload.engine.trace import TRAINER, Span, Tape, Timeline, timelines_of

SHORTEST_S, LONGEST_S = 0.0005, 0.05  # between two looks
FILLED_SHARE = 0.25  # of a recorder, that a look should find
SEARCH_S = 0.1  # between two looks for new rings: torch mode makes one for each epoch


@dataclass
class Recording:
    """The rings that are being recorded. A context manager is not needed: mappings end with it.

    Args:
        pid: of the trainer whose rings are wanted; None: everyone's.
    """

    pid: int | None = None
    tapes: dict[str, Tape] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # name -> why it cannot be read

    def search(self, *, with_history: bool = True) -> None:
        """Attaches to rings that are new since the last search."""
        for block in RingReader.find().blocks:
            name, path = block.stem, block.path
            if block.uid != os.geteuid() or name in self.tapes or name in self.refused:
                continue
            try:
                tape = Tape(RingReader.open(path).control, with_history=with_history)
            except FileNotFoundError:  # it has just gone
                continue
            except (OSError, ValueError) as error:
                self.refused[name] = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
                continue
            if self.pid is None or tape.owner_pid == self.pid:
                self.tapes[name] = tape
            else:
                self.refused[name] = f"{path}: it is of process {tape.owner_pid}"

    def record(self, seconds: float) -> None:
        """Reads for so long, as often as the fullest recorder demands."""
        end, next_search = monotonic() + seconds, 0.0
        pause = SHORTEST_S
        while True:
            now = monotonic()
            if now >= next_search:
                self.search()
                next_search = now + SEARCH_S
            most = max((tape.drain() / tape.capacity for tape in self.tapes.values()), default=0.0)
            pause = min(max(pause * min(FILLED_SHARE / max(most, 0.01), 2.0), SHORTEST_S), LONGEST_S)
            if now >= end:
                return
            sleep(min(pause, end - now))  # nobody rings for an stats reader

    def timelines(self) -> list[Timeline]:
        """What was recorded, ring by ring; without those that did nothing."""
        return timelines_of(self.tapes.values())


# ------------------------------------------------------------ a picture

BATCHES = 24  # that a picture shows
KINDS = {  # of spans: colour, and what the legend says of it
    "fill": ("#1b7f79", "worker fills rows"),
    "idle": ("#d9dde3", "worker waits for orders"),
    "start": ("#8a8f98", "worker starts"),
    "wait": ("#c8553d", "trainer waits for a batch"),
    "deliver": ("#e0a526", "batch is delivered"),
    "program": ("#5b6c9d", "the program has a batch"),
    "filling": ("#9fcfcb", "slot is being filled"),
    "ready": ("#e8cf7a", "slot is ready"),
    "held": ("#5b6c9d", ""),
    "room": ("#7a4e8a", ""),
    "layout": ("#7a4e8a", ""),
}


def save(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes a PNG of the ring that delivered most: some batches from the middle of its trace on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    timeline = max(timelines, key=lambda timeline: timeline.num_batches)
    begin, end = stretch(timeline)
    doers = {**timeline.tracks, TRAINER: with_program(timeline.tracks[TRAINER])}
    slots = {f"slot {slot}": spans for slot, spans in sorted(timeline.slots.items()) if any(_shown(spans, begin, end))}
    rows = {**doers, **slots}
    figure = Figure(figsize=(12, 2.4 + 0.36 * len(rows)), dpi=130, layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(len(rows), 4), 1.6])
    for row, spans in enumerate(rows.values()):
        _draw_row(axes, row, _shown(spans, begin, end), begin)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axhline(len(doers) - 0.5, color="#bbbbbb", linewidth=0.8)
    below.step([(at - begin) / 1e6 for at, _ in timeline.ready], [n for _, n in timeline.ready], where="post", color="#b8860b")
    below.set_ylabel("ready\nslots", fontsize=9)
    below.set_ylim(0, max((count for _, count in timeline.ready), default=0) + 0.5)
    below.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    below.set_xlim(0, (end - begin) / 1e6)
    below.set_xlabel("ms")
    for pane in (axes, below):
        pane.spines[["top", "right"]].set_visible(False)
        pane.tick_params(labelsize=9)
    kinds = {span.kind for spans in rows.values() for span in _shown(spans, begin, end)}
    patches = [Patch(color=colour, label=text) for kind, (colour, text) in KINDS.items() if text and kind in kinds]
    figure.legend(handles=patches, loc="outside upper right", ncols=4, frameon=False, fontsize=8.5)
    figure.suptitle(f"shmload trace: process {timeline.owner_pid}", x=0.01, ha="left", fontsize=12)
    figure.savefig(path, format="png")


def stretch(timeline: Timeline) -> tuple[int, int]:
    """From when to when a picture shows: BATCHES deliveries from the middle on, or all there is."""
    deliveries = [span for span in timeline.tracks[TRAINER] if span.kind == "deliver"]
    if len(deliveries) <= BATCHES:
        spans = timeline.spans or timeline.moments
        return min(span.begin_ns for span in spans), max(span.end_ns for span in spans) + 1
    first = (len(deliveries) - BATCHES) // 2
    return deliveries[first].begin_ns, deliveries[first + BATCHES - 1].end_ns


def with_program(track: Sequence[Span]) -> list[Span]:
    """The trainer's track, with the program's own time between a delivery and what the trainer does next."""
    found: list[Span] = []
    for span in track:
        if found and found[-1].kind == "deliver" and span.begin_ns > found[-1].end_ns:
            found.append(Span("program", found[-1].end_ns, span.begin_ns, {"step": found[-1].args["step"]}))
        found.append(span)
    return found


def _shown(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    return [span for span in spans if span.end_ns > begin and span.begin_ns < end]


def _draw_row(axes: Any, row: int, spans: Sequence[Span], begin: int) -> None:
    for kind in dict.fromkeys(span.kind for span in spans):
        bars = [((span.begin_ns - begin) / 1e6, (span.end_ns - span.begin_ns) / 1e6) for span in spans if span.kind == kind]
        axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=KINDS[kind][0], edgecolor="white", linewidth=0.4)
