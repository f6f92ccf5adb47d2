"""Running loaders, observed from another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from typing import Any

import psutil
import pytest

from shmload.shm import janitor
from shmload.shm.names import SHM_DIR
from shmload.tools.top.watch import Watch
from tests.faults.faults_kit import DEADLINE_S, program_env
from tests.faults.killed_kit import ProcessTree
from tests.top.live_kit import look_until, only_loader, running
from tests.top.live_program import BAD, STUCK

pytestmark = pytest.mark.slow(reason="each observes a trainer process that imports torch")


def watched(pid: int, least_s: float = 0.3) -> dict[str, Any]:
    """Returns the second look, at least `least_s` after the first."""
    watch = Watch([pid])
    began = only_loader(watch.look())["age_s"]
    aside = Watch([pid])
    look_until(aside, lambda look: only_loader(look)["age_s"] >= began + least_s)
    return only_loader(watch.look())


def watched_until(pid: int, is_expected: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Returns the first look over an interval in which the program was not delayed by others on this machine."""
    until = monotonic() + DEADLINE_S
    while not is_expected(found := watched(pid)):
        assert monotonic() < until, found
    return found


def test_with_a_dataset_that_sleeps_the_trainer_waits_and_source_is_the_bottleneck() -> None:
    def is_slow(found: dict[str, Any]) -> bool:
        is_at_work = all(worker["busy_share"] > 0.8 for worker in found["workers"])
        is_late = found["time"]["trainer_waits"] > 60 and found["time"]["workers_wait"] < 15
        return is_at_work and is_late and found["bottleneck"] == "source"

    with running("slow dataset") as program:
        found = watched_until(program.pid, is_slow)
    assert sum(found["time"].values()) == pytest.approx(100)
    # two workers, 5 ms per sample; up to six batches may have been ready before
    assert 0 < found["samples_per_s"] <= 400 + 24 / found["interval_s"]
    assert found["nbytes_per_s"] == pytest.approx(2048 * found["samples_per_s"])
    read = sum(worker["samples_per_s"] for worker in found["workers"])
    assert read == pytest.approx(found["samples_per_s"], abs=24 / found["interval_s"])


def test_with_a_slow_program_the_workers_wait_and_the_trainer_is_the_bottleneck() -> None:
    def is_slow(found: dict[str, Any]) -> bool:
        time = found["time"]
        return bool(time["workers_wait"] > 60 and time["trainer_waits"] < 15 and found["slots"]["ready"] >= 1)

    with running("slow program") as program:
        found = watched_until(program.pid, is_slow)
    assert found["bottleneck"] == "trainer"
    assert 2 <= found["slots"]["leased"] <= 4
    assert 0 < found["batches_per_s"] <= 60  # 20 ms per step, and an interval may begin or end within one
    assert found["epoch"] == 0
    assert 0 < found["step"] < found["num_steps"] == 1000


def test_stuck_sample_is_shown_with_its_worker_and_growing_time() -> None:
    with running("stuck") as program:
        watch = Watch([program.pid])
        first = only_loader(look_until(watch, lambda look: only_loader(look)["waits_for"] is not None))
        index = first["waits_for"]["worker"]
        assert first["workers"][index].items() >= {"state": "decoding", "index": STUCK, "epoch": 0}.items()
        later = only_loader(look_until(watch, lambda look: only_loader(look)["age_s"] > first["age_s"] + 0.1))
        grown = later["workers"][index]["for_s"] - first["workers"][index]["for_s"]
        assert grown == pytest.approx(later["age_s"] - first["age_s"], abs=0.01)
        assert later["waits_for"]["for_s"] > first["waits_for"]["for_s"]
        assert later["waits_for"]["step"] == STUCK // 4
        assert later["workers"][index]["pid"] in {child.pid for child in psutil.Process(program.pid).children()}
        assert later["workers"][1 - index]["state"] == "waiting"


def test_all_figures_of_an_idle_loader_are_shown(still: int) -> None:
    found = watched(still)
    assert found["pid"] == found["owner_pid"] == still
    assert found["parent_pid"] == os.getpid()
    assert found["command"].endswith("live_program.py still")
    assert found["kind"] == "shm"
    assert found["slots"] == {"free": 0, "held": 0, "ordered": 4, "leased": 2, "draining": 0, "parked": 0, "filling": 0, "ready": 4}
    assert found.items() >= {"dataset": "Rows", "read_by": "read_into", "mode": "seed", "rank": 0, "world_size": 1}.items()
    assert found.items() >= {"epoch": 0, "step": 1, "num_steps": 10, "batches": 2, "samples": 8}.items()
    assert found["time"] == {"start_up": 0.0, "trainer_waits": 0.0, "workers_wait": 100.0, "free": 0.0}
    assert {worker["state"] for worker in found["workers"]} == {"waiting"}
    files = [name for name in os.listdir(SHM_DIR) if found["stem"] in name and not name.startswith("sem.")]
    assert found["memory"]["ring_nbytes"] == sum(os.stat(f"{SHM_DIR}/{name}").st_size for name in files)
    assert found["memory"]["workers_rss_bytes"] == sum(worker["rss_bytes"] for worker in found["workers"]) > 1 << 20


