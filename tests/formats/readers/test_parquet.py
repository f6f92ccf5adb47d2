from __future__ import annotations

import datetime
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

from shmload import BlockShuffle, SampleError, ShardCorrupt, ShmLoader
from shmload.formats import ParquetDataset
from shmload.remote import RemoteDataset
from shmload.remote.layouts import Parquet
from tests.formats.open_files_kit import limited_open_files


def written(path: Path, rows_per_group: int = 4, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


def batch_of(dataset: Any, size: int = 100) -> Any:
    with ShmLoader(dataset, batch_size=size, ragged="list") as loader:
        return next(iter(loader))


NUMBERS = st.sampled_from([pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()])


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, list[Any]], pa.Table]:
    count = draw(st.integers(1, 12))

    def some(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=count, max_size=count))

    number = draw(NUMBERS)
    value = st.integers(0, 100)
    columns = {
        "number": (some(value), number),
        "flag": (some(st.booleans()), pa.bool_()),
        "text": (some(st.text(max_size=5)), draw(st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]))),
        "raw": (some(st.binary(max_size=5)), pa.binary()),
        "list": (some(st.lists(value, max_size=4)), draw(st.sampled_from([pa.list_, pa.large_list]))(number)),
        "pair": (some(st.lists(value, min_size=2, max_size=2)), pa.list_(number, 2)),
        "pairs": (some(st.lists(st.lists(value, min_size=2, max_size=2), max_size=3)), pa.list_(pa.list_(number, 2))),
    }
    values = {name: column for name, (column, _) in columns.items()}
    return values, pa.table({name: pa.array(column, kind) for name, (column, kind) in columns.items()})


@given(drawn=tables(), rows_per_group=st.integers(1, 5), cache_bytes=st.sampled_from([0, 200, 1 << 20]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_table_is_read_back(tmp_path: Path, drawn: Any, rows_per_group: int, cache_bytes: int) -> None:
    values, table = drawn
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=rows_per_group)
    dataset = ParquetDataset(tmp_path / "t.parquet", cache_bytes=cache_bytes)
    batch = batch_of(dataset)
    for row in range(len(dataset)):
        sample = dataset[row]
        for name, column in values.items():
            wanted = column[row]
            assert wanted == (sample[name].tolist() if isinstance(sample[name], (np.ndarray, np.generic)) else sample[name])
            given_ = batch[name][row]
            assert wanted == (given_.tolist() if hasattr(given_, "tolist") else given_)


def test_times_are_integers_and_dictionaries_are_decoded(tmp_path: Path) -> None:
    day = datetime.date(1970, 1, 11)
    path = written(
        tmp_path / "t.parquet",
        when=pa.array([3, 4], pa.timestamp("ms")),
        day=pa.array([day, day]),
        kind=pa.array(["a", "b"]).dictionary_encode(),
        hash=pa.array([b"12", b"34"], pa.binary(2)),
    )
    sample = ParquetDataset(path)[1]
    assert sample == {"when": 4, "day": 10, "kind": "b", "hash": b"34"}


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    written(tmp_path / "b.parquet", x=[3, 4])
    written(tmp_path / "a.parquet", x=[1, 2])
    assert [sample["x"] for sample in ParquetDataset(f"{tmp_path}/*.parquet")] == [1, 2, 3, 4]
    written(tmp_path / "c.parquet", x=["text"])
    with pytest.raises(ValueError, match=r"c\.parquet: column 'x' is string, and int64 in .*a\.parquet; the files"):
        len(ParquetDataset(f"{tmp_path}/*.parquet"))
    with pytest.raises(FileNotFoundError, match=r"no Parquet file has the name .*\*\.nothing', or matches it as a pattern"):
        ParquetDataset(f"{tmp_path}/*.nothing")
    with pytest.raises(ValueError, match="needs at least one path"):
        ParquetDataset([])


def test_columns_and_types_are_selected(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", x=[1, 2], image=[[1, 2, 3, 4], [5, 6, 7, 8]], left={"a": [1, 2]}["a"])
    dataset = ParquetDataset(path, ["x", "image"], {"x": "float32", "image": ("uint8", (2, 2))})
    assert dataset.schema == {"x": ("float32", ()), "image": ("uint8", (2, 2))}
    np.testing.assert_array_equal([[5, 6], [7, 8]], dataset[1]["image"])
    batch = batch_of(dataset)
    assert batch["x"].tolist() == [1.0, 2.0]
    assert batch["image"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"columns": []}, "columns needs at least one name"),
        ({"columns": ["z"]}, r"columns names \['z'\], which do not exist; it has \['x', 'l', 's', 'n'\]"),
        ({}, r"column 'n' of struct<a: int64> cannot be a field of a batch: .* name the others in columns="),
        ({"columns": ["x"], "schema": {"y": "int8"}}, r"schema names \['y'\], which is not a column"),
        ({"columns": ["x"], "fill_null": {"y": 1}}, r"fill_null names \['y'\], which is not a column"),
        ({"columns": ["x"], "schema": {"x": ("int8", (2,))}}, "column 'x' is stored as int64 and cannot be read as schema says"),
        ({"columns": ["s"], "schema": {"s": "int8"}}, "column 's' is stored as string and cannot be read as schema says"),
        ({"columns": ["l"], "schema": {"l": ("int8", (None, 2))}}, "column 'l' is stored as .* cannot be read as schema says"),
        ({"columns": ["l"], "schema": {"l": ("int8", (1, None))}}, "column 'l' is stored as .* cannot be read as schema says"),
        ({"columns": ["l"], "schema": {"l": ("int8", (-1,))}}, r"schema field 'l' has shape \(-1,\): extents are at least 0"),
    ],
)
def test_invalid_selection_is_an_error(tmp_path: Path, given_: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "t.parquet", x=[1], l=[[1]], s=["a"], n=[{"a": 1}])
    with pytest.raises(ValueError, match=message):
        len(ParquetDataset(path, **given_))


