from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload import ShardCorrupt, ShmLoader
from shmload.batch.layout import layout_of_schema
from shmload.batch.row_placer import RowOut, private_rows
from shmload.formats import TarDataset, TarStream, TarWriter

SCHEMA = {"npy": ("float32", (4,)), "cls": "int16", "txt": str, "rag.npy": ("int64", (None, 2)), "__key__": str}


def sample(number: int) -> dict[str, Any]:
    return {
        "__key__": f"d/{number:04d}",
        "npy": np.arange(4, dtype=np.float32) + number,
        "cls": number - 3,
        "txt": f"é {number}",
        "rag.npy": np.full((number % 3, 2), number),
    }


@pytest.fixture
def shards(tmp_path: Path) -> str:
    with TarWriter(tmp_path / "%02d.tar", maxcount=4) as writer:
        for number in range(10):
            writer.write(sample(number))
    return f"{tmp_path}/{{00..02}}.tar"


def rows_of(dataset: TarDataset, indices: list[int]) -> dict[str, Any]:
    assert dataset.schema is not None
    rows = private_rows(layout_of_schema(dataset.schema), len(indices))
    dataset.read_batch_into(indices, RowOut(rows, slice(0, len(indices))))
    return rows


def written(path: Path, **members: Any) -> Path:
    with TarWriter(path) as writer:
        writer.write({"__key__": "a", **members})
    return path


def test_samples_equal_the_written_ones(shards: str) -> None:
    found = list(TarDataset(shards))
    assert len(found) == 10
    for number, each in enumerate(found):
        np.testing.assert_equal(each, sample(number))


def test_indices_behave_like_those_of_a_list(shards: str) -> None:
    dataset = TarDataset(shards)
    assert dataset[9]["__key__"] == dataset[-1]["__key__"] == "d/0009"
    for index in (10, -11):
        with pytest.raises(IndexError, match=f"index {index} is out of range: the dataset has 10 samples"):
            dataset[index]
    with pytest.raises(IndexError, match="is out of range: the dataset has 10 samples"):
        rows_of(TarDataset(shards, schema={"cls": "int64"}), [10])
    assert rows_of(TarDataset(shards, schema={"cls": "int64"}), [-1, -10])["cls"].tolist() == [6, -3]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow(reason="starts a worker"))])
def test_dataset_with_a_schema_is_read_in_place(shards: str, num_workers: int) -> None:
    with ShmLoader(TarDataset(shards, schema=SCHEMA), batch_size=4, num_workers=num_workers, ragged="list") as loader:
        found = [(b, row) for b in loader for row in range(len(b["cls"]))]
        for number, (batch, row) in enumerate(found):
            wanted = sample(number)
            assert (wanted["__key__"], wanted["txt"]) == (batch["__key__"][row], batch["txt"][row])
            assert wanted["cls"] == batch["cls"][row].item()
            np.testing.assert_array_equal(wanted["npy"], batch["npy"][row].numpy())
            np.testing.assert_array_equal(wanted["rag.npy"], batch["rag.npy"][row].numpy())
        assert len(found) == 10


@pytest.mark.parametrize(("extension", "data"), [("txt", b'"a \xc3\xa9"'), ("json", b'"\\"a \\u00e9\\""')])
def test_text_in_a_schema_is_decoded_by_the_members_extension(tmp_path: Path, extension: str, data: bytes) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "0", extension: data})
    (batch,) = ShmLoader(TarDataset(tmp_path / "a.tar", schema={extension: str}))
    assert batch[extension] == ['"a é"']


def test_pickled_dataset_is_small_and_reads_the_same(shards: str) -> None:
    dataset = TarDataset(shards, schema=SCHEMA)
    assert len(dataset) == 10
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    np.testing.assert_equal(dataset[7], pickle.loads(pickled)[7])


def test_fields_have_alternatives(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "0", "png": b"p", "cls": 1})
        writer.write({"__key__": "1", "jpg": b"j", "png": b"q", "cls": 2})
        writer.write({"__key__": "2", "cls": 3})
    dataset = TarDataset(tmp_path / "a.tar", fields={"image": "jpg;png"})
    assert [dataset[0], dataset[1]] == [{"__key__": "0", "image": b"p"}, {"__key__": "1", "image": b"j"}]
    with pytest.raises(ShardCorrupt, match=r"field 'image' of sample '2' at byte \d+: there is no member jpg or png, only cls"):
        dataset[2]
    raw = TarDataset(tmp_path / "a.tar", fields={"image": "jpg;png"}, schema={"image": ("uint8", (1,))})
    assert rows_of(raw, [0, 1])["image"].tolist() == [[112], [106]]
    with pytest.raises(ShardCorrupt, match="there is no member jpg or png, only cls"):
        rows_of(raw, [0, 2])