def test_restarts_and_bad_samples_are_shown() -> None:
    with running("worker's death") as program:
        found = watched(program.pid)
    assert found["num_restarts"] == 1
    assert [worker["num_restarts"] for worker in found["workers"]] == [0, 1]
    assert found["num_bad_samples"] == 1
    assert found["samples"] == 4 * found["batches"] - 1, f"sample {BAD} was skipped"


def test_stopped_worker_and_trainer_are_shown_as_stopped(still: int) -> None:
    found = watched(still, least_s=0)
    assert (found["is_stopped"], [worker["is_stopped"] for worker in found["workers"]]) == (False, [False, False])
    pids = [still, found["workers"][0]["pid"]]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        look_until(Watch([still]), lambda look: only_loader(look)["is_stopped"] is True)
        look_until(Watch([still]), lambda look: only_loader(look)["workers"][0]["is_stopped"] is True)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_ring_in_a_memfd_is_found_through_its_trainer() -> None:
    with running("memfd") as program:
        found = watched(program.pid, least_s=0)
        assert (found["kind"], found["pid"]) == ("memfd", program.pid)
        assert found["slots"]["leased"] == 2
        assert os.stat(f"{SHM_DIR}/{found['stem']}-control").st_size == 0, "the named file only marks the place"


def test_observing_changes_no_byte_of_a_block() -> None:
    with running("slow dataset") as program, ExitStack() as stack:
        found = watched(program.pid, least_s=0)
        path = f"{SHM_DIR}/{found['stem']}-control"
        family = ProcessTree.of(program.pid, stack)
        for pid in family.pids:
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)  # the reaper removes the group's names after that
        for pid in family.pids:
            look_until(Watch([program.pid]), lambda _, pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        with open(path, "rb") as file:
            before = file.read()
        looks = [only_loader(Watch([program.pid]).look()) for _ in range(5)]
        with open(path, "rb") as file:
            assert file.read() == before
        assert looks[0]["batches"] == looks[4]["batches"] > 0
        assert os.stat(path).st_mode & 0o777 == 0o600


def test_killed_trainer_becomes_a_leftover() -> None:
    with running("still") as program, ExitStack() as stack:
        watch = Watch([program.pid])
        stem = only_loader(watch.look())["stem"]
        family = ProcessTree.of(program.pid, stack)
        for pid in family.pids:  # including its reaper, which would remove the names
            os.kill(pid, signal.SIGSTOP)
        for pid in family.pids:
            os.kill(pid, signal.SIGKILL)
        assert family.survivors(DEADLINE_S) == []
        try:
            look = look_until(Watch(), lambda look: program.pid in look["leftovers"]["pids"])
            assert look["leftovers"]["nbytes"] > 4096
            assert stem not in [loader["stem"] for loader in look["loaders"]]
        finally:
            janitor.sweep()


CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
can_unshare = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare, reason="PID namespaces are not permitted here")
def test_loader_in_a_container_with_a_shared_dev_shm_is_visible_inside_and_outside() -> None:
    with running("still", CONTAINER) as container:
        trainer = psutil.Process(container.pid).children()[0].pid
        found = watched(trainer, least_s=0)
        assert (found["pid"], found["owner_pid"], found["slots"]["leased"]) == (trainer, 1, 2)
        assert [worker["rss_bytes"] for worker in found["workers"]] == [None, None], (
            "its workers' process ids are those of its namespace"
        )
    with running("still") as outside:
        (stem,) = (loader["stem"] for loader in Watch([outside.pid]).look()["loaders"])
        words = [*CONTAINER, sys.executable, "-m", "shmload", "top", "--once", "--json", "--interval", "0.01"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=program_env(), check=True)
        (found,) = (loader for loader in json.loads(done.stdout)["loaders"] if loader["stem"] == stem)
        assert (found["pid"], found["owner_pid"], found["command"]) == (None, outside.pid, "")


def test_ranks_of_one_run_are_listed_together() -> None:
    alone, ranks = {"RANK": "0", "WORLD_SIZE": "1"}, [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    with running("still", **ranks[0]) as one, running("still", **alone) as other, running("still", **ranks[1]) as two:
        look = Watch([one.pid, other.pid, two.pid]).look()
    assert [loader["world_size"] for loader in look["loaders"]] == [1, 2, 2]


def test_ranks_of_one_run_are_distinguished() -> None:
    with running("still", RANK="0", WORLD_SIZE="2") as one, running("still", RANK="1", WORLD_SIZE="2") as two:
        look = Watch([one.pid, two.pid]).look()
        assert [(loader["pid"], loader["rank"]) for loader in look["loaders"]] == [(one.pid, 0), (two.pid, 1)]
        assert {(loader["parent_pid"], loader["world_size"]) for loader in look["loaders"]} == {(os.getpid(), 2)}
        assert look["totals"].items() >= {"num_loaders": 2, "num_workers": 4}.items()
        assert look["totals"]["ring_nbytes"] == sum(loader["memory"]["ring_nbytes"] for loader in look["loaders"])
        by_parent = Watch([os.getpid()]).look()
        assert {one.pid, two.pid} <= {loader["pid"] for loader in by_parent["loaders"]}
