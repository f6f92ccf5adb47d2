"""Supervised samplers: failures of samplers, of their supervisor and of the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from shmload.errors import WorkerDied
from shmload.formats import TFRecordWriter
from shmload.growing import SampleCache, sampler_supervisor
from tests.growing.growing_kit import (
    broken,
    dataset_of,
    dies_once,
    draws,
    endless,
    epoch_of,
    first_ends_with_a_full_log,
    loader_of,
    put,
    stuck_after_one,
    stuck_at_once,
    ten,
    values_of,
    wait_until,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_supervisor, "PAUSE_S", 0.001)


def test_killed_sampler_is_restarted_and_loses_only_unpublished_samples(cache: SampleCache, tmp_path: Path) -> None:
    samplers = cache.start(partial(dies_once, tmp_path), 2, publish_s=0.0)
    wait_until(lambda: samplers.are_done, "both to end")
    assert [state["restarts"] for state in samplers.states] == [1, 1]
    assert [state["state"] for state in samplers.states] == ["finished"] * 2
    with loader_of(dataset_of(cache)) as loader:
        assert sorted([*range(6), *range(6)]) == sorted(epoch_of(loader))


def test_samplers_have_a_state_before_their_supervisors_first_report(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_supervisor.SamplerSupervisor, "_write", lambda self: None)
    samplers = cache.start(ten, 2)
    assert [(state["worker_id"], state["state"], state["pid"]) for state in samplers.states] == [
        (0, "starting", 0),
        (1, "starting", 0),
    ]
    assert not samplers.are_done


def test_failing_sampler_is_reported_with_its_traceback_and_its_samples_are_kept(cache: SampleCache) -> None:
    samplers = cache.start(broken, 1, max_restarts=10**6)
    state = wait_until(lambda: (s := samplers.states[0])["restarts"] >= 2 and s, "two restarts")
    assert state["error"].startswith("sampler 0: Traceback (most recent call last)")
    assert "ConnectionError: the far store is gone" in state["error"]
    samplers.stop()
    assert len(cache.files()) >= 2


def test_next_epoch_raises_the_error_after_all_samplers_failed(cache: SampleCache) -> None:
    samplers = cache.start(stuck_at_once, 2, max_restarts=2)
    wait_until(lambda: samplers.are_done, "both to be given up")
    assert [state["restarts"] for state in samplers.states] == [2, 2]
    with (
        loader_of(dataset_of(cache, timeout_s=30.0)) as loader,
        pytest.raises(WorkerDied, match="all 2 samplers have failed and are given up, so the cache does not grow") as caught,
    ):
        iter(loader)
    assert "ConnectionError: the far store was never there" in str(caught.value)


def test_failure_of_the_next_epoch_does_not_disturb_the_current_one(cache: SampleCache) -> None:
    put(cache, range(24))
    with loader_of(dataset_of(cache), num_workers=1, prefetch_factor=2) as loader:
        batches = iter(loader)
        samplers = cache.start(stuck_at_once, 1, max_restarts=0)
        wait_until(lambda: samplers.are_done, "it to be given up")
        assert list(range(24)) == [value for batch in batches for value in values_of(batch)]
        with pytest.raises(WorkerDied, match="all 1 samplers have failed"):
            iter(loader)
        samplers.stop()
        assert list(range(24)) == epoch_of(loader)


def test_sampler_whose_log_cannot_be_written_ends_alone(cache: SampleCache) -> None:
    samplers = cache.start(first_ends_with_a_full_log, 2, max_restarts=0)
    wait_until(lambda: samplers.states[0]["state"] in ("finished", "given up"), "the first to end")
    assert [state["state"] for state in samplers.states] == ["finished", "running"]


def test_error_for_too_few_samples_says_that_samplers_have_ended(cache: SampleCache) -> None:
    samplers = cache.start(ten, 1)
    wait_until(lambda: samplers.are_done, "it to end")
    with (
        loader_of(dataset_of(cache, min_samples=11)) as loader,
        pytest.raises(TimeoutError, match=r"holds 10 samples .* needs 11\. Its samplers have ended"),
    ):
        iter(loader)


def test_each_sampler_draws_its_own_numbers(cache: SampleCache) -> None:
    samplers = cache.start(draws, 3)
    wait_until(lambda: samplers.are_done, "all to end")
    with loader_of(dataset_of(cache)) as loader:
        assert len(set(epoch_of(loader))) == 3


def test_stopped_samplers_publish_their_samples(cache: SampleCache) -> None:
    samplers = cache.start(endless, 1, publish_s=1e9)
    wait_until(lambda: cache.stats().generation >= 2, "the first files")
    samplers.stop()
    names = [file.name for file in cache.files()]
    samplers.stop()
    assert names == [file.name for file in cache.files()]
    with loader_of(dataset_of(cache)) as loader:
        values = epoch_of(loader)
    assert sorted(values) == list(range(min(values), max(values) + 1))
    assert list((cache.path / ".growing" / "samplers").iterdir()) == []


def test_sample_is_published_in_time_although_the_next_one_is_slow(cache: SampleCache) -> None:
    samplers = cache.start(stuck_after_one, 1, publish_s=0.01)
    wait_until(lambda: cache.stats().num_samples, "the sample")
    samplers.stop()
    assert [file.num_records for file in cache.files()] == [1]


def test_stop_during_a_record_leaves_a_file_that_matches_its_name(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = TFRecordWriter._appended

    def stopped(writer: TFRecordWriter, nbytes: int) -> None:
        if writer.num_records == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        counted(writer, nbytes)

    monkeypatch.setattr(TFRecordWriter, "_appended", stopped)
    samplers = cache.start(endless, 1, publish_s=1e9, multiprocessing_context="fork")
    wait_until(lambda: samplers.are_done, "it to end")
    with loader_of(dataset_of(cache)) as loader:
        assert epoch_of(loader) == [0, 1, 2]


@pytest.mark.slow(reason="kills the samplers' supervisor and reads epochs until a new one has started")
def test_killed_supervisor_ends_its_samplers_and_is_replaced(cache: SampleCache, caplog: pytest.LogCaptureFixture) -> None:
    samplers = cache.start(endless, 2)
    with loader_of(dataset_of(cache, timeout_s=30.0)) as loader:
        epoch_of(loader)
        pids = [state["pid"] for state in samplers.states]
        samplers._child.send(signal.SIGKILL)
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the samplers to end")
        wait_until(lambda: not samplers._child.lives, "the supervisor to be seen dead")
        epoch_of(loader)
        epoch_of(loader)
        wait_until(lambda: all(s["pid"] not in (0, *pids) for s in samplers.states), "new ones")
    assert "the samplers' supervisor was killed by SIGKILL; a new one is started" in caplog.text


@pytest.mark.slow(reason="the supervisor starts by spawn, and imports everything again")
def test_samplers_run_under_a_spawned_supervisor(cache: SampleCache) -> None:
    samplers = cache.start(ten, 2, multiprocessing_context="spawn")
    wait_until(lambda: samplers.are_done, "both to end")
    with loader_of(dataset_of(cache)) as loader:
        assert list(range(20)) == sorted(epoch_of(loader))


TRAINER = """
import sys
from tests.growing.growing_kit import dataset_of, endless, epoch_of, loader_of
from shmload.growing import SampleCache

