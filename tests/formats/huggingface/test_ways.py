"""How a dataset is read, what pickling it costs, and which datasets are rejected."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, Sequence, Value, load_from_disk
from datasets.formatting.formatting import PythonFormatter
from datasets.formatting.torch_formatter import TorchFormatter

from shmload import ShmLoader
from shmload.errors import SampleError
from shmload.formats.arrow.arrow_column import column_of
from tests.formats.huggingface.hf_kit import (
    ARRAYS,
    LISTS,
    RAGGED,
    SCALARS,
    TEXTS,
    assert_same,
    batches_of,
    dataset_of,
    shmload_batches,
    torch_batches,
)

slow = pytest.mark.slow(reason="starts two workers for each of two loaders")
WHEN = datetime.datetime(2026, 11, 21)
PLAIN: dict[str, Callable[[], Any]] = {
    "Python lists": lambda: dataset_of({"x": LISTS["fixed"]}),
    "arrays without a format": lambda: dataset_of({"x": ARRAYS["array2d"]}),
    "arrays in torch's format": lambda: dataset_of(ARRAYS).with_format("torch"),
    "arrays in numpy's format": lambda: dataset_of(ARRAYS).with_format("numpy"),
    "text in numpy's format": lambda: dataset_of(TEXTS).with_format("numpy"),
    "lists of bool": lambda: Dataset.from_dict({"x": [[True, False]] * 3}).with_format("torch"),
    "dicts": lambda: Dataset.from_dict({"x": [{"a": 1, "b": 2.0}] * 3}),
    "lists of text": lambda: Dataset.from_dict({"x": [["a", "b"]] * 3}),
    "empty lists": lambda: dataset_of({"x": (Sequence(Value("int64")), [[], []])}).with_format("torch"),
    "a transform": lambda: dataset_of(SCALARS).with_transform(lambda batch: {"twice": [2 * v for v in batch["int8"]]}),
    "output_all_columns": lambda: dataset_of(SCALARS).with_format("torch", ["int8"], output_all_columns=True),
    "uint64": lambda: Dataset.from_dict({"x": [1, 2]}, features=Features({"x": Value("uint64")})).with_format("torch"),
    "a dtype that truncates": lambda: dataset_of({"x": SCALARS["int64"]}).with_format("torch", dtype=torch.int16),
    "a dtype that numpy lacks": lambda: dataset_of({"x": SCALARS["int8"]}).with_format("torch", dtype=torch.bfloat16),
    "a device": lambda: dataset_of({"x": SCALARS["int8"]}).with_format("torch", device="cpu"),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "a null": lambda: Dataset.from_dict({"x": [1, None, 3]}),
    "timestamps": lambda: Dataset.from_dict({"x": [WHEN] * 3}),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_unsupported_columns_are_read_as_samples(kind: str) -> None:
    dataset = PLAIN[kind]()
    assert_same(torch_batches(dataset, 2), shmload_batches(dataset, 2, path="__getitems__"))


@pytest.mark.parametrize("kind", REFUSED)
def test_error_for_values_that_torch_rejects_is_torchs(kind: str) -> None:
    dataset = REFUSED[kind]()
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        torch_batches(dataset)
    with pytest.raises((TypeError, RuntimeError)) as ours:
        shmload_batches(dataset, path="__getitems__")
    assert str(theirs.value) == str(ours.value)


def test_null_inside_a_list_makes_the_dataset_be_read_as_samples() -> None:
    dataset = Dataset.from_dict({"x": [[1.0, 2.0], [None, 4.0]]}).with_format("torch")
    (theirs,), (ours,) = torch_batches(dataset), shmload_batches(dataset, path="__getitems__")
    assert torch.equal(theirs["x"].nan_to_num(), ours["x"].nan_to_num())


def test_subclass_of_dataset_is_read_as_samples() -> None:
    class Doubled(Dataset):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [{"x": 2 * sample["x"]} for sample in super().__getitems__(keys)]

    base = Dataset.from_dict({"x": [1, 2, 3]})
    dataset = Doubled(base.data, info=base.info)
    assert_same([{"x": torch.tensor([2, 4, 6])}], shmload_batches(dataset, path="__getitems__"))


def test_custom_collate_fn_gets_the_samples() -> None:
    dataset = dataset_of({"x": SCALARS["int8"]})
    assert torch_batches(dataset, collate_fn=list) == shmload_batches(dataset, path="collate_fn", collate_fn=list)


def test_values_never_become_python_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a formatter of datasets is called, as in every other way of reading."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("formatted")

    dataset = dataset_of(SCALARS | TEXTS | RAGGED | LISTS)
    for formatter in (TorchFormatter, PythonFormatter):
        for name in ("format_row", "format_batch", "format_column"):
            monkeypatch.setattr(formatter, name, refuse)
    with pytest.raises(AssertionError, match="formatted"):
        dataset.with_format("torch")[0]
    shmload_batches(dataset.with_format("torch"), ragged="jagged")
    shmload_batches(dataset.select_columns([*SCALARS, *TEXTS]))


def test_mapped_file_is_not_copied_to_spawned_workers(tmp_path: Any) -> None:
    """Rows stay in the file; the pickle contains its name."""
    rows = np.zeros((1000, 1024), np.float32)
    Dataset.from_dict({"x": rows}).save_to_disk(tmp_path / "d")
    dataset = load_from_disk(tmp_path / "d").with_format("torch")
    with ShmLoader(dataset, 4) as loader:
        assert "read by read_batch_into" in repr(loader)
        assert len(pickle.dumps(loader._config().job())) < 5000 < rows.nbytes


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=slow)])
@pytest.mark.parametrize("form", [None, "torch"])
def test_iterable_dataset_is_split_among_workers(form: str | None, num_workers: int) -> None:
    dataset = dataset_of({"x": SCALARS["int64"], "s": TEXTS["string"]}).to_iterable_dataset(num_shards=3)
    dataset = dataset.with_format(form)
    assert isinstance(dataset, IterableDataset)
    expected = torch_batches(dataset, 2, num_workers=num_workers)
    with ShmLoader(dataset, 2, num_workers=num_workers) as loader:
        got = batches_of(loader)
    assert_same(expected, got)
    assert sorted(v for batch in got for v in batch["x"].tolist()) == sorted(SCALARS["int64"][1])


@pytest.mark.parametrize("splits", [{"train": None, "test": None}, {}])
def test_dict_of_datasets_is_an_error(splits: dict[str, Any]) -> None:
    dataset = DatasetDict(dict.fromkeys(splits, Dataset.from_dict({"x": [1]})))
    words = "with 'train', 'test'" if splits else "with no split"
    with pytest.raises(
        TypeError, match=rf"one split of a dataset; got DatasetDict {words}. Pick one: ShmLoader\(dataset\['train'\], ...\)"
    ):
        ShmLoader(dataset)  # type: ignore[arg-type]  # a DatasetDict, on purpose


def test_on_error_skips_only_the_bad_sample() -> None:
    """After a batch fails, on_error reads its rows one by one."""
    dataset = dataset_of(SCALARS | RAGGED | TEXTS).with_format("torch")
    with ShmLoader(dataset, 3, sampler=[0, 50, 2], on_error="skip", ragged="list") as loader:
        (batch,) = loader
        assert [SCALARS["int64"][1][i] for i in (0, 2)] == batch["int64"].tolist()
        assert loader.stats()["num_bad_samples"] == 1


def damaged(values: pa.Array, offsets: list[int]) -> pa.ChunkedArray:
    """Returns a column read from an arrow file whose offsets were replaced by `offsets`."""
    sink = pa.BufferOutputStream()
    table = pa.table({"x": values})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    whole = np.frombuffer(values.buffers()[1], np.int32)[: len(values) + 1].tobytes()
    written = sink.getvalue().to_pybytes()
    assert written.count(whole) == 1
    return pa.ipc.open_stream(written.replace(whole, np.array(offsets, np.int32).tobytes())).read_all().column(0)


@pytest.mark.parametrize("values", [pa.array([[7], [8, 9, 7], [8]]), pa.array(["7", "897", "8"])], ids=["lists", "text"])
@pytest.mark.parametrize("offsets", [[0, 3, 2, 5], [0, 9, 2, 5], [0, -5, 3, 5]])
def test_decreasing_offsets_are_an_error(values: pa.Array, offsets: list[int]) -> None:
    column = column_of("x", damaged(values, offsets))
    assert column is not None
    with pytest.raises(SampleError, match="column 'x' of the arrow table has offsets that are out of order"):
        column.lengths(np.arange(3))


@pytest.mark.parametrize("offsets", [[0, 2, 3, 6000], [-1, 2, 3, 4]])
def test_text_ending_outside_its_buffer_is_left_to_arrow(offsets: list[int]) -> None:
    assert column_of("x", damaged(pa.array(["7", "897", "8"]), offsets)) is None
