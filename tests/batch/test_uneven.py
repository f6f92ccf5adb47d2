"""Batches whose samples cannot be stacked: the warning where they become lists, and the note on torch's error where not."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shmload import ShmLoader
from shmload.pipeline import Items

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers

SAMPLE, OTHER = np.ones(3, np.float32), np.ones(4, np.float32)
WIDE = "float32 of shape (4,)"
PLAIN = "float32 of shape (3,)"
CASES: dict[str, tuple[Any, Any, str, str, bool]] = {
    "shapes": (SAMPLE, OTHER, f"is {PLAIN} and sample 5 (row 1) is {WIDE}", "field 'data'", True),
    "dimensions": (
        SAMPLE,
        np.ones((3, 1), np.float32),
        f"is {PLAIN} and sample 5 (row 1) is float32 of shape (3, 1)",
        "field 'data'",
        False,
    ),
    "tensors": (torch.ones(3), torch.ones(4), f"is {PLAIN} and sample 5 (row 1) is {WIDE}", "field 'data'", True),
    "None": (SAMPLE, None, f"is {PLAIN} and sample 5 (row 1) is None", "field 'data'", False),
    "second dimension": (
        np.ones((2, 3), np.float32),
        np.ones((2, 4), np.float32),
        "is float32 of shape (2, 3) and sample 5 (row 1) is float32 of shape (2, 4)",
        "field 'data'",
        False,
    ),
    "field": ({"x": SAMPLE, "y": 1}, {"x": OTHER, "y": 1}, f"is {PLAIN} and sample 5 (row 1) is {WIDE}", "field 'x'", True),
    "number": ({"y": 1}, {"y": None}, "is of type int and sample 5 (row 1) is None", "field 'y'", False),
    "sample": ((SAMPLE, 1), None, "is of type tuple and sample 5 (row 1) is None", "field 'data'", False),
}


def samples_with(other: Any, sample: Any) -> list[Any]:
    return [other if number == 5 else sample for number in range(12)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_first_batch_with_a_list_in_place_of_a_tensor_is_a_warning(
    case: str, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    sample, other, difference, what, can_pad = CASES[case]
    with ShmLoader(samples_with(other, sample), batch_size=2, seed=1, num_workers=num_workers) as loader:
        first, second = [type(batch) for batch in loader], [type(batch) for batch in loader]
    assert first == second
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"epoch 0, batch 2: {what} is a list of the samples' values, because these cannot be stacked: ")
    assert f"sample 4 (row 0) {difference}. " in warning
    assert ('ragged="pad"' in warning) is can_pad
    assert 'ragged="list" accepts lists' in warning


@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_batches_of_lists_that_were_requested_are_no_warning(ragged: Any, caplog: pytest.LogCaptureFixture) -> None:
    with ShmLoader(samples_with(OTHER, SAMPLE), batch_size=2, seed=1, ragged=ragged) as loader:
        list(loader)
    assert warnings_of(caplog) == []


class Opaque:
    def __repr__(self) -> str:
        return "Opaque()"


@pytest.mark.parametrize("values", [["a", "b"], [None, None], ["a", None], [Opaque(), Opaque()], [Opaque(), None]], ids=str)
def test_fields_that_are_lists_in_every_batch_are_no_warning(values: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"x": SAMPLE, "y": value} for value in values]
    with ShmLoader(samples, batch_size=2, seed=1) as loader:
        (batch,) = loader
    assert isinstance(batch["y"], list)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_pipeline_warns_of_its_first_uneven_batch_by_the_item(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    numbers = Items(list(range(12))).map(lambda number: np.ones(4 if number == 5 else 3, np.float32), workers=workers)
    assert sum(1 for _ in numbers.batch(2)) == 6
    (warning,) = warnings_of(caplog)
    assert warning.startswith("epoch 0, batch 2: field 'data' is a list")
    assert "item 5" in warning


def test_pipeline_that_filters_warns_of_its_first_uneven_batch(caplog: pytest.LogCaptureFixture) -> None:
    numbers = Items(list(range(12))).filter(lambda number: number != 1)
    assert len(list(numbers.map(lambda number: np.ones(4 if number == 5 else 3, np.float32)).batch(2))) == 6
    (warning,) = warnings_of(caplog)
    assert "of block 0 of epoch 0: field 'data' is a list" in warning
    assert f"{PLAIN} and row " in warning or f"{WIDE} and row " in warning


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("has_getitems", [False, True])
@pytest.mark.parametrize("case", ["shapes", "dimensions", "tensors", "None", "field", "second dimension"])
def test_torchs_error_has_a_note_with_the_samples_that_differ(case: str, has_getitems: bool, num_workers: int) -> None:
    sample, other, difference, what, can_pad = CASES[case]
    samples: Any = samples_with(other, sample)
    dataset = Together(samples) if has_getitems else samples
    outcomes = []
    for loader in (DataLoader(dataset, batch_size=2), ShmLoader(dataset, batch_size=2, num_workers=num_workers)):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            list(loader)
        outcomes.append(caught.value)
    theirs, ours = outcomes
    assert type(ours) is type(theirs)
    assert str(theirs).splitlines()[-1] in str(ours)
    told = "\n".join([str(ours), *getattr(ours, "__notes__", [])])
    given = 'ragged="pad" or "list"' if can_pad else 'ragged="list"'
    assert f"shmload: {what}: sample 4 (row 0) {difference}. Make the samples alike, or give {given}" in told


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("samples", "difference"),
    [
        ([{"a": 1, "b": 1}, {"a": 1}], "row 1 of the batch has the keys ['a'], and row 0 has ['a', 'b']"),
        ([(1, 2), (1, 2, 3)], "field 'data' has sequences of different lengths (2 in row 0, 3 in row 1)"),
    ],
    ids=["keys", "lengths"],
)
def test_torchs_error_has_a_note_with_the_containers_that_differ(samples: list[Any], difference: str, num_workers: int) -> None:
    with ShmLoader(samples, batch_size=2, num_workers=num_workers) as loader, pytest.raises((KeyError, RuntimeError)) as caught:
        list(loader)
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"shmload: {difference}" in told
    assert "epoch 0, batch 0, of the samples [0, 1]" in told


class Together(list[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]