def test_limit_of_open_files_is_an_error_of_the_system(tmp_path: Path) -> None:
    for number in range(4):
        written(tmp_path / f"{number}.parquet", x=[number])
    with limited_open_files(1), pytest.raises(OSError, match="Too many open files"):
        len(ParquetDataset(tmp_path))
    assert len(ParquetDataset(tmp_path)) == 4


@pytest.mark.parametrize("is_deleted", [False, True], ids=["replaced", "deleted"])
def test_file_that_is_opened_again_must_not_have_changed(tmp_path: Path, is_deleted: bool) -> None:
    """Its metadata are not read again, so the pages of another file would be decoded by them."""
    with limited_open_files() as too_many:
        paths = [written(tmp_path / f"{i:03}.parquet", x=[i]) for i in range(too_many)]
        dataset = ParquetDataset([str(path) for path in paths])
        assert len(dataset) == len(paths)
        paths[0].unlink()
        if not is_deleted:
            written(paths[0], x=[1, 2, 3])
        error, message = (FileNotFoundError, "no such file") if is_deleted else (ShardCorrupt, "was changed since it was opened")
        with pytest.raises(error, match=rf"000\.parquet: .*{message}"):
            dataset[0]
        assert dataset[1]["x"] == 1


def test_rows_whose_length_differs_from_the_schema_are_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", x=[[1, 2], [3]])
    with pytest.raises(
        SampleError, match=r"column 'x': the schema says rows of shape \(2,\), but row groups here have lists of different"
    ):
        ParquetDataset(path, schema={"x": ("int64", (2,))})[0]
    path = written(tmp_path / "u.parquet", x=[[1, 2, 3]])
    with pytest.raises(SampleError, match=r"the schema says rows of shape \(2,\), but row groups here have 3 values"):
        ParquetDataset(path, schema={"x": ("int64", (2,))})[0]


