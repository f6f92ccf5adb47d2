"""Exceptions in iterable datasets: what is raised, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from tests.behaviour.behaviour_kit import ErrorSummary, outcomes, raised, same_as_torch

NUM_WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2])


def worker_id() -> int:
    """Returns the number of this process's worker, or 0 in the trainer."""
    info = get_worker_info()
    return 0 if info is None else info.id


class Generated(IterableDataset):
    """A dataset whose generator raises at its fifth sample, in worker 0 only."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        for i in range(8):
            if i == 4 and worker_id() == 0:
                raise self.error
            yield 10 * worker_id() + i


class Counting(Generated):
    """The same with an iterator that can continue after the exception."""

    def __iter__(self) -> Iterator[int]:
        self.at = -1
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 4 and worker_id() == 0:
            raise self.error
        if self.at == 8:
            raise StopIteration
        return 10 * worker_id() + self.at


@NUM_WORKERS
@pytest.mark.parametrize("kind_of_dataset", [Generated, Counting])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_exception_midway_is_raised_and_iterators_that_can_continue_do(
    num_workers: int, kind_of_dataset: type[Generated], batch_size: int | None
) -> None:
    def program(kind: Any) -> Any:
        dataset = kind_of_dataset(ValueError("midway"))
        return outcomes(iter(kind(dataset, batch_size=batch_size, num_workers=num_workers)))

    found = same_as_torch(program)
    errors = [one for one in found if isinstance(one, ErrorSummary)]
    assert len(errors) == 1
    assert errors[0].kind is ValueError
    if num_workers:
        assert errors[0].first == "Caught ValueError in DataLoader worker process 0."
        assert errors[0].last == "ValueError: midway"


@NUM_WORKERS
@pytest.mark.parametrize("persistent", [False, True])
def test_epoch_after_an_exception_is_complete(num_workers: int, persistent: bool) -> None:
    def program(kind: Any) -> Any:
        loader = kind(
            Generated(KeyError("midway")), batch_size=3, num_workers=num_workers, persistent_workers=persistent and num_workers > 0
        )
        return outcomes(iter(loader)), outcomes(iter(loader))

    first, second = same_as_torch(program)
    assert first == second


class Unstartable(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        raise OSError("no such stream")


@NUM_WORKERS
def test_exception_in_iter_is_raised_when_torch_raises_it(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return raised(lambda: next(iter(kind(Unstartable(), num_workers=num_workers))))

    error = same_as_torch(program)
    assert error.kind is OSError
    assert error.last.endswith("no such stream")


class NoIterator(IterableDataset):
    def __iter__(self) -> Any:
        return 7


@NUM_WORKERS
def test_iter_that_returns_no_iterator_is_an_error(num_workers: int) -> None:
    assert same_as_torch(lambda kind: raised(lambda: next(iter(kind(NoIterator(), num_workers=num_workers))))).kind is TypeError


class OfDifferentShapes(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from ([1], [2], [3], [4, 5], [6], [7])


@NUM_WORKERS
def test_exception_in_collate_loses_only_that_batch(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return outcomes(iter(kind(OfDifferentShapes(), batch_size=2, num_workers=num_workers)))

    found = same_as_torch(program)
    assert sum(isinstance(one, ErrorSummary) for one in found) == max(num_workers, 1)


def init_fails(number: int) -> None:
    raise RuntimeError(f"init of {number}")


def test_exception_in_worker_init_fn_is_raised_first() -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(Generated(ValueError()), num_workers=2, worker_init_fn=init_fails))
        return raised(lambda: next(stream)), raised(lambda: next(stream))

    found = same_as_torch(program)
    assert [one.last for one in found] == ["RuntimeError: init of 0", "RuntimeError: init of 1"]


@NUM_WORKERS
def test_stop_iteration_inside_a_generator_is_a_runtime_error(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return outcomes(iter(kind(Generated(StopIteration("early")), batch_size=2, num_workers=num_workers)))

    errors = [one for one in same_as_torch(program) if isinstance(one, ErrorSummary)]
    assert [RuntimeError] == [error.kind for error in errors]


def stop(samples: Any) -> Any:
    raise StopIteration("collated enough")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_iteration_in_collate_ends_the_stream(num_workers: int) -> None:
    same_as_torch(lambda kind: outcomes(iter(kind(Counting(ValueError()), collate_fn=stop, num_workers=num_workers))))
