"""Promises that concern several modules: start-up, the epoch boundary, slow samples, positions, many fields."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shmload import ShmLoader, sample_info
from shmload._core.trainer import READY
from shmload.worker import fork_warnings

slow = pytest.mark.slow(reason="workers start as new interpreters, which import everything again")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
DEADLINE_S = 60  # limit for what should happen immediately; only a hang reaches it
BOTH_MODES = pytest.mark.parametrize("seed", [None, 3])
FORK = multiprocessing.get_context("fork")


class Numbers:
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index


# ---------------------------------------------------------------- R2: positions


@pytest.fixture
def stopped() -> Iterator[Callable[[ShmLoader[Any]], None]]:
    """Returns a function that stops a loader's workers; closing a loader would end them anyway."""
    pids: list[int] = []

    def stop(loader: ShmLoader[Any]) -> None:
        for pid in loader._builder.last.pool.pids:
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            pids.append(pid)

    yield stop
    assert pids


@BOTH_MODES
def test_state_is_available_without_asking_workers(seed: int | None, stopped: Callable[[ShmLoader[Any]], None]) -> None:
    with ShmLoader(Numbers(100), 4, num_workers=2, seed=seed) as loader:
        iterator = iter(loader)
        before = [next(iterator).tolist() for _ in range(3)]
        engine = loader._builder.last
        while not all(engine._is_done(order) for order in engine._queue):
            engine._ready.wait(0.02)
        stopped(loader)
        before.append(next(iterator).tolist())
        assert not engine._is_done(engine._queue[-1])  # it was just ordered, and no worker makes it
        state = loader.state_dict()
        for pid in loader._builder.last.pool.pids:
            os.kill(pid, signal.SIGCONT)
        rest = [batch.tolist() for batch in iterator]
    assert [*before, *rest] == [list(range(i, i + 4)) for i in range(0, 100, 4)]
    with ShmLoader(Numbers(100), 4, num_workers=2, seed=seed) as resumed:
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == rest


def test_state_costs_at_most_50_us_wherever_it_is_taken() -> None:
    """Measured in seed mode: the minimum of many, in this thread's CPU time, so that a busy machine does not count."""
    with ShmLoader(range(10**9), 4, shuffle=True, num_workers=1, seed=3) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
            took = []
            for _ in range(200):
                began = time.thread_time_ns()
                loader.state_dict()
                took.append(time.thread_time_ns() - began)
            assert min(took) <= 50_000


# ---------------------------------------------------------------- R8: many fields


class Wide:
    """Samples of many fields, decoded in place."""

    def __init__(self, num_fields: int) -> None:
        self.schema = {f"field {i}": ("float32", (4,)) for i in range(num_fields)}

    def __len__(self) -> int:
        return 100_000

    def read_into(self, index: int, out: Any) -> None:
        for name in self.schema:
            out[name] = 0


def descriptors_of(num_fields: int) -> int:
    """Returns the number of descriptors that a loader has open while the program holds three of its batches."""
    before = len(os.listdir("/proc/self/fd"))
    with ShmLoader(Wide(num_fields), 2, num_workers=1, seed=3, prefetch_factor=6) as loader:
        iterator = iter(loader)
        held = [next(iterator) for _ in range(3)]
        assert len(held[0]) == num_fields
        return len(os.listdir("/proc/self/fd")) - before


def test_descriptors_are_the_same_for_any_number_of_fields() -> None:
    assert descriptors_of(4) == descriptors_of(104)


# ---------------------------------------------------------------- R10: start and epochs


class CountsPickles(Numbers):
    """A dataset that counts how often it is pickled."""

    num_pickled = 0

    def __getstate__(self) -> dict[str, Any]:
        type(self).num_pickled += 1
        return self.__dict__


@slow
@BOTH_MODES
def test_dataset_is_pickled_once_for_all_workers(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountsPickles, "num_pickled", 0)
    with ShmLoader(CountsPickles(12), 2, num_workers=3, seed=seed, multiprocessing_context="forkserver") as loader:
        assert [batch.tolist() for batch in loader] == [[i, i + 1] for i in range(0, 12, 2)]
    assert CountsPickles.num_pickled == 1


@BOTH_MODES
def test_workers_start_at_the_same_time(seed: int | None) -> None:
    """Checks that no worker leaves worker_init_fn before all have entered it."""
    barrier = FORK.Barrier(3)

    def meet(worker_id: int) -> None:
        barrier.wait(DEADLINE_S)

    options = {"num_workers": 3, "worker_init_fn": meet, "multiprocessing_context": FORK}
    with ShmLoader(Numbers(12), 2, seed=seed, **options) as loader:
        assert len(list(loader)) == 6


def test_workers_read_into_the_next_epoch_before_it_begins() -> None:
    with ShmLoader(Numbers(12), 2, num_workers=2, prefetch_factor=2, seed=3) as loader:
        assert sum(1 for _ in loader) == 6
        engine = loader._builder.last
        until = time.monotonic() + DEADLINE_S
        while not (len(engine._queue) == 4 and all(engine._is_done(order) for order in engine._queue)):
            assert time.monotonic() < until
            engine._ready.wait(0.02)
        assert [(order.epoch, order.step) for order in engine._queue] == [(1, step) for step in range(4)]
        num_waits = loader.stats()["num_waits"]
        assert next(iter(loader)).tolist() == [0, 1]
        assert loader.stats()["num_waits"] == num_waits


