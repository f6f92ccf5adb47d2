"""Unusual Parquet files: pyarrow's values, or one error that names the file and the remedy."""

from __future__ import annotations

import base64
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import ShmLoader
from shmload.errors import SampleError, ShardCorrupt
from shmload.formats import ParquetDataset, TarDataset, TarWriter
from shmload.formats.parquet.parquet_footer import file_footer, row_groups
from shmload.formats.shared_index.shared_index import SharedIndex
from shmload.remote import RemoteDataset
from shmload.remote.layouts import Parquet
from shmload.tools.inspect import describe


class _Keys(pe.KmsClient):
    """A key server that keeps nothing secret."""

    def __init__(self, _: Any) -> None:
        pe.KmsClient.__init__(self)

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, wrapped: bytes, _: str) -> bytes:
        return base64.b64decode(wrapped)


TABLE = pa.table({"secret": [3, 4, 5], "x": [1, 2, 3], "s": [{"a": 1, "b": 2}] * 3})


def write_encrypted(path: Path, *, plaintext_footer: bool = True, columns: tuple[str, ...] = ("secret", "s.a")) -> Path:
    config = pe.EncryptionConfiguration(footer_key="k", column_keys={"k2": list(columns)}, plaintext_footer=plaintext_footer)
    properties = pe.CryptoFactory(_Keys).file_encryption_properties(pe.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=properties) as writer:
        for part in (TABLE, TABLE.slice(1)):
            writer.write_table(part)
    return path


ENCRYPTED = r"t\.parquet: columns \['secret', 's\.a'\] are encrypted, and shmload decrypts no Parquet"


@pytest.mark.slow(reason="starts an interpreter, because without the check the process aborts")
def test_encrypted_columns_do_not_abort_the_process(tmp_path: Path) -> None:
    path = write_encrypted(tmp_path / "t.parquet")
    program = f"from shmload.remote import RemoteDataset; len(RemoteDataset.from_urls({str(path)!r}))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "columns ['secret', 's.a'] are encrypted" in ended.stderr


def test_encrypted_columns_are_named_by_every_reader(tmp_path: Path) -> None:
    path = write_encrypted(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=ENCRYPTED + r"; give layout=Parquet\(columns=\.\.\.\)"):
        len(RemoteDataset.from_urls(str(path)))
    with pytest.raises(ValueError, match=r"t\.parquet: columns \['secret'\] are encrypted"):
        len(RemoteDataset.from_urls(str(path), layout=Parquet(columns=("x", "secret"))))
    with pytest.raises(ValueError, match=r"t\.parquet: columns \['secret'\] are encrypted.*; name the others in columns="):
        len(ParquetDataset(path, ["x", "secret"]))
    with pytest.raises(ValueError, match=ENCRYPTED):
        SharedIndex.from_manifest(path)
    assert any("columns ['secret'] are encrypted" in note for note in describe(path).notes)


def test_readable_columns_beside_encrypted_ones_are_read(tmp_path: Path) -> None:
    path = write_encrypted(tmp_path / "t.parquet")
    assert [sample["x"] for sample in ParquetDataset(path, ["x"])] == [1, 2, 3, 2, 3]
    with closing(RemoteDataset.from_urls(str(path), layout=Parquet(columns=("x",)), shuffle=False)) as dataset:
        assert [sample["x"] for sample in dataset] == [1, 2, 3, 2, 3]


def test_encrypted_footer_is_refused(tmp_path: Path) -> None:
    path = write_encrypted(tmp_path / "t.parquet", plaintext_footer=False)
    with pytest.raises(ShardCorrupt, match=r"t\.parquet: at byte \d+: the footer of this Parquet file is encrypted"):
        len(RemoteDataset.from_urls(str(path)))
    with pytest.raises(ShardCorrupt, match=r"t\.parquet.*encrypted"):
        len(ParquetDataset(path))
    with pytest.raises(ValueError, match=r"t\.parquet.*encrypted"):
        SharedIndex.from_manifest(path)


