"""A worker thread that is stuck in a sample is left behind at the time limit, and reaches no batch when it wakes up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from shmload import SampleTimeout, ShmLoader
from shmload.worker.thread_pool import WorkerThread

N, LIMIT_S = 32, 0.2


class Stuck(Dataset[Any]):
    """Sample `late` waits for a gate, and is -1 then."""

    late, length = 5, N

    def __init__(self) -> None:
        self.gate, self.num_stuck = threading.Event(), 0

    def __len__(self) -> int:
        return self.length

    def number(self, index: int) -> int:
        if index != self.late:
            return index
        self.num_stuck += not self.gate.is_set()  # in seed mode, the next epoch is read ahead after the gate has opened
        self.gate.wait(60)
        return -1

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full(3000, self.number(index))}


class AtOnce(Stuck):
    """Is stuck before its thread has mapped the memory of batches."""

    late = 0


class InPlace(Stuck):
    """Is stuck between the halves of its row."""

    schema = {"x": ("int64", (3000,))}

    def read_into(self, index: int, out: Any) -> None:
        out["x"][:1500] = index
        out["x"][:] = self.number(index)


class Whole(Stuck):
    """Reads all samples of a chunk in one call."""

    schema = InPlace.schema

    def read_batch_into(self, indices: Any, out: Any) -> None:
        numbers = [self.number(index) for index in indices.tolist()]
        out["x"][:] = np.array(numbers)[:, None]


class Texts(Stuck):
    """Samples of different sizes, whose batches are packed and need more room than their slots have."""

    def __getitem__(self, index: int) -> Any:
        return {"x": f"{self.number(index)} " * (1000 + index)}


class Many(Stuck):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def numbers(batch: Any) -> list[int]:
    """Return the number of each sample, after checking that all its values are the same."""
    found = [set(row.split()) if isinstance(row, str) else set(row.tolist()) for row in batch["x"]]
    assert all(len(values) == 1 for values in found)
    return [int(value) for values in found for value in values]


def workers() -> list[WorkerThread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)]


def left_behind_by(loader: Any) -> list[WorkerThread]:
    return [thread for thread in workers() if thread not in loader._builder.last.pool._threads.values()]


def wake(dataset: Stuck, left_behind: list[WorkerThread]) -> None:
    """Let the threads go on, and wait until they have ended."""
    dataset.gate.set()
    for thread in left_behind:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("kind", [Stuck, AtOnce, InPlace, Whole, Texts, Many])
def test_thread_left_behind_changes_no_batch_when_it_wakes_up(
    kind: Callable[[], Stuck], seed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = kind()
    dataset.length = 2 * N  # so that the next epoch is not read ahead before the gate opens
    expected = [index for index in range(2 * N) if index != dataset.late]
    with ShmLoader(
        dataset, 8, seed=seed, num_workers=2, backend="thread", sample_timeout_s=LIMIT_S, on_error="skip", shuffle=False
    ) as loader:
        iterator = iter(loader)
        held = [next(iterator)]
        left_behind = left_behind_by(loader)
        held += [next(iterator)]
        wake(dataset, left_behind)
        rest = [number for batch in iterator for number in numbers(batch)]
        assert [number for batch in held for number in numbers(batch)] + rest == expected
        assert loader.stats()["num_restarts"] == dataset.num_stuck == len(left_behind)
        assert {(bad["index"], bad["error"].split(":")[0]) for bad in loader.stats()["bad_samples"]} == {
            (dataset.late, "SampleTimeout")
        }
    assert len(left_behind) == (2 if kind in (Whole, Many) and seed is None else 1)  # several rows at once, then one by one
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == len(left_behind)
    assert "in number" in told[-1]
    assert "cannot be killed, is left behind and is replaced" in told[-1]
    assert not workers()


@pytest.mark.parametrize("seed", [None, 5])
def test_time_limit_of_a_thread_is_an_error_and_the_loader_goes_on(seed: int | None) -> None:
    dataset = InPlace()
    with ShmLoader(dataset, 8, seed=seed, num_workers=1, backend="thread", sample_timeout_s=LIMIT_S, shuffle=False) as loader:
        iterator = iter(loader)
        with pytest.raises(SampleTimeout, match=r"sample 5 of epoch 0 \(row 5 of batch 0\) took longer than sample_timeout_s=0.2"):
            next(iterator)
        left_behind = left_behind_by(loader)
        second = next(iterator)
        wake(dataset, left_behind)
        assert [numbers(batch) for batch in (second, *iterator)] == [list(range(first, first + 8)) for first in (8, 16, 24)]


def test_loader_closes_while_a_thread_left_behind_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    dataset = InPlace()
    with ShmLoader(
        dataset, 8, seed=5, num_workers=2, backend="thread", sample_timeout_s=LIMIT_S, on_error="skip", shuffle=False
    ) as loader:
        assert sum(len(numbers(batch)) for batch in loader) == N - 1
    assert [thread.name for thread in workers()]
    caplog.clear()
    wake(dataset, workers())
    assert not caplog.records


def test_thread_without_a_claim_is_not_left_behind() -> None:
    dataset = InPlace()
    dataset.gate.set()
    options: Any = {"num_workers": 1, "backend": "thread", "persistent_workers": True}
    with ShmLoader(dataset, 8, sample_timeout_s=60.0, **options) as loader:
        assert sum(1 for _ in loader) == 4
        pool: Any = loader._builder.last.pool  # type: ignore[union-attr]  # made by the pass
        assert pool.kill(0) is None
        assert sum(1 for _ in loader) == 4


PROGRAM = """
import logging
import time
from torch.utils.data import Dataset
from shmload import ShmLoader

class Asleep(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            time.sleep(1000)
        return index

logging.disable()
with ShmLoader(Asleep(), 4, num_workers=2, backend="thread", sample_timeout_s=0.2, on_error="skip", seed=1, shuffle=False) as loader:
    print([batch.tolist() for batch in loader])
"""


@pytest.mark.slow(reason="runs a program of its own")
def test_program_ends_while_a_thread_left_behind_is_stuck(output_of: Callable[..., str]) -> None:
    assert output_of(PROGRAM).splitlines()[-1] == "[[0, 1, 2], [4, 5, 6, 7]]"
