"""`backend="auto"` chooses threads or processes once, says why, and changes neither batches nor the trainer."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shmload import ShmLoader
from shmload.engine import backend_choice
from shmload.engine.backend_choice import chosen_backend
from shmload.modes import gil_share
from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Range
from shmload.worker import thread_pool

needs_gil = pytest.mark.skipif(not backend_choice.has_gil(), reason="this Python has no GIL, so nothing is measured")
N = 24
# measured shares of samples that release the lock, and that hold it: where other programs wait for the CPUs, they come closer
RELEASED_MAX, HELD_MIN = 0.6, 0.7


def sleep(_: int) -> None:
    """Release the lock, like a read from a network."""
    time.sleep(0.02)  # long beside the time for which a busy machine may stop a thread that holds the lock


def count(_: int) -> None:
    """Hold the lock, like a decoder that is written in Python."""
    for _ in range(40_000):
        pass


class Draws(Dataset[Any]):
    """Numbers, drawn from every generator after some work."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self.work = work
        self.opened_by: int | None = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.opened_by = os.getpid()
        self.work(index)
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(1))], dtype=torch.float64)


def rows(loader: Any) -> list[Any]:
    return [row for batch in loader for row in batch.tolist()]


def chosen(loader: Any) -> Any:
    return loader.stats()["backend"]


@pytest.fixture
def measure_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures as usual, and rounds what it finds to 0 or 1, as on a machine with nothing else to do."""

    def measured(config: Any) -> float:
        return float(gil_share.measured_share(config) > RELEASED_MAX)

    monkeypatch.setattr("shmload.loader.measured_share", measured)


@needs_gil
@pytest.mark.usefixtures("measure_rounds")
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(("work", "expected"), [(sleep, "thread"), (count, "process")])
def test_batches_are_those_of_the_backend_that_fits_the_dataset(
    work: Callable[[int], None], expected: Literal["thread", "process"], seed: int | None
) -> None:
    def read(backend: Any) -> tuple[Any, Any]:
        torch.manual_seed(5)
        dataset = Draws(work)
        with ShmLoader(dataset, 4, shuffle=True, num_workers=2, seed=seed, backend=backend) as loader:
            found = rows(loader), torch.rand(1).item(), random.getstate(), dataset.opened_by is None
            return found, loader.stats().get("backend")

    found, choice = read("auto")
    assert (choice["backend"], choice["held_share"]) == (expected, float(expected == "process"))
    assert found == read(expected)[0]


@needs_gil
@pytest.mark.usefixtures("measure_rounds")
def test_repr_and_stats_name_the_choice_and_its_reason() -> None:
    with ShmLoader(Draws(sleep), 4, num_workers=2, seed=1, backend="auto") as loader:
        assert "backend=auto" in repr(loader)
        assert "backend" not in loader.stats()
        rows(loader)
        reason = chosen(loader)["reason"]
        assert f"backend=thread ({reason})" in repr(loader)
        assert "of the time; 2 threads allow 25.0%" in reason


@needs_gil
@pytest.mark.parametrize(
    ("held_share", "num_workers", "expected"),
    [(0.2, 2, "thread"), (0.3, 2, "process"), (0.2, 4, "process"), (0.4, 1, "thread"), (0.6, 1, "process")],
)
def test_threads_are_chosen_if_all_together_hold_the_lock_for_half_of_the_time(
    held_share: float, num_workers: int, expected: str
) -> None:
    loader = ShmLoader(Draws(sleep), 4, num_workers=num_workers, backend="auto")
    choice = chosen_backend(loader._config(), lambda config: held_share)
    assert (choice.backend, choice.held_share) == (expected, held_share)


class Stateful(Draws):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _not_measured(config: Any) -> float:
    raise AssertionError("there is nothing to measure")


@pytest.mark.parametrize(
    ("dataset", "options", "reason"),
    [
        (Draws(sleep), {"multiprocessing_context": "fork"}, "multiprocessing_context"),
        (Draws(sleep), {"threads_per_worker": 2}, "threads_per_worker=2"),
        (Draws(sleep), {"share": "node", "seed": 1}, "share='node'"),
        (Stateful(sleep), {}, "Stateful"),
    ],
)
def test_where_threads_are_refused_processes_are_chosen(dataset: Any, options: dict[str, Any], reason: str) -> None:
    loader = ShmLoader(dataset, 4, num_workers=2, backend="auto", **options)
    choice = chosen_backend(loader._config(), _not_measured)
    assert choice.backend == "process"
    assert reason in choice.reason


def test_without_a_lock_threads_are_chosen_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "has_gil", lambda: False)
    choice = chosen_backend(ShmLoader(Draws(count), 4, num_workers=2, backend="auto")._config(), _not_measured)
    assert (choice.backend, choice.reason) == ("thread", "this Python has no GIL")


@needs_gil
def test_dataset_that_cannot_be_pickled_is_read_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil_share, "context_of", lambda wanted: multiprocessing.get_context("forkserver"))
    with ShmLoader(Draws(lambda index: None), 4, num_workers=2, seed=1, backend="auto") as loader:
        assert len(rows(loader)) == N
        assert chosen(loader)["backend"] == "thread"
        assert "dataset.work" in chosen(loader)["reason"]


@needs_gil
@pytest.mark.slow(reason="starts an interpreter")
def test_dataset_is_measured_in_a_process_that_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil_share, "context_of", lambda wanted: multiprocessing.get_context("spawn"))
    with ShmLoader(Draws(sleep), 4, shuffle=True, num_workers=2, seed=1, backend="auto") as loader:
        assert len(rows(loader)) == N
        assert chosen(loader)["held_share"] < RELEASED_MAX


def _fail(index: int) -> None:
    raise ValueError(f"sample {index} is damaged")


def _exit(index: int) -> None:
    if multiprocessing.current_process().name == "shmload measures the GIL":
        os._exit(1)


@needs_gil
@pytest.mark.parametrize(("work", "reason"), [(_fail, "ValueError: sample 0 is damaged"), (_exit, "the measuring process died")])
def test_samples_that_cannot_be_measured_are_read_by_processes(work: Callable[[int], None], reason: str) -> None:
    before = multiprocessing.active_children()
    config = ShmLoader(Draws(work), 4, num_workers=2, backend="auto")._config()
    choice = chosen_backend(config, gil_share.measured_share)
    assert (choice.backend, choice.reason) == ("process", f"the first samples could not be measured: {reason}")
    assert multiprocessing.active_children() == before


def _fail_first(index: int) -> None:
    sleep(index)
    if index < 2:
        raise ValueError


@needs_gil
def test_bad_samples_that_are_skipped_do_not_decide() -> None:
    with ShmLoader(Draws(_fail_first), 4, num_workers=2, seed=1, on_error="skip", backend="auto") as loader:
        assert len(rows(loader)) == N - 2
        assert chosen(loader)["held_share"] is not None  # so it was measured


class Stream(IterableDataset[Any]):
    """Samples that need `worker_init_fn` and the worker's info."""

    is_open = False

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        assert self.is_open
        for index in range(info.id, N, info.num_workers):
            sleep(index)
            yield index


