"""Datasets and helpers for traces, at module level so that every start method can pickle them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

Event = dict[str, Any]
NESTED = {"room", "layout"}


class Rows:
    """Sixteen bytes a sample, decoded in place."""

    schema = {"x": ("float32", (2,)), "y": "int64"}

    def __init__(self, n: int = 60) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def read_into(self, index: int, out: Any) -> None:
        out["x"][...] = index
        out["y"] = index


class Plain(Rows):
    """Samples without a schema: the first one defines the layout."""

    read_into = None  # type: ignore[assignment]
    schema = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        return np.full(2, index, np.float32), index


class Growing(Plain):
    """Packed batches that need more memory each time."""

    def __getitem__(self, index: int) -> Any:
        return "x" * (1 << (index // 4))


class Broken(Rows):
    """Samples of which some cannot be read."""

    def read_into(self, index: int, out: Any) -> None:
        if index % 10 == 3:
            raise ValueError(f"bad sample {index}")
        super().read_into(index, out)


class Stream(IterableDataset[Any]):
    """An iterable dataset whose last batch is short."""

    def __iter__(self) -> Any:
        return iter(np.arange(10, dtype=np.float32))


def run(loader: Iterable[Any]) -> int:
    """Reads a pass without keeping batches. Returns the number of batches."""
    return sum(1 for _ in loader)


def spans_by_thread(trace: dict[str, Any]) -> dict[tuple[int, int], list[Event]]:
    """Returns the complete events of a trace, ordered, for each thread."""
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for spans in threads.values():
        spans.sort(key=lambda span: (span["ts"], -span["dur"]))
    return threads


def of_kind(trace: dict[str, Any], kind: str) -> list[Event]:
    """Returns the complete events of a category."""
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == kind]


def check(trace: dict[str, Any]) -> None:
    """Checks what must be true of every trace without lost events.

    Spans of a thread do not overlap, except those within a fill; every delivered batch has chunks whose rows sum to its own, all
    filled before it was delivered; all counts of ready slots are possible; arrows go forward.
    """
    assert trace["otherData"]["lost_events"] == 0
    for spans in spans_by_thread(trace).values():
        end, outer_end = 0.0, 0.0
        for span in spans:
            assert span["dur"] >= 0
            if span["cat"] in NESTED:
                assert span["ts"] + span["dur"] <= outer_end, span
                continue
            assert span["ts"] >= end - 0.001, span
            end = span["ts"] + span["dur"]
            outer_end = end if span["cat"] == "fill" else outer_end
    by_order = defaultdict(list)
    for fill in of_kind(trace, "fill"):
        if fill["args"]["result"] == "done":
            by_order[fill["pid"], fill["args"]["order"]].append(fill)
    for batch in of_kind(trace, "deliver"):
        chunks = by_order[batch["pid"], batch["args"]["order"]]
        assert batch["args"]["rows"] == sum(chunk["args"]["rows"] for chunk in chunks)
        assert {batch["args"]["step"]} == {chunk["args"]["step"] for chunk in chunks}
        assert batch["ts"] >= max(chunk["ts"] + chunk["dur"] for chunk in chunks)
    assert all(count >= 0 for count in ready_counts(trace["traceEvents"]))
    starts = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[arrow]["ts"] <= ends[arrow]["ts"] for arrow in starts)


def ready_counts(events: Iterable[Event]) -> list[int]:
    """Returns the values of the counter of ready slots."""
    return [event["args"]["slots"] for event in events if event["ph"] == "C" and event["name"] == "ready slots"]


def loaded(path: Path) -> dict[str, Any]:
    """Returns the content of a trace file."""
    trace: dict[str, Any] = json.loads(path.read_text())
    return trace
