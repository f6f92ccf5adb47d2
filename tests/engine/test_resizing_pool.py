"""A worker pool that changes its size yields the batches of the schedule, even if workers are killed at the same time."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import select
import signal
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from shmload import ShmLoader
from shmload.engine.tuning import autotune
from tests.engine.tuning_kit import BATCH, SEED, N, Rows, change, engine_of, expected_epochs, values_of
from tests.faults.faults_kit import stop

slow = pytest.mark.slow(reason="workers start as new interpreters, which import everything again")
MOST, NUM_EPOCHS = 4, 40
DEADLINE_S = 60
STEPS = N // BATCH


@pytest.fixture(autouse=True)
def manual_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets only tests change worker pools, and allows four workers on every machine."""
    monkeypatch.setattr(autotune, "WINDOW_S", 1e9)
    monkeypatch.setenv("SHMLOAD_MAX_WORKERS", str(MOST))


@pytest.fixture(scope="module")
def expected() -> list[list[Any]]:
    return expected_epochs(NUM_EPOCHS)


def auto_loader(**options: Any) -> ShmLoader[Any]:
    numbers = {"num_workers": "auto", "prefetch_factor": "auto"}
    return ShmLoader(Rows(), **{"batch_size": BATCH, "shuffle": True, "seed": SEED, **numbers, **options})


def disable_tuning(loader: ShmLoader[Any]) -> None:
    autotune: Any = loader._builder.tuner
    autotune.count_batch = lambda engine: autotune.num_ahead