def test_row_groups_begin_at_pyarrows_offsets(tmp_path: Path) -> None:
    table = pa.table({"n": np.arange(90), "t": [str(i % 3) for i in range(90)], "l": [[i, i] for i in range(90)]})
    for number, options in enumerate(({}, {"use_dictionary": False}, {"data_page_version": "2.0", "write_page_index": True})):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table, path, row_group_size=7, **options)
        metadata, expected = pq.read_metadata(path), []
        for each in map(metadata.row_group, range(metadata.num_row_groups)):
            chunks = [each.column(k) for k in range(each.num_columns)]
            begin = min(min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in chunks)
            expected.append((each.num_rows, begin, ()))
        assert [(group.num_rows, group.begin, group.encrypted) for group in row_groups(file_footer(str(path)))] == expected


@settings(deadline=None)
@given(st.data())
def test_damaged_metadata_is_an_error_or_row_groups(data: st.DataObject) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=1)
    whole = bytearray(sink.getvalue().to_pybytes())
    footer = whole[len(whole) - 8 - int.from_bytes(whole[-8:-4], "little") :]
    for _ in range(data.draw(st.integers(1, 4))):
        footer[data.draw(st.integers(0, len(footer) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = row_groups(bytes(footer[: data.draw(st.integers(0, len(footer)))]))
    except ValueError:
        return
    assert all(isinstance(group.num_rows, int) for group in found)


# ------------------------------------------------------------ row groups without rows


@pytest.mark.parametrize("sizes", [(3, 0, 3), (0, 3), (3, 0), (0, 0, 2, 0, 0, 1, 0), (1, 0, 0)], ids=str)
def test_empty_row_groups_are_skipped(sizes: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_groups(path, sizes)
    expected = pq.read_table(path)["n"].to_pylist()
    assert [int(sample["n"]) for sample in ParquetDataset(path)] == expected
    with closing(RemoteDataset.from_urls(str(path), shuffle=False)) as dataset:
        assert len(dataset) == len(expected)
        assert [int(sample["n"]) for sample in dataset] == expected
        assert [int(dataset.indexed()[k]["n"]) for k in range(len(expected))] == expected
    with ShmLoader(ParquetDataset(path), batch_size=2, seed=1, shuffle=True, num_workers=1) as loader:
        assert sorted(int(n) for batch in loader for n in batch["n"]) == sorted(expected)


def test_file_of_empty_row_groups_has_no_samples(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_groups(tmp_path / "a" / "0.parquet", (0, 0))
    assert len(ParquetDataset(tmp_path / "a" / "0.parquet")) == 0
    with closing(RemoteDataset.from_urls(str(tmp_path / "a"))) as dataset:
        assert list(dataset) == []
    write_groups(tmp_path / "a" / "1.parquet", (0, 2))
    write_groups(tmp_path / "a" / "2.parquet", ())
    assert len(ParquetDataset(f"{tmp_path}/a/*.parquet")) == 2
    with closing(RemoteDataset.from_urls(str(tmp_path / "a"), shuffle=False)) as dataset:
        assert [int(sample["n"]) for sample in dataset] == [0, 1]


def write_groups(path: Path, sizes: tuple[int, ...]) -> None:
    """Writes a file with row groups of these sizes, whose column "n" counts."""
    begin = 0
    with pq.ParquetWriter(path, pa.schema([("n", pa.int64()), ("t", pa.string())])) as writer:
        for size in sizes:
            numbers = list(range(begin, begin + size))
            writer.write_table(pa.table({"n": numbers, "t": [str(n) for n in numbers]}, writer.schema))
            begin += size


# ------------------------------------------------------------ values and names that Python's types cannot represent


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([0, 2**62], pa.timestamp("us")), r"column 't' of timestamp\[us\] .*OverflowError"),
        (pa.array([None, 0], pa.timestamp("us", tz="Mars/Phobos")), r"column 't' of timestamp\[us, tz=Mars/Phobos\]"),
        (pa.array([1000, 1], pa.time64("ns")), r"column 't' of time64\[ns\] .*would lose data: 1"),
        (pa.array([[1000], [2000, 1]], pa.list_(pa.time64("ns"))), r"column 't' of list<.*would lose data: 1"),
        (pa.array([[1000], [1]], pa.large_list(pa.time64("ns"))), r"column 't' of large_list<.*would lose data: 1"),
        (pa.array([[1000], [1]], pa.list_(pa.time64("ns"), 1)), r"column 't' of fixed_size_list<.*would lose data: 1"),
        (pa.array([{"t": 1000}, {"t": 1}], pa.struct([("t", pa.time64("ns"))])), r"column 't' of struct<.*would lose data: 1"),
        (pa.array([[("a", 1000)], [("a", 1)]], pa.map_(pa.string(), pa.time64("ns"))), r"column 't' of map<.*would lose data: 1"),
        (pa.array([0, 2**31 - 1], pa.date32()), r"column 't' of date32"),
    ],
    ids=["microseconds", "zone", "nanoseconds", "list", "large list", "fixed list", "struct", "map", "days"],
)
def test_times_outside_pythons_range_are_errors_that_name_the_column(column: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"n": [1, 2], "t": column}), path)
    with closing(RemoteDataset.from_urls(str(path), shuffle=False)) as dataset:
        samples = iter(dataset)
        assert next(samples)["t"] == column[0].as_py()
        with pytest.raises(SampleError, match=rf"t\.parquet: row group 0, row 1: {words}"):
            next(samples)
    if not pa.types.is_nested(column.type):
        expected = [number or 0 for number in column.cast(pa.int64() if column.type != pa.date32() else pa.int32()).to_pylist()]
        assert [sample["t"] for sample in ParquetDataset(path, fill_null={"t": 0})] == expected


