"""The timeline computed from tapes that tests write: times are small numbers of ns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.events import KINDS
from shmload._core.filler import DONE, VOID
from shmload.engine.tracing.event_log import EVENT
from shmload.engine.tracing.ring_timeline import TRAINER, Span, Timeline, timeline_of
from shmload.engine.tracing.trace_file import events, write

KIND_OF = {name: number for number, name in KINDS.items()}


class WrittenTape:
    """Replaces a Tape: given events of two workers and the trainer."""

    owner_pid = 41
    num_lost = 5
    num_workers = 2

    def __init__(self) -> None:
        self._events: list[list[tuple[Any, ...]]] = [[], [], []]

    def pids(self) -> list[int]:
        return [42, 0]

    def add(
        self,
        owner: int,
        kind: str,
        begin: int,
        end: int,
        order: int = 0,
        *,
        slot: int = 0,
        place: int = 0,
        rows: int = 4,
        amount: int = 0,
    ) -> None:
        self._events[owner].append((begin, end, order, 0, order * 10, KIND_OF[kind], slot, place, rows, amount))

    def events(self, owner: int) -> NDArray[np.void]:
        return np.array(self._events[owner], EVENT)

    def publish(self, at: int, order: int, slot: int = 0) -> None:
        self.add(2, "publish", at, at, order, slot=slot, place=2)

    def fill(self, worker: int, begin: int, end: int, order: int, chunk: int, *, slot: int = 0, amount: int = DONE) -> None:
        self.add(worker, "chunk", begin, end, order, slot=slot, place=chunk, rows=2, amount=amount)

    def timeline_of_all(self) -> Timeline:
        return timeline_of(self)  # type: ignore[arg-type]  # replaces one


def life(timeline_of_all: Timeline, slot: int = 0) -> list[tuple[str, int, int]]:
    return [(span.kind, span.begin_ns, span.end_ns) for span in timeline_of_all.slots[slot]]


def test_batch_is_ready_with_its_last_chunk_and_held_until_released() -> None:
    tape = WrittenTape()
    tape.publish(10, 1)
    tape.fill(0, 12, 20, 1, 0)
    tape.fill(1, 12, 30, 1, 1)
    tape.add(2, "wait", 15, 31, 1)
    tape.add(2, "deliver", 31, 33, 1, amount=64)
    tape.add(2, "lease", 31, 50, 1)
    timeline_of_all = tape.timeline_of_all()
    assert life(timeline_of_all) == [("filling", 10, 30), ("ready", 30, 31), ("held", 31, 50)]
    assert timeline_of_all.ready == [(30, 1), (31, 0)]
    assert timeline_of_all.links == [("worker 0", 20, 31), ("worker 1", 30, 31)]
    assert [(span.kind, span.name) for span in timeline_of_all.tracks[TRAINER]] == [("wait", "wait 10"), ("deliver", "deliver 10")]
    assert timeline_of_all.tracks[TRAINER][1].args == {"epoch": 0, "step": 10, "order": 1, "slot": 0, "rows": 4, "nbytes": 64}
    assert timeline_of_all.tracks["worker 0"][0].args["result"] == "done"
    assert (timeline_of_all.num_batches, timeline_of_all.num_lost, timeline_of_all.pids) == (1, 5, {"worker 0": 42, "worker 1": 0})


def test_batch_without_a_recorded_release_is_held_to_the_end() -> None:
    tape = WrittenTape()
    tape.publish(10, 1)
    tape.fill(0, 12, 20, 1, 0)
    tape.fill(0, 20, 22, 1, 1)
    tape.add(2, "deliver", 31, 33, 1)
    tape.publish(40, 2, slot=1)
    timeline_of_all = tape.timeline_of_all()
    assert life(timeline_of_all)[-1] == ("held", 31, 40)
    assert timeline_of_all.slots[0][-1].args["is_held_still"]
    assert life(timeline_of_all, 1) == [("filling", 40, 40)]


def test_abandoned_order_ends_when_it_was_abandoned() -> None:
    tape = WrittenTape()
    tape.publish(10, 1)
    tape.publish(11, 2, slot=1)
    tape.fill(0, 12, 14, 2, 0, slot=1)
    tape.fill(0, 14, 16, 2, 1, slot=1)
    tape.add(2, "abandon", 20, 20, rows=0)
    tape.publish(30, 3)
    timeline_of_all = tape.timeline_of_all()
    assert life(timeline_of_all) == [("filling", 10, 20), ("filling", 30, 30)]
    assert life(timeline_of_all, 1) == [("filling", 11, 16), ("ready", 16, 20)]
    assert timeline_of_all.ready == [(16, 1), (20, 0)]
    assert [moment.kind for moment in timeline_of_all.moments] == ["publish", "publish", "abandon", "publish"]


def test_repeated_order_ends_when_the_new_one_begins() -> None:
    tape = WrittenTape()
    tape.publish(10, 1)
    tape.fill(0, 12, 14, 1, 0, amount=VOID)
    tape.publish(20, 2)
    tape.fill(0, 22, 24, 2, 0)
    tape.fill(0, 24, 26, 2, 1)
    tape.add(2, "deliver", 30, 31, 2)
    assert life(tape.timeline_of_all())[:3] == [("filling", 10, 20), ("filling", 20, 26), ("ready", 26, 30)]


def test_rows_filled_twice_after_a_death_count_once() -> None:
    tape = WrittenTape()
    tape.publish(10, 1)
    tape.fill(0, 12, 14, 1, 0)
    tape.fill(1, 15, 18, 1, 0)
    timeline_of_all = tape.timeline_of_all()
    assert life(timeline_of_all) == [("filling", 10, 18)]
    assert timeline_of_all.ready == []


def test_wait_for_orders_recorded_in_pieces_is_one_span() -> None:
    tape = WrittenTape()
    tape.add(0, "idle", 10, 20)
    tape.add(0, "idle", 20, 35)
    tape.add(0, "idle", 40, 45)
    assert [(span.begin_ns, span.end_ns) for span in tape.timeline_of_all().tracks["worker 0"]] == [(10, 35), (40, 45)]


def test_replacement_process_begins_after_the_replaced_one_has_ended() -> None:
    tape = WrittenTape()
    tape.fill(0, 10, 20, 1, 0)
    tape.add(0, "start", 15, 30)
    starts = [span for span in tape.timeline_of_all().tracks["worker 0"] if span.kind == "start"]
    assert [(span.begin_ns, span.end_ns) for span in starts] == [(20, 30)]


def test_event_kind_of_a_later_version_is_skipped() -> None:
    tape = WrittenTape()
    tape._events[0].append((1, 2, 0, 0, 0, 99, 0, 0, 0, 0))
    timeline_of_all = tape.timeline_of_all()
    assert timeline_of_all.spans == []
    assert (timeline_of_all.slots, timeline_of_all.ready, timeline_of_all.links) == ({}, [], [])


def test_several_rings_are_separate() -> None:
    tape = WrittenTape()
    tape.add(0, "idle", 1000, 3000)
    found = list(events([tape.timeline_of_all(), tape.timeline_of_all()]))
    assert {event["pid"] for event in found} == {1, 2, 3, 4}
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {
        1: "shmload, process 41",
        2: "slots, process 41",
        3: "shmload, process 41, ring 2",
        4: "slots, process 41, ring 2",
    }
    threads = {event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert threads == {"trainer", "worker 0 (pid 42)", "worker 1"}
    assert [(event["ts"], event["dur"]) for event in found if event["ph"] == "X"] == [(0, 2), (0, 2)]


def test_span_without_a_batch_is_named_after_its_kind() -> None:
    assert Span("idle", 0, 1, {}).name == "idle"


def test_trace_does_not_replace_a_pipe_or_a_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write([], tmp_path / "pipe")
    assert json.loads(os.read(reader, 4096))["traceEvents"] == []
    os.close(reader)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    write([], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text())["traceEvents"] == []
    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "file", "link"}
