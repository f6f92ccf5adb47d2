"""in_order=False: a slow batch holds up no other; every sample still comes exactly once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import DEADLINE_S, KINDS, Numbers, Told, alike, batches, plain, told
from tests.matrix.versions import TORCH

N = 12
WAIT_S = 30  # a loader that waits for the slow batch waits for ever: after this it says so
FORK = multiprocessing.get_context("fork")
# before 2.7 torch's own gives each worker its next batch in turn, also the slow one, and counts that among those under way
IS_STUCK = pytest.mark.skipif(TORCH < (2, 7), reason="torch's own waits for a slow worker all the same, before 2.7")
KINDS_OUT_OF_ORDER = pytest.mark.parametrize("kind", [pytest.param(DataLoader, marks=IS_STUCK), ShmLoader])


def some(stream: Any, count: int, gate: Any) -> list[Any]:
    """So many batches, or less and the timeout; then the gate is opened."""
    found: list[Any] = []
    try:
        found.extend(plain(batch) for batch in islice(stream, count))
    except RuntimeError as error:
        found.append(told(error))
    gate.set()
    return found


class Gated(Numbers):
    """Sample 0 waits for the gate, and whoever reads it counts as its worker."""

    def __init__(self, n: int = N) -> None:
        super().__init__(n)
        self.gate = FORK.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            assert self.gate.wait(DEADLINE_S)
        info = get_worker_info()
        return index, info is not None and info.id


class GatedStream(IterableDataset):
    """Worker 0 waits for the gate before its second sample."""

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
def test_batches_behind_a_slow_one_come_before_it(kind: Any) -> None:
    dataset = Gated()
    stream = iter(kind(dataset, batch_size=None, num_workers=2, in_order=False, timeout=WAIT_S))
    found = some(stream, N - 2, dataset.gate)
    late = [sample[0] for sample in stream]
    assert not isinstance(found[-1], Told), found
    early = [sample[0] for sample in found]
    assert 0 not in early
    assert 0 in late
    assert list(range(N)) == sorted(early + late)


@IS_STUCK
def test_meanwhile_every_batch_is_made_by_the_worker_that_torch_gives_it_to() -> None:
    def program(kind: Any) -> Any:
        dataset = Gated()
        stream = iter(kind(dataset, batch_size=None, num_workers=2, in_order=False, timeout=WAIT_S))
        early = some(stream, N - 2, dataset.gate)
        return early, list(stream)

    early, late = alike(program)
    assert [index for index, _ in late] == [0, 2]
    assert [[index, 1] for index in (1, *range(3, N))] == early


@KINDS_OUT_OF_ORDER
def test_a_slow_worker_of_an_iterable_dataset_holds_up_no_other(kind: Any) -> None:
    dataset = GatedStream()
    stream = iter(kind(dataset, batch_size=None, num_workers=2, in_order=False, timeout=WAIT_S))
    early = some(stream, 6, dataset.gate)
    assert {0, 10, 11, 12, 13, 14} == set(early)
    assert list(stream) == [1, 2, 3, 4]


@KINDS
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_sample_comes_exactly_once_an_epoch(kind: Any, persistent: bool, num_workers: int) -> None:
    loader = kind(Numbers(40), batch_size=3, num_workers=num_workers, in_order=False, persistent_workers=persistent)
    for _ in range(2):
        found = batches(loader)
        assert list(range(40)) == sorted(index for batch in found for index in batch)
        assert sorted([*range(0, 39, 3), 39]) == sorted(batch[0] for batch in found)


@KINDS
def test_every_sample_of_an_iterable_dataset_comes_exactly_once(kind: Any) -> None:
    dataset = GatedStream()
    dataset.gate.set()
    loader = kind(dataset, batch_size=2, num_workers=3, in_order=False, persistent_workers=True)
    for _ in range(2):
        found = [index for batch in batches(loader) for index in batch]
        assert [10 * w + i for w in range(3) for i in range(5)] == sorted(found)


def test_with_one_worker_or_none_the_order_is_kept() -> None:
    for num_workers in (0, 1):

        def program(kind: Any, num_workers: int = num_workers) -> Any:
            return batches(kind(Numbers(9), batch_size=2, num_workers=num_workers, in_order=False, shuffle=True))

        alike(program)


@KINDS
def test_an_epoch_left_early_leaves_nothing_for_the_next(kind: Any) -> None:
    loader = kind(Numbers(40), batch_size=4, num_workers=2, in_order=False, persistent_workers=True)
    for _ in range(3):
        next(iter(loader))
    assert list(range(40)) == sorted(index for batch in batches(loader) for index in batch)


def test_draws_of_a_sampler_come_in_torchs_order() -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(40), batch_size=4, num_workers=2, in_order=False, shuffle=True)
        return sorted(batches(loader))

    alike(program)
