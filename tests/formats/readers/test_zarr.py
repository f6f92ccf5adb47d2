from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from shmload.formats import ZarrDataset

ROWS = np.random.default_rng(0).random((20, 3)).astype(np.float32)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("how", [{"chunks": (3, 2)}, {"chunks": (20, 3), "compressors": None}, {"chunks": (1, 3)}])
def test_formats_2_and_3_are_read(tmp_path: Path, version: Any, how: dict[str, Any]) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=ROWS, zarr_format=version, **how)
    dataset = ZarrDataset(tmp_path / "a.zarr")
    found = {"data": np.empty((4, 3), np.float32)}
    dataset.read_batch_into([19, 0, -3, 0], found)
    np.testing.assert_array_equal(ROWS[[19, 0, -3, 0]], found["data"])


def test_shards_are_blocks(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=ROWS, chunks=(2, 3), shards=(10, 3))
    dataset = ZarrDataset(tmp_path / "a.zarr")
    np.testing.assert_array_equal(ROWS[11], dataset[11]["data"])
    cache = dataset._opened._columns["data"]._blocks.cache  # type: ignore[attr-defined]  # Columns
    assert cache.nbytes == 10 * 3 * 4


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.filterwarnings("ignore:The data type")  # zarr warns that this type may change
def test_bytes_of_fixed_length_are_bytes(tmp_path: Path, version: Any) -> None:
    values = [b"a", b"\xff\xfe", b""]
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    group.create_array("x", data=np.array(values, "S2"), chunks=(2,))
    dataset = ZarrDataset(tmp_path / "a.zarr")
    assert dataset.schema == {"x": bytes}
    assert [dataset[row]["x"] for row in range(3)] == values


@pytest.mark.parametrize(("kind", "values"), [("variable_length_bytes", [b"a", b"\xff\0", b""]), ("string", ["a", "é", ""])])
@pytest.mark.filterwarnings("ignore:The data type")  # zarr warns that this type may change
def test_values_of_variable_length_are_read_back(tmp_path: Path, kind: str, values: list[Any]) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(3,), chunks=(2,), dtype=kind, zarr_format=3)
    array[:] = np.array(values, array.dtype)
    dataset = ZarrDataset(tmp_path / "a.zarr")
    assert dataset.schema == {"data": type(values[0])}
    assert [dataset[row]["data"] for row in range(3)] == values


def test_fields_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Fields must not depend on the order of folder entries, which differs between file systems."""
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for name in "rxaib":
        group.create_array(name, data=ROWS)
    assert list(ZarrDataset(tmp_path / "a.zarr").schema) == ["a", "b", "i", "r", "x"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": "nothing"}, r"fields names 'nothing', which does not exist; it has \['one', 'x', 'y'\]"),
        ({"x": "group"}, "field 'x' is a group; a field is an array"),
        ({"x": "one"}, "field 'x' is a single value; a field is an array"),
        ({"x": "x", "y": "y"}, "these have x: 20, y: 4"),
    ],
)
def test_error_explains_why_an_array_cannot_be_a_field(tmp_path: Path, fields: dict[str, str], message: str) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("x", data=ROWS)
    group.create_array("y", data=ROWS[:4])
    group.create_array("one", data=np.array(3.0))
    group.create_group("group")
    with pytest.raises(ValueError, match=message):
        len(ZarrDataset(tmp_path / "a.zarr", fields))
