"""Batches equal those of torch's DataLoader for every kind of column, format and arrangement of a dataset."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Sequence, Value, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import ShmLoader
from tests.formats.huggingface.hf_kit import (
    ARRANGED,
    LISTS,
    NUMPYS_BOOLEANS,
    SCALARS,
    TEXTS,
    assert_same,
    dataset_of,
    shmload_batches,
    torch_batches,
)

pytestmark = NUMPYS_BOOLEANS
COLUMNS = {None: SCALARS | TEXTS, "torch": SCALARS | TEXTS | LISTS, "numpy": SCALARS | LISTS}


@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("form", COLUMNS)
def test_batches_equal_torchs(form: str | None, arranged: str) -> None:
    dataset = ARRANGED[arranged](dataset_of(COLUMNS[form])).with_format(form)
    assert_same(torch_batches(dataset), shmload_batches(dataset))


@pytest.mark.parametrize("form", COLUMNS)
def test_each_column_alone_equals_torchs(form: str | None) -> None:
    for name, column in COLUMNS[form].items():
        dataset = dataset_of({name: column}).with_format(form)
        assert_same(torch_batches(dataset), shmload_batches(dataset))


@pytest.mark.slow(reason="starts two workers, also by spawn")
@pytest.mark.parametrize(("form", "context"), [(None, "fork"), ("torch", "fork"), ("numpy", "fork"), ("torch", "spawn")])
def test_batches_of_workers_equal_torchs(form: str | None, context: str) -> None:
    dataset = dataset_of(COLUMNS[form]).shuffle(seed=3).with_format(form)
    got = shmload_batches(dataset, num_workers=2, multiprocessing_context=context)
    assert_same(torch_batches(dataset), got)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("torch", {"dtype": torch.float64}),
        ("torch", {"dtype": torch.float32}),
        ("torch", {"dtype": "float64"}),
        ("numpy", {"dtype": np.float64}),
        ("numpy", {"dtype": "float32"}),
    ],
)
def test_dtype_of_the_format_is_used(form: str, options: dict[str, Any]) -> None:
    dataset = dataset_of(SCALARS | LISTS).with_format(form, **options)
    if options == {"dtype": "float64"} and form == "torch":  # torch.tensor does not accept str
        with pytest.raises(TypeError):
            torch_batches(dataset)
        with pytest.raises(TypeError):
            shmload_batches(dataset, path="__getitems__")
        return
    assert_same(torch_batches(dataset), shmload_batches(dataset))


@pytest.mark.parametrize("form", COLUMNS)
def test_selected_columns_keep_the_tables_order(form: str | None) -> None:
    dataset = dataset_of(SCALARS | LISTS).with_format(form, columns=["label", "int8", "float64"])
    (first, *_) = got = shmload_batches(dataset)
    assert list(first) == ["int8", "float64", "label"]
    assert_same(torch_batches(dataset), got)


@pytest.mark.parametrize("keep_in_memory", [False, True])
def test_dataset_on_disk_is_read_from_its_files(tmp_path: Any, keep_in_memory: bool) -> None:
    dataset_of(SCALARS | TEXTS | LISTS).save_to_disk(tmp_path / "d", num_shards=3)
    dataset = load_from_disk(tmp_path / "d", keep_in_memory=keep_in_memory).with_format("torch")
    for each in (dataset, dataset.shuffle(seed=2)):
        assert_same(torch_batches(each), shmload_batches(each, num_workers=0))


@pytest.mark.parametrize("form", COLUMNS)
def test_datasets_of_few_or_no_rows(form: str | None) -> None:
    dataset = dataset_of(COLUMNS[form]).with_format(form)
    assert_same(torch_batches(dataset.select([4])), shmload_batches(dataset.select([4])))
    assert_same(torch_batches(dataset, 100), shmload_batches(dataset, 100))
    assert shmload_batches(dataset.select([]), path="__getitems__") == torch_batches(dataset.select([])) == []


@pytest.mark.parametrize("arranged", ["plain", "concatenated", "shuffled"])
def test_negative_indices_count_from_the_end(arranged: str) -> None:
    """Negative indices work as in dataset[-1]. datasets itself fails on several of them if the dataset is shuffled."""
    dataset = ARRANGED[arranged](dataset_of(SCALARS)).with_format("torch")
    indices = [-1, 0, -len(dataset), 3]
    expected = torch_batches(dataset, sampler=[index % len(dataset) for index in indices])
    assert_same(expected, shmload_batches(dataset, sampler=indices))
    if arranged == "shuffled":
        with pytest.raises(IndexError, match="Offset must be non-negative"):
            torch_batches(dataset, sampler=indices)
    else:
        assert_same(expected, torch_batches(dataset, sampler=indices))


@pytest.mark.parametrize("arranged", ["plain", "shuffled"])
@pytest.mark.parametrize("index", [11, -12])
def test_index_out_of_range_has_the_message_of_datasets(index: int, arranged: str) -> None:
    dataset = ARRANGED[arranged](dataset_of(SCALARS)).with_format("torch")
    words = rf"Invalid key: {index} is out of bounds for size 11"
    with pytest.raises(IndexError, match=words):
        torch_batches(dataset, sampler=[0, index])
    with pytest.raises(IndexError, match=words):
        shmload_batches(dataset, sampler=[0, index])


def test_error_in_a_worker_has_the_same_message() -> None:
    dataset = dataset_of(SCALARS).with_format("torch")
    with pytest.raises(IndexError, match="Invalid key: 11 is out of bounds for size 11"):
        shmload_batches(dataset, sampler=[0, 11], num_workers=1)


def test_subset_is_read_in_place() -> None:
    whole: Any = dataset_of(SCALARS | TEXTS).with_format("torch")  # datasets.Dataset is not a subclass of torch's Dataset
    dataset = torch.utils.data.Subset(whole, [5, 1, 8])
    assert_same(torch_batches(dataset, 2), shmload_batches(dataset, 2))


@pytest.mark.parametrize("form", COLUMNS)
def test_torchs_concat_dataset_is_read_row_by_row(form: str | None) -> None:
    """Compare row by row, because in numpy's format a single row has other dtypes than the same row in a batch."""
    one = dataset_of(COLUMNS[form]).with_format(form)
    dataset = torch.utils.data.ConcatDataset([one, one])  # type: ignore[list-item]  # not a subclass either
    assert_same(torch_batches(dataset), shmload_batches(dataset, path="__getitem__"))


