"""`loader.trace`: the file of a real run."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from time import monotonic_ns, process_time
from typing import Any

import pytest

from shmload import ShmLoader
from tests.trace.trace_kit import Broken, Event, Growing, Plain, Rows, check, loaded, of_kind, run


@pytest.mark.parametrize("seed", [3, None])
def test_trace_has_every_batch_with_its_chunks(seed: int | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    begin = monotonic_ns()
    with ShmLoader(Rows(), 8, num_workers=2, seed=seed) as loader, loader.trace(path) as trace:
        num_batches = sum(1 for _ in range(2) for _ in loader)
    end = monotonic_ns()
    found = loaded(path)
    check(found)
    assert (trace.num_batches, trace.num_lost, trace.path) == (num_batches, 0, path)
    delivered = [(e["args"]["step"], e["args"]["rows"]) for e in of_kind(found, "deliver")]
    assert delivered == 2 * [*((step, 8) for step in range(7)), (7, 4)]
    zero = found["otherData"]["begin_ns"]
    assert zero >= begin - 20_000_000  # a process's start time is known to a clock tick
    for event in found["traceEvents"]:
        if "ts" in event:
            assert event["ts"] >= 0
            assert zero + (event["ts"] + event.get("dur", 0)) * 1000 <= end
    assert 1 <= len(of_kind(found, "start")) <= (2 if seed else 4)  # one worker may be done before another has started
    assert len(of_kind(found, "held")) == num_batches


def test_trace_has_names_counters_and_arrows(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as loader, loader.trace(path):
        run(loader)
        (pid,) = [worker["pid"] for worker in loader.stats()["workers"]]
    events: list[Event] = loaded(path)["traceEvents"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads[:2] == ["trainer", f"worker 0 (pid {pid})"]
    assert {event["name"] for event in events if event["ph"] == "C"} == {"ready slots"}
    of_this_epoch = [fill for fill in of_kind({"traceEvents": events}, "fill") if fill["args"]["epoch"] == 0]
    assert sum(event["ph"] == "s" for event in events) == len(of_this_epoch)


def test_trace_begins_with_its_block(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as loader:
        run(loader)
        with loader.trace(path):
            run(loader)
        run(loader)
    found = loaded(path)
    assert {span["args"]["epoch"] for span in of_kind(found, "deliver")} == {1}
    assert of_kind(found, "start") == []


@pytest.mark.slow(reason="reads and checks an epoch of 1500 batches")
def test_more_events_than_a_recorder_holds_are_read_in_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShmLoader(Rows(1500), 1, num_workers=2, seed=1) as loader, loader.trace(path) as trace:
        for _ in loader:
            pass
    assert (trace.num_batches, trace.num_lost) == (1500, 0)
    check(loaded(path))


def test_idle_rings_are_omitted(tmp_path: Path) -> None:
    with ShmLoader(Rows(), 8, num_workers=1) as loader:
        iterator = iter(loader)  # torch mode: the iterator keeps its own ring alive
        for _ in iterator:
            pass
        with loader.trace(tmp_path / "trace.json"):
            run(loader)
    names = [event["args"]["name"] for event in loaded(tmp_path / "trace.json")["traceEvents"] if event["name"] == "process_name"]
    assert names == [f"shmload, process {os.getpid()}", f"slots, process {os.getpid()}"]


def test_trace_contains_an_abandoned_epoch(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShmLoader(Rows(), 4, num_workers=2, seed=1) as loader, loader.trace(path):
        for _ in loader:
            break
        next(iter(loader))
    found = loaded(path)
    check(found)
    assert sum(event["name"] == "abandon" for event in found["traceEvents"]) == 1
    assert [(e["args"]["epoch"], e["args"]["step"]) for e in of_kind(found, "deliver")] == [(0, 0), (1, 0)]


def test_waits_for_a_layout_are_within_their_chunk(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShmLoader(Plain(), 8, num_workers=1, seed=1) as loader, loader.trace(path):
        run(loader)
    found = loaded(path)
    check(found)
    assert len(of_kind(found, "layout")) == 1


def test_waits_for_room_are_within_their_chunk(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShmLoader(Growing(), 4, num_workers=1, seed=1) as loader, loader.trace(path):
        for _ in loader:
            pass
    found = loaded(path)
    check(found)
    assert len(of_kind(found, "room")) >= 1


def test_repeated_batches_appear_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShmLoader(Broken(), 10, num_workers=2, seed=1, on_error="skip") as loader, loader.trace(path):
        rows = [len(batch["y"]) for batch in loader]
    found = loaded(path)
    check(found)
    assert [span["args"]["rows"] for span in of_kind(found, "deliver")] == rows
    assert "error" in {fill["args"]["result"] for fill in of_kind(found, "fill")}


def test_file_is_written_after_an_exception_in_the_block(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as loader:
        with pytest.raises(ZeroDivisionError), loader.trace(path):
            next(iter(loader))
            _ = 1 / 0
        assert len(of_kind(loaded(path), "deliver")) == 1
        with loader.trace(path):
            pass
    assert of_kind(loaded(path), "deliver") == []


def test_block_without_events_writes_an_empty_trace(tmp_path: Path) -> None:
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as loader, loader.trace(tmp_path / "trace.json"):
        pass
    found = loaded(tmp_path / "trace.json")
    assert found["traceEvents"] == []
    assert found["otherData"] == {"tool": "shmload", "begin_ns": 0, "lost_events": 0, "pids": []}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_second_trace_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as loader, loader.trace(tmp_path / "one.json"):
        with pytest.raises(RuntimeError, match=r"is already being traced to .*one\.json: leave that block first"):
            loader.trace(tmp_path / "two.json").__enter__()
        run(loader)
    assert len(of_kind(loaded(tmp_path / "one.json"), "deliver")) == 8
    assert not (tmp_path / "two.json").exists()


def test_two_loaders_are_traced_separately(tmp_path: Path) -> None:
    one, other = (ShmLoader(Rows(), batch_size, num_workers=1, seed=1) for batch_size in (8, 30))
    with one, other, one.trace(tmp_path / "one.json"), other.trace(tmp_path / "other.json"):
        run(one)
        run(other)
    assert len(of_kind(loaded(tmp_path / "one.json"), "deliver")) == 8
    assert len(of_kind(loaded(tmp_path / "other.json"), "deliver")) == 2


def test_trace_without_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace\(\) needs num_workers > 0: .* torch.profiler shows"):
        ShmLoader(Rows(), 8, seed=1).trace(tmp_path / "trace.json")


def test_missing_folder_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none/trace.json: trace\(\) needs an existing folder"):
        ShmLoader(Rows(), 8, num_workers=1, seed=1).trace(tmp_path / "none" / "trace.json")


def test_copy_of_a_traced_loader_is_not_traced(tmp_path: Path) -> None:
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as loader, loader.trace(tmp_path / "one.json"):
        copied = pickle.loads(pickle.dumps(loader))
        with copied, copied.trace(tmp_path / "two.json"):
            run(copied)
    assert of_kind(loaded(tmp_path / "one.json"), "deliver") == []
    assert len(of_kind(loaded(tmp_path / "two.json"), "deliver")) == 8


def test_lost_events_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmload.engine.tracing.event_log.EventLog.drain_if_due", lambda event_log: None)
    caplog.set_level(logging.WARNING, "shmload")
    with ShmLoader(Rows(600), 1, num_workers=1, seed=1) as loader, loader.trace(tmp_path / "t.json") as trace:
        run(loader)
    assert trace.num_lost > 0
    assert loaded(tmp_path / "t.json")["otherData"]["lost_events"] == trace.num_lost
    assert f"t.json: {trace.num_lost} events are missing from the trace: they were overwritten" in caplog.text


class SlowToUnpickle(Rows):
    """Rows whose worker computes for 60 ms while unpickling them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        end = process_time() + 0.06
        while process_time() < end:
            pass


@pytest.mark.slow(reason="workers start as new interpreters, which import all modules")
def test_start_of_a_spawned_worker_includes_unpickling(tmp_path: Path) -> None:
    made: dict[str, Any] = {"num_workers": 1, "seed": 1, "multiprocessing_context": "spawn"}
    with ShmLoader(SlowToUnpickle(), 8, **made) as loader, loader.trace(tmp_path / "trace.json"):
        run(loader)
    found = loaded(tmp_path / "trace.json")
    check(found)
    (start,) = of_kind(found, "start")
    assert start["dur"] > 50_000  # us
