"""The same columns in a file of each format, written by the format's own library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from safetensors.numpy import save_file

from shmload.formats import HDF5Dataset, ParquetDataset, SafetensorsDataset, ZarrDataset

COUNT = 50
COLUMNS = {
    "image": np.random.default_rng(3).random((COUNT, 6), np.float32),
    "label": np.arange(COUNT, dtype=np.int16) * 7,
    "flag": np.arange(COUNT) % 3 == 0,
}


def write_parquet(path: Path) -> Path:
    images = pa.FixedSizeListArray.from_arrays(COLUMNS["image"].reshape(-1), 6)
    table = pa.table({"image": images, "label": COLUMNS["label"], "flag": COLUMNS["flag"]})
    pq.write_table(table, path, row_group_size=8)
    return path


def write_hdf5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["image"] = COLUMNS["image"]  # contiguous: mapped
        file.create_dataset("label", data=COLUMNS["label"], chunks=(8,), compression="gzip")
        file["flag"] = COLUMNS["flag"]
    return path


def write_zarr(path: Path) -> Path:
    group = zarr.open_group(path, mode="w")
    for name, values in COLUMNS.items():
        group.create_array(name, data=values, chunks=(8, *values.shape[1:]))
    return path


def write_safetensors(path: Path) -> Path:
    save_file(COLUMNS, path)
    return path


WRITERS: dict[type, Callable[[Path], Path]] = {
    ParquetDataset: write_parquet,
    HDF5Dataset: write_hdf5,
    ZarrDataset: write_zarr,
    SafetensorsDataset: write_safetensors,
}


@pytest.fixture(params=list(WRITERS), ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Any:
    """Returns a dataset class."""
    return request.param


@pytest.fixture
def path(kind: Any, tmp_path: Path) -> Path:
    """Writes a file for this dataset class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WRITERS[kind](tmp_path / "data.file")


@pytest.fixture
def columns() -> dict[str, Any]:
    """Returns the content of the file."""
    return COLUMNS
