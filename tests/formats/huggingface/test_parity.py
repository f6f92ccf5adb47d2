"""Side by side with torch's DataLoader: every kind of column, format and arrangement gives equal batches."""

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
    of_ours,
    of_torch,
)

pytestmark = NUMPYS_BOOLEANS
COLUMNS = {None: SCALARS | TEXTS, "torch": SCALARS | TEXTS | LISTS, "numpy": SCALARS | LISTS}


@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("form", COLUMNS)
def test_batches_are_torchs(form: str | None, arranged: str) -> None:
    dataset = ARRANGED[arranged](dataset_of(COLUMNS[form])).with_format(form)
    assert_same(of_torch(dataset), of_ours(dataset))


@pytest.mark.parametrize("form", COLUMNS)
def test_each_column_by_itself_is_torchs(form: str | None) -> None:
    for name, column in COLUMNS[form].items():
        dataset = dataset_of({name: column}).with_format(form)
        assert_same(of_torch(dataset), of_ours(dataset))


@pytest.mark.slow(reason="starts two workers, by spawn, too")
@pytest.mark.parametrize(("form", "context"), [(None, "fork"), ("torch", "fork"), ("numpy", "fork"), ("torch", "spawn")])
def test_workers_batches_are_torchs(form: str | None, context: str) -> None:
    dataset = dataset_of(COLUMNS[form]).shuffle(seed=3).with_format(form)
    got = of_ours(dataset, num_workers=2, multiprocessing_context=context)
    assert_same(of_torch(dataset), got)


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
def test_a_format_with_a_dtype_gives_it(form: str, options: dict[str, Any]) -> None:
    dataset = dataset_of(SCALARS | LISTS).with_format(form, **options)
    if options == {"dtype": "float64"} and form == "torch":  # torch.tensor takes no str
        with pytest.raises(TypeError):
            of_torch(dataset)
        with pytest.raises(TypeError):
            of_ours(dataset, path="__getitems__")
        return
    assert_same(of_torch(dataset), of_ours(dataset))


@pytest.mark.parametrize("form", COLUMNS)
def test_chosen_columns_come_in_the_tables_order(form: str | None) -> None:
    dataset = dataset_of(SCALARS | LISTS).with_format(form, columns=["label", "int8", "float64"])
    (first, *_) = got = of_ours(dataset)
    assert list(first) == ["int8", "float64", "label"]
    assert_same(of_torch(dataset), got)


@pytest.mark.parametrize("keep_in_memory", [False, True])
def test_a_dataset_on_disk_is_read_from_its_files(tmp_path: Any, keep_in_memory: bool) -> None:
    dataset_of(SCALARS | TEXTS | LISTS).save_to_disk(tmp_path / "d", num_shards=3)
    dataset = load_from_disk(tmp_path / "d", keep_in_memory=keep_in_memory).with_format("torch")
    for each in (dataset, dataset.shuffle(seed=2)):
        assert_same(of_torch(each), of_ours(each, num_workers=0))


@pytest.mark.parametrize("form", COLUMNS)
def test_few_rows_are_enough(form: str | None) -> None:
    dataset = dataset_of(COLUMNS[form]).with_format(form)
    assert_same(of_torch(dataset.select([4])), of_ours(dataset.select([4])))
    assert_same(of_torch(dataset, 100), of_ours(dataset, 100))
    assert of_ours(dataset.select([]), path="__getitems__") == of_torch(dataset.select([])) == []


@pytest.mark.parametrize("arranged", ["plain", "concatenated", "shuffled"])
def test_negative_indices_count_from_the_end(arranged: str) -> None:
    """As in dataset[-1]. datasets itself does not find them among several where there is a mapping of indices."""
    dataset = ARRANGED[arranged](dataset_of(SCALARS)).with_format("torch")
    indices = [-1, 0, -len(dataset), 3]
    expected = of_torch(dataset, sampler=[index % len(dataset) for index in indices])
    assert_same(expected, of_ours(dataset, sampler=indices))
    if arranged == "shuffled":
        with pytest.raises(IndexError, match="Offset must be non-negative"):
            of_torch(dataset, sampler=indices)
    else:
        assert_same(expected, of_torch(dataset, sampler=indices))


