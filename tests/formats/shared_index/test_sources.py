"""Indexes of DataFrames and manifest files."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

from shmload import SharedIndex
from shmload.formats.shared_index import index_sources

ROWS = [{"path": "a.jpg", "label": 3, "weight": 0.5}, {"path": 'ü,"b".jpg', "label": 5, "weight": float("inf")}]


@pytest.mark.parametrize(
    "paths",
    [
        pd.Series(["a", "b"], dtype=object),
        pd.Series(["a", "b"], dtype="string"),
        pd.Series(["a", "b"], dtype="string[pyarrow]"),
        pd.Series(["a", "b"], dtype="category"),
    ],
    ids=lambda series: str(series.dtype),
)
def test_text_of_a_dataframe_is_read_back(paths: Any) -> None:
    frame = pd.DataFrame({"path": paths})
    frame.index = pd.Index([7, 7])
    assert list(SharedIndex.from_dataframe(frame)) == [{"path": "a"}, {"path": "b"}]


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        ("int32", "int32"),
        ("bool", "bool"),
        ("float32", "float32"),
        ("Int64", "int64"),
        ("boolean", "bool"),
        ("Float32", "float32"),
        ("int64[pyarrow]", "int64"),
    ],
)
def test_numbers_of_a_dataframe_keep_their_dtype(dtype: str, held: str) -> None:
    index = SharedIndex.from_dataframe(pd.DataFrame({"x": pd.Series([1, 0, 1], dtype=dtype)}))
    assert index.columns == {"x": held}
    assert index.column("x").tolist() == [1, 0, 1]


def test_nan_in_a_column_of_floats_is_a_value() -> None:
    index = SharedIndex.from_dataframe(pd.DataFrame({"x": [0.5, float("nan")]}))
    assert np.isnan(index[1]["x"])


@pytest.mark.parametrize("values", [["a", None], pd.Series([1, None], dtype="Int64"), pd.Series(["a", None], dtype="category")])
def test_missing_values_of_a_dataframe_are_an_error(values: Any) -> None:
    with pytest.raises(ValueError, match="column 'x' has 1 missing values, the first in row 1: fill or drop them first"):
        SharedIndex.from_dataframe(pd.DataFrame({"x": values}))


def test_unsupported_values_of_a_dataframe_are_an_error() -> None:
    with pytest.raises(TypeError, match="entry 0, column 'when': an index cannot store values of type Timestamp"):
        SharedIndex.from_dataframe(pd.DataFrame({"when": pd.to_datetime(["2020-01-01"])}))
    with pytest.raises(TypeError, match="names of columns are str; got 0 of type int"):
        SharedIndex.from_dataframe(pd.DataFrame([[1]]))
    with pytest.raises(ValueError, match=r"the columns of an index have different names; got \['a', 'a'\]"):
        SharedIndex.from_dataframe(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(TypeError, match="a DataFrame has columns; got list"):
        SharedIndex.from_dataframe([1])
    with pytest.raises(TypeError, match=r"a DataFrame gives its columns' names, not its rows: use SharedIndex.from_dataframe"):
        SharedIndex(pd.DataFrame({"a": [1]}))


def test_any_object_with_columns_is_read_as_a_dataframe() -> None:
    class Table:
        columns = ("path", "label")

        def __getitem__(self, name: str) -> Any:
            return {"path": ["a", "b"], "label": np.array([1, 2], np.int16)}[name]

    index = SharedIndex.from_dataframe(Table())
    assert index[1] == {"path": "b", "label": 2}
    assert index.columns == {"path": "str", "label": "int16"}


def write(path: Path, text: str | bytes) -> Path:
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_jsonl_manifest_is_read(tmp_path: Path, ending: str) -> None:
    text = "\n".join(map(json.dumps, ROWS)) + "\n\n"
    assert list(SharedIndex.from_manifest(write(tmp_path / f"m.jsonl{ending}", text))) == ROWS


@pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz"])
def test_table_gives_str_unless_types_are_given(tmp_path: Path, ending: str) -> None:
    text = 'path,label,note\r\n"a\n,.jpg",007,\r\n\r\nb.jpg,5,x\r\n'
    path = write(tmp_path / f"m.{ending}", text.replace(",", "\t") if "tsv" in ending else text)
    comma = "\t" if "tsv" in ending else ","
    assert list(SharedIndex.from_manifest(path)) == [
        {"path": f"a\n{comma}.jpg", "label": "007", "note": ""},
        {"path": "b.jpg", "label": "5", "note": "x"},
    ]
    assert SharedIndex.from_manifest(str(path), types={"label": int}).column("label").tolist() == [7, 5]


def test_txt_gives_lines_including_names_that_are_not_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "m.txt", b"a.jpg\r\n\n b\xff.jpg ")
    assert list(map(os.fsencode, SharedIndex.from_manifest(path))) == [b"a.jpg", b" b\xff.jpg "]


def test_parquet_manifest_gives_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "path": pa.array(["a", None, "ü"]).dictionary_encode(),
            "raw": pa.array([b"\0", b"", b"x"]),
            "label": pa.array([1, 2, 3], pa.int16()),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "m.parquet", row_group_size=2)
    assert list(SharedIndex.from_manifest(tmp_path / "m.parquet")) == table.to_pylist()


def test_parquet_manifest_with_two_columns_of_one_name_is_an_error(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table([[1, 2], [3, 4]], names=["a", "a"]), tmp_path / "m.parquet")
    with pytest.raises(ValueError, match=r"m\.parquet: the columns of an index have different names; got \['a', 'a'\]"):
        SharedIndex.from_manifest(tmp_path / "m.parquet")


def test_parquet_without_pyarrow_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ImportError, match=r"m\.parquet: .*the package pyarrow is needed and is not installed: pip install .shmload\[parquet\]"
    ):
        SharedIndex.from_manifest(tmp_path / "m.parquet")


def test_parquet_manifest_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"path": [f"folder/of/images/{i:010d}.jpg" for i in range(300_000)]})
    pyarrow.parquet.write_table(table, tmp_path / "m.parquet", use_dictionary=False, row_group_size=50_000)
    held, before = [], 0

    class Watching(index_sources.ColumnBuilder):
        def extend(self, values: Any) -> None:
            held.append(pa.total_allocated_bytes() - before)
            super().extend(values)

    monkeypatch.setattr(index_sources, "ColumnBuilder", Watching)
    nbytes = table.nbytes
    del table
    before = pa.total_allocated_bytes()
    index = SharedIndex.from_manifest(tmp_path / "m.parquet")
    assert (len(index), index[299_999]) == (300_000, {"path": "folder/of/images/0000299999.jpg"})
    assert max(held) < nbytes / 2


def test_text_of_a_manifest_may_begin_with_a_mark_and_bools_are_words_or_digits(tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", "\ufeffpath,good\na,False\nb,true\nc,0\nd,1\n")
    index = SharedIndex.from_manifest(path, types={"good": bool})
    assert list(index) == [{"path": name, "good": good} for name, good in zip("abcd", [False, True, False, True], strict=True)]
    assert list(SharedIndex.from_manifest(write(tmp_path / "m.txt", "\ufeffa\nb\n"))) == ["a", "b"]


BAD = [
    ("m.jsonl", '{"a": 1}\n{"b": 1}', {}, r"m.jsonl: entry 1: keys \['b'\] after rows of \['a'\]"),
    ("m.jsonl", '{"a": 1}\n{"a": "x"}', {}, "m.jsonl: entry 1, column 'a': str after int"),
    ("m.jsonl", '{"a": 1}\n{"a": ', {}, "m.jsonl: entry 1: Expecting value: line 1"),
    ("m.csv", "a,b\n1\n", {}, r"m.csv: entry 0: 1 values in line 2, and 2 columns \['a', 'b'\]"),
    ("m.csv", "a,a\n1,2\n", {}, r"m.csv: the first line names the columns, each once; got \['a', 'a'\]"),
    ("m.csv", "", {}, r"m.csv: the first line names the columns, each once; got \[\]"),
    ("m.csv", "a,b\n1,x\n", {"b": int}, "m.csv: entry 0, column 'b': invalid literal for int"),
    ("m.csv", "a\nyes\n", {"a": bool}, "m.csv: entry 0, column 'a': 'yes' is neither true nor false, 1 nor 0"),
    ("m.csv", 'a\n"x', {}, "m.csv: unexpected end of data"),
    ("m.csv", "a\n1\n", {"b": int}, r"m.csv: types names columns \['b'\], and the file has \['a'\]"),
    ("m.csv", b"a\n\xff\n", {}, "m.csv: 'utf-8' codec can't decode"),
    ("m.jsonl", "1", {"a": int}, "m.jsonl: types= is only for .csv and .tsv; .jsonl files define the types of their values"),
    ("m.xml", "", {}, r"m.xml: a manifest is .jsonl, .csv, .tsv or .txt \(or any of them .gz\), or .parquet; got '.xml'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "types", "message"), BAD, ids=[case[3][:30] for case in BAD])
def test_error_names_what_is_wrong_with_a_manifest(tmp_path: Path, name: str, text: Any, types: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SharedIndex.from_manifest(write(tmp_path / name, text), types=types)


GZIP_DAMAGED = {
    "cut": gzip.compress(b"a,b\n1,2\n" * 99)[:-20],
    "none": b"no gzip",
    "garbage": gzip.compress(b"")[:10] + b"\xff" * 9,
}


@pytest.mark.parametrize("data", GZIP_DAMAGED.values(), ids=list(GZIP_DAMAGED))  # their bytes contain the time
def test_error_names_the_manifest_with_a_damaged_gzip_stream(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.csv.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"m.csv.gz: the gzip stream is damaged or cut: "):
        SharedIndex.from_manifest(tmp_path / "m.csv.gz")


def test_error_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.txt"):
        SharedIndex.from_manifest(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match=r"none.txt"):
        SharedIndex.from_manifest(tmp_path / "none.txt", name="x")