def test_nulls_are_an_error_unless_a_fill_value_is_given(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", x=[1, None, 3], s=["a", None, None])
    with pytest.raises(SampleError, match=r"t\.parquet, row group 0: column 'x' has 1 nulls, .* pass fill_null="):
        ParquetDataset(path)[0]
    dataset = ParquetDataset(path, fill_null={"x": -1, "s": ""})
    assert [(sample["x"], sample["s"]) for sample in dataset] == [(1, "a"), (-1, ""), (3, "")]
    inner = written(tmp_path / "u.parquet", x=[[1], [None]])
    with pytest.raises(SampleError, match=r"column 'x' of .* has nulls within its lists"):
        ParquetDataset(inner)[0]


def test_block_shuffle_decodes_each_row_group_once(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", 8, x=list(range(100)))
    dataset = ParquetDataset(path, cache_bytes=4 * 8 * 8)
    assert [*range(0, 100, 8), 100] == dataset.block_starts.tolist()
    order = BlockShuffle(len(dataset), block_size=dataset.block_size, window=3)
    with ShmLoader(dataset, batch_size=4, sampler=order, seed=0) as loader:
        found = [x for batch in loader for x in batch["x"].tolist()]
    assert list(range(100)) == sorted(found)
    assert found != sorted(found)
    assert dataset.num_decoded == 13


def test_cache_stays_within_its_limit(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", 8, x=list(range(100)))
    dataset = ParquetDataset(path, cache_bytes=130)
    for index in (0, 9, 17, 0, 1):
        assert index == dataset[index]["x"]
        assert dataset._opened.cache.nbytes <= 130
    assert dataset.num_decoded == 4  # the first was evicted and decoded again
    assert list(range(99, -1, -1)) == list(
        batch_of_indices(dataset, list(range(99, -1, -1)))
    )  # with more groups than fit into the cache


def batch_of_indices(dataset: Any, indices: list[int]) -> list[int]:
    rows = {"x": np.empty(len(indices), np.int64)}
    dataset.read_batch_into(indices, rows)
    return rows["x"].tolist()


def test_text_is_read_through_concat_dataset(tmp_path: Path) -> None:
    parts = [ParquetDataset(written(tmp_path / f"{k}.parquet", s=[f"é{k}", "x"], r=[[k], []])) for k in range(2)]
    batch = batch_of(ConcatDataset(parts))
    assert batch["s"] == ["é0", "x", "é1", "x"]
    assert [row.tolist() for row in batch["r"]] == [[0], [], [1], []]


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    bad = pa.array([b"\xff\xfe"]).view(pa.string())
    path = written(tmp_path / "t.parquet", s=bad)
    with pytest.raises(ShardCorrupt, match=r"t\.parquet, row group 0: .*Invalid UTF8"):
        ParquetDataset(path)[0]


def test_checksums_of_pages_are_verified(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"x": np.arange(1000)}), path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardCorrupt, match=r"t\.parquet, row group 0: .*CRC"):
        ParquetDataset(path)[0]


def test_two_columns_with_the_same_name_are_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"]), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="two columns have the same name"):
        len(ParquetDataset(tmp_path / "t.parquet"))


def test_table_without_rows_is_an_empty_dataset(tmp_path: Path) -> None:
    assert len(ParquetDataset(written(tmp_path / "t.parquet", x=pa.array([], pa.int64())))) == 0


def dataset_of_groups(path: Path, num_groups: int) -> tuple[Any, int]:
    """Returns a dataset of groups of 4 rows, and the size of a group in bytes."""
    rows = np.random.default_rng(0).integers(0, 1 << 60, (num_groups * 4, 16))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(rows.reshape(-1), 16)})
    pq.write_table(table, path, row_group_size=4, use_dictionary=False, compression="none")
    dataset = ParquetDataset(path)
    return dataset, int(dataset._opened._nbytes.max())