@pytest.mark.parametrize("arranged", ["plain", "shuffled"])
@pytest.mark.parametrize("index", [11, -12])
def test_an_index_out_of_range_is_refused_in_datasets_words(index: int, arranged: str) -> None:
    dataset = ARRANGED[arranged](dataset_of(SCALARS)).with_format("torch")
    words = rf"Invalid key: {index} is out of bounds for size 11"
    with pytest.raises(IndexError, match=words):
        of_torch(dataset, sampler=[0, index])
    with pytest.raises(IndexError, match=words):
        of_ours(dataset, sampler=[0, index])


def test_an_error_of_a_worker_has_the_same_words() -> None:
    dataset = dataset_of(SCALARS).with_format("torch")
    with pytest.raises(IndexError, match="Invalid key: 11 is out of bounds for size 11"):
        of_ours(dataset, sampler=[0, 11], num_workers=1)


def test_a_subset_is_read_in_place_too() -> None:
    dataset = torch.utils.data.Subset(dataset_of(SCALARS | TEXTS).with_format("torch"), [5, 1, 8])  # type: ignore[arg-type]  # a datasets.Dataset is no subclass of torch's
    assert_same(of_torch(dataset, 2), of_ours(dataset, 2))


@pytest.mark.parametrize("form", COLUMNS)
def test_torchs_concat_dataset_reads_row_by_row(form: str | None) -> None:
    """A row by itself has other dtypes than the same row of a batch, in numpy's format."""
    one = dataset_of(COLUMNS[form]).with_format(form)
    dataset = torch.utils.data.ConcatDataset([one, one])  # type: ignore[list-item]  # as above
    assert_same(of_torch(dataset), of_ours(dataset, path="__getitem__"))


def test_text_loses_the_nuls_at_its_end_only_where_torchs_format_drops_them() -> None:
    values = ["a\0\0", "\0", "\0b", "", "c"]
    dataset = Dataset.from_dict({"s": values, "b": [v.encode() for v in values]})
    assert of_ours(dataset, 5) == [{"s": values, "b": [v.encode() for v in values]}] == of_torch(dataset, 5)
    stripped = ["a", "", "\0b", "", "c"]
    dataset = dataset.with_format("torch")
    assert of_ours(dataset, 5) == [{"s": stripped, "b": [v.encode() for v in stripped]}] == of_torch(dataset, 5)


def test_numbers_beyond_a_float32_are_infinite_without_a_warning() -> None:
    dataset = Dataset.from_dict({"x": [1e300, -1e300, float("nan"), 1e-300]}).with_format("torch")
    assert_same(of_torch(dataset), of_ours(dataset))


def test_a_format_set_later_counts() -> None:
    dataset = dataset_of({"x": SCALARS["int32"], "f": LISTS["fixed"]})
    loader = ShmLoader(dataset, 4)
    assert "read by __getitems__" in repr(loader)  # lists of Python's are turned inside out
    dataset.set_format("torch")
    assert "read by read_batch_into" in repr(loader)
    assert_same(of_torch(dataset), list(loader))


@pytest.mark.parametrize("seed", [0, 9])
def test_seed_mode_has_the_same_batches_for_any_number_of_workers(seed: int) -> None:
    dataset = dataset_of(SCALARS | TEXTS | LISTS).with_format("torch")
    alone = of_ours(dataset, 3, shuffle=True, seed=seed)
    assert_same(alone, of_ours(dataset, 3, shuffle=True, seed=seed, num_workers=2))
    for rows in alone:  # and they are rows of the dataset
        for name in ("int64", "even"):
            stored = dataset[:][name].tolist()
            assert all(row in stored for row in rows[name].tolist())


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    # as datasets casts to float32, what lies just beyond its range would warn, and warnings are errors here
    "float64": st.floats(-3e38, 3e38) | st.sampled_from([math.inf, -math.inf, math.nan]),
    "float32": st.floats(width=32),
    "bool": st.booleans(),
    "string": st.text(max_size=4),
}


@st.composite
def tables(draw: st.DrawFn) -> Dataset:
    """A table of any columns that a batch can be made of, arranged in any way."""
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


@pytest.mark.slow(reason="hypothesis makes and reads many tables")
@settings(max_examples=40, deadline=None)
@given(dataset=tables(), form=st.sampled_from([None, "torch", "numpy"]), batch_size=st.integers(1, 5))
def test_any_table_gives_torchs_batches(dataset: Dataset, form: str | None, batch_size: int) -> None:
    dataset = dataset.with_format(form)
    with np.errstate(over="ignore"):  # numpy's format warns of a float64 beyond float32
        expected = of_torch(dataset, batch_size)
    with ShmLoader(dataset, batch_size) as loader:
        assert_same(expected, list(loader))
