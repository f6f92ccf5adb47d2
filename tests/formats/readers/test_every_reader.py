"""Promises that Parquet, HDF5, Zarr and safetensors share."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from torch.utils.data import Subset

from shmload import ShardCorrupt, ShmLoader
from shmload.batch.layout import layout_of_schema
from shmload.batch.row_placer import RowOut, private_rows
from shmload.formats import HDF5Dataset, ParquetDataset, SafetensorsDataset, ZarrDataset
from tests.formats.open_files_kit import limited_open_files


def rows_of(dataset: Any, indices: Any) -> dict[str, Any]:
    rows = private_rows(layout_of_schema(dataset.schema), len(indices))
    dataset.read_batch_into(indices, RowOut(rows, slice(0, len(indices))))
    return rows


def test_samples_equal_the_written_ones(kind: Any, path: Path, columns: dict[str, Any]) -> None:
    dataset = kind(path)
    assert len(dataset) == 50
    for index in (0, 7, 8, 49):
        sample = dataset[index]
        assert set(columns) == set(sample)
        for name, values in columns.items():
            assert values.dtype == sample[name].dtype
            np.testing.assert_array_equal(values[index], sample[name])
    assert dataset.schema == {"image": ("float32", (6,)), "label": ("int16", ()), "flag": ("bool", ())}


def test_indices_behave_like_those_of_a_list(kind: Any, path: Path, columns: dict[str, Any]) -> None:
    dataset = kind(path)
    assert dataset[-1]["label"] == dataset[49]["label"] == columns["label"][49]
    assert dataset[np.int64(3)]["label"] == columns["label"][3]
    for index in (50, -51):
        with pytest.raises(IndexError, match=f"index {index} is out of range: the dataset has 50 samples"):
            dataset[index]
        with pytest.raises(IndexError, match=f"index {index} is out of range: the dataset has 50 samples"):
            rows_of(dataset, [0, index])
    with pytest.raises(TypeError):
        dataset[1.5]
    with pytest.raises(TypeError, match="indices are integers; got float64"):
        dataset.read_batch_into([1.5], {})
    for read in (lambda: dataset[2**64 - 1], lambda: rows_of(dataset, np.array([2**64 - 1], np.uint64))):
        with pytest.raises(IndexError, match="index 18446744073709551615 is out of range: the dataset has 50 samples"):
            read()


@given(indices=st.lists(st.integers(-50, 49), max_size=60))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_batch_has_the_rows_in_the_requested_order(kind: Any, path: Path, columns: dict[str, Any], indices: list[int]) -> None:
    found = rows_of(kind(path), indices)
    for name, values in columns.items():
        np.testing.assert_array_equal(values[np.array(indices, np.int64)], found[name])


@pytest.mark.slow(reason="starts two workers, also by spawn")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_deliver_every_row_of_a_dataset_read_before_in_the_trainer(
    kind: Any, path: Path, columns: dict[str, Any], start_method: str
) -> None:
    dataset = kind(path)
    assert dataset[1]["label"] == columns["label"][1]  # opened here, so that a forked worker inherits it
    with ShmLoader(dataset, batch_size=8, num_workers=2, shuffle=True, seed=5, multiprocessing_context=start_method) as loader:
        batches = [{name: rows.numpy().copy() for name, rows in batch.items()} for batch in loader]
    labels = np.concatenate([batch["label"] for batch in batches])
    images = np.concatenate([batch["image"] for batch in batches])
    assert sorted(columns["label"]) == sorted(labels)
    np.testing.assert_array_equal(columns["image"][labels // 7], images)


def test_pass_is_resumed_where_it_stopped(kind: Any, path: Path) -> None:
    def loader() -> Any:
        return ShmLoader(kind(path), batch_size=8, shuffle=True, seed=1)

    with loader() as whole:
        wanted = [batch["label"].tolist() for batch in whole]
    with loader() as first:
        batches = iter(first)
        begun = [next(batches)["label"].tolist() for _ in range(3)]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert wanted == begun + [batch["label"].tolist() for batch in second]


def test_pickled_dataset_is_small_and_reads_the_same(kind: Any, path: Path) -> None:
    dataset = kind(path)
    assert "not opened yet" in repr(dataset)
    wanted = dataset[7]
    assert "50 samples" in repr(dataset)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 600
    np.testing.assert_equal(wanted, pickle.loads(pickled)[7])


def test_forked_child_opens_the_file_again(kind: Any, path: Path, columns: dict[str, Any]) -> None:
    dataset = kind(path)
    inherited = dataset._opened
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            is_right = dataset[9]["label"] == columns["label"][9] and dataset._opened is not inherited
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert dataset._opened is inherited
    assert dataset[9]["label"] == columns["label"][9]


def test_threads_read_concurrently(kind: Any, path: Path, columns: dict[str, Any]) -> None:
    dataset = kind(path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda index: dataset[index]["label"], list(range(50)) * 4))
    assert list(columns["label"]) * 4 == found


def test_error_names_the_missing_library_and_its_extra(kind: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, module = {
        "ParquetDataset": ("parquet", "pyarrow.parquet"),
        "HDF5Dataset": ("hdf5", "h5py"),
        "ZarrDataset": ("zarr", "zarr"),
        "SafetensorsDataset": ("safetensors", "safetensors"),
    }[kind.__name__]
    monkeypatch.setitem(sys.modules, module, None)
    package = module.split(".")[0]
    with pytest.raises(
        ModuleNotFoundError, match=rf"the package {package} is needed and is not installed: pip install 'shmload\[{extra}\]'"
    ):
        len(kind(path))


def test_missing_file_is_a_file_not_found_error(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.file"):
        len(kind(tmp_path / "nowhere.file"))


def _data_file(path: Path) -> Path:
    """Returns the file to damage: the file itself, or a chunk in its folder."""
    return path / "label/c/0" if path.is_dir() else path


def test_file_that_may_not_be_read_is_not_reported_as_damaged(kind: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.is_dir():
        pytest.skip("Zarr reads chunks that cannot be read as missing ones")
    dataset = kind(path)
    len(kind(path))  # imports its library
    with limited_open_files(0), pytest.raises(OSError, match=r"Too many open files|errno = 24") as found:
        len(dataset)
    assert not isinstance(found.value, ShardCorrupt)


def copies_of(path: Path, number: int) -> list[Path]:
    copies = [path.with_name(f"{i}.file") for i in range(number)]
    for copy in copies:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    return copies


def test_datasets_may_be_more_than_the_files_that_a_process_may_open(kind: Any, path: Path, columns: dict[str, Any]) -> None:
    """Programs concatenate a dataset for each file, such as one for each episode of a robot."""
    with limited_open_files() as too_many:
        datasets = [kind(copy) for copy in copies_of(path, too_many)]
        for index in (3, 30):
            assert [dataset[index]["label"] for dataset in datasets] == [columns["label"][index]] * too_many


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_error_for_a_truncated_file_names_it(kind: Any, path: Path, share: float) -> None:
    damaged = _data_file(path)
    damaged.write_bytes(damaged.read_bytes()[: int(damaged.stat().st_size * share)])
    with pytest.raises(ShardCorrupt, match=r"data\.file.*"):
        rows_of(kind(path), range(50))


def test_error_for_a_file_of_garbage_names_it(kind: Any, path: Path) -> None:
    damaged = path / "zarr.json" if path.is_dir() else path
    damaged.write_bytes(np.random.default_rng(1).bytes(5000))
    with pytest.raises(ShardCorrupt, match=r"data\.file.*"):
        len(kind(path))


def test_loader_raises_the_error_of_a_damaged_file(kind: Any, path: Path) -> None:
    damaged = _data_file(path)
    dataset = kind(path)
    data = bytearray(damaged.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    damaged.write_bytes(data)
    with pytest.raises(ShardCorrupt, match=r"data\.file"), ShmLoader(dataset, batch_size=50) as loader:
        list(loader)


def test_worker_refuses_a_file_replaced_since_the_trainer_opened_it(kind: Any, path: Path, tmp_path: Path) -> None:
    if kind is ZarrDataset:
        pytest.skip("a Zarr folder has no version: any of its files may be written at any time")
    loader = ShmLoader(kind(path), batch_size=8, seed=0, num_workers=1)
    assert len(loader) == 7  # the trainer has opened the file
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    os.replace(other, path)
    with loader, pytest.raises(ShardCorrupt, match=rf"{path.name}: was changed since it was opened, with \d+ bytes: create the"):
        next(iter(loader))
    assert len(list(kind(path))) == 50


def test_worker_reports_why_it_could_not_open_the_dataset(kind: Any, path: Path) -> None:
    loader = ShmLoader(Subset(kind(path), range(40)), batch_size=8, seed=0, num_workers=1)
    path.rename(path.with_name("elsewhere"))
    with loader, pytest.raises(FileNotFoundError, match=path.name) as caught:
        next(iter(loader))
    assert "the worker could not open the dataset" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("fields", [["flag"], ("label", "image"), {"y": "label"}])
def test_fields_are_a_list_or_a_mapping(kind: Any, path: Path, columns: dict[str, Any], fields: Any) -> None:
    named = fields if isinstance(fields, dict) else {name: name for name in fields}
    if kind is ParquetDataset:
        fields = named = {name: name for name in named.values()}
    sample = kind(path, list(fields) if kind is ParquetDataset else fields)[3]
    assert list(sample) == list(named)
    for name, stored in named.items():
        assert np.array_equal(sample[name], columns[stored][3])


def test_string_as_a_list_of_fields_is_an_error(kind: Any, path: Path) -> None:
    with pytest.raises(TypeError, match=r"must be a list of names, got 'label'; write (fields|columns)=\["):
        kind(path, "label")


@pytest.mark.parametrize("kind", [HDF5Dataset, ZarrDataset, SafetensorsDataset])
@pytest.mark.parametrize("shape", [(0,), (0, 3)], ids=str)
def test_arrays_without_rows_are_an_empty_dataset(kind: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.zeros(shape, np.float32)
    if kind is HDF5Dataset:
        with h5py.File(tmp_path / "x", "w") as file:
            file["x"] = values
            file.create_dataset("y", data=values, chunks=(4, 3)[: values.ndim], maxshape=(None, 3)[: values.ndim])
    elif kind is ZarrDataset:
        group = zarr.open_group(tmp_path / "x", mode="w")
        group.create_array("x", data=values, chunks=(4, 3)[: values.ndim])
    else:
        save_file({"x": values}, tmp_path / "x")
    dataset = kind(tmp_path / "x")
    assert len(dataset) == 0
    with ShmLoader(dataset, batch_size=2, num_workers=0) as loader:
        assert list(loader) == []