def test_trailing_nuls_of_text_are_dropped_only_in_torchs_format() -> None:
    values = ["a\0\0", "\0", "\0b", "", "c"]
    dataset = Dataset.from_dict({"s": values, "b": [v.encode() for v in values]})
    assert shmload_batches(dataset, 5) == [{"s": values, "b": [v.encode() for v in values]}] == torch_batches(dataset, 5)
    stripped = ["a", "", "\0b", "", "c"]
    dataset = dataset.with_format("torch")
    assert shmload_batches(dataset, 5) == [{"s": stripped, "b": [v.encode() for v in stripped]}] == torch_batches(dataset, 5)


def test_numbers_beyond_float32_become_infinite_without_a_warning() -> None:
    dataset = Dataset.from_dict({"x": [1e300, -1e300, float("nan"), 1e-300]}).with_format("torch")
    assert_same(torch_batches(dataset), shmload_batches(dataset))


def test_format_set_after_the_loader_was_made_is_used() -> None:
    dataset = dataset_of({"x": SCALARS["int32"], "f": LISTS["fixed"]})
    loader = ShmLoader(dataset, 4)
    assert "read by __getitems__" in repr(loader)  # without a format, torch's collate transposes lists
    dataset.set_format("torch")
    assert "read by read_batch_into" in repr(loader)
    assert_same(torch_batches(dataset), list(loader))


@pytest.mark.parametrize("seed", [0, 9])
def test_seed_mode_gives_the_same_batches_with_any_number_of_workers(seed: int) -> None:
    dataset = dataset_of(SCALARS | TEXTS | LISTS).with_format("torch")
    alone = shmload_batches(dataset, 3, shuffle=True, seed=seed)
    assert_same(alone, shmload_batches(dataset, 3, shuffle=True, seed=seed, num_workers=2))
    for rows in alone:  # all rows are rows of the dataset
        for name in ("int64", "even"):
            stored = dataset[:][name].tolist()
            assert all(row in stored for row in rows[name].tolist())


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    # datasets casts to float32, so values just beyond its range would warn, and warnings are errors here
    "float64": st.floats(-3e38, 3e38) | st.sampled_from([math.inf, -math.inf, math.nan]),
    "float32": st.floats(width=32),
    "bool": st.booleans(),
    "string": st.text(max_size=4),
}


@st.composite
def tables(draw: st.DrawFn) -> Dataset:
    """Draws a table of any columns that can be batched, arranged in any way."""
    n = draw(st.integers(1, 9))
    columns = {}
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(_VALUES)))
        shape = [] if dtype in ("bool", "string") else draw(st.lists(st.integers(1, 3), max_size=2))
        values, kind = _VALUES[dtype], Value(dtype)
        for extent in reversed(shape):
            values = st.lists(values, min_size=extent, max_size=extent)
            kind = Sequence(kind, length=extent if draw(st.booleans()) else -1)
        columns[f"c{i}"] = (kind, draw(st.lists(values, min_size=n, max_size=n)))
    dataset = dataset_of(columns)
    if draw(st.booleans()):
        dataset = dataset.select(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=12)))
    return dataset


@pytest.mark.slow(reason="hypothesis generates and reads many tables")
@settings(max_examples=40, deadline=None)
@given(dataset=tables(), form=st.sampled_from([None, "torch", "numpy"]), batch_size=st.integers(1, 5))
def test_batches_of_any_table_equal_torchs(dataset: Dataset, form: str | None, batch_size: int) -> None:
    dataset = dataset.with_format(form)
    with np.errstate(over="ignore"):  # numpy's format warns about float64 beyond float32
        expected = torch_batches(dataset, batch_size)
    with ShmLoader(dataset, batch_size) as loader:
        assert_same(expected, list(loader))