def _open(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.is_open = True


@needs_gil
@pytest.mark.parametrize("batch_size", [4, None])
def test_samples_of_a_stream_are_measured_in_a_worker_that_was_set_up(batch_size: int | None) -> None:
    with ShmLoader(Stream(), batch_size, num_workers=2, worker_init_fn=_open, backend="auto") as loader:
        assert sorted(index for batch in loader for index in torch.as_tensor(batch).reshape(-1).tolist()) == list(range(N))
        assert chosen(loader)["held_share"] < RELEASED_MAX


@needs_gil
def test_choice_is_made_once_and_not_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(config: Any) -> float:
        measured.append(config.num_workers)
        return 0.0

    monkeypatch.setattr("shmload.loader.measured_share", measure)
    with ShmLoader(Draws(sleep), 4, backend="auto") as loader:
        rows(loader)
        assert not measured
        loader.num_workers = 1
        rows(loader)
        rows(loader)
        assert measured == [1]
        assert chosen(loader)["backend"] == "thread"


@needs_gil
def test_lock_is_held_while_a_sample_never_ends() -> None:
    def reads() -> Iterator[None]:
        yield
        while True:
            pass

    assert _share_of(reads) > HELD_MIN


def _share_of(reads: Callable[[], Iterator[None]]) -> float:
    """Return the share in a process of its own, because the thread goes on."""
    answers, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: (sender.send(gil_share.held_share(reads())), os._exit(0)))
    process.start()
    share: float = answers.recv()
    process.join()
    return share


@needs_gil
@pytest.mark.usefixtures("measure_rounds")
@pytest.mark.parametrize(("work", "expected"), [(sleep, "thread"), (count, "process")])
def test_pipeline_chooses_too(work: Callable[[int], None], expected: str) -> None:
    def worked(index: int) -> int:
        work(index)
        return index

    with Conveyer([Range(N, repeating=False), DistributedBatchedMap(worked, 2), Collate(4)], backend="auto") as pipeline:
        assert [index for batch in pipeline for index in batch.tolist()] == list(range(N))
        assert pipeline.stats()["backend"]["backend"] == expected


def test_threads_that_were_chosen_are_the_workers() -> None:
    before = set(thread_pool._pools)
    with ShmLoader(Draws(sleep), 4, num_workers=2, seed=1, backend="auto") as loader:
        next(iter(loader))
        assert len(set(thread_pool._pools) - before) == 1
