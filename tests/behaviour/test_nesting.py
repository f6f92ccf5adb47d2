"""Loaders inside datasets, inside workers, and in forked trainers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import DEADLINE_S, KINDS, WORKERS, Numbers, batches, raised, same_as_torch


class OfLoaders(Numbers):
    """A dataset whose sample i is an epoch of another loader."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__(3)
        self.kind, self.options = kind, options

    def __getitem__(self, index: int) -> Any:
        before = get_worker_info()
        found = batches(self.kind(Numbers(index + 2), batch_size=index + 2, **self.options))
        return sum(found[0]), before is get_worker_info()


class Streaming(IterableDataset):
    """An iterable dataset that iterates another loader."""

    def __init__(self, kind: Any) -> None:
        self.loader = kind(Numbers(7), batch_size=None, shuffle=True)

    def __iter__(self) -> Any:
        return iter(self.loader)


@WORKERS
def test_dataset_can_use_a_loader_without_workers(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return batches(kind(OfLoaders(kind), batch_size=None, num_workers=num_workers))

    assert same_as_torch(program) == [[1, True], [3, True], [6, True]]


@WORKERS
def test_iterable_dataset_can_use_a_loader(num_workers: int) -> None:
    same_as_torch(lambda kind: batches(kind(Streaming(kind), batch_size=2, num_workers=num_workers)))


def test_dataset_without_workers_can_use_a_loader_with_workers() -> None:
    assert same_as_torch(lambda kind: batches(kind(OfLoaders(kind, num_workers=1), batch_size=None)))[2] == [6, True]


def test_worker_cannot_start_workers() -> None:
    error = same_as_torch(lambda kind: raised(lambda: batches(kind(OfLoaders(kind, num_workers=1), num_workers=1))))
    assert error.kind is AssertionError
    assert error.first == "Caught AssertionError in DataLoader worker process 0."
    assert error.last == "AssertionError: daemonic processes are not allowed to have children"


def in_a_child(program: Any) -> Any:
    """Returns what `program` returns in a child made by os.fork."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, pickle.dumps(program()))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return pickle.loads(found)


@KINDS
@pytest.mark.parametrize("num_workers", [0, 1])
def test_forked_child_iterates_another_loader_at_the_same_time(kind: Any, num_workers: int) -> None:
    loader = kind(Numbers(6), batch_size=2, num_workers=2)
    stream = iter(loader)
    first = next(stream).tolist()
    found = in_a_child(lambda: batches(kind(Numbers(4), batch_size=2, num_workers=num_workers)))
    assert found == [[0, 1], [2, 3]]
    assert [first, *batches(stream)] == [[0, 1], [2, 3], [4, 5]]


@KINDS
def test_forked_child_can_begin_an_epoch_of_the_trainers_loader(kind: Any) -> None:
    loader = kind(Numbers(6), batch_size=2, num_workers=1)
    batches(loader)
    assert in_a_child(lambda: batches(loader)) == [[0, 1], [2, 3], [4, 5]]
    stream = iter(loader)
    first = next(stream).tolist()
    assert in_a_child(lambda: batches(loader)) == [[0, 1], [2, 3], [4, 5]]
    assert [first, *batches(stream)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("seed", [None, 3])
def test_forked_child_can_begin_an_epoch_of_a_loader_with_persistent_workers(seed: int | None) -> None:
    with ShmLoader(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True, seed=seed) as loader:  # torch's is refused
        expected = batches(loader)
        assert in_a_child(lambda: [batches(loader), batches(loader)]) == [expected, expected]
        stream = iter(loader)
        first = next(stream).tolist()
        assert in_a_child(lambda: batches(loader)) == expected
        assert [first, *batches(stream)] == expected == batches(loader)


def child_epoch(loader: Any, pipe: Any) -> None:
    pipe.send(batches(loader))
    pipe.close()


@KINDS
def test_child_of_multiprocessing_can_iterate_the_parents_loader(kind: Any) -> None:
    context = multiprocessing.get_context("fork")
    loader = kind(Numbers(6), batch_size=2, num_workers=1)
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=child_epoch, args=(loader, writer))
    child.start()
    assert reader.poll(DEADLINE_S)
    assert reader.recv() == [[0, 1], [2, 3], [4, 5]]
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    child.close()


@KINDS
def test_exit_of_a_child_does_not_end_the_trainers_workers(kind: Any) -> None:
    loader = kind(Numbers(6), batch_size=2, num_workers=2, persistent_workers=True)
    first = batches(loader)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=int)
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    child.close()
    assert batches(loader) == first
