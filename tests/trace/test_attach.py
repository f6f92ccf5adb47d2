"""Tracing from another process: which rings are found, how often they are read, and the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shmload import ShmLoader
from shmload.cli import app
from shmload.engine.ring_reader import ControlBlock, HostRings, RingReader
from shmload.engine.tracing.ring_timeline import timelines_of
from shmload.shm import segment
from shmload.tools import trace_recording
from shmload.tools.trace_recording import TraceRecording
from tests.trace.trace_kit import Rows, check, loaded, of_kind, run

Command = Callable[..., Any]


@pytest.fixture
def command() -> Command:
    """Returns a function that runs `shmload ...` in this process."""

    def call(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


@pytest.fixture
def loader() -> Iterator[ShmLoader[Any]]:
    """Yields a loader whose workers have started."""
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as made:
        run(made)
        yield made


def mine(watch: TraceRecording) -> int:
    return sum(event_log.owner_pid == os.getpid() for event_log in watch.event_logs.values())


# ---------------------------------------------------------------- which rings are found


def test_files_that_are_not_rings_are_skipped_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x" * 4096)
    blocks = [ControlBlock(name, str(tmp_path / name), os.geteuid(), 7, "shm") for name in ("x", "gone")]
    another = ControlBlock("y", str(tmp_path / "x"), os.geteuid() + 1, 7, "shm")
    monkeypatch.setattr(RingReader, "find", lambda: HostRings([*blocks, another], []))
    watch = TraceRecording()
    watch.search()
    assert watch.event_logs == {}
    assert list(watch.refused) == ["x"]
    assert watch.refused["x"].startswith(f"{tmp_path}/x: the file is not a control block, or is still being created")


def test_pid_selects_a_loader(loader: ShmLoader[Any]) -> None:
    watch = TraceRecording(os.getpid())
    watch.search()
    assert mine(watch) == len(watch.event_logs) == 1
    other = TraceRecording(1)
    other.search()
    assert other.event_logs == {}
    assert any(why.endswith(f"it is of process {os.getpid()}") for why in other.refused.values())


def test_ring_in_a_memfd_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "shm_free_bytes", lambda: 0)
    with ShmLoader(Rows(), 8, num_workers=1, seed=1) as made:
        run(made)
        watch = TraceRecording(os.getpid())
        watch.record(0)
    (timeline,) = timelines_of(watch.event_logs.values())
    assert timeline.num_batches == 8


# ---------------------------------------------------------------- recording


def test_recording_includes_earlier_events(loader: ShmLoader[Any], command: Command, tmp_path: Path) -> None:
    done = command("trace", "--pid", os.getpid(), "--seconds", 0, "--out", tmp_path / "t.json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/t.json: 8 batches of process {os.getpid()}; open it in https://ui.perfetto.dev\n"
    found = loaded(tmp_path / "t.json")
    check(found)
    assert found["otherData"]["pids"] == [os.getpid()]


def test_recording_adapts_its_rate_and_counts_missed_events(loader: ShmLoader[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    clock = [0.0]

    def work(pause: float) -> None:
        pauses.append(pause)
        clock[0] += 1.0
        if len(pauses) == 5:
            for _ in range(30):
                run(loader)

    monkeypatch.setattr(trace_recording, "sleep", work)
    monkeypatch.setattr(trace_recording, "monotonic", lambda: clock[0])
    watch = TraceRecording(os.getpid())
    watch.record(8.0)
    assert len(pauses) == 8
    assert pauses[:4] == sorted(pauses[:4])  # the pauses get longer while nothing happens
    assert pauses[5] < pauses[4]  # a recorder overflowed
    assert min(pauses) >= trace_recording.SHORTEST_S
    assert max(pauses) <= trace_recording.LONGEST_S
    (timeline,) = timelines_of(watch.event_logs.values())
    assert timeline.num_lost > 0
    assert 8 < timeline.num_batches < 248


def test_ring_created_during_a_recording_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ShmLoader[Any]] = []
    clock = [0.0]

    def work(pause: float) -> None:
        clock[0] += 1.0
        if not made:
            made.append(ShmLoader(Rows(), 8, num_workers=1, seed=1))
            run(made[0])

    monkeypatch.setattr(trace_recording, "sleep", work)
    monkeypatch.setattr(trace_recording, "monotonic", lambda: clock[0])
    watch = TraceRecording(os.getpid())
    watch.record(3.0)
    made[0].close()
    assert [timeline.num_batches for timeline in timelines_of(watch.event_logs.values())] == [8]


def test_interrupted_recording_is_written(
    loader: ShmLoader[Any], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trace_recording, "sleep", interrupt)
    done = command("trace", "--pid", os.getpid(), "--out", tmp_path / "t.json")
    assert done.exit_code == 0
    assert done.stderr == "shmload trace: interrupted; writing what was recorded so far\n"
    assert len(of_kind(loaded(tmp_path / "t.json"), "deliver")) == 8


def test_command_reports_lost_events(
    loader: ShmLoader[Any], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_recording, "sleep", lambda seconds: [run(loader) for _ in range(30)])
    done = command("trace", "--pid", os.getpid(), "--seconds", 0.001, "--out", tmp_path / "t.json")
    assert "events overwritten before being read; open it" in done.stdout


@pytest.mark.slow(reason="a program in a process of its own, which imports torch")
def test_recording_does_not_write_to_the_block(tmp_path: Path) -> None:
    """Stops the owner, so that any change would come from the stats reader."""
    code = (
        "import os, signal\n"
        "from tests.trace.trace_kit import Rows, run\n"
        "from shmload import ShmLoader\n"
        "loader = ShmLoader(Rows(), 8, num_workers=1, seed=1); run(loader)\n"
        "for worker in loader.stats()['workers']: os.kill(worker['pid'], signal.SIGSTOP)\n"
        "print('up', flush=True); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "for worker in loader.stats()['workers']: os.kill(worker['pid'], signal.SIGCONT)\n"
        "loader.close()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        (path,) = [block.path for block in RingReader.find().blocks if block.pid == child.pid]
        before = Path(path).read_bytes()
        watch = TraceRecording(child.pid)
        watch.record(0)
        assert [timeline.num_batches for timeline in timelines_of(watch.event_logs.values())] == [8]
        assert Path(path).read_bytes() == before
    finally:
        child.send_signal(signal.SIGCONT)
        assert child.wait(timeout=120) == 0
        child.stdout.close()  # type: ignore[union-attr]  # a pipe


# ---------------------------------------------------------------- the command


def test_command_reports_that_there_is_no_loader(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingReader, "find", lambda: HostRings([], []))
    done = command("trace", "--out", tmp_path / "t.json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "shmload trace: no loader with workers runs on this machine, or it has done nothing\n"
    assert not (tmp_path / "t.json").exists()


def test_trace_is_written_to_the_current_folder_by_default(
    loader: ShmLoader[Any], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("trace", "--pid", os.getpid(), "--seconds", 0)
    assert done.stdout.startswith(f"trace.json: 8 batches of process {os.getpid()}; open it")
    assert (tmp_path / "trace.json").exists()


def test_error_for_a_process_without_a_loader_names_skipped_rings(loader: ShmLoader[Any], command: Command, tmp_path: Path) -> None:
    done = command("trace", "--pid", 1, "--out", tmp_path / "t.json")
    assert done.exit_code == 2
    assert done.stderr.startswith("shmload trace: process 1 has no loader with workers, or it has done nothing\n")
    assert f"it is of process {os.getpid()}\n" in done.stderr


def test_missing_folder_is_reported(command: Command) -> None:
    done = command("trace", "--out", "/none/t.json")
    message = "shmload trace: /none/t.json: needs an existing folder to write to\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", message)


def test_unwritable_file_is_reported(loader: ShmLoader[Any], command: Command, tmp_path: Path) -> None:
    done = command("trace", "--pid", os.getpid(), "--seconds", 0, "--out", tmp_path)
    assert done.exit_code == 2
    assert "is a folder; name a file in it" in done.stderr
    assert list(tmp_path.iterdir()) == []