def test_schema_with_unknown_fields_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the schema names \['b'\], which fields does not; it has \['a'\]"):
        TarDataset("a.tar", fields=["a"], schema={"b": "int64"})
    with pytest.raises(ValueError, match=r"fields\['a'\] needs 1 to 254 extensions; got 0"):
        TarDataset("a.tar", fields={"a": []})
    with pytest.raises(ValueError, match="is not a numpy type"):
        TarDataset("a.tar", schema={"npy": ("bfloat16", (2,))})


def test_entry_of_a_schema_that_no_member_can_have_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"schema field 'npy' is \('float32', 8\): give \(dtype, shape\)"):
        TarDataset("a.tar", schema={"npy": ("float32", 8)})
    with pytest.raises(ValueError, match=r"schema\['txt'\] is text of shape \(None,\): a member is one value of it"):
        TarDataset("a.tar", schema={"txt": (str, (None,))})


def test_missing_library_of_a_decoder_is_not_reported_as_damage(tmp_path: Path) -> None:
    def decode(data: bytes) -> Any:
        raise ImportError("this needs a library")

    path = written(tmp_path / "a.tar", jpg=b"sound")
    with pytest.raises(ImportError, match="this needs a library"):
        TarDataset(path, decode={"jpg": decode})[0]
    with pytest.raises(ImportError, match="this needs a library"):
        next(iter(TarStream(path, decode={"jpg": decode})))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(6, dtype=np.float32).reshape(2, 3),
    ],
    ids=["big-endian", "fortran", "plain"],
)
@pytest.mark.parametrize("shape", [(2, 3), (None, 3)])
def test_arrays_of_any_order_are_converted(tmp_path: Path, array: Any, shape: Any) -> None:
    dataset = TarDataset(written(tmp_path / "a.tar", npy=array), schema={"npy": ("float32", shape)})
    with ShmLoader(dataset, batch_size=1, num_workers=0, ragged="list") as loader:
        (batch,) = loader
        np.testing.assert_array_equal(array, batch["npy"][0].numpy())


@pytest.mark.parametrize(
    ("extension", "value", "spec", "cause"),
    [
        ("npy", np.zeros(3, np.float32), ("float32", (4,)), r"the schema says shape \(4,\), but the value has \(3,\)"),
        ("npy", np.zeros(4, np.float64), ("float32", (4,)), "the schema says float32, and it is of float64; change"),
        ("npy", b"nothing", ("float32", (4,)), "magic"),
        ("cls", b"one", "int64", "invalid literal for int"),
        ("cls", 300, "uint8", "the schema says uint8, and it is 300 of int64"),
        ("bin", b"123", ("uint16", (None,)), "3 bytes are not a whole number of uint16"),
        ("txt", b"\xff", str, "can't decode byte 0xff"),
        ("bin", b"\xff", str, "can't decode byte 0xff"),
        ("json", {"a": 1}, str, "the schema says str, and the value is of type dict"),
    ],
)
def test_error_names_the_member_that_does_not_fit_the_schema(
    tmp_path: Path, extension: str, value: Any, spec: Any, cause: str
) -> None:
    dataset = TarDataset(written(tmp_path / "a.tar", **{extension: value}), schema={extension: spec})
    with pytest.raises(ShardCorrupt, match=rf"a\.tar: field '{extension}' of sample 'a' at byte 512: .*{cause}"):
        dataset[0]
    with ShmLoader(dataset, batch_size=1, ragged="list") as loader, pytest.raises(ShardCorrupt, match=cause):
        list(loader)


@pytest.mark.parametrize(
    ("extension", "value", "kind"),
    [("jpg", b"\xff\xd8\xff" + bytes(6), "JPEG"), ("png", b"\x89PNG\r\n\x1a\n" + bytes(1), "PNG")],
    ids=["jpg", "png"],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_image_without_decoder_is_an_error_that_names_decode(
    tmp_path: Path, extension: str, value: bytes, kind: str, num_workers: int
) -> None:
    dataset = TarDataset(
        written(tmp_path / "a.tar", **{extension: value}), fields={"image": extension}, schema={"image": ("uint8", (3, 8, 8))}
    )
    cause = rf"a\.tar: field 'image' of sample 'a' is an encoded image, 9 bytes of a {kind} file; .*decode=\{{'{extension}': ImageDecoder"
    with ShmLoader(dataset, num_workers=num_workers) as loader, pytest.raises(ValueError, match=cause) as found:
        list(loader)
    assert type(found.value) is ValueError  # the shard is not damaged


@pytest.mark.parametrize("nbytes", [-1, 1])
def test_an_array_with_too_few_or_too_many_bytes_is_an_error(tmp_path: Path, nbytes: int) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "npy": np.arange(4, dtype=np.float32)})
    payload = TarDataset(tmp_path / "a.tar", decode=False)[0]["npy"]
    payload = payload[:-1] if nbytes < 0 else payload + b"\0"
    dataset = TarDataset(written(tmp_path / "b.tar", npy=payload), schema={"npy": ("float32", (4,))})
    with pytest.raises(ShardCorrupt, match=rf"its header says float32 of shape \(4,\), and {16 + nbytes} bytes follow"):
        rows_of(dataset, [0])


