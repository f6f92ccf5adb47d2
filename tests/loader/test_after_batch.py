"""`after_batch` is called once in the trainer for each delivered batch, and does not change positions."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from shmload import ShmLoader

MODES = [{"seed": 3}, {}]


class Numbers:
    """A dataset of each index and the worker's process id."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Recorder:
    """A function for after_batch that records its arguments."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.pids: set[int] = set()

    def __call__(self, batch: Any) -> list[int]:
        self.pids.add(os.getpid())
        self.batches.append(batch[0].tolist())
        return self.batches[-1]


@pytest.mark.parametrize("options", MODES, ids=["seed", "torch"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loop_gets_what_the_function_returns(num_workers: int, options: dict[str, Any]) -> None:
    counted = Recorder()
    with ShmLoader(Numbers(), 3, num_workers=num_workers, after_batch=counted, **options) as loader:
        passes = [list(loader), list(loader)]
    assert passes[0] == passes[1] == [list(range(first, min(first + 3, 20))) for first in range(0, 20, 3)]
    assert counted.batches == passes[0] + passes[1]
    assert counted.pids == {os.getpid()}


class Failed(Exception):
    """The error of the second batch of each pass."""


@pytest.mark.parametrize("options", MODES, ids=["seed", "torch"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_whose_function_fails_is_lost_and_the_next_follows(num_workers: int, options: dict[str, Any]) -> None:
    def fails(batch: Any) -> Any:
        if 4 in batch[0]:
            raise Failed
        return batch[0].tolist()

    with ShmLoader(Numbers(), 3, num_workers=num_workers, after_batch=fails, **options) as loader:
        iterator = iter(loader)
        assert next(iterator) == [0, 1, 2]
        with pytest.raises(Failed) as raised:
            next(iterator)
        assert raised.value.__notes__ == [
            "shmload: raised by after_batch (epoch 0, batch 1); that batch is lost; the next call returns the batch after it"
        ]
        state = loader.state_dict()
        assert [batch[0] for batch in iterator] == [6, 9, 12, 15, 18]
    with ShmLoader(Numbers(), 3, num_workers=num_workers, after_batch=fails, **options) as again:
        again.load_state_dict(state)
        assert [batch[0] for batch in again] == [6, 9, 12, 15, 18]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", MODES, ids=["seed", "torch"])
def test_interrupt_does_not_lose_a_batch(options: dict[str, Any], num_workers: int) -> None:
    interrupts = [KeyboardInterrupt]

    def interrupted(batch: Any) -> Any:
        if 4 in batch[0] and interrupts:
            raise interrupts.pop()
        return batch[0].tolist()

    def make() -> ShmLoader[Any]:
        return ShmLoader(Numbers(), 4, num_workers=num_workers, after_batch=interrupted, **options)

    with make() as loader, make() as resumed:
        iterator = iter(loader)
        assert next(iterator) == [0, 1, 2, 3]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        resumed.load_state_dict(loader.state_dict())
        assert [batch[0] for batch in iterator] == [4, 8, 12, 16]
        assert [batch[0] for batch in resumed] == [4, 8, 12, 16]


@pytest.mark.parametrize("options", MODES, ids=["seed", "torch"])
def test_stop_iteration_from_the_function_does_not_end_the_pass(options: dict[str, Any]) -> None:
    def stops(batch: Any) -> Any:
        return next(iter(()))

    message = r"after_batch \(epoch 0, batch 0\) raised StopIteration"
    with ShmLoader(Numbers(), 4, num_workers=1, after_batch=stops, **options) as loader, pytest.raises(RuntimeError, match=message):
        list(loader)


@pytest.mark.parametrize("options", MODES, ids=["seed", "torch"])
def test_slot_is_free_after_the_function_returns(options: dict[str, Any]) -> None:
    """Checks that a program that keeps every batch holds the function's results and no slot."""
    with ShmLoader(Numbers(), 1, num_workers=1, after_batch=lambda batch: batch[0].clone(), **options) as loader:
        kept = list(loader)
        gc.collect()
        assert loader.stats()["num_copied_out"] == 0
    assert torch.cat(kept).tolist() == list(range(20))


def test_batches_replayed_for_a_resume_do_not_call_the_function() -> None:
    with ShmLoader(Numbers(), 2, num_workers=2, snapshot_every_n_steps=0) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = loader.state_dict()
    counted = Recorder()
    with ShmLoader(Numbers(), 2, num_workers=2, snapshot_every_n_steps=0, after_batch=counted) as loader:
        loader.load_state_dict(state)
        assert list(loader) == counted.batches == [[10, 11], [12, 13], [14, 15], [16, 17], [18, 19]]


class Stream(IterableDataset[int]):
    """An iterable dataset of five numbers."""

    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_an_iterable_dataset_call_the_function(num_workers: int) -> None:
    with ShmLoader(Stream(), 2, num_workers=num_workers, after_batch=torch.Tensor.tolist) as loader:
        assert list(loader) == [[0, 1], [2, 3], [4]]


def test_function_can_be_set_between_passes() -> None:
    functions: list[Callable[[Any], Any] | None] = [None, torch.Tensor.tolist]
    with ShmLoader(range(4), 2, seed=1, num_workers=1) as loader:
        found = []
        for function in functions:
            loader.after_batch = function
            found.append([type(batch) for batch in loader])
    assert found == [[torch.Tensor] * 2, [list] * 2]


def test_after_batch_that_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="after_batch must be a function of a batch or None; got 'normalize'"):
        ShmLoader(range(4), after_batch="normalize")  # type: ignore[arg-type]  # must be refused
