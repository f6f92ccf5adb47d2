"""KeyboardInterrupt in next() at every line of the engine: no batch is lost or repeated, and nothing is left over."""

from __future__ import annotations

import linecache
import multiprocessing
import os
import signal
import sys
import threading
from itertools import count
from typing import Any

import pytest

from shmload import ShmLoader
from shmload.engine import engine
from shmload.modes import epochs, sampled_epochs, seed_mode
from shmload.processes.proc_stat import stat_of
from tests.faults.faults_kit import COLLATE, DATASETS, DEADLINE_S, FaultFolder, Rows, WorkerKiller, digest

pytestmark = pytest.mark.slow(reason="each interrupts loaders with workers repeatedly")
LAST_LINES = {"return batch", "return sent"}  # between these lines and the assignment the batch belongs to the caller
FILES = {engine.__file__, seed_mode.__file__, epochs.__file__, sampled_epochs.__file__}


class InterruptAtLine:
    """A trace function that raises KeyboardInterrupt before the n-th line of the engine's files; n counts across calls."""

    def __init__(self) -> None:
        self.countdown = -1
        self.places: set[tuple[str, int]] = set()

    def __call__(self, frame: Any, event: str, argument: object) -> Any:
        # next_step is left out because Python handles signals at calls and loops, not where a step is given back
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in ("_mend", "__del__", "close", "next_step"):
            return None
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() not in LAST_LINES:
            self.countdown -= 1
            if self.countdown == 0:
                self.places.add((frame.f_code.co_name, frame.f_lineno))
                signal.raise_signal(signal.SIGINT)  # like a real ^C, which the engine can defer
        return self


@pytest.mark.parametrize("kind", ["rows", "growing"])
def test_interrupt_at_any_line_loses_and_repeats_no_batch(kind: str, fault_folder: FaultFolder) -> None:
    dataset = DATASETS[kind](48)
    options: dict[str, Any] = {"batch_size": 4, "seed": 3, "collate_fn": COLLATE.get(kind)}
    with ShmLoader(dataset, **options) as quiet:
        expected = [digest(batch) for batch in quiet]
    tracer = InterruptAtLine()
    num_interrupts = 0
    for start in range(1, 160, 3 if kind == "rows" else 9):
        if start % 4 == 1:
            fault_folder.arm("mid_decode", signal.SIGKILL)
        with ShmLoader(dataset, num_workers=2, **options) as loader:
            stream = iter(loader)
            got = [digest(next(stream))]
            step = 0
            while len(got) < len(expected):
                step += 1
                tracer.countdown = start + 7 * step
                sys.settrace(tracer)
                try:
                    batch = next(stream)
                except KeyboardInterrupt:
                    num_interrupts += 1
                    continue
                finally:
                    sys.settrace(None)
                got.append(digest(batch))
                del batch
            with pytest.raises(StopIteration):
                next(stream)
            states = loader.stats()["slots"]
            assert states["held"] == 0
        assert expected == got
    assert num_interrupts > 50
    assert len(tracer.places) > 25


class InterruptAtCall:
    """A trace function that raises KeyboardInterrupt at the n-th call of one of the package's functions."""

    def __init__(self, countdown: int) -> None:
        self.countdown = countdown

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if f"{os.sep}shmload{os.sep}" in frame.f_code.co_filename and frame.f_code.co_name not in UNSAFE:
            self.countdown -= 1
            if self.countdown == 0:
                signal.raise_signal(signal.SIGINT)


UNSAFE = {
    "__del__",
    "__exit__",
    "_complete",
    "_count_order",
    "completed",
    "add",
    "forget",
}  # the last two microseconds of a call count it


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_in_torch_mode_counts_what_was_delivered_before_an_interrupt_at_any_call(num_workers: int) -> None:
    expected = list(range(24))
    with ShmLoader(expected, 3, num_workers=num_workers) as loader, ShmLoader(expected, 3) as resumed:
        for number in count(1):
            iterator = iter(loader)
            got = next(iterator).tolist()
            tracer = InterruptAtCall(number)
            sys.settrace(tracer)
            try:
                got += next(iterator).tolist()
                got += next(iterator).tolist()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            resumed.load_state_dict(loader.state_dict())
            assert got + [number for batch in resumed for number in batch.tolist()] == expected
            if tracer.countdown > 0:
                break
    assert number > 25


