"""A state lists the finished orders: with batches out of order, failed, or without samples, a single count would not suffice."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from time import monotonic
from typing import Any

import pytest
import torch

from shmload import ShmLoader
from shmload._core.trainer import FILLING
from tests.resume import noisy_data as data
from tests.resume.noisy_data import rows

N, BATCH = 40, 2
pytestmark = [
    pytest.mark.slow(reason="most cases start workers for their loaders"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class FirstBatchBlocks(data.Noisy):
    """Its first batch blocks until the trainer lets it continue, so that other batches overtake it."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.gate = torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            assert self.gate.wait(60)
        return super().__getitem__(index)


class WaitingLines(data.Lines):
    """Its first worker has no sample until the trainer lets it continue."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.gate = torch.multiprocessing.get_context("fork").Event()

    def __iter__(self) -> Any:
        for sample in super().__iter__():
            if sample[0] == 0:
                assert self.gate.wait(60)
            yield sample


class StatefulWaitingLines(data.StatefulIteratorLines):
    """Like `WaitingLines`, with an iterator that saves its position."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.gate = torch.multiprocessing.get_context("fork").Event()

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        iterator.gate = self.gate
        iterator.__class__ = _WaitingIterator
        return iterator


class _WaitingIterator(data._LineIterator):
    gate: Any

    def __next__(self) -> torch.Tensor:
        if self.at == 0 and self.numbers.start == 0:
            assert self.gate.wait(60)
        return super().__next__()


KINDS: dict[str, Callable[..., Any]] = {
    "map": FirstBatchBlocks,
    "iterable": WaitingLines,
    "iterable with a state": StatefulWaitingLines,
}


@pytest.mark.parametrize("every", [1, 3, 0])
@pytest.mark.parametrize("is_ordered_then", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_read_once_if_batches_are_out_of_order(kind: str, is_ordered_then: bool, every: int) -> None:
    options: dict[str, Any] = {"num_workers": 3, "snapshot_every_n_steps": every}
    dataset = KINDS[kind](N)
    with ShmLoader(dataset, BATCH, in_order=False, **options) as loader:
        iterator = iter(loader)
        before = rows(islice(iterator, 3))
        assert 0 not in before, "the first batch must be overtaken"
        dataset.gate.set()
        state = json.loads(json.dumps(loader.state_dict()))
        whole = before + rows(iterator)
    assert sorted(whole) == list(range(N))
    dataset = KINDS[kind](N)
    dataset.gate.set()
    with ShmLoader(dataset, BATCH, in_order=is_ordered_then, **options) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        middle = rows(islice(iterator, 2))
        state = json.loads(json.dumps(loader.state_dict()))
        assert sorted(before + middle + rows(iterator)) == list(range(N))
        assert sorted(rows(loader)) == list(range(N)), "the next epoch must be complete"
    with ShmLoader(dataset, BATCH, in_order=False, **options) as loader:
        loader.load_state_dict(state)
        assert sorted(before + middle + rows(loader)) == list(range(N)), "a state may be loaded twice"


class _SlowSearch:
    """A ring in which every order is finished between the first and the second look of the search for a finished order."""

    def __init__(self, ring: Any) -> None:
        self._ring, self._first = ring, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    def look(self, slot: int) -> int:
        if self._first < 0:
            self._first = slot
            return int(FILLING)
        deadline = monotonic() + 60
        while self._ring.look(slot) == FILLING:
            assert monotonic() < deadline, "the order must be finished"
        return int(self._ring.look(slot))


def test_order_finished_while_the_search_looks_elsewhere_is_not_overtaken_by_its_workers_next_one() -> None:
    with ShmLoader(data.StatefulIteratorLines(12), BATCH, num_workers=1, in_order=False) as loader:
        iterator: Any = iter(loader)
        before, engine = rows([next(iterator)]), iterator._engine
        engine._ring = _SlowSearch(engine._ring)
        assert before + rows(iterator) == list(range(12))


@pytest.mark.parametrize("sampler", [None, data.StatefulSampler])
def test_pass_out_of_order_resumes_without_workers(sampler: Any) -> None:
    dataset = FirstBatchBlocks(N)
    options = {} if sampler is None else {"sampler": sampler(N)}
    with ShmLoader(dataset, BATCH, num_workers=2, in_order=False, **options) as loader:
        if sampler is not None:
            dataset.gate.set()
        iterator = iter(loader)
        before = rows(islice(iterator, 3))
        state = loader.state_dict()
        dataset.gate.set()
    options = {} if sampler is None else {"sampler": sampler(N)}
    with ShmLoader(dataset, BATCH, **options) as loader:
        loader.load_state_dict(state)
        assert sorted(before + rows(loader)) == list(range(N))


class Faulty(data.Noisy):
    """One of its samples cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (6, 7):
            raise ValueError("a bad sample")
        return super().__getitem__(index)


@pytest.mark.parametrize("every", [1, 2, 0])
@pytest.mark.parametrize("workers", [0, 2])
def test_failed_batch_counts_as_consumed(workers: int, every: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "snapshot_every_n_steps": every}
    with ShmLoader(Faulty(N), BATCH, **options) as loader:
        iterator, before = iter(loader), []
        for _ in range(6):
            try:
                before += rows([next(iterator)])
            except ValueError:
                before += [6, 7]
        assert before == list(range(12))
        state = loader.state_dict()
    with ShmLoader(Faulty(N), BATCH, **options) as loader:
        loader.load_state_dict(state)
        assert rows(loader) == list(range(12, N))


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_with_only_skipped_samples_counts_as_consumed(workers: int) -> None:
    with ShmLoader(Faulty(N), BATCH, num_workers=workers, on_error="skip") as loader:
        before = rows(islice(iter(loader), 5))
        assert before == [*range(6), *range(8, 12)]
        state = loader.state_dict()
    with ShmLoader(Faulty(N), BATCH, num_workers=workers, on_error="skip") as loader:
        loader.load_state_dict(state)
        assert rows(loader) == list(range(12, N))