def taken(dataset: Any, rows: Any) -> Any:
    out = {"x": np.empty((len(rows), 16), np.int64)}
    dataset.read_batch_into(rows, out)
    return out["x"]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list of how many groups each join had."""
    from shmload.formats.arrow import arrow_groups

    found: list[int] = []
    join = arrow_groups._joined
    monkeypatch.setattr(arrow_groups, "_joined", lambda tables: found.append(len(tables)) or join(tables))
    return found


def test_nothing_is_joined_after_all_row_groups_are_decoded(tmp_path: Path, joined: list[int]) -> None:
    dataset, _ = dataset_of_groups(tmp_path / "t.parquet", 30)
    every = taken(dataset, list(range(120)))
    dataset, rng = ParquetDataset(tmp_path / "t.parquet"), np.random.default_rng(1)
    for epoch in range(4):
        before = len(joined)
        for rows in rng.permutation(120).reshape(-1, 8):
            assert np.array_equal(every[rows], taken(dataset, rows))
        if epoch:
            assert len(joined) - before <= 3 * (epoch == 1)
    assert dataset.num_decoded == 30


def test_first_pass_joins_each_row_group_only_a_few_times(tmp_path: Path, joined: list[int]) -> None:
    dataset, _ = dataset_of_groups(tmp_path / "t.parquet", 200)
    for first in range(0, 796, 4):
        taken(dataset, range(first + 2, first + 6))
    assert sum(joined) <= 4 * 200


def test_evicted_row_groups_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, nbytes = dataset_of_groups(tmp_path / "t.parquet", 12)
    dataset, alive, most = ParquetDataset(tmp_path / "t.parquet", cache_bytes=4 * nbytes), [], 0
    decoded = dataset._opened._decoded

    def watched(group: int) -> Any:
        nonlocal most
        table, its_nbytes = decoded(group)
        alive.append(weakref.ref(table["x"].table))
        most = max(most, sum(each() is not None for each in alive))
        return table, its_nbytes

    monkeypatch.setattr(dataset._opened, "_decoded", watched)
    for groups in ((0, 1), (2, 3), (0, 1, 2, 3), (4, 5, 6), (1, 7, 8), (0, 1, 2, 3, 4, 5), (6, 7), (9, 10, 11)):
        taken(dataset, [4 * group for group in groups])
    assert most <= 4 + 1


def test_rows_next_to_a_row_group_of_other_lengths_are_read(tmp_path: Path) -> None:
    lists = [[1, 2]] * 8 + [[1, 2, 3]] * 4
    dataset = ParquetDataset(
        written(tmp_path / "t.parquet", x=pa.array(lists, pa.list_(pa.int64()))), schema={"x": ("int64", (2,))}
    )
    for _ in range(3):
        with pytest.raises(SampleError, match="the schema says rows of shape"):
            dataset[8]
        assert [dataset[row]["x"].tolist() for row in (0, 7, 4)] == [[1, 2]] * 3


LISTS_OF_TEXT = {
    "strings": (pa.list_(pa.string()), [["a", "", "ü"], [], ["b"], [None, "c"], ["d"] * 5, ["e"]]),
    "large": (pa.large_list(pa.large_string()), [["a"], [], [None], ["b", "c"], [], ["d"]]),
    "binary": (pa.list_(pa.binary()), [[b"a", b""], [b"\x00\xff"], [], [None], [b"b"], []]),
    "pairs": (pa.list_(pa.string(), 2), [["a", "b"], ["c", "d"], ["e", "f"], ["g", None], ["h", "i"], ["j", "k"]]),
    "nested": (pa.list_(pa.list_(pa.string())), [[["a"], []], [], [["b", "c"]], [None], [[]], [["d"]]]),
}


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("mode", [{"seed": 1}, {}, {"ragged": "pad"}])
def test_lists_of_text_equal_pyarrows(tmp_path: Path, mode: dict[str, Any], cache_bytes: int) -> None:
    columns = {name: pa.array(values, kind) for name, (kind, values) in LISTS_OF_TEXT.items()}
    columns |= {"x": pa.array(range(6)), "text": pa.array("uvwxyz"), "runs": pa.array([[1], [2, 3], [], [4], [5], [6]])}
    path = written(tmp_path / "t.parquet", 2, **columns)
    wanted = pq.read_table(path, columns=list(LISTS_OF_TEXT)).to_pylist()
    dataset = ParquetDataset(path, cache_bytes=cache_bytes)
    assert [{name: sample[name] for name in LISTS_OF_TEXT} for sample in dataset] == wanted
    with ShmLoader(dataset, batch_size=4, sampler=[5, 0, 3, 1, 2, 4], num_workers=0, **mode) as loader:
        rows = [
            dict(zip(LISTS_OF_TEXT, values, strict=True))
            for batch in loader
            for values in zip(*(batch[name] for name in LISTS_OF_TEXT), strict=True)
        ]
        assert rows == [wanted[i] for i in ([5, 0, 3, 1, 2, 4])]


def test_null_in_place_of_a_list_of_text_is_filled(tmp_path: Path) -> None:
    path = written(tmp_path / "t.parquet", x=pa.array([["a"], None], pa.list_(pa.string())))
    with pytest.raises(SampleError, match=r"column 'x' has 1 nulls, .* pass fill_null"):
        ParquetDataset(path)[0]
    assert ParquetDataset(path, fill_null={"x": []})[1] == {"x": []}
    with pytest.raises(SampleError, match=r"fill_null=\{'x': 'none'\} is not a value of it \(it is text, which would be split"):
        ParquetDataset(path, fill_null={"x": "none"})[1]


def partitioned(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    for name, columns in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written(folder / name, **columns)
    return folder


HIVE: list[list[str]] = [
    ["year=2024/month=01", "year=2024/month=02", "year=2023/month=12"],
    ["y=a%20b%2Fc", "y=1"],
    ["y=1/z=2", "y=3/z=x"],
    ["y=3000000000"],
    ["y=-5", "y=007", "y=-0", "y=2147483647", "y=-2147483648", "y=0x10"],
    *(
        [f"y={value}"]
        for value in ("+1", " 1", "1 ", "1.5", "true", "2024-01-01", "a=b", "2147483648", "%31", "%zz", "-", "1_0", "\u0661")
    ),
    ["y=", "y=1"],
    ["other/y=1"],
    ["y=1/y=2"],
    ["a%20b=1"],
]


@pytest.mark.parametrize("folders", HIVE, ids=" ".join)
@pytest.mark.parametrize("by", ["folder", "pattern"])
def test_partitions_are_columns_as_in_pyarrow(tmp_path: Path, folders: list[str], by: str) -> None:
    partitioned(tmp_path / "lr=0.1", {f"{folder}/{i}.parquet": {"x": [i, i + 100]} for i, folder in enumerate(folders)})
    root = tmp_path / "lr=0.1"
    theirs = ds.dataset(root, partitioning="hive")
    dataset = ParquetDataset(root if by == "folder" else f"{root}/**/*.parquet")
    samples = [{k: v if isinstance(v, str) else v.item() for k, v in sample.items()} for sample in dataset]
    assert sorted(samples, key=lambda s: s["x"]) == sorted(theirs.to_table().to_pylist(), key=lambda s: s["x"])
    kinds = {"int32": ("int32", ()), "int64": ("int64", ()), "string": str}
    assert dataset.schema == {field.name: kinds[str(field.type)] for field in theirs.schema}
    batch = batch_of(ParquetDataset(root, columns=[theirs.schema.names[-1]]))  # no column of the files
    assert len(batch[theirs.schema.names[-1]]) == len(samples)


@pytest.mark.parametrize("folders", HIVE, ids=" ".join)
def test_remote_dataset_reads_partitions_as_pyarrow_does(tmp_path: Path, folders: list[str]) -> None:
    root = partitioned(tmp_path / "lr=0.1", {f"{folder}/{i}.parquet": {"x": [i, i + 100]} for i, folder in enumerate(folders)})
    table = ds.dataset(root, partitioning="hive").to_table()
    view = RemoteDataset.from_urls(str(root)).indexed()
    samples = [{k: v if isinstance(v, str) else v.item() for k, v in view[i].items()} for i in range(len(view))]
    assert sorted(samples, key=lambda s: s["x"]) == sorted(table.to_pylist(), key=lambda s: s["x"])
    types = {name: str(table.schema.field(name).type) for name in table.schema.names}
    assert {name: "string" if isinstance(value, str) else value.dtype.name for name, value in view[0].items()} == types
    last = table.schema.names[-1]  # so that no column of the files is read
    only = RemoteDataset.from_urls(str(root), layout=Parquet(columns=(last,))).indexed()
    assert [set(only[i]) for i in range(len(only))] == [{last}] * len(samples)


def test_remote_partition_that_is_null_is_none(tmp_path: Path) -> None:
    null = "y=__HIVE_DEFAULT_PARTITION__"
    root = partitioned(tmp_path / "t", {"y=1/a.parquet": {"x": [1]}, f"{null}/b.parquet": {"x": [2]}, "c.parquet": {"x": [3]}})
    view = RemoteDataset.from_urls(str(root)).indexed()
    assert sorted((int(s["x"]), s["y"]) for s in map(view.__getitem__, range(3))) == [(1, 1), (2, None), (3, None)]


def test_remote_partition_and_column_of_one_name(tmp_path: Path) -> None:
    same = partitioned(tmp_path / "same", {"y=1/a.parquet": {"y": pa.array([7], pa.int32()), "x": [1]}})
    view = RemoteDataset.from_urls(str(same)).indexed()
    assert {name: value.item() for name, value in view[0].items()} == {"y": 1, "x": 1}
    other = partitioned(tmp_path / "other", {"y=1/a.parquet": {"y": [7], "x": [1]}})
    with pytest.raises(ValueError, match=r"a\.parquet: column 'y' is int64 in the file, and int32 by the name of its folder"):
        _ = RemoteDataset.from_urls(str(other)).indexed()[0]
    assert RemoteDataset.from_urls(str(other), layout=Parquet(columns=("x",))).indexed()[0] == {"x": 1}


def test_partition_that_is_null_needs_a_value(tmp_path: Path) -> None:
    null = "y=__HIVE_DEFAULT_PARTITION__"
    root = partitioned(tmp_path / "t", {"y=1/a.parquet": {"x": [1]}, f"{null}/b.parquet": {"x": [2]}, "c.parquet": {"x": [3]}})
    wanted = sorted(ds.dataset(root, partitioning="hive").to_table().to_pylist(), key=lambda s: s["x"])
    assert [row["y"] for row in wanted] == [1, None, None]
    with pytest.raises(SampleError, match=r"column 'y' has 1 nulls, .* pass fill_null"):
        list(ParquetDataset(root))
    filled = sorted((int(s["x"]), int(s["y"])) for s in ParquetDataset(root, fill_null={"y": -1}))
    assert filled == [(1, 1), (2, -1), (3, -1)]
    only = partitioned(tmp_path / "only", {f"{null}/b.parquet": {"x": [2]}})
    with pytest.raises(
        ValueError, match=r"b\.parquet: the folders' names give column 'y' the value .* only, so its type is unknown"
    ):
        len(ParquetDataset(only))
    assert [sample["x"] for sample in ParquetDataset(only, columns=["x"])] == [2]


def test_partition_and_column_of_one_name(tmp_path: Path) -> None:
    same = partitioned(tmp_path / "same", {"y=1/a.parquet": {"y": pa.array([7, 8], pa.int32()), "x": [1, 2]}})
    rows = [{name: value.item() for name, value in sample.items()} for sample in ParquetDataset(same)]
    assert rows == ds.dataset(same, partitioning="hive").to_table().to_pylist() == [{"y": 1, "x": 1}, {"y": 1, "x": 2}]
    other = partitioned(tmp_path / "other", {"y=1/a.parquet": {"y": [7, 8], "x": [1, 2]}})
    with pytest.raises(ValueError, match=r"column 'y' is int64 in the file, and int32 by the name of its folder"):
        len(ParquetDataset(other))
    assert [sample["x"] for sample in ParquetDataset(other, columns=["x"])] == [1, 2]
    assert [sample["y"] for sample in ParquetDataset(other / "y=1" / "a.parquet")] == [7, 8]
    bad = partitioned(tmp_path / "bad", {"y=%ff/a.parquet": {"x": [1]}})
    with pytest.raises(ValueError, match=r"the folder name 'y=%ff' is not UTF-8 after URL decoding"):
        len(ParquetDataset(bad))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([300, 1], "uint8"),
        ([1, -1], "uint8"),
        (pa.array([2**63 + 5], pa.uint64()), "int64"),
        ([float("nan")], "int32"),
        ([3e9], "int32"),
        ([2.5], "int64"),
        ([[300, 1]], ("uint8", (2,))),
        ([1.0, 1e300], "float32"),
        ([float("nan"), -1e300], "float32"),
        ([70000], "float16"),
    ],
    ids=str,
)
def test_number_that_the_schemas_dtype_cannot_represent_is_an_error(tmp_path: Path, values: Any, dtype: Any) -> None:
    dataset = ParquetDataset(written(tmp_path / "x.parquet", x=values), schema={"x": dtype})
    with pytest.raises(SampleError, match=r"column 'x' is stored as .*, and the schema says .*; choose another type in schema="):
        _ = dataset[0]


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [([255, 0], "uint8", [255, 0]), ([2.0, -3.0], "int8", [2, -3]), ([2**24 + 1], "float32", [2.0**24]), ([True], "int32", [1])],
    ids=str,
)
def test_numbers_are_converted_to_the_schemas_dtype(tmp_path: Path, values: Any, dtype: str, expected: list[float]) -> None:
    dataset = ParquetDataset(written(tmp_path / "x.parquet", x=values), schema={"x": dtype})
    assert batch_of(dataset)["x"].tolist() == expected


@pytest.mark.parametrize(("values", "fill"), [([1, None], 0.5), ([1, None], "a"), ([1, None], 2**70), (["a", None], 3)], ids=str)
def test_fill_that_is_not_of_the_columns_type_is_an_error(tmp_path: Path, values: Any, fill: Any) -> None:
    dataset = ParquetDataset(written(tmp_path / "x.parquet", x=values), fill_null={"x": fill})
    with pytest.raises(
        SampleError, match=r"column 'x' is stored as .*, so fill_null=\{'x': .*\} is not a value of it .*: give one of"
    ):
        _ = dataset[0]


def test_tensors_in_the_usual_order_of_dimensions_are_read(tmp_path: Path) -> None:
    """pyarrow's own way to make such a column names that order, too."""
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    pq.write_table(pa.table({"x": column}), tmp_path / "x.parquet")
    dataset = ParquetDataset(tmp_path / "x.parquet")
    np.testing.assert_array_equal([dataset[i]["x"] for i in range(4)], values)