cache = SampleCache(sys.argv[1], 1 << 16, file_nbytes=1024)
samplers = cache.start(endless, 2, publish_s=0.0)
loader = loader_of(dataset_of(cache, timeout_s=30.0), num_workers=1)
epoch_of(loader)
print(samplers._child.pid, *[state["pid"] for state in samplers.states], flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


@pytest.mark.slow(reason="the trainer is a process of its own, with samplers")
@pytest.mark.parametrize("end", ["killed", "exits silently"])
def test_no_sampler_outlives_the_trainer(cache: SampleCache, end: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-W", "error", "-c", TRAINER, str(cache.path), "wait" if end == "killed" else "end"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as trainer:
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        if end == "killed":
            os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    assert (-signal.SIGKILL if end == "killed" else 0) == trainer.returncode
    assert len(pids) == 3
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "all of them to end")
    with cache.writer() as writer:  # the next writer sweeps the reserved space
        writer.write(b"x")
        stats = cache.stats()
    assert stats.num_leased == 0
    assert 1024 + sum(file.nbytes for file in cache.files()) >= stats.nbytes


@pytest.mark.parametrize(
    ("number", "text"),
    [({"num_processes": 0}, "num_processes is at least 1; got 0"), ({"max_restarts": -1}, "max_restarts is at least 0; got -1")],
)
def test_numbers_out_of_range_are_refused(cache: SampleCache, number: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cache.start(ten, **number)