# ---------------------------------------------------------------- R11: slow samples


class WaitForEachOther(Numbers):
    """Samples of the first epoch that wait for each other, so they return only if different workers read them at the same time."""

    def __init__(self, n: int, meeting: set[int]) -> None:
        super().__init__(n)
        self.meeting, self.barrier = meeting, FORK.Barrier(len(meeting))

    def __getitem__(self, index: int) -> Any:
        if index in self.meeting and sample_info().epoch == 0:
            self.barrier.wait(DEADLINE_S)
        return index


def test_all_workers_read_the_rows_of_one_batch() -> None:
    dataset = WaitForEachOther(64, {0, 16, 32, 48})
    with ShmLoader(dataset, 64, num_workers=4, seed=3, multiprocessing_context=FORK) as loader:
        assert next(iter(loader)).tolist() == list(range(64))


@BOTH_MODES
def test_slow_sample_does_not_keep_other_slots_from_filling(seed: int | None) -> None:
    """Lets the first batch arrive only while the fourth one is being read."""
    dataset = WaitForEachOther(16, {0, 7})
    with ShmLoader(dataset, 2, num_workers=2, prefetch_factor=2, seed=seed, multiprocessing_context=FORK) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(8)] == [[i, i + 1] for i in range(0, 16, 2)]


def test_slot_after_a_slow_one_becomes_ready() -> None:
    gate = FORK.Event()

    class Gated(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                gate.wait(DEADLINE_S)
            return index

    with ShmLoader(Gated(12), 2, num_workers=2, prefetch_factor=2, seed=3, multiprocessing_context=FORK) as loader:
        stream = loader._passes
        assert stream is not None
        engine = stream._made_engine()
        iterator = iter(loader)
        stream._cursor = (0, 0)
        stream._fill(engine)
        until = time.monotonic() + DEADLINE_S
        while not all(order.slot >= 0 and engine._is_done(order) for order in list(engine._queue)[1:]):
            assert time.monotonic() < until
            engine._work_once()
            engine._ready.wait(0.02)
        assert engine._ring.look(engine.front.slot) != READY
        gate.set()
        assert next(iterator).tolist() == [0, 1]


# ---------------------------------------------------------------- R12: the epoch travels with the order


class Epochs(Numbers):
    def __getitem__(self, index: int) -> Any:
        return sample_info().epoch


def test_persistent_workers_know_the_epoch_of_every_order() -> None:
    with ShmLoader(Epochs(12), 2, num_workers=2, prefetch_factor=3, seed=3, persistent_workers=True) as loader:
        pids: list[int] = []
        for epoch in (0, 1, 2, 7, 8, 3):
            loader.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == [[epoch, epoch]] * 6
            now = loader._builder.last.pool.pids
            assert pids in ([], now)
            pids = now


# ---------------------------------------------------------------- R16: fork


@BOTH_MODES
def test_fork_in_a_process_that_uses_cuda_warns(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with (
        ShmLoader(Numbers(4), 2, num_workers=1, seed=seed, multiprocessing_context="fork") as loader,
        pytest.warns(RuntimeWarning, match=r"CUDA is in use .* cannot use it.*multiprocessing_context=\"spawn\""),
    ):
        next(iter(loader))


@slow
def test_workers_that_are_not_forked_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with ShmLoader(np.arange(4), 2, num_workers=1, multiprocessing_context="forkserver") as loader:
        assert len(list(loader)) == 2


def test_fork_beside_running_threads_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_warnings, "_has_logged_threads", False)
    caplog.set_level(logging.WARNING, "shmload")
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, name=name, daemon=name == "daemon") for name in ("daemon", "mine")]
    for thread in threads:
        thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                with ShmLoader(Numbers(4), 2, num_workers=1, multiprocessing_context="fork") as loader:
                    next(iter(loader))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    messages = [record.getMessage() for record in caplog.records if "fork" in record.getMessage()]
    assert len(messages) == 1
    (names,) = re.findall(r"^workers are forked while \d+ other threads? runs? \((.*)\): a lock that", messages[0])
    assert "mine" in names.split(", ")  # threads of other tests may run, too
    assert "daemon" not in names.split(", ")
    assert 'multiprocessing_context="forkserver"' in messages[0]


@pytest.mark.parametrize("seed", [None, 7])
def test_unreferenced_loader_ends_its_workers_immediately(seed: int | None) -> None:
    """Checks that no reference cycle keeps the workers until the garbage collector runs."""
    loader = ShmLoader(list(range(20)), 4, num_workers=1, seed=seed)
    batches = iter(loader)
    next(batches)
    assert loader._builder.last is not None
    (pid,) = loader._builder.last.pool.pids
    gc.collect()
    gc.disable()
    try:
        del loader, batches
        assert not os.path.exists(f"/proc/{pid}")
    finally:
        gc.enable()