@pytest.mark.parametrize("is_submitted", [False, True])
def test_pass_in_torch_mode_continues_after_an_interrupt_while_it_orders(
    is_submitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShmLoader(range(24), 3, num_workers=1) as loader:
        iterator = iter(loader)
        got = next(iterator).tolist()
        engine = loader._builder.last
        submit = engine.submit

        def interrupted(order: Any) -> None:
            monkeypatch.undo()
            if is_submitted:
                submit(order)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert got + [number for batch in iterator for number in batch.tolist()] == list(range(24))


class Gated(Rows):
    """A dataset whose samples are read once the gate is open."""

    def __init__(self, n: int, gate: Any) -> None:
        super().__init__(n)
        self.gate = gate

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.gate.wait(DEADLINE_S)
        return super().__getitem__(index)


def test_interrupt_ends_a_wait_at_once_and_the_stream_continues() -> None:
    with ShmLoader(Rows(48), batch_size=12, seed=3) as quiet:
        expected = [digest(batch) for batch in quiet]
    got: list[str] = []
    gate = multiprocessing.get_context("fork").Event()
    with ShmLoader(Gated(48, gate), batch_size=12, seed=3, num_workers=2, multiprocessing_context="fork") as loader:
        stream = iter(loader)
        made = loader._passes._made_engine()
        wait, num = made._ready.wait, 0

        def interrupted(timeout_s: float) -> bool:
            nonlocal num
            num += 1
            if num == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return wait(timeout_s)

        made._ready.wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert num == 2
        gate.set()
        got = [digest(batch) for batch in stream]
    assert expected == got


class Signaling(Rows):
    """A dataset in which one sample signals its trainer, once, while the trainer sleeps."""

    def __init__(self, n: int, number: int) -> None:
        super().__init__(n)
        self.number = number

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 17:
            while not self.sleeps(os.getppid()):
                pass
            os.kill(os.getppid(), self.number)
        return super().__getitem__(index)

    @staticmethod
    def sleeps(pid: int) -> bool:
        return stat_of(pid)[0] == "S"


class Stop(BaseException):
    """The exception of a signal handler."""


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGUSR1, Stop)]
)
@pytest.mark.parametrize("seed", [3, None])
def test_exception_of_a_signal_handler_during_a_wait_is_raised_by_next(
    number: int, kind: type[BaseException], seed: int | None
) -> None:
    def stop(*_: object) -> None:
        raise kind

    before = signal.signal(number, stop)
    try:
        with ShmLoader(Signaling(48, number), batch_size=4, seed=seed, num_workers=2) as loader:
            stream = iter(loader)
            num, stops = 0, 0
            while True:
                try:
                    next(stream)
                except StopIteration:
                    break
                except kind:
                    stops += 1
                else:
                    num += 1
        assert stops == 1
        assert num == 12
    finally:
        signal.signal(number, before)


def test_workers_ignore_an_interrupt_of_the_process_group() -> None:
    with ShmLoader(Rows(48, 100), batch_size=4, seed=3, num_workers=2) as loader:
        stream = iter(loader)
        next(stream)
        ring = loader._builder.last._ring
        while not all(ring.worker(number)["pid"] for number in range(2)):  # one may still start
            pass
        for pid in loader._builder.last.pool.pids:
            os.kill(pid, signal.SIGINT)
        assert sum(1 for _ in stream) == 11
        assert loader.stats()["num_restarts"] == 0


def test_signal_handler_that_runs_during_a_wait_changes_nothing() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    with ShmLoader(Rows(48, 300), batch_size=4, seed=3, num_workers=2) as loader:
        thread = threading.Thread(target=disturb)
        thread.start()
        num_epochs = num_disturbed = 0
        try:
            while not num_disturbed or num_epochs < 2:  # the thread may get no time in an epoch
                stream = iter(loader)
                next(stream)
                calls.clear()
                assert sum(1 for _ in stream) == 11
                num_epochs += 1
                num_disturbed += len(calls)
        finally:
            stop.set()
            thread.join()
            signal.signal(signal.SIGUSR1, before)


def interrupt_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Sends an interrupt whenever a worker has been started but not recorded."""
    call = getattr(os, name)

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return call(*arguments)

    monkeypatch.setattr(os, name, interrupted)


def test_interrupt_while_workers_start_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShmLoader(Rows(48), batch_size=4, seed=3, num_workers=2)
    with monkeypatch.context() as patch:
        interrupt_in(patch, "pidfd_open")
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    loader.close()  # afterwards a fixture checks for children


def test_interrupt_while_a_worker_is_replaced_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    with ShmLoader(Rows(48), batch_size=4, seed=3) as quiet:
        expected = [digest(batch) for batch in quiet]
    with ShmLoader(Rows(48), batch_size=4, seed=3, num_workers=2) as loader:
        stream = iter(loader)
        got = [digest(next(stream))]
        WorkerKiller(loader._builder.last).kill(0)
        loader._builder.last._ring.look_again(0.0)
        with monkeypatch.context() as patch:
            interrupt_in(patch, "pidfd_open")
            with pytest.raises(KeyboardInterrupt):
                got += [digest(batch) for batch in stream]
        assert len(loader._builder.last.pool.pids) == 2
        rest = [digest(batch) for batch in stream]
        assert loader.stats()["num_restarts"] == 1
    assert expected[len(expected) - len(rest) :] == rest
    assert len(got) == 1
    assert rest
