"""in_order=False: a slow batch does not delay the others, and every sample is delivered exactly once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import DEADLINE_S, KINDS, ErrorSummary, Numbers, batches, error_summary, plain, same_as_torch
from tests.matrix.versions import TORCH

N = 12
WAIT_S = 30  # timeout of a loader that waits for the slow batch
FORK = multiprocessing.get_context("fork")
# before 2.7 torch's own loader gives batches to workers in turn, also to the slow one, whose batch counts as outstanding
NEEDS_TORCH_2_7 = pytest.mark.skipif(TORCH < (2, 7), reason="before 2.7 torch's own loader also waits for a slow worker")
KINDS_OUT_OF_ORDER = pytest.mark.parametrize("kind", [pytest.param(DataLoader, marks=NEEDS_TORCH_2_7), ShmLoader])


def some(stream: Any, count: int, gate: Any) -> list[Any]:
    """Takes `count` batches, or fewer and the timeout error, and then opens the gate."""
    found: list[Any] = []
    try:
        found.extend(plain(batch) for batch in islice(stream, count))
    except RuntimeError as error:
        found.append(error_summary(error))
    gate.set()
    return found


class Gated(Numbers):
    """A dataset whose sample 0 waits for the gate; samples contain the number of their worker."""

    def __init__(self, n: int = N) -> None:
        super().__init__(n)
        self.gate = FORK.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            assert self.gate.wait(DEADLINE_S)
        info = get_worker_info()
        return index, info is not None and info.id


class GatedStream(IterableDataset):
    """An iterable dataset of which worker 0 waits for the gate before its second sample."""

    def __init__(self) -> None:
        self.gate = FORK.Event()

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        for i in range(5):
            if info.id == 0 and i == 1:
                assert self.gate.wait(DEADLINE_S)
            yield 10 * info.id + i


@KINDS_OUT_OF_ORDER
def test_batches_after_a_slow_one_are_delivered_before_it(kind: Any) -> None:
    dataset = Gated()
    stream = iter(kind(dataset, batch_size=None, num_workers=2, in_order=False, timeout=WAIT_S))
    found = some(stream, N - 2, dataset.gate)
    late = [sample[0] for sample in stream]
    assert not isinstance(found[-1], ErrorSummary), found
    early = [sample[0] for sample in found]
    assert 0 not in early
    assert 0 in late
    assert list(range(N)) == sorted(early + late)


@NEEDS_TORCH_2_7
def test_batches_are_assigned_to_the_same_workers_as_by_torch() -> None:
    def program(kind: Any) -> Any:
        dataset = Gated()
        stream = iter(kind(dataset, batch_size=None, num_workers=2, in_order=False, timeout=WAIT_S))
        early = some(stream, N - 2, dataset.gate)
        return early, list(stream)

    early, late = same_as_torch(program)
    assert [index for index, _ in late] == [0, 2]
    assert [[index, 1] for index in (1, *range(3, N))] == early


@KINDS_OUT_OF_ORDER
def test_slow_worker_of_an_iterable_dataset_does_not_delay_others(kind: Any) -> None:
    dataset = GatedStream()
    stream = iter(kind(dataset, batch_size=None, num_workers=2, in_order=False, timeout=WAIT_S))
    early = some(stream, 6, dataset.gate)
    assert {0, 10, 11, 12, 13, 14} == set(early)
    assert list(stream) == [1, 2, 3, 4]


@KINDS
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_sample_is_delivered_once_per_epoch(kind: Any, persistent: bool, num_workers: int) -> None:
    loader = kind(Numbers(40), batch_size=3, num_workers=num_workers, in_order=False, persistent_workers=persistent)
    for _ in range(2):
        found = batches(loader)
        assert list(range(40)) == sorted(index for batch in found for index in batch)
        assert sorted([*range(0, 39, 3), 39]) == sorted(batch[0] for batch in found)


@KINDS
def test_every_sample_of_an_iterable_dataset_is_delivered_once(kind: Any) -> None:
    dataset = GatedStream()
    dataset.gate.set()
    loader = kind(dataset, batch_size=2, num_workers=3, in_order=False, persistent_workers=True)
    for _ in range(2):
        found = [index for batch in batches(loader) for index in batch]
        assert [10 * w + i for w in range(3) for i in range(5)] == sorted(found)


def test_order_is_kept_with_at_most_one_worker() -> None:
    for num_workers in (0, 1):

        def program(kind: Any, num_workers: int = num_workers) -> Any:
            return batches(kind(Numbers(9), batch_size=2, num_workers=num_workers, in_order=False, shuffle=True))

        same_as_torch(program)


@KINDS
def test_abandoned_epoch_leaves_nothing_for_the_next(kind: Any) -> None:
    loader = kind(Numbers(40), batch_size=4, num_workers=2, in_order=False, persistent_workers=True)
    for _ in range(3):
        next(iter(loader))
    assert list(range(40)) == sorted(index for batch in batches(loader) for index in batch)


def test_sampler_draws_random_numbers_in_torchs_order() -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(40), batch_size=4, num_workers=2, in_order=False, shuffle=True)
        return sorted(batches(loader))

    same_as_torch(program)