def await_end(pid: int) -> None:
    """Waits until every thread of a child is gone, which may have been reaped already."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(DEADLINE_S * 1000), f"process {pid} did not end"
    os.close(pidfd)


class Machine(RuleBasedStateMachine):
    """Random actions on one loader, whose batches are compared with the expected ones."""

    epochs: list[list[Any]]

    @initialize(method=st.just("fork"))
    def begin(self, method: str) -> None:
        self.loader = auto_loader(multiprocessing_context=method, timeout=DEADLINE_S)
        self.epoch, self.step = -1, STEPS
        self.num_kills = 0  # kills since the last batch
        self.harmed = (-1, -1)  # newest batch during which a worker was killed; two kills would make a sample a suspect
        self.held: list[tuple[Any, Any]] = []
        self.states: list[tuple[dict[str, Any], int, int]] = []
        self.next_pass()

    def next_pass(self) -> None:
        self.batches = iter(self.loader)
        self.epoch, self.step = self.epoch + 1, 0

    @rule(count=st.integers(1, 12), is_held=st.booleans())
    def take(self, count: int, is_held: bool) -> None:
        for _ in range(count):
            if self.step == STEPS:
                assert next(self.batches, None) is None
                self.next_pass()
            batch, expected = next(self.batches), self.epochs[self.epoch][self.step]
            assert values_of(batch) == expected
            self.step += 1
            self.num_kills = 0
        if is_held:
            self.held = [(batch, expected)]  # only one, because the smallest ring has four slots

    @precondition(lambda self: self.loader._builder.last is not None)
    @rule(num_workers=st.integers(1, MOST), prefetch=st.integers(1, 8))
    def resize(self, num_workers: int, prefetch: int) -> None:
        change(self.loader, num_workers, prefetch)
        assert self.loader.num_workers == num_workers
        assert self.loader.prefetch_factor == prefetch

    @precondition(lambda self: self.loader._builder.last is not None and self.num_kills < 5)
    @rule(which=st.integers(0, MOST - 1))
    def kill(self, which: int) -> None:
        engine: Any = self.loader._builder.last
        pids = engine.pool._workers
        if which not in pids or not stop(pid := pids[which].pid):
            return
        held = engine._ring.held_by(which)
        order = None if held is None else engine._supervisor._order_in(held[0])
        if order is not None and (order.epoch, order.step) <= self.harmed:
            os.kill(pid, signal.SIGCONT)
            return
        if order is not None:
            self.harmed = (order.epoch, order.step)
        os.kill(pid, signal.SIGKILL)
        self.num_kills += 1

    @rule()
    def abandon_pass(self) -> None:
        self.next_pass()

    @rule()
    def save_state(self) -> None:
        self.states.append((self.loader.state_dict(), self.epoch, self.step))

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        state, epoch, step = data.draw(st.sampled_from(self.states))
        self.loader.load_state_dict(state)
        self.epoch, self.step = (epoch, step) if step < STEPS else (epoch + 1, 0)
        self.harmed = (NUM_EPOCHS, 0)  # batches are read again
        self.batches = iter(self.loader)

    def teardown(self) -> None:
        try:
            for batch, expected in self.held:
                assert values_of(batch) == expected
            self.take(STEPS, False)
            engine: Any = self.loader._builder.last
            assert engine._ring.counters()["num_copied_out"] == 0
        finally:
            self.loader.close()


@pytest.mark.slow(reason="workers start, end and are killed at every step of hypothesis")
def test_random_resizes_kills_breaks_and_resumes_change_no_batch(expected: list[list[Any]]) -> None:
    Machine.epochs = expected
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=slow), pytest.param("forkserver", marks=slow)])
def test_pools_of_every_start_method_grow_and_shrink(method: str, expected: list[list[Any]]) -> None:
    found = []
    with auto_loader(multiprocessing_context=method) as loader:
        for number, batch in enumerate(loader):
            found.append(values_of(batch))
            if number in (2, 6, 10):
                change(loader, {2: 3, 6: 1, 10: 2}[number])
    assert found == expected[0]


def pool_of(loader: ShmLoader[Any]) -> dict[int, int]:
    engine: Any = loader._builder.last
    return {worker: process.pid for worker, process in engine.pool._workers.items()}


def take_until(batches: Iterator[Any], loader: ShmLoader[Any], workers: set[int]) -> None:
    """Reads on until exactly these workers exist."""
    deadline = monotonic() + DEADLINE_S
    while set(pool_of(loader)) != workers:
        assert monotonic() < deadline
        next(batches)
        engine_of(loader)._handle_deaths()


def endless(loader: ShmLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def test_worker_asked_to_leave_is_not_counted_as_dead(caplog: pytest.LogCaptureFixture) -> None:
    with auto_loader(max_restarts=0) as loader, caplog.at_level(logging.WARNING, "shmload"):
        batches = endless(loader)
        next(batches)
        change(loader, 3)
        take_until(batches, loader, {0, 1, 2})
        change(loader, 1)
        take_until(batches, loader, {0})
        assert loader.stats()["num_restarts"] == 0
        assert caplog.records == []


def test_worker_that_left_is_started_again_when_the_pool_grows() -> None:
    with auto_loader() as loader:
        batches = endless(loader)
        next(batches)
        change(loader, 2)
        next(batches)
        pid = pool_of(loader)[1]
        change(loader, 1)
        await_end(pid)
        change(loader, 2)  # its end has not been noticed yet
        take_until(batches, loader, {0, 1})
        assert pool_of(loader)[1] in (pid, *pool_of(loader).values())
        deadline = monotonic() + DEADLINE_S
        while pool_of(loader)[1] == pid and monotonic() < deadline:
            next(batches)
            engine_of(loader)._handle_deaths()
        assert pool_of(loader)[1] != pid
        assert loader.stats()["num_restarts"] == 0


def test_rows_of_a_worker_killed_while_leaving_are_read_again(expected: list[list[Any]], caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(3)
    with auto_loader() as loader, caplog.at_level(logging.WARNING, "shmload"):
        found, num_harmed = [], 0
        for batch in loader:
            found.append(values_of(batch))
            if len(found) == 1:
                change(loader, MOST)
                disable_tuning(loader)  # otherwise a leaving worker might be kept
            engine: Any = loader._builder.last
            for worker in rng.sample(range(1, MOST), MOST - 1):
                pid = pool_of(loader).get(worker, 0)
                if num_harmed or not pid or not stop(pid):
                    continue
                if engine._ring.held_by(worker) is None:
                    os.kill(pid, signal.SIGCONT)
                    continue
                change(loader, 1)
                os.kill(pid, signal.SIGKILL)
                num_harmed += 1
                await_end(pid)
        engine._handle_deaths()  # its rows may belong to the next epoch, which is not read
    assert found == expected[0]
    if num_harmed:
        assert any("it was about to leave" in record.message for record in caplog.records)


def test_pool_that_cannot_grow_continues_unchanged(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with auto_loader() as loader, caplog.at_level(logging.INFO, "shmload"):
        batches = iter(loader)
        found = [values_of(next(batches))]
        first = int(loader.num_workers)
        engine: Any = loader._builder.last

        def refused(link: Any) -> None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        monkeypatch.setattr(engine.pool, "_start", refused)
        change(loader, MOST)
        assert loader.num_workers == first
        report = loader.stats()["autotune"]
        assert report["most_workers"] == first, "growth is not tried again"
        assert report["decisions"][-1]["reason"] == "a test wants it; but no more processes could be started"
        words = "could not be started ([Errno 11] Resource temporarily unavailable); the loader continues with fewer workers"
        assert any(words in record.message for record in caplog.records)
        found += [values_of(batch) for batch in batches]
    assert found == expected[0]


def test_worker_without_a_pidfd_is_ended(monkeypatch: pytest.MonkeyPatch, expected: list[list[Any]]) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with auto_loader() as loader:
        batches = iter(loader)
        found = [values_of(next(batches))]
        before = set(multiprocessing.active_children())
        with monkeypatch.context() as patched:
            patched.setattr(os, "pidfd_open", refused)
            change(loader, MOST)
        assert set(multiprocessing.active_children()) == before
        found += [values_of(batch) for batch in batches]
    assert found == expected[0]
