"""Without a seed a dead worker ends the iteration as in torch's loader, unless `max_restarts` is set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from time import monotonic
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from shmload import ShmLoader, WorkerDied
from tests.faults import torch_error
from tests.faults.faults_kit import FaultFolder, Rows, WorkerKiller, digest, program_env

pytestmark = pytest.mark.slow(reason="each starts workers, most of which die")
BOUND_S = 60.0  # it takes 0.2 s, or forever if nothing notices the death


ENDS = [-signal.SIGKILL, -signal.SIGSEGV, 3]


def torchs_error(end: int) -> list[str]:
    """Returns torch's error message for a worker that ends with a signal or exit code."""
    command = [sys.executable, torch_error.__file__, str(int(end))]
    for _ in range(20):
        ran = subprocess.run(command, capture_output=True, timeout=120, env=program_env())
        if ran.returncode == 0:  # otherwise torch's SIGCHLD handler raised at an unexpected point
            words: list[str] = json.loads(ran.stdout.splitlines()[-1])
            return words
    raise AssertionError(ran.stderr.decode())


@pytest.mark.parametrize("end", ENDS)
def test_error_of_a_dead_worker_is_torchs(end: int) -> None:
    began = monotonic()
    words = torch_error.error_of(ShmLoader, end)
    assert monotonic() - began < BOUND_S
    assert words[0] == "DataLoader worker (pid(s) PID) exited unexpectedly"
    assert torchs_error(end)[0] in words  # with several causes, torch reports either


@pytest.mark.parametrize("point", ["before_claim", "after_claim", "mid_decode", "before_finish", "after_finish", "before_post"])
@pytest.mark.parametrize("persistent", [False, True])
def test_death_at_any_point_ends_the_iteration_and_leaves_nothing(point: str, persistent: bool, fault_folder: FaultFolder) -> None:
    loader = ShmLoader(Rows(80), batch_size=4, num_workers=2, persistent_workers=persistent)
    began = monotonic()
    with pytest.raises(WorkerDied, match=r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"):
        for step, _ in enumerate(loader):
            if step == 3:
                fault_folder.arm(point, signal.SIGKILL)
                began = monotonic()
    assert monotonic() - began < BOUND_S
    assert fault_folder.num_triggered == 1
    loader.close()
    assert loader._builder.last.pool.pids == []


def test_next_iteration_works_without_persistent_workers() -> None:
    loader = ShmLoader(Rows(80), batch_size=4, num_workers=2)
    with pytest.raises(WorkerDied):
        for _ in loader:
            WorkerKiller(loader._builder.last).kill(1)
    assert sum(1 for _ in loader) == 20


def test_iterator_outlives_its_loader_but_not_close() -> None:
    assert sum(1 for _ in ShmLoader(Rows(80), batch_size=4, num_workers=2)) == 20
    stream = iter(loader := ShmLoader(Rows(80), batch_size=4, num_workers=2))
    next(stream)
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        for _ in stream:
            pass


def test_failed_iteration_keeps_raising_its_error() -> None:
    stream = iter(loader := ShmLoader(Rows(80), batch_size=4, num_workers=2))
    next(stream)
    WorkerKiller(loader._builder.last).kill(0)
    for _ in range(2):
        with pytest.raises(WorkerDied, match="exited unexpectedly"):
            for _ in stream:
                pass
    del stream
    loader.close()


def test_max_restarts_limits_replacements() -> None:
    torch.manual_seed(1)
    expected = [digest(b["x"]) for b in DataLoader(Rows(160), batch_size=4, shuffle=True)]
    torch.manual_seed(1)
    loader = ShmLoader(Rows(160, 300), batch_size=4, shuffle=True, num_workers=2, max_restarts=3)
    got: list[str] = []
    with pytest.raises(WorkerDied):
        for step, batch in enumerate(loader):
            got.append(digest(batch["x"]))
            if step % 8 == 0:
                WorkerKiller(loader._builder.last).kill(step // 8 % 2)
    assert loader.stats()["num_restarts"] == 3
    assert 24 < len(got) <= 32
    assert expected[: len(got)] == got
    loader.close()


def test_replaced_workers_keep_torchs_order_and_their_own_batches() -> None:
    loader = ShmLoader(Rows(160, 100), batch_size=4, num_workers=2, max_restarts=20)
    expected = [digest(b["x"]) for b in DataLoader(Rows(160), batch_size=4)]
    got = []
    for step, batch in enumerate(loader):
        got.append(digest(batch["x"]))
        if step % 4 == 0:
            WorkerKiller(loader._builder.last).kill(step // 4 % 2)
    assert expected == got
    assert loader.stats()["num_restarts"] >= 8


class Bad(list[int]):
    """Samples of which some raise an error."""

    def __getitem__(self, index: Any) -> int:
        if index in (4, 7):
            raise ValueError(f"sample {index} is broken")
        return int(super().__getitem__(index))


def test_worker_that_dies_with_a_failed_batch_is_replaced_by_one_that_reads_it_before_later_failures() -> None:
    with ShmLoader(
        Bad(range(18)), batch_size=3, num_workers=1, prefetch_factor=4, on_error="skip", max_restarts=3, timeout=60
    ) as loader:
        batches = iter(loader)
        got = [next(batches).tolist()]
        ring = loader._builder.last._ring
        while ring.worker(0)["num_chunks"] < 2:  # then batch 1 has failed, and the worker waits for its repair
            os.sched_yield()
        WorkerKiller(loader._builder.last).kill(0)
        got += [batch.tolist() for batch in batches]
    assert got == [[0, 1, 2], [3, 5], [6, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17]]
