from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shmload import ShardCorrupt, ShmLoader
from shmload.formats import HDF5Dataset
from shmload.formats.block_cache import BlockCache
from shmload.formats.columns import Blocks, MappedColumn


def written(path: Path, userblock: int = 0, **datasets: Any) -> Path:
    with h5py.File(path, "w", userblock_size=userblock) as file:
        for name, value in datasets.items():
            file.create_dataset(name, **value) if isinstance(value, dict) else file.__setitem__(name, value)
    return path


ROWS = np.random.default_rng(0).random((20, 3))


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", ">i2", "<u8", "<f2"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_contiguous_dataset_is_mapped(tmp_path: Path, dtype: str, userblock: int) -> None:
    values = (ROWS * 100).astype(dtype)
    dataset = HDF5Dataset(written(tmp_path / "a.h5", userblock, x=values))
    assert isinstance(dataset._opened._columns["x"], MappedColumn)  # type: ignore[attr-defined]  # Columns
    found = {"x": np.empty((3, 3), np.dtype(dtype).newbyteorder("="))}
    dataset.read_batch_into([4, 19, 4], found)
    np.testing.assert_array_equal(values[[4, 19, 4]], found["x"])


def test_external_link_is_read_from_the_file_it_leads_to(tmp_path: Path) -> None:
    written(tmp_path / "far.h5", 0, x=ROWS)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["filler"] = np.full((20, 1000), 99.0)
        file["x"] = h5py.ExternalLink("far.h5", "/x")
    dataset = HDF5Dataset(tmp_path / "a.h5", ["x"])
    assert [dataset[number]["x"].tolist() for number in (0, 19)] == [ROWS[0].tolist(), ROWS[19].tolist()]


def test_raw_storage_in_another_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the other file's name is relative to it
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("x", data=ROWS, external=[("raw", 0, h5py.h5f.UNLIMITED)])
    dataset = HDF5Dataset("a.h5")
    assert [dataset[number]["x"].tolist() for number in (0, 19)] == [ROWS[0].tolist(), ROWS[19].tolist()]


@pytest.mark.parametrize(
    "how",
    [
        {"chunks": (3, 2)},
        {"chunks": (1, 3), "compression": "gzip", "shuffle": True},
        {"chunks": (64, 3), "maxshape": (None, 3), "fletcher32": True},
        {"dtype": ">f8", "chunks": (7, 3)},
    ],
)
def test_chunks_are_decoded(tmp_path: Path, how: dict[str, Any]) -> None:
    dataset = HDF5Dataset(written(tmp_path / "a.h5", x={"data": ROWS, **how}), {"rows": "/x"})
    with ShmLoader(dataset, batch_size=7, shuffle=True, seed=3) as loader:
        found = np.concatenate([batch["rows"].numpy() for batch in loader])
    np.testing.assert_array_equal(np.sort(ROWS, 0), np.sort(found, 0))


def test_text_and_arrays_of_variable_length_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["text"] = ["é", "", "abc"]
        file["raw"] = np.array([b"a", b"bc", b""], "S2")
        runs = file.create_dataset("group/runs", (3,), h5py.vlen_dtype(np.int32))
        for row in range(3):
            runs[row] = np.arange(row)
    dataset = HDF5Dataset(path)
    assert {"text": str, "raw": bytes, "group/runs": ("int32", (None,))} == dataset.schema
    np.testing.assert_equal({"text": "abc", "raw": b"", "group/runs": np.arange(2)}, dataset[2])
    with ShmLoader(dataset, batch_size=3, ragged="list") as loader:
        (batch,) = loader
    assert (batch["text"], batch["raw"]) == (["é", "", "abc"], [b"a", b"bc", b""])
    assert [run.tolist() for run in batch["group/runs"]] == [[], [0], [0, 1]]


@pytest.mark.parametrize("userblock", [0, 512])
def test_unwritten_rows_have_the_fill_value(tmp_path: Path, userblock: int) -> None:
    dataset = HDF5Dataset(written(tmp_path / "a.h5", userblock, x={"shape": (4, 2), "dtype": "f4", "fillvalue": 7}))
    np.testing.assert_array_equal([7, 7], dataset[3]["x"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": "/nothing"}, r"a\.h5: '/nothing' is not there; a field is a dataset"),
        ({"x": "/g"}, "'/g' is a group; a field is a dataset"),
        ({"x": "/one"}, "'/one' is a single value; a field is a dataset"),
        ({"x": "/x", "y": "/y"}, r"one row for each sample; these have x: 20, y: 3. Name those of one length in fields="),
        ({"x": "/pair"}, "'/pair': rows of .* cannot be a field of a batch"),
        ({"x": "/runs"}, "'/runs': rows of variable length are stored as >f8, not in this machine's byte order"),
        ({}, "has no array with rows to be a field"),
    ],
)
def test_error_explains_why_a_dataset_cannot_be_a_field(tmp_path: Path, fields: dict[str, str], message: str) -> None:
    pair = np.zeros(3, [("a", "i4"), ("b", "f4")])
    runs = {"shape": (3,), "dtype": h5py.vlen_dtype(np.dtype(">f8"))}
    path = written(tmp_path / "a.h5", x=ROWS, y=ROWS[:3], one=np.float32(1), pair=pair, runs=runs, **{"g/z": ROWS})
    with pytest.raises(ValueError, match=message):
        len(HDF5Dataset(path, fields))


