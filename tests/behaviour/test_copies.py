"""Copies of a loader by copy and pickle iterate like torch's, whatever the original loader did before."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import Numbers, Shards, batches, raised, same_as_torch


def pickled(loader: Any) -> Any:
    return pickle.loads(pickle.dumps(loader))


def try_copy(copied: Callable[[Any], Any], loader: Any) -> Any:
    """Returns an epoch of a copy, or the error of copying."""
    error = raised(lambda: copied(loader))
    return error or batches(copied(loader))


COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled], ids=["copy", "deepcopy", "pickle"])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True, "batch_size": 3},
    "workers": {"num_workers": 2, "batch_size": 3},
    "batches": {"batch_sampler": [[1, 2], [3]]},
    "single": {"batch_size": None},
    "persistent": {"num_workers": 1, "persistent_workers": True},
}


@COPIES
@pytest.mark.parametrize("name", OPTIONS)
def test_copy_of_a_new_loader_iterates(name: str, copied: Callable[[Any], Any]) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(7), **OPTIONS[name])
        error = raised(lambda: copied(loader))
        if error:
            return error
        twin = copied(loader)
        return type(twin) is kind, len(twin), batches(twin), batches(loader)

    same_as_torch(program)


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        (name, copied)
        for name in ("plain", "shuffled", "workers", "batches", "single")
        for copied in (copy.copy, copy.deepcopy, pickled)
    ],
)
def test_copy_of_a_used_loader_iterates(name: str, copied: Callable[[Any], Any]) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(7), **OPTIONS[name])
        first = batches(loader)
        return first, try_copy(copied, loader), batches(loader)

    same_as_torch(program)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copy_during_an_epoch_begins_at_its_start(copied: Callable[[Any], Any]) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(7), num_workers=1)
        stream = iter(loader)
        first = next(stream).tolist()
        return first, try_copy(copied, loader), batches(stream)

    same_as_torch(program)


@COPIES
def test_copy_of_a_loader_with_persistent_workers_has_workers_of_its_own(copied: Callable[[Any], Any]) -> None:
    """torch's copies share the iterator, so that a pass of the copy ends that of the original, or fail."""
    with ShmLoader(Numbers(7), num_workers=1, persistent_workers=True) as loader:
        expected = batches(loader)
        stream = iter(loader)
        first = next(stream).tolist()
        with copied(loader) as twin:
            assert batches(twin) == expected
        assert [first, *batches(stream)] == expected


@COPIES
def test_copy_of_a_loader_over_an_iterable_dataset_iterates(copied: Callable[[Any], Any]) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Shards([1, 2], [3]), num_workers=2)
        return try_copy(copied, loader), batches(loader)

    same_as_torch(program)


@COPIES
def test_copy_keeps_generator_context_and_locks(copied: Callable[[Any], Any]) -> None:
    def program(kind: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        loader = kind(Numbers(7), shuffle=True, generator=generator, num_workers=1, multiprocessing_context="fork")
        error = raised(lambda: copied(loader))
        if error:
            return error
        twin = copied(loader)
        found = type(twin.multiprocessing_context), twin.generator is generator, batches(twin), batches(loader)
        return found, raised(lambda: setattr(twin, "batch_size", 3))

    same_as_torch(program)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_copy_works_without_its_original(copied: Callable[[Any], Any]) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(7), batch_size=3, num_workers=1)
        twin = copied(loader)
        del loader
        gc.collect()
        return batches(twin)

    assert same_as_torch(program) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.slow(reason="starts workers by spawn, which import torch")
def test_loader_can_be_sent_to_a_spawned_process() -> None:
    def program(kind: Any) -> Any:
        with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
            found: list[Any] = []
            error = raised(lambda: found.extend(pool.apply(list, (kind([1, 2, 3], batch_size=2),))))
            return error or found

    assert same_as_torch(program) == [[1, 2], [3]]
