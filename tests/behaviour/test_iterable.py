"""Iterable datasets: what each worker yields, and in which order, over one epoch and several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.behaviour.behaviour_kit import Shards, as_list, batches, same_as_torch

UNEVEN = ([0, 1, 2, 3, 4, 5, 6], [10, 11], [20, 21, 22, 23, 24])
NUM_WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2, 3])


@NUM_WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_uneven_shards_have_torchs_order(num_workers: int, drop_last: bool, batch_size: int) -> None:
    def program(kind: Any) -> Any:
        return batches(kind(Shards(*UNEVEN), batch_size=batch_size, drop_last=drop_last, num_workers=num_workers))

    found = same_as_torch(program)
    if not drop_last:
        assert sorted(chain.from_iterable(UNEVEN)) == sorted(chain.from_iterable(found))


@NUM_WORKERS
def test_samples_without_batching(num_workers: int) -> None:
    found = same_as_torch(lambda kind: batches(kind(Shards(*UNEVEN), batch_size=None, num_workers=num_workers)))
    assert sorted(chain.from_iterable(UNEVEN)) == sorted(found)


@pytest.mark.parametrize("shards", [([], [1, 2, 3]), ([1, 2, 3], []), ([], []), ([1],), ()], ids=str)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_worker_with_nothing_to_yield(shards: Any, batch_size: int | None) -> None:
    same_as_torch(lambda kind: batches(kind(Shards(*shards), batch_size=batch_size, num_workers=2)))


@pytest.mark.parametrize("prefetch_factor", [1, 2, 5])
def test_workers_that_end_at_different_times_keep_torchs_order(prefetch_factor: int) -> None:
    shards = [list(range(100 * w, 100 * w + n)) for w, n in enumerate((1, 12, 5))]

    def program(kind: Any) -> Any:
        return batches(kind(Shards(*shards), batch_size=2, num_workers=3, prefetch_factor=prefetch_factor))

    assert sorted(chain.from_iterable(shards)) == sorted(chain.from_iterable(same_as_torch(program)))


@NUM_WORKERS
@pytest.mark.parametrize("batch_size", [None, 2])
def test_collate_fn_gets_the_same_as_from_torch(num_workers: int, batch_size: int | None) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Shards(*UNEVEN), batch_size=batch_size, num_workers=num_workers, collate_fn=as_list)
        return [(type(batch), batch) for batch in loader]

    same_as_torch(program)


class Rows(IterableDataset):
    """Dicts with tensors of growing shape, and text."""

    def __iter__(self) -> Iterator[Any]:
        for i in range(6):
            yield {"x": torch.full((1 + i // 2,), float(i)), "name": f"row {i}", "pair": (i, i / 2)}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_structured_samples_are_collated_as_by_torch(num_workers: int, batch_size: int | None) -> None:
    same_as_torch(lambda kind: batches(kind(Rows(), batch_size=batch_size, num_workers=num_workers)))


class WorkerInfoDataset(IterableDataset):
    """Yields what get_worker_info returns inside __iter__, whether its dataset is this one, and random numbers."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_epochs += 1
        info = get_worker_info()
        known = (None, None, None, None)
        if info is not None:
            known = (info.id, info.num_workers, info.seed, info.dataset is self)
        for step in range(4):
            yield known, self.num_epochs, step, torch.rand(()).item()


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (2, False), (1, True), (2, True), (3, True)])
def test_dataset_knows_its_worker_and_epoch(num_workers: int, persistent: bool) -> None:
    def program(kind: Any) -> Any:
        loader = kind(WorkerInfoDataset(), batch_size=2, num_workers=num_workers, persistent_workers=persistent, collate_fn=as_list)
        return [batches(loader) for _ in range(3)]

    epochs = same_as_torch(program)
    last = epochs[2][0][0]
    assert last[1] == (3 if persistent or num_workers == 0 else 1)


class Shrinking(IterableDataset):
    """A dataset that yields fewer samples each epoch, down to zero."""

    def __init__(self) -> None:
        self.left = 5

    def __iter__(self) -> Iterator[int]:
        self.left -= 2
        return iter(range(self.left))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_epochs_of_different_lengths_follow_each_other(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Shrinking(), batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
        return [batches(loader) for _ in range(3)]

    assert same_as_torch(program)[2] == []


@pytest.mark.parametrize("persistent", [False, True])
def test_abandoned_epoch_does_not_affect_the_next(persistent: bool) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Shards(*UNEVEN), batch_size=2, num_workers=2, persistent_workers=persistent)
        found = []
        for num_taken in (1, 4, 0, 100):
            for step, batch in enumerate(loader):
                if step == num_taken:
                    break
                found.append(batch.tolist())
        return found

    same_as_torch(program)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_endless_dataset_is_read_only_as_far_as_needed(num_workers: int) -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            at = 0
            while True:
                yield at
                at += 1

    def program(kind: Any) -> Any:
        stream = iter(kind(Endless(), batch_size=3, num_workers=num_workers))
        return [next(stream).tolist() for _ in range(7)]

    same_as_torch(program)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_exhausted_iterator_stays_exhausted(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Shards([1, 2], [3]), batch_size=2, num_workers=num_workers))
        return [next(stream, "end") for _ in range(5)]

    assert same_as_torch(program)[2:] == ["end"] * 3


@pytest.mark.slow(reason="workers start as new interpreters, which import everything again")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_sharding_is_the_same_with_every_start_method(method: str) -> None:
    def program(kind: Any) -> Any:
        return batches(kind(Shards(*UNEVEN), batch_size=2, num_workers=2, multiprocessing_context=method))

    same_as_torch(program)
