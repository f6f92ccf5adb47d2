"""Objects that a program shares with its workers (multiprocessing's objects, shared tensors) reach workers of every start method."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import reduction
from multiprocessing.sharedctypes import RawValue
from typing import Any

import pytest
import torch

from shmload import ShmLoader

pytestmark = pytest.mark.slow(reason="starts templates, which import torch")

METHODS = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
MODES = pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])


class Sharing:
    """Counts the samples that were read in `counter`, and adds the value of `epoch` to each sample."""

    def __init__(self, context: Any) -> None:
        self.counter, self.array = context.Value("q", 0), context.Array("d", 2)
        self.epoch = RawValue("q", 0)
        self.lock, self.event, self.barrier = context.Lock(), context.Event(), context.Barrier(2)
        self.queue, self.results = context.SimpleQueue(), context.Queue()
        self.reader, self.writer = context.Pipe(duplex=False)
        self.tensor = torch.zeros(4).share_memory_()
        self.generator = torch.Generator()  # its state is a temporary tensor in shared memory while it is pickled
        self.bits = torch.zeros(8, dtype=torch.uint16).share_memory_()  # plain pickle cannot send this dtype

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        with self.counter.get_lock():
            self.counter.value += 1
        with self.lock:
            self.array[0] += index
            self.tensor[0] += index
            self.writer.send(index)
        self.bits[index] = 1
        self.event.set()
        self.results.put(index)
        return index + 100 * self.epoch.value


@METHODS
@MODES
def test_multiprocessing_objects_are_shared_with_all_workers(method: str, seed: int | None) -> None:
    dataset: Any = Sharing(multiprocessing.get_context(method))
    with ShmLoader(dataset, 2, num_workers=2, multiprocessing_context=method, seed=seed) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert dataset.counter.value >= 8  # in seed mode, workers read ahead into the next epoch
        assert dataset.array[0] >= 28
        assert dataset.tensor[0] >= 28
        assert dataset.bits.tolist() == [1] * 8
        assert dataset.event.is_set()
        assert {dataset.results.get() for _ in range(8)} == {*range(8)} or seed is not None
        assert {dataset.reader.recv() for _ in range(8)} == {*range(8)} or seed is not None
    dataset.results.close()


@METHODS
def test_epoch_counter_reaches_persistent_workers(method: str) -> None:
    dataset: Any = Sharing(multiprocessing.get_context(method))
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    with ShmLoader(dataset, 4, **options) as loader:
        for epoch in range(3):
            dataset.epoch.value = epoch
            assert [batch.tolist() for batch in loader] == [[100 * epoch + i for i in range(k, k + 4)] for k in (0, 4)]
    dataset.results.close()


class OfTensors:
    """A dataset with a shared tensor and no object of multiprocessing."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(4).share_memory_()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.tensor[index] = index
        return index


@METHODS
@MODES
def test_tensors_in_shared_memory_are_shared(method: str, seed: int | None) -> None:
    dataset = OfTensors()
    with ShmLoader(dataset, 4, num_workers=1, multiprocessing_context=method, seed=seed) as loader:
        next(iter(loader))
    assert dataset.tensor.tolist() == [0, 1, 2, 3]


class Deadly(Sharing):
    """Its sample 3 kills the first worker that reads it."""

    def __getitem__(self, index: int) -> int:
        with self.counter.get_lock():
            self.counter.value += 1
            is_first = index == 3 and not self.array[1]
            if is_first:
                self.array[1] = os.getpid()
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@METHODS
def test_replacement_of_a_killed_worker_has_the_same_objects(method: str) -> None:
    dataset: Any = Deadly(multiprocessing.get_context(method))
    with ShmLoader(dataset, 2, num_workers=1, multiprocessing_context=method, seed=1) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert dataset.array[1] not in (0, *loader._builder.last.pool.pids)
        assert dataset.counter.value >= 9
    dataset.results.close()


class Handle:
    """An object for which the program registers a reducer, which opens it in each process."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __getstate__(self) -> Any:
        return {"place": "not opened"}


def reduced(handle: Handle) -> Any:
    return Handle, (f"{handle.place} opened",)


class OfHandle:
    def __init__(self) -> None:
        self.handle = Handle("database")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        return self.handle.place


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@MODES
def test_reducer_registered_with_multiprocessing_is_used(method: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    reducers: dict[Any, Any] = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # private
    monkeypatch.setitem(reducers, Handle, reduced)
    with ShmLoader(OfHandle(), 2, num_workers=1, multiprocessing_context=method, seed=seed) as loader:
        assert list(loader) == [["database opened"] * 2]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_lock_of_another_start_method_is_refused_by_name(method: str) -> None:
    dataset = OfHandle()
    dataset.handle = multiprocessing.get_context("fork").Lock()  # type: ignore[assignment]  # any attribute will do
    with (
        ShmLoader(dataset, 2, num_workers=1, multiprocessing_context=method) as loader,
        pytest.raises(TypeError, match=r"dataset\.handle.*cannot be pickled.*RuntimeError: A SemLock created in a fork context"),
    ):
        next(iter(loader))