def test_columns_with_the_same_name_are_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["x", "x", "y"]), path)
    with (
        closing(RemoteDataset.from_urls(str(path))) as dataset,
        pytest.raises(ValueError, match=r"t\.parquet: two columns have the same name: \['x', 'x', 'y'\]"),
    ):
        list(dataset)
    with pytest.raises(ValueError, match=r"t\.parquet: two columns have the same name: \['x', 'x', 'y'\]"):
        len(ParquetDataset(path))
    with closing(RemoteDataset.from_urls(str(path), layout=Parquet(columns=("y",)))) as dataset:
        assert [sample["y"] for sample in dataset] == [3]


def test_single_string_in_place_of_a_list_of_columns_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"abc": [1]}), tmp_path / "x.parquet")
    with TarWriter(tmp_path / "x.tar") as tar:
        tar.write({"__key__": "0", "cls": 0})
    with pytest.raises(TypeError, match=r"columns must be a list of names, got 'abc'; write columns=\['x', 'y'\]"):
        Parquet(columns="abc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns needs at least one name; None takes all of them"):
        Parquet(columns=())
    for make in (
        lambda: RemoteDataset.from_urls(str(tmp_path / "x.parquet")).indexed(fields="abc"),
        lambda: RemoteDataset.from_urls(str(tmp_path / "x.tar")).indexed(fields="cls"),
        lambda: TarDataset(tmp_path / "x.tar", fields="cls"),
    ):
        with pytest.raises(TypeError, match=r"fields must be a list of names, got '(abc|cls)'; write fields="):
            make()


def test_columns_may_be_a_list(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "x.parquet")
    layout = Parquet(columns=["b"])  # type: ignore[arg-type]
    (sample,) = RemoteDataset.from_urls(str(tmp_path), layout=layout)
    assert sample["b"] == 2
    assert "a" not in sample
    assert hash(layout) == hash(Parquet(columns=("b",)))