def changed(path: Path, data: bytes) -> None:
    """Writes different content of the same size, with a different modification time."""
    before = path.stat()
    assert len(data) == before.st_size
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize("is_mapped", [False, True], ids=["indexed", "mapped"])
def test_shard_changed_at_the_same_size_is_an_error(tmp_path: Path, is_mapped: bool) -> None:
    paths = [written(tmp_path / f"{name}.tar", cls=1) for name in "ab"]
    other = written(tmp_path / "other.tar", cls=2).read_bytes()
    dataset = TarDataset(paths, schema={"cls": "int64"})
    assert len(dataset) == 2
    if is_mapped:
        assert [dataset[n]["cls"] for n in range(2)] == [1, 1]
    changed(paths[1], other)
    assert dataset[0]["cls"] == 1
    cause = "b.tar: was changed since it was indexed, with 10240 bytes: create the dataset again"
    with pytest.raises(ShardCorrupt, match=cause):
        dataset[1]
    with pytest.raises(ShardCorrupt, match=cause):
        rows_of(dataset, [0, 1])
    assert TarDataset(paths, schema={"cls": "int64"})[1]["cls"] == 2


def test_shard_changed_while_a_batch_is_read_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", cls=1, txt=b"x")
    dataset = TarDataset(path, schema={"cls": "int64", "txt": str})

    class ChangingFile(dict[str, Any]):
        """Rows that change the file whenever a field is delivered."""

        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(name, value)
            changed(path, path.read_bytes())

    with pytest.raises(ShardCorrupt, match="was changed since it was indexed"):
        dataset.read_batch_into([0], ChangingFile(cls=np.empty(1, np.int64)))


def test_replaced_shard_is_still_read_as_it_was(tmp_path: Path) -> None:
    dataset = TarDataset(written(tmp_path / "a.tar", cls=1))
    assert dataset[0]["cls"] == 1
    written(tmp_path / "b.tar", cls=2).replace(tmp_path / "a.tar")
    assert dataset[0]["cls"] == 1


def test_shard_of_changed_size_is_an_error(tmp_path: Path) -> None:
    dataset = TarDataset(written(tmp_path / "a.tar", cls=1))
    assert len(dataset) == 1
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(ShardCorrupt, match="was changed since it was indexed, with 10240 bytes: create the dataset again"):
        dataset[0]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1).map(str) | st.sampled_from(["+5", " 7\n", "1_0", "007", "-0"]), min_size=1))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_are_parsed_as_by_int(tmp_path: Path, numbers: list[str]) -> None:
    with TarWriter(tmp_path / "n.tar") as writer:
        for k, number in enumerate(numbers):
            writer.write({"__key__": str(k), "cls": number})
    dataset = TarDataset(tmp_path / "n.tar", schema={"cls": "int64"}, cache=False)
    assert [int(n) for n in numbers] == rows_of(dataset, list(range(len(numbers))))["cls"].tolist()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)  # webdataset does not close its files
def test_webdataset_reads_shards_written_by_shmload(shards: str) -> None:
    names = TarDataset(shards).paths
    found = list(webdataset.WebDataset(names, shardshuffle=False, empty_check=False).decode())
    for number, each in enumerate(found):
        np.testing.assert_equal({k: v for k, v in each.items() if k not in ("__url__", "__local_path__")}, sample(number))
    assert len(found) == 10


def test_shards_written_by_webdataset_are_read(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(5):
            writer.write(
                {**sample(number), "json": {"n": [number]}, "ten": [np.arange(number, dtype="i4")], "npz": {"a": np.ones(2)}}
            )
    for number, each in enumerate(TarDataset(tmp_path / "a.tar")):
        wanted = {**sample(number), "json": {"n": [number]}, "ten": [np.arange(number, dtype="i4")], "npz": {"a": np.ones(2)}}
        np.testing.assert_equal(each, wanted)
