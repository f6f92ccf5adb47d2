"""Lists of different lengths: torch's own error without `ragged`, and every mode of `ragged` read directly from the offsets."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Sequence, Value

from shmload import Jagged, Padded, ShmLoader
from shmload.errors import SampleError
from tests.formats.huggingface.hf_kit import (
    ARRANGED,
    LISTS,
    NUMPYS_BOOLEANS,
    RAGGED,
    SCALARS,
    TEXTS,
    N,
    assert_same,
    dataset_of,
    shmload_batches,
    torch_batches,
)

pytestmark = NUMPYS_BOOLEANS
MODES = ["list", "pad", "nested", "jagged"]


def rows_of(delivered: Any) -> list[torch.Tensor]:
    """Returns the rows of a ragged field delivered in any mode."""
    if isinstance(delivered, Padded):
        return [row[: int(n)] for row, n in zip(delivered.values, delivered.lengths, strict=True)]
    if isinstance(delivered, Jagged):
        ends = delivered.offsets.tolist()
        return [delivered.values[a:b] for a, b in itertools.pairwise(ends)]
    return list(delivered.unbind()) if isinstance(delivered, torch.Tensor) else delivered


def expected_rows(dataset: Dataset, name: str, form: str | None) -> list[torch.Tensor]:
    """Returns the rows as the format gives them one by one, with Python numbers converted as torch's collate does."""
    if form is not None:
        return [torch.as_tensor(dataset[i][name]) for i in range(len(dataset))]
    is_float = "float" in str(dataset.features[name])
    return [torch.tensor(row, dtype=torch.float64 if is_float else torch.int64) for row in dataset[:][name]]


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
@pytest.mark.parametrize("arranged", ["plain", "shuffled", "a slice", "concatenated and shuffled"])
@pytest.mark.parametrize("mode", MODES)
def test_ragged_columns_in_each_mode(mode: str, arranged: str, form: str | None) -> None:
    dataset = ARRANGED[arranged](dataset_of(RAGGED | SCALARS)).with_format(form)
    batches = shmload_batches(dataset, 3, ragged=mode)
    for name in RAGGED:
        got = [row for batch in batches for row in rows_of(batch[name])]
        assert_same(expected_rows(dataset, name, form), got)
    scalars = [{name: batch[name] for name in SCALARS} for batch in batches]
    assert_same(torch_batches(dataset.select_columns(list(SCALARS)), 3), scalars)


@pytest.mark.parametrize("mode", MODES)
def test_reading_in_place_equals_reading_samples(mode: str) -> None:
    dataset = dataset_of(RAGGED | {"label": SCALARS["label"]}).with_format("torch")

    class Plain(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(dataset)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return dataset.__getitems__(indices)

    uneven = {"batch_size": 4, "sampler": range(1, 9)}  # no batch has rows of equal length, which torch would stack
    expected = shmload_batches(Plain(), path="__getitems__", ragged=mode, **uneven)
    for ours, plain in zip(shmload_batches(dataset, ragged=mode, **uneven), expected, strict=True):
        assert list(plain) == list(ours)
        for name in RAGGED:
            assert type(plain[name]) is type(ours[name])
            assert_same(rows_of(plain[name]), rows_of(ours[name]))


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_rows_of_rows_are_ragged_in_the_first_dimension(form: str) -> None:
    rows = [np.arange(2 * (i % 3 + 1)).reshape(-1, 2).tolist() for i in range(N)]
    dataset = dataset_of(
        {"fixed": (Sequence(Sequence(Value("int32"), length=2)), rows), "even": (Sequence(Sequence(Value("int32"))), rows)}
    ).with_format(form)
    for batch in (batches := shmload_batches(dataset, 4, ragged="jagged")):
        assert {type(value) for value in batch.values()} == {Jagged}
    for name in dataset.column_names:
        assert_same([torch.tensor(row) for row in rows], [row for b in batches for row in rows_of(b[name])])


def test_lists_of_lists_of_different_inner_lengths_are_read_as_samples() -> None:
    dataset = Dataset.from_dict({"x": [[[1], [2, 3]], [[4, 5], [6]]]}).with_format("torch")
    with ShmLoader(dataset, 2, ragged="list") as loader:
        assert "read by __getitems__" in repr(loader)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # torch warns about arrays in numpy's format
@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_without_a_ragged_mode_the_error_is_torchs(form: str | None) -> None:
    dataset = dataset_of({"ragged": RAGGED["ragged"]}).with_format(form)
    with pytest.raises(RuntimeError) as theirs:
        torch_batches(dataset)
    with pytest.raises(RuntimeError) as ours:
        shmload_batches(dataset, path="__getitems__")
    assert str(theirs.value) == str(ours.value)


def test_seed_implies_ragged_lists() -> None:
    dataset = dataset_of(RAGGED).with_format("torch")
    (batch,) = shmload_batches(dataset, N, seed=1)
    assert_same(expected_rows(dataset, "ragged", "torch"), batch["ragged"])


def test_lists_of_equal_length_are_ragged_by_their_type_or_by_name() -> None:
    """A mode also applies to lists whose lengths happen to be equal; "list" stacks them."""
    dataset = dataset_of({name: LISTS[name] for name in ("even", "fixed")}).with_format("torch")

    def kinds(ragged: Any) -> list[type]:
        return [type(value) for value in shmload_batches(dataset, ragged=ragged)[0].values()]

    assert kinds("jagged") == [Jagged, torch.Tensor]
    assert kinds({"even": "pad", "fixed": "jagged"}) == [Padded, Jagged]
    assert kinds({"fixed": "pad"}) == [torch.Tensor, Padded]
    assert_same(expected_rows(dataset, "fixed", "torch"), rows_of(shmload_batches(dataset, N, ragged={"fixed": "pad"})[0]["fixed"]))
    assert kinds("list") == [torch.Tensor, torch.Tensor]


def test_ragged_with_an_unknown_name_is_an_error() -> None:
    dataset = dataset_of({"even": LISTS["even"]}).with_format("torch")
    with pytest.raises(SampleError, match="ragged names 'tokens', but samples have arrays only in 'even'"):
        shmload_batches(dataset, path="__getitems__", seed=0, ragged={"tokens": "pad"})


@pytest.mark.slow(reason="reads with zero, one and two workers")
@pytest.mark.parametrize("mode", MODES)
def test_batches_are_the_same_with_any_number_of_workers(mode: str) -> None:
    dataset = dataset_of(RAGGED | TEXTS | SCALARS | LISTS).with_format("torch")
    alone = shmload_batches(dataset, 3, ragged=mode, shuffle=True, seed=4)
    for num_workers in (1, 2):
        for theirs, ours in zip(
            alone, shmload_batches(dataset, 3, ragged=mode, shuffle=True, seed=4, num_workers=num_workers), strict=True
        ):
            assert list(theirs) == list(ours)
            for name in theirs:
                assert_same(rows_of(theirs[name]), rows_of(ours[name]))


def test_batch_of_empty_rows_only() -> None:
    features = Features({"x": Sequence(Value("int64")), "s": Value("string")})
    dataset = Dataset.from_dict({"x": [[], [], [1]], "s": ["", "", "z"]}, features=features).with_format("torch")
    (first, second) = shmload_batches(dataset, 2, ragged="jagged")
    assert (first["x"].offsets.tolist(), first["s"]) == ([0, 0, 0], ["", ""])
    assert (second["x"].values.tolist(), second["s"]) == ([1], ["z"])
