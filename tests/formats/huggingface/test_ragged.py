"""Lists of different lengths: torch's own refusal without a rule, and every mode of `ragged` straight from the offsets."""

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
    of_ours,
    of_torch,
)

pytestmark = NUMPYS_BOOLEANS
MODES = ["list", "pad", "nested", "jagged"]


def rows_of(delivered: Any) -> list[torch.Tensor]:
    """The rows of a ragged field, delivered in any mode."""
    if isinstance(delivered, Padded):
        return [row[: int(n)] for row, n in zip(delivered.values, delivered.lengths, strict=True)]
    if isinstance(delivered, Jagged):
        ends = delivered.offsets.tolist()
        return [delivered.values[a:b] for a, b in itertools.pairwise(ends)]
    return list(delivered.unbind()) if isinstance(delivered, torch.Tensor) else delivered


def expected_rows(dataset: Dataset, name: str, form: str | None) -> list[torch.Tensor]:
    """The rows as the format makes them one by one; Python's numbers as torch's collate takes them."""
    if form is not None:
        return [torch.as_tensor(dataset[i][name]) for i in range(len(dataset))]
    is_float = "float" in str(dataset.features[name])
    return [torch.tensor(row, dtype=torch.float64 if is_float else torch.int64) for row in dataset[:][name]]


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
@pytest.mark.parametrize("arranged", ["plain", "shuffled", "a slice", "concatenated and shuffled"])
@pytest.mark.parametrize("mode", MODES)
def test_ragged_columns_come_by_the_mode(mode: str, arranged: str, form: str | None) -> None:
    dataset = ARRANGED[arranged](dataset_of(RAGGED | SCALARS)).with_format(form)
    batches = of_ours(dataset, 3, ragged=mode)
    for name in RAGGED:
        got = [row for batch in batches for row in rows_of(batch[name])]
        assert_same(expected_rows(dataset, name, form), got)
    scalars = [{name: batch[name] for name in SCALARS} for batch in batches]
    assert_same(of_torch(dataset.select_columns(list(SCALARS)), 3), scalars)


@pytest.mark.parametrize("mode", MODES)
def test_the_direct_way_delivers_what_the_plain_way_does(mode: str) -> None:
    dataset = dataset_of(RAGGED | {"label": SCALARS["label"]}).with_format("torch")

    class Plain(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(dataset)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return dataset.__getitems__(indices)

    uneven = {"batch_size": 4, "sampler": range(1, 9)}  # no batch has rows of one length, which torch would stack
    expected = of_ours(Plain(), path="__getitems__", ragged=mode, **uneven)
    for ours, plain in zip(of_ours(dataset, ragged=mode, **uneven), expected, strict=True):
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
    for batch in (batches := of_ours(dataset, 4, ragged="jagged")):
        assert {type(value) for value in batch.values()} == {Jagged}
    for name in dataset.column_names:
        assert_same([torch.tensor(row) for row in rows], [row for b in batches for row in rows_of(b[name])])


def test_lists_of_lists_that_differ_inside_go_the_plain_way() -> None:
    dataset = Dataset.from_dict({"x": [[[1], [2, 3]], [[4, 5], [6]]]}).with_format("torch")
    with ShmLoader(dataset, 2, ragged="list") as loader:
        assert "read by __getitems__" in repr(loader)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # torch's, of numpy's format
@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_without_a_rule_torch_refuses_them(form: str | None) -> None:
    dataset = dataset_of({"ragged": RAGGED["ragged"]}).with_format(form)
    with pytest.raises(RuntimeError) as theirs:
        of_torch(dataset)
    with pytest.raises(RuntimeError) as ours:
        of_ours(dataset, path="__getitems__")
    assert str(theirs.value) == str(ours.value)


def test_a_seed_is_a_rule_too() -> None:
    dataset = dataset_of(RAGGED).with_format("torch")
    (batch,) = of_ours(dataset, N, seed=1)
    assert_same(expected_rows(dataset, "ragged", "torch"), batch["ragged"])


def test_lists_of_one_length_are_ragged_by_their_type_or_by_name() -> None:
    """Under a mode, lists that happen to be equal are delivered like their neighbors of other datasets; "list" stacks them."""
    dataset = dataset_of({name: LISTS[name] for name in ("even", "fixed")}).with_format("torch")

    def kinds(ragged: Any) -> list[type]:
        return [type(value) for value in of_ours(dataset, ragged=ragged)[0].values()]

    assert kinds("jagged") == [Jagged, torch.Tensor]
    assert kinds({"even": "pad", "fixed": "jagged"}) == [Padded, Jagged]
    assert kinds({"fixed": "pad"}) == [torch.Tensor, Padded]
    assert_same(expected_rows(dataset, "fixed", "torch"), rows_of(of_ours(dataset, N, ragged={"fixed": "pad"})[0]["fixed"]))
    assert kinds("list") == [torch.Tensor, torch.Tensor]


def test_a_name_that_no_column_has_is_told() -> None:
    dataset = dataset_of({"even": LISTS["even"]}).with_format("torch")
    with pytest.raises(SampleError, match="ragged names 'tokens', but samples have arrays only in 'even'"):
        of_ours(dataset, path="__getitems__", seed=0, ragged={"tokens": "pad"})


@pytest.mark.slow(reason="reads with no, one and two workers")
@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_workers_makes_the_same_batches(mode: str) -> None:
    dataset = dataset_of(RAGGED | TEXTS | SCALARS | LISTS).with_format("torch")
    alone = of_ours(dataset, 3, ragged=mode, shuffle=True, seed=4)
    for num_workers in (1, 2):
        for theirs, ours in zip(
            alone, of_ours(dataset, 3, ragged=mode, shuffle=True, seed=4, num_workers=num_workers), strict=True
        ):
            assert list(theirs) == list(ours)
            for name in theirs:
                assert_same(rows_of(theirs[name]), rows_of(ours[name]))


def test_a_batch_of_nothing_but_empty_rows() -> None:
    features = Features({"x": Sequence(Value("int64")), "s": Value("string")})
    dataset = Dataset.from_dict({"x": [[], [], [1]], "s": ["", "", "z"]}, features=features).with_format("torch")
    (first, second) = of_ours(dataset, 2, ragged="jagged")
    assert (first["x"].offsets.tolist(), first["s"]) == ([0, 0, 0], ["", ""])
    assert (second["x"].values.tolist(), second["s"]) == ([1], ["z"])
