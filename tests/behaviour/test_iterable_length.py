"""The length of a loader over an iterable dataset is an estimate, with warnings if it proves wrong."""

from __future__ import annotations

from typing import Any

import pytest

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import Shards, Sized, batches, raised, same_as_torch

BEGIN = "Length of IterableDataset Sized(3) was reported to be 3(when accessing len(dataloader)), but "
ADVICE = (
    "For multiprocessing data-loading, this could be caused by not properly configuring the "
    "IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 7),
        ({"batch_size": 2}, 4),
        ({"batch_size": 2, "drop_last": True}, 3),
        ({"batch_size": None}, 7),
        ({"batch_size": 50, "drop_last": True}, 0),
    ],
    ids=str,
)
def test_length_is_computed_from_the_datasets(options: dict[str, Any], expected: int, num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Sized(7, [1]), num_workers=num_workers, **options)
        before = loader._IterableDataset_len_called
        return before, len(loader), loader._IterableDataset_len_called

    assert same_as_torch(program) == (None, expected, 7)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_len_without_a_length_is_a_type_error(num_workers: int) -> None:
    error = same_as_torch(lambda kind: raised(lambda: len(kind(Shards([1]), num_workers=num_workers))))
    assert error.kind is TypeError
    assert error.first == "object of type 'Shards' has no len()"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_len_of_an_iterator_is_a_type_error(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        return raised(lambda: len(iter(kind(Sized(3, [1, 2, 3]), batch_size=None, num_workers=num_workers))))

    assert same_as_torch(program).kind is TypeError


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_warning_if_len_was_never_called(num_workers: int) -> None:
    same_as_torch(lambda kind: batches(kind(Sized(1, [1, 2], [3, 4]), num_workers=num_workers)))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_batch_beyond_the_length_gives_a_warning(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Sized(3, [1, 2, 3], [4, 5]), num_workers=num_workers)
        return len(loader), batches(loader)

    same_as_torch(program, num_warnings=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_warning_names_dataset_length_and_count(num_workers: int) -> None:
    loader = ShmLoader(Sized(3, [1, 2], [3, 4]), num_workers=num_workers)
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="samples have been fetched") as caught:
        batches(loader)
    end = "4 samples have been fetched. " + ADVICE * bool(num_workers)
    assert [BEGIN + end] == [str(warning.message) for warning in caught]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_len_called_during_an_epoch_affects_warnings_of_the_next(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Sized(1, [1, 2], [3]), num_workers=num_workers, persistent_workers=num_workers > 0)
        stream = iter(loader)
        first = [next(stream).tolist(), len(loader), batches(stream)]
        return first, batches(loader)

    same_as_torch(program, num_warnings=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_large_length_gives_no_warning(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Sized(100, [1, 2], [3]), num_workers=num_workers)
        return len(loader), batches(loader)

    same_as_torch(program)
