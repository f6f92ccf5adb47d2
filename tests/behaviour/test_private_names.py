"""Private names of torch's loader that other programs use: trainers, profilers, samplers, stateful loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, StackDataset, Subset, random_split

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import KINDS, Numbers, Shards, batches, raised, same_as_torch

LOADER_NAMES = ["_dataset_kind", "_auto_collation", "_IterableDataset_len_called", "_iterator", "_DataLoader__initialized"]
ITERATOR_NAMES = [
    "_auto_collation",
    "_base_seed",
    "_dataset_kind",
    "_drop_last",
    "_IterableDataset_len_called",
    "_num_workers",
    "_num_yielded",
    "_persistent_workers",
    "_pin_memory",
    "_pin_memory_device",
    "_shared_seed",
    "_timeout",
]
WORKER_ITERATOR_NAMES = ["_prefetch_factor", "_in_order", "_shutdown", "_worker_init_fn"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"batch_sampler": [[1, 2]]}], ids=str)
@pytest.mark.parametrize("iterable", [False, True])
def test_private_attributes_of_the_loader(num_workers: int, options: dict[str, Any], iterable: bool) -> None:
    if iterable and "batch_sampler" in options:
        options = {"drop_last": True}

    def program(kind: Any) -> Any:
        loader = kind(Shards([1]) if iterable else Numbers(), num_workers=num_workers, **options)
        sampler = loader._index_sampler
        is_own = sampler is (loader.batch_sampler if loader._auto_collation else loader.sampler)
        return [getattr(loader, name) for name in LOADER_NAMES], is_own, type(sampler)

    same_as_torch(program)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ITERATOR_NAMES)
def test_private_attribute_of_the_iterator(name: str, num_workers: int) -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Numbers(), num_workers=num_workers))
        before = getattr(stream, name)
        next(stream)
        return before, getattr(stream, name)

    same_as_torch(program)


@pytest.mark.parametrize("name", ["_prefetch_factor", *WORKER_ITERATOR_NAMES[1:]])
def test_private_attribute_of_the_iterator_with_workers(name: str) -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Numbers(), num_workers=2))
        return getattr(stream, name, "missing")

    assert same_as_torch(program) != "missing"


@KINDS
@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterator_refers_to_the_loaders_objects(kind: Any, num_workers: int) -> None:
    loader = kind(Numbers(), num_workers=num_workers)
    stream = iter(loader)
    assert stream._dataset is loader.dataset
    assert stream._collate_fn is loader.collate_fn
    assert stream._index_sampler is loader._index_sampler


@KINDS
@pytest.mark.parametrize("persistent", [False, True])
def test_loader_keeps_only_persistent_workers(kind: Any, persistent: bool) -> None:
    loader = kind(Numbers(), num_workers=2, persistent_workers=persistent)
    assert loader._iterator is None
    stream = iter(loader)
    assert (loader._iterator is stream) == persistent
    assert (loader._iterator is None) != persistent


@KINDS
def test_workers_are_processes_that_live_until_the_end_of_the_epoch(kind: Any) -> None:
    loader = kind(Numbers(), num_workers=2, persistent_workers=True)
    stream = iter(loader)
    workers = list(stream._workers)
    assert len({worker.pid for worker in workers}) == 2
    assert all(worker.is_alive() and worker.daemon for worker in workers)
    batches(stream)
    batches(loader)
    assert [worker.pid for worker in workers] == [worker.pid for worker in loader._iterator._workers]


@KINDS
def test_workers_can_be_shut_down_as_by_lightning(kind: Any) -> None:
    loader = kind(Numbers(5), num_workers=2, persistent_workers=True)
    assert len(batches(loader)) == 5
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert len(batches(loader)) == 5


def test_nothing_is_delivered_after_a_shutdown() -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Numbers(50), num_workers=2))
        next(stream)
        stream._shutdown_workers()
        return raised(lambda: [next(stream, "end") for _ in range(10)]) is not None

    same_as_torch(program)


@KINDS
def test_subclass_can_override_get_iterator(kind: Any) -> None:
    class Hooked(kind):  # type: ignore[misc,valid-type]  # a class known only at run time
        num_made = 0

        def _get_iterator(self) -> Any:
            self.num_made += 1
            return super()._get_iterator()

    loader = Hooked(Numbers(4), num_workers=1)
    assert len(batches(loader)) == 4
    assert loader.num_made == 1


@KINDS
def test_iterator_of_a_subclass_is_kept_with_persistent_workers(kind: Any) -> None:
    class OwnIterator:
        def __init__(self) -> None:
            self.left = 0

        def _reset(self, *_: Any) -> None:
            self.left = 2

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

        def __iter__(self) -> Any:
            return self

    class Hooked(kind):  # type: ignore[misc,valid-type]  # a class known only at run time
        def _get_iterator(self) -> Any:
            return OwnIterator()

    loader = Hooked(Numbers(4), num_workers=1, persistent_workers=True)
    assert [list(loader) for _ in range(3)] == [[], [1, 0], [1, 0]]


@KINDS
def test_subclass_can_wrap_each_batch(kind: Any) -> None:
    class Doubling(kind):  # type: ignore[misc,valid-type]  # a class known only at run time
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield 2 * batch

        def __len__(self) -> int:
            return 7

    loader = Doubling(Numbers(4), num_workers=1)
    assert batches(loader) == [[0], [2], [4], [6]]
    assert len(loader) == 7


def test_torchs_subsets_and_wrappers_of_datasets() -> None:
    def program(kind: Any) -> Any:
        generator = torch.Generator().manual_seed(4)
        parts: list[Dataset[Any]] = [
            *random_split(Numbers(9), [4, 5], generator=generator),
            ConcatDataset([Numbers(2), Numbers(3)]),
            StackDataset(Numbers(4), Numbers(4)),
            Subset(StackDataset(a=Numbers(4)), [2, 1]),
            ChainDataset([Shards([1, 2]), Shards([3])]),
        ]
        return [[batches(kind(part, batch_size=3, num_workers=n)) for n in (0, 1)] for part in parts]

    same_as_torch(program)


def test_repr_is_shmloads() -> None:
    assert repr(ShmLoader(Numbers(3))).startswith("ShmLoader(Numbers, batch_size=1, num_workers=0, torch mode")


@pytest.mark.parametrize("seed", [None, 7])
def test_override_of_get_iterator_in_a_librarys_loader_is_called(seed: int | None) -> None:
    class Doubling(torch.utils.data.DataLoader[Any]):  # as PyTorch Geometric's NeighborLoader adds features in the trainer
        def _get_iterator(self) -> Any:
            return (batch * 2 for batch in super()._get_iterator())

    class Both(Doubling, ShmLoader[Any]):
        """Combines both classes as docs/frameworks.md advises."""

    assert [batch.tolist() for batch in Both(range(4), batch_size=2, seed=seed)] == [[0, 2], [4, 6]]
