"""threads_per_worker: a worker reads several samples at once, and nothing else changes."""

from __future__ import annotations

import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from shmload import ShmLoader, sample_info, sample_rng
from shmload.worker.thread_reader import read_by_threads

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers
NUM_THREADS = 4


class WaitForThreads:
    """Samples that return only while as many of them as there are threads are being read."""

    def __init__(self) -> None:
        self.barrier: threading.Barrier | None = None

    def __len__(self) -> int:
        return 16

    def meet(self) -> None:
        with _creating:
            if self.barrier is None:
                self.barrier = threading.Barrier(NUM_THREADS)
        self.barrier.wait(timeout=120)

    def __getitem__(self, index: int) -> Any:
        self.meet()
        return index, sample_info().index, sample_rng().random()


_creating = threading.Lock()  # created in the worker, where no thread holds it after the fork


class WaitForThreadsInPlace(WaitForThreads):
    schema: ClassVar = {"index": "int64", "own": "int64", "draw": "float64"}

    def read_into(self, index: int, out: Any) -> None:
        self.meet()
        out["index"], out["own"], out["draw"] = index, sample_info().index, sample_rng().random()


class OneByOne:
    """The same samples, read one by one."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return index, sample_info().index, sample_rng().random()


@pytest.mark.parametrize("kind", [WaitForThreads, WaitForThreadsInPlace])
def test_samples_are_read_at_once_and_are_the_same(kind: Any) -> None:
    with ShmLoader(OneByOne(), 8, shuffle=True, seed=3) as loader:
        expected = [[column.tolist() for column in batch] for batch in loader]
    with ShmLoader(kind(), 8, shuffle=True, seed=3, num_workers=1, threads_per_worker=NUM_THREADS) as loader:
        got = [[column.tolist() for column in (batch.values() if isinstance(batch, dict) else batch)] for batch in loader]
    assert expected == got


def log_to(path: Path, worker: int) -> None:
    logging.getLogger("shmload").addHandler(logging.FileHandler(path))


class Draws(OneByOne):
    """Samples with random numbers of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind, self.own = kind, np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        draw = {
            "random": random.random,
            "numpy": np.random.random,
            "torch": lambda: torch.rand(1).item(),
            "own": self.own.random,
            "sample_rng": lambda: sample_rng().random(),
            "nothing": lambda: 0.0,
        }
        return index, draw[self.kind]()


@pytest.mark.parametrize("kind", ["random", "numpy", "torch", "own", "sample_rng", "nothing"])
def test_draws_that_depend_on_the_threads_timing_are_logged_once(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    begin = partial(log_to, log)
    for _ in ShmLoader(Draws(kind), 4, seed=1, num_workers=1, threads_per_worker=2, worker_init_fn=begin):
        pass
    is_keyed = kind in ("sample_rng", "nothing")
    assert log.read_text().count("the dataset draws from generators that the threads share") == (0 if is_keyed else 1)


def test_threads_give_the_same_in_torch_mode() -> None:
    with ShmLoader(WaitForThreads(), 8, num_workers=2, threads_per_worker=NUM_THREADS) as loader:
        assert [batch[0].tolist() for batch in loader] == [list(range(8)), list(range(8, 16))]


class Odd(OneByOne):
    def __getitem__(self, index: int) -> Any:
        if index % 2:
            raise ValueError(f"sample {index} is odd")
        return index


@pytest.mark.parametrize("seed", [None, 1])
def test_error_is_that_of_the_first_bad_row(seed: int | None) -> None:
    with ShmLoader(Odd(), 4, num_workers=1, threads_per_worker=3, seed=seed) as loader:
        iterator = iter(loader)
        for first in (1, 5, 9, 13):
            with pytest.raises(ValueError, match=f"sample {first} is odd") as caught:
                next(iterator)
            assert f"shmload: sample {first}, " in caught.value.__notes__[0]


def test_bad_samples_are_skipped_and_counted() -> None:
    with ShmLoader(Odd(), 4, num_workers=1, threads_per_worker=3, seed=1, on_error="skip") as loader:
        assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6], [8, 10], [12, 14]]
        assert loader.stats()["num_bad_samples"] == 8


def test_no_read_continues_after_its_batch_failed() -> None:
    begun, may_end = threading.Event(), threading.Event()
    started: list[int] = []
    ended: list[int] = []

    def read(row: int) -> int:
        started.append(row)
        if row == 0:
            begun.wait(30)
            raise ValueError("row 0")
        begun.set()
        may_end.wait(30)
        ended.append(row)
        return row

    results = read_by_threads(ThreadPoolExecutor(2), read, range(8), lambda row: None)
    releasing = threading.Timer(0.05, may_end.set)
    releasing.start()
    with pytest.raises(ValueError, match="row 0"):
        next(results)
    assert sorted([0, *ended]) == sorted(started)
    assert 1 in ended
    releasing.join()


def test_ragged_batch_is_read_by_threads() -> None:
    class Lines(OneByOne):
        def __getitem__(self, index: int) -> Any:
            return np.full(index, index)

    with ShmLoader(Lines(), 4, num_workers=1, threads_per_worker=2, ragged="jagged") as loader:
        assert [batch.lengths.tolist() for batch in loader][1] == [4, 5, 6, 7]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class ThreadContext(SpawnContext):
    """A context like the one in MONAI's loader."""

    Process = threading.Thread  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (OneByOne(), {"threads_per_worker": 0, "num_workers": 1}, "an integer of at least 1; got 0"),
        (OneByOne(), {"threads_per_worker": 2}, "threads_per_worker=2 needs num_workers > 0"),
        (Stream(), {"threads_per_worker": 2, "num_workers": 1}, "needs a map-style dataset"),
        (OneByOne(), {"threads_per_worker": 2, "num_workers": 1, "seed": 1, "seed_samples": True}, "cannot be combined"),
        (
            OneByOne(),
            {"multiprocessing_context": ThreadContext(), "num_workers": 1},
            "ThreadContext starts threads, and .* are processes",
        ),
    ],
)
def test_options_that_threads_cannot_support_are_refused(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ShmLoader(dataset, **options)
