"""Several iterators of a loader, abandoned iterators, and iterators that outlive their loader."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import KINDS, Numbers, batches, raised, same_as_torch

NUM_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def num_workers_alive() -> int:
    return len(multiprocessing.active_children())


@NUM_WORKERS
def test_two_simultaneous_iterators_do_not_affect_each_other(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(9), batch_size=2, num_workers=num_workers, shuffle=True)
        return [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]

    same_as_torch(program)


def test_second_iterator_of_persistent_workers_resets_the_first() -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(9), batch_size=2, num_workers=2, persistent_workers=True)
        first = iter(loader)
        found = [next(first).tolist(), next(first).tolist()]
        second = iter(loader)
        return found, first is second, batches(first), batches(second)

    assert same_as_torch(program)[1:] == (True, [[0, 1], [2, 3], [4, 5], [6, 7], [8]], [])


@NUM_WORKERS
def test_two_loaders_of_one_dataset_and_one_sampler(num_workers: int) -> None:
    class Once:
        """A sampler that is its own iterator."""

        def __init__(self) -> None:
            self.at = -1

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at >= 9:
                raise StopIteration
            return self.at

    def program(kind: Any) -> Any:
        dataset, sampler = Numbers(9), Once()
        a, b = (iter(kind(dataset, sampler=sampler, num_workers=num_workers)) for _ in range(2))
        return next(a), next(b), batches(a), batches(b)

    same_as_torch(program)


@KINDS
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_an_abandoned_iterator_end(kind: Any, persistent: bool) -> None:
    before = num_workers_alive()
    loader = kind(Numbers(100), num_workers=2, persistent_workers=persistent)
    stream = iter(loader)
    next(stream)
    assert num_workers_alive() == before + 2
    del stream
    gc.collect()
    assert num_workers_alive() == before + (2 if persistent else 0)
    del loader
    gc.collect()
    assert num_workers_alive() == before


@KINDS
def test_workers_that_do_not_persist_end_with_the_epoch(kind: Any) -> None:
    before = num_workers_alive()
    loader = kind(Numbers(8), num_workers=2)
    stream = iter(loader)
    assert len(batches(stream)) == 8
    assert num_workers_alive() == before
    assert next(stream, "end") == "end"
    persistent = kind(Numbers(8), num_workers=2, persistent_workers=True)
    assert len(batches(persistent)) == 8
    assert num_workers_alive() == before + 2


@KINDS
def test_workers_start_with_iter(kind: Any) -> None:
    before = num_workers_alive()
    loader = kind(Numbers(8), num_workers=2)
    len(loader)
    assert num_workers_alive() == before
    stream = iter(loader)
    assert num_workers_alive() == before + 2
    del stream


@NUM_WORKERS
@pytest.mark.parametrize("persistent", [False, True])
def test_iterator_outlives_its_loader(num_workers: int, persistent: bool) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(8), batch_size=3, num_workers=num_workers, persistent_workers=persistent and num_workers > 0)
        stream = iter(loader)
        first = next(stream).tolist()
        del loader
        gc.collect()
        return first, batches(stream)

    assert same_as_torch(program) == ([0, 1, 2], [[3, 4, 5], [6, 7]])


@NUM_WORKERS
def test_iterator_is_an_instance_of_torchs_class_and_its_own_iterator(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(9), batch_size=2, num_workers=num_workers)
        stream = iter(loader)
        lengths = [len(stream), len(loader)]
        next(stream)
        return isinstance(stream, _BaseDataLoaderIter), iter(stream) is stream, lengths, len(stream)

    assert same_as_torch(program) == (True, True, [5, 5], 5)


@NUM_WORKERS
def test_pickling_an_iterator_is_an_error(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Numbers(9), num_workers=num_workers))
        try:
            pickle.dumps(stream)
        except NotImplementedError as error:
            error.__traceback__ = None
            return error.args[0]
        return None

    assert same_as_torch(program) == "{} cannot be pickled"


@NUM_WORKERS
def test_empty_dataset_gives_an_empty_epoch(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind([], num_workers=num_workers)
        return len(loader), batches(loader), batches(loader)

    assert same_as_torch(program) == (0, [], [])


@NUM_WORKERS
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_dataset_that_grows_between_epochs(num_workers: int, persistent: bool, shuffle: bool) -> None:
    def program(kind: Any) -> Any:
        dataset = [0, 1, 2, 3]
        loader = kind(
            dataset, batch_size=3, shuffle=shuffle, num_workers=num_workers, persistent_workers=persistent and num_workers > 0
        )
        first = len(loader), batches(loader)
        dataset += [4, 5, 6]
        return first, len(loader), raised(lambda: batches(loader)) or batches(loader)

    same_as_torch(program)


def test_workers_alternate_between_batches_in_every_epoch() -> None:
    class WorkerIds(Numbers):
        def __getitem__(self, index: int) -> Any:
            return get_worker_info().id

    def program(kind: Any) -> Any:
        loader = kind(WorkerIds(5), num_workers=3, persistent_workers=True)
        found = [batches(loader)]
        for _ in zip(loader, range(2), strict=False):
            pass
        return [*found, batches(loader)]

    assert same_as_torch(program) == [[[0], [1], [2], [0], [1]]] * 2


def test_shutdown_can_be_called_twice_and_ends_the_workers() -> None:
    for kind in (DataLoader, ShmLoader):
        before = num_workers_alive()
        stream = iter(kind(Numbers(100), num_workers=2))
        next(stream)
        stream._shutdown_workers()
        stream._shutdown_workers()
        assert num_workers_alive() == before
