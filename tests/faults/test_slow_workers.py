"""A stopped or slow worker is not dead: it keeps its rows, but does not block closing the loader."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import pytest

from shmload import ShmLoader
from tests.faults.faults_kit import FaultFolder, Rows, await_readable, digest

pytestmark = [
    pytest.mark.slow(reason="waits for time limits that stopped or busy workers exceed"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
CLOSE_S = 60.0  # it takes 1 s, or LONG_S if it waits for the workers
LONG_S = 180
NUM_BATCHES = 100  # on a busy machine many pass before a worker is found at work


def stop_a_claimant(loader: ShmLoader, take: Callable[[], Any]) -> tuple[int, int, tuple[int, int, int, int]]:
    """Stops a worker that holds rows. Returns its number, its pid and what it holds.

    Args:
        take: takes a batch, so that workers have work again if all orders were finished.
    """
    engine = loader._builder.last
    while True:
        for worker, pid in enumerate(engine.pool.pids):
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            held = engine._ring.held_by(worker)
            if held is not None and engine.front is not None:
                return worker, pid, held
            os.kill(pid, signal.SIGCONT)
            select.select([], [], [], 0)
        take()


@pytest.mark.parametrize("seed", [4, None])
def test_batch_of_a_stopped_worker_waits_while_others_continue(seed: int | None) -> None:
    with ShmLoader(Rows(12 * NUM_BATCHES), batch_size=12, seed=seed) as quiet:
        expected = [digest(batch["x"]) for batch in quiet]
    with ShmLoader(Rows(12 * NUM_BATCHES, 400), batch_size=12, seed=seed, num_workers=3, prefetch_factor=2) as loader:
        stream = iter(loader)
        got = [digest(next(stream)["x"]) for _ in range(3)]
        engine = loader._builder.last
        worker, pid, held = stop_a_claimant(loader, lambda: got.append(digest(next(stream)["x"])))
        slot = held[0]
        stopped = next(order for order in engine._queue if order.slot == slot)
        while engine.front is not stopped:
            got.append(digest(next(stream)["x"]))
        others = [order for order in engine._queue if order is not stopped]
        if seed is None:
            others = [order for order in others if order.worker != worker]
        while not all(engine._ring.look(order.slot) == 1 for order in others if order.slot >= 0):
            engine._ready.wait(0.02)
        assert held == engine._ring.held_by(worker)
        assert engine._ring.look(slot) == 0
        assert loader.stats()["num_restarts"] == 0
        os.kill(pid, signal.SIGCONT)
        got += [digest(batch["x"]) for batch in stream]
        assert loader.stats()["num_restarts"] == 0
    assert expected == got


@pytest.mark.parametrize("seed", [4, None])
def test_worker_stopped_before_its_first_sample_times_out_without_blaming_a_sample(
    seed: int | None, fault_folder: FaultFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with ShmLoader(Rows(48), batch_size=12, seed=seed) as quiet:
        expected = [digest(batch["x"]) for batch in quiet]
    fault_folder.arm("after_claim", signal.SIGSTOP)
    options = {"num_workers": 2, "sample_timeout_s": 0.2, "max_restarts": 0}
    with ShmLoader(Rows(48), batch_size=12, seed=seed, **options) as loader:
        got = [digest(batch["x"]) for batch in loader]
        assert (fault_folder.num_triggered, loader.stats()["num_restarts"]) == (1, 1)
    assert expected == got
    assert re.search(
        r"batch \d of epoch 0 was claimed, and no single sample of it was begun, for sample_timeout_s=0.2: worker", caplog.text
    )


@pytest.mark.parametrize("seed", [4, None])
def test_loader_with_a_stopped_worker_closes(seed: int | None) -> None:
    loader = ShmLoader(Rows(12 * NUM_BATCHES, 400), batch_size=12, seed=seed, num_workers=3)
    stream = iter(loader)
    next(stream)
    stop_a_claimant(loader, partial(next, stream))
    began = monotonic()
    loader.close()
    assert monotonic() - began < CLOSE_S
    assert loader._builder.last.pool.pids == []


class Long(Rows):
    """Samples that take minutes in Python, or in a C call that holds the GIL, after a byte written to a pipe."""

    def __init__(self, n: int, kind: str, fd: int) -> None:
        super().__init__(n)
        self.kind, self.fd = kind, fd

    def __getitem__(self, index: int) -> dict[str, Any]:
        os.write(self.fd, b".")
        if self.kind == "c":
            ctypes.PyDLL(None).sleep(LONG_S)
        end = monotonic() + LONG_S
        while monotonic() < end:
            pass
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["python", "c"])
@pytest.mark.parametrize("seed", [4, None])
def test_loader_with_busy_workers_closes(seed: int | None, kind: str) -> None:
    end, begun = os.pipe()
    try:
        loader = ShmLoader(Long(48, kind, begun), batch_size=4, seed=seed, num_workers=2, timeout=0.05)
        stream = iter(loader)
        with pytest.raises(RuntimeError, match=r"timed out after 0\.05 seconds"):
            next(stream)
        for _ in range(2):
            await_readable(end)
            os.read(end, 1)
        began = monotonic()
        loader.close()
        assert monotonic() - began < CLOSE_S
        assert loader._builder.last.pool.pids == []
    finally:
        os.close(end)
        os.close(begun)