def test_bit_fields_are_integers(tmp_path: Path) -> None:
    stored = np.array([1, 2, 255], np.uint8)
    with h5py.File(tmp_path / "bits.h5", "w") as file:
        space = h5py.h5s.create_simple((3,))
        bits = h5py.h5d.create(file.id, b"bits", h5py.h5t.STD_B8LE, space)
        bits.write(h5py.h5s.ALL, h5py.h5s.ALL, stored, mtype=h5py.h5t.STD_B8LE)
    assert [sample["bits"] for sample in HDF5Dataset(tmp_path / "bits.h5")] == stored.tolist()


@pytest.mark.parametrize("how", [{}, {"chunks": (2,), "compression": "gzip"}], ids=["in one piece", "chunks"])
@pytest.mark.parametrize("base", ["i1", ">i4", "u2"])
def test_enums_are_integers_and_booleans_are_bool(tmp_path: Path, base: str, how: dict[str, Any]) -> None:
    path = tmp_path / "x.h5"
    stored = np.array([0, 1, 1, 7], base)
    with h5py.File(path, "w") as file:
        file.create_dataset("enum", data=stored, dtype=h5py.enum_dtype({"cat": 0, "dog": 1, "owl": 7}, base), **how)
        file.create_dataset("flag", data=stored == 1, **how)
    dataset = HDF5Dataset(path)
    assert dataset.schema == {"enum": (np.dtype(base).newbyteorder("=").name, ()), "flag": ("bool", ())}
    assert [sample["enum"] for sample in dataset] == stored.tolist()
    assert [sample["flag"] for sample in dataset] == (stored == 1).tolist()


def unusual(kind: str) -> Any:
    """Returns a type that HDF5 can store, but numpy or torch lacks."""
    h5t = h5py.h5t
    if kind == "int128":
        made = h5t.STD_I64LE.copy()
        made.set_size(16)
        made.set_precision(128)
        return made
    if kind == "compound":
        made = h5t.create(h5t.COMPOUND, 8)
        made.insert(b"at", 0, h5t.UNIX_D32LE)
        return made
    return {"time": h5t.UNIX_D32LE, "times": h5t.vlen_create(h5t.UNIX_D32LE), "references": h5t.STD_REF_OBJ}[kind]


@pytest.mark.parametrize(
    ("kind", "stored", "reason"),
    [
        ("time", "time of 4 bytes", "have no numpy dtype"),
        ("times", "vlen of time of 4 bytes", "have no numpy dtype"),
        ("compound", "compound of 8 bytes", "have no numpy dtype"),
        ("int128", "integer of 16 bytes", "have no numpy dtype"),
        ("references", "reference of 8 bytes", "cannot be a field of a batch"),
    ],
)
def test_error_for_an_unsupported_type_names_the_dataset_and_a_remedy(tmp_path: Path, kind: str, stored: str, reason: str) -> None:
    path = written(tmp_path / "a.h5", x=ROWS)
    with h5py.File(path, "a") as file:
        h5py.h5d.create(file.id, b"odd", unusual(kind), h5py.h5s.create_simple((len(ROWS),)))
    with pytest.raises(ValueError, match=rf"a\.h5, '/odd': rows .*stored as {stored},? {reason}.* name the other.* in fields="):
        len(HDF5Dataset(path))
    assert len(HDF5Dataset(path, ["x"])) == len(ROWS)


@pytest.mark.parametrize("dtype", [h5py.string_dtype(), h5py.string_dtype("utf-8", 3)], ids=["variable", "fixed"])
def test_error_for_several_texts_a_row_names_the_dataset_and_a_remedy(tmp_path: Path, dtype: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("words", (3, 2), dtype)
    with pytest.raises(ValueError, match=r"a\.h5, '/words': rows .*shape \(2,\), stored as string.* name the others in fields="):
        len(HDF5Dataset(tmp_path / "a.h5"))


def test_file_that_is_cut_off_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", x=np.arange(1.0, 17))
    with h5py.File(path) as file:
        nbytes = file["x"].id.get_offset() + 8  # within a page, whose rest the system then fills with zeros
    dataset = HDF5Dataset(path)
    assert dataset[15]["x"] == 16
    os.truncate(path, nbytes)
    with pytest.raises(ShardCorrupt, match=rf"a\.h5, offset {nbytes}: the file was cut off while it was read"):
        dataset[15]


def test_lack_of_memory_is_not_reported_as_damage() -> None:
    def load(first: int, end: int) -> Any:
        raise MemoryError("a block")

    with pytest.raises(MemoryError, match="a block"):
        Blocks("x", 4, 2, load, BlockCache(100)).block(0)
