"""Existing datasets: samples that other libraries wrote are read completely, in each order, on any number of ranks, through any
cache.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.fernet import Fernet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload import ShmLoader
from shmload.errors import ObjectMissing, SampleError, ShardCorrupt, ShmloadError
from shmload.formats import TarDataset, TarWriter, TFRecordDataset, TFRecordWriter, json_lines
from shmload.formats.block_index import RecordIndex
from shmload.formats.compression import expanded_pieces
from shmload.formats.json_lines import JsonLines
from shmload.formats.litdata import litdata_frames
from shmload.formats.npy import NumpyRows
from shmload.formats.parquet import parquet_format
from shmload.formats.tfrecord.tfrecord_format import TFRecords
from shmload.remote import RemoteDataset
from shmload.remote.fetch import SIDECAR
from shmload.remote.indexed import RemoteRecords
from shmload.remote.layouts import LitData, Mds, Parquet, example_features
from shmload.remote.listing import shards_in
from shmload.remote.shard_indexes import indexes_beside
from shmload.storage.local_store import LocalStore
from tests.remote.layout_kit import (
    CASES,
    DATA,
    NUM_SAMPLES,
    OPTIONAL,
    Case,
    array,
    each,
    identity,
    lines,
    numbers_by_content,
    records,
    same,
    table,
)
from tests.remote.remote_kit import WatchedStore, concatenated
from tests.remote.write_foreign import FERNET_KEY

BY_NAME = {case.name: case for case in CASES}
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture
def data(case: Case, tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    case.write(folder)
    return folder


def opened(case: Case, folder: Path, **options: Any) -> RemoteDataset:
    return RemoteDataset(None, str(folder), **{**case.options(), **options})


def one_shard_cache_nbytes(case: Case, folder: Path) -> int:
    """Returns the size of a cache that has room for one shard but not for two."""
    return shards_in(LocalStore(folder), case.layout).largest + 1


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if not name.startswith("__")}


@EVERY
def test_samples_equal_what_was_written(case: Case, data: Path) -> None:
    dataset = opened(case, data, shuffle=False)
    found = list(dataset)
    assert len(found) == len(dataset) == NUM_SAMPLES
    if case.name == "files":  # ordered by file name
        found.sort(key=lambda sample: sample["__key__"][-5:])
    for number, sample in enumerate(found):
        assert same(plain(sample), case.sample(number)), number
    assert len({sample["__key__"] for sample in found}) == NUM_SAMPLES
    assert all(sample["__url__"].startswith(str(data)) for sample in found)
    dataset.close()


@EVERY
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("cache", ["none", "small", "large"])
def test_each_sample_is_read_once_per_epoch(case: Case, data: Path, world_size: int, cache: str) -> None:
    cache_bytes = {"none": 0, "small": one_shard_cache_nbytes(case, data), "large": 1 << 30}[cache]
    if case.is_compressed and not cache_bytes:
        with pytest.raises(ValueError, match=r"is compressed, and its samples are read from its \d+ decompressed bytes"):
            opened(case, data, cache_bytes=0)
        return
    numbers = numbers_by_content(case)
    options = {"cache_bytes": cache_bytes, "uneven": "exact", "seed": 5, "cache_folder": data.parent / "cache"}
    ranks = [opened(case, data, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    orders = []
    for _ in range(2):
        order = [numbers[identity(sample)] for rank in ranks for sample in rank]
        assert sorted(order) == list(range(NUM_SAMPLES))
        orders.append(order)
    assert orders[0] != orders[1]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("case", [case for case in CASES if case.name[:3] != "tar"], ids=lambda case: case.name)
def test_samples_are_read_by_index(case: Case, data: Path) -> None:
    order = list(range(NUM_SAMPLES)) * 2
    random.Random(3).shuffle(order)
    unshuffled = opened(case, data, shuffle=False)
    expected = [plain(sample) for sample in unshuffled]
    unshuffled.close()
    for cache_bytes in (one_shard_cache_nbytes(case, data), 1 << 30):
        dataset = opened(case, data, cache_bytes=cache_bytes)
        view = dataset.indexed()
        assert isinstance(view, RemoteRecords)
        assert len(view) == NUM_SAMPLES
        for index in order:
            assert same(view[index], expected[index])
        assert all(itertools.starmap(same, zip(view.__getitems__(order), [expected[i] for i in order], strict=True)))
        dataset.close()


LABELED = ["jsonl", "jsonl.zst", "parquet", "tfrecord, schema", "mds", "mds.zstd", "litdata", "litdata.zstd", "litdata rows"]


@pytest.mark.parametrize("case", [BY_NAME[name] for name in LABELED], ids=LABELED)
@pytest.mark.parametrize("block", [False, True])
def test_loader_resumes_with_another_number_of_workers(case: Case, data: Path, block: bool) -> None:
    dataset = opened(case, data, cache_bytes=one_shard_cache_nbytes(case, data))

    def loader(num_workers: int) -> ShmLoader[Any]:
        view: Any = dataset.indexed(fields=["label", "name"])
        order = {"sampler": view.block_shuffle(2)} if block else {"shuffle": True}
        return ShmLoader(view, batch_size=4, seed=7, num_workers=num_workers, **order)

    with loader(2) as whole:
        expected = [(batch["label"].tolist(), batch["name"]) for batch in whole]
    assert sorted(name for _, names in expected for name in names) == sorted(case.sample(n)["name"] for n in range(NUM_SAMPLES))
    with loader(1) as first:
        items = iter(first)
        begun = [(batch["label"].tolist(), batch["name"]) for batch in itertools.islice(items, 2)]
        state = first.state_dict()
        del items
    with loader(2) as second:
        second.load_state_dict(state)
        rest = [(batch["label"].tolist(), batch["name"]) for batch in second]
    assert begun + rest == expected
    dataset.close()


# ------------------------------------------------------------ indexes


PIECES = st.sampled_from([1, 7, 64, 1000, 1 << 20])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    piece=PIECES,
    texts=st.lists(st.sampled_from(["", " ", "\t\r", "7", '{"a": 1}', '"' + "x" * 300 + '"']), max_size=12),
    end=st.booleans(),
)
def test_lines_are_found_regardless_of_read_boundaries(piece: int, texts: list[str], end: bool) -> None:
    data = ("\n".join(texts) + "\n" * end).encode()
    before, json_lines.PIECE = json_lines.PIECE, piece
    try:
        layout = JsonLines()
        index: Any = layout.unpack("x", layout.scan("x", len(data), lambda at, n: data[at : at + n]), len(data))
    finally:
        json_lines.PIECE = before
    found = [layout.sample(index, number, lambda at, n: data[at : at + n]) for number in range(index.num_samples)]
    parsed = [json.loads(text) for text in texts if text.strip()]
    assert found == [value if isinstance(value, dict) else {"value": value} for value in parsed]


@pytest.mark.parametrize("name", ["tfrecord", "npy", "parquet", "mds", "litdata", "jsonl"])
def test_index_made_with_range_reads_equals_that_of_the_whole_shard(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    case.write(tmp_path)
    shard = shards_in(LocalStore(tmp_path), case.layout).all[1]
    data = (tmp_path / shard.key).read_bytes()
    asked: list[int] = []

    def read(offset: int, nbytes: int) -> bytes:
        asked.append(nbytes)
        return data[offset : offset + nbytes]

    packed = shard.format.scan(shard.url, len(data), read)
    assert packed == shard.format.pack(shard.url, data)
    assert shard.format.unpack(shard.url, packed, len(data)) is not None
    assert shard.format.unpack(shard.url, packed, len(data) + 1) is None
    assert all(asked)


def test_large_records_are_skipped_while_indexing() -> None:
    record = b"x" * (20 << 20)
    from shmload._core.crc32c import crc32c, masked

    head = len(record).to_bytes(8, "little")
    one = head + masked(crc32c(head)).to_bytes(4, "little") + record + masked(crc32c(record)).to_bytes(4, "little")
    data, read = one * 3, [0]

    def ranges(offset: int, nbytes: int) -> bytes:
        read[0] += nbytes
        return data[offset : offset + nbytes]

    index: Any = TFRecords().unpack("x", TFRecords().scan("x", len(data), ranges), len(data))
    assert index.num_samples == 3
    assert read[0] < len(one)


def test_index_of_equal_blocks_is_small() -> None:
    even = RecordIndex("x", np.arange(0, 8_000_008, 8, dtype=np.int64))
    packed = even.pack("npy", 8_000_000)
    assert len(packed) < 200
    found = RecordIndex.unpack("x", packed, "npy", 8_000_000)
    assert found is not None
    assert np.array_equal(found.bounds, even.bounds)
    assert RecordIndex.unpack("x", packed, "jsonl", 8_000_000) is None


@pytest.mark.parametrize("name", ["npy", "jsonl"])
def test_index_with_a_changed_byte_is_unchanged_or_rejected(name: str, tmp_path: Path) -> None:
    """Positions of equal blocks are in the head of the index."""
    case = BY_NAME[name]
    case.write(tmp_path)
    shard = shards_in(LocalStore(tmp_path), case.layout).all[0]
    data = (tmp_path / shard.key).read_bytes()
    packed = shard.format.pack(shard.url, data)
    whole: Any = shard.format.unpack(shard.url, packed, len(data))
    for at in range(len(packed)):
        for byte in {b"0"[0], b"9"[0], packed[at] ^ 1} - {packed[at]}:
            changed = packed[:at] + bytes([byte]) + packed[at + 1 :]
            found: Any = shard.format.unpack(shard.url, changed, len(data))
            assert found is None or (np.array_equal(found.bounds, whole.bounds) and found.extra == whole.extra)


def test_damaged_index_is_rebuilt(tmp_path: Path) -> None:
    case = BY_NAME["jsonl"]
    (tmp_path / "data").mkdir()
    case.write(tmp_path / "data")
    for _ in range(2):
        dataset = opened(case, tmp_path / "data", cache_folder=tmp_path / "cache", shuffle=False)
        assert [sample["label"] for sample in dataset] == list(range(NUM_SAMPLES))
        dataset.close()
        for path in (tmp_path / "cache/indexes").glob("*.index"):
            text = bytearray(path.read_bytes())
            text[-16] ^= 4  # the end of the last sample but one
            path.write_bytes(text)


def test_index_file_beside_a_shard_is_used(tmp_path: Path) -> None:
    BY_NAME["jsonl.gz"].write(tmp_path)
    command = [sys.executable, "-m", "shmload", "index", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 4
    assert all("samples, index of" in line for line in said)
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [f"{tmp_path}: 4 shards, each of which has its index beside it"]
    store = WatchedStore(LocalStore(tmp_path))
    shards = shards_in(store)
    assert [shard.has_index for shard in shards.all] == [True] * 4
    dataset = RemoteDataset(None, shards)
    assert len(dataset) == NUM_SAMPLES
    assert not any(what == "read_into" for what, *_ in getattr(store, "asked", []))
    dataset.close()
    path = next(tmp_path.glob(f"*{SIDECAR}"))
    text = path.read_text(errors="surrogateescape")
    path.write_text(text.replace('"version": "', '"version": "x', 1), errors="surrogateescape")  # written by another version
    dataset = RemoteDataset.from_urls(str(tmp_path))
    assert sorted(sample["label"] for sample in dataset) == list(range(NUM_SAMPLES))
    dataset.close()


def test_index_file_of_a_replaced_shard_is_ignored(tmp_path: Path) -> None:
    each(lines, ".jsonl")(tmp_path)
    path = tmp_path / "part-000.jsonl"
    path.write_bytes(b'{"label": 0}\n{"label": 100}\n')
    list(indexes_beside(shards_in(LocalStore(tmp_path))))
    path.unlink()
    path.write_bytes(b'{"label": 1000}\n{"label":1}\n')  # the same length, but other line boundaries
    dataset = RemoteDataset.from_urls(str(tmp_path), shuffle=False)
    assert [sample["label"] for sample in dataset][:2] == [1000, 1]
    dataset.close()


def test_record_with_changed_bytes_is_an_error(tmp_path: Path) -> None:
    records(tmp_path / "x.tfrecord", range(3))
    text = bytearray((tmp_path / "x.tfrecord").read_bytes())
    text[-7] ^= 1  # in the last record's data
    (tmp_path / "x.tfrecord").write_bytes(text)
    with pytest.raises(ShardCorrupt, match=r"x.tfrecord: sample 2, at byte \d+: the checksum of its data differs"):
        list(RemoteDataset.from_urls(str(tmp_path / "x.tfrecord"), shuffle=False))
    with pytest.raises(ShardCorrupt, match=r"x.tfrecord: sample 2, at byte \d+: corrupted: the checksum of .* differs"):
        list(RemoteDataset.from_urls(str(tmp_path / "x.tfrecord"), layout=TFRecords({"label": "int64"}), shuffle=False))


def test_compressed_shards_are_read_through_a_small_cache(tmp_path: Path) -> None:
    case = BY_NAME["jsonl.gz"]
    case.write(tmp_path)
    fetched: list[str] = []
    store = WatchedStore(LocalStore(tmp_path), harm=lambda method, key: fetched.append(key) if method == "read_into" else None)
    shards = shards_in(store)
    dataset = RemoteDataset(None, shards, cache_bytes=shards.largest + 1)
    view = dataset.indexed()
    len(view)
    fetched.clear()
    for _ in range(5):  # samples of one shard take one fetch at most
        for index in (0, 1, 2, 3, 8, 9, 10, 11):
            assert view[index]["label"] == index
    assert len(fetched) <= 10
    dataset.close()


def test_indexes_are_stored_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    each(records, ".tfrecord")(tmp_path / "data")
    command = [sys.executable, "-m", "shmload", "index", f"file://{tmp_path}/data", "--cache-folder", str(tmp_path / "cache")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"7 samples, index in {tmp_path}/cache/indexes" in said
    assert not list((tmp_path / "data").glob(f"*{SIDECAR}"))
    assert len(list((tmp_path / "cache/indexes").glob("*.index"))) == 4


class ConcurrentReads:
    """A fault of a store: reads wait until `num_parties` reads are under way at once, or for 30 seconds."""

    def __init__(self, num_parties: int) -> None:
        self.has_met = threading.Event()
        self.barrier = threading.Barrier(num_parties, self.has_met.set)

    def __call__(self, method: str, key: str) -> None:
        if method == "read_into" and not self.has_met.is_set():
            with suppress(threading.BrokenBarrierError):
                self.barrier.wait(30)


@pytest.mark.parametrize("way", ["fluent", "batch"])
def test_small_objects_are_fetched_concurrently(way: str, tmp_path: Path) -> None:
    BY_NAME["files"].write(tmp_path)
    meeting = ConcurrentReads(4)
    dataset = RemoteDataset(None, shards_in(WatchedStore(LocalStore(tmp_path), harm=meeting)), window=4, cache_bytes=1 << 20)
    if way == "fluent":
        items = iter(dataset)
        first = next(items)
        assert first["png"].startswith(b"\x89PNG")
    else:
        view: Any = dataset.indexed()
        assert len(view.__getitems__(range(20))) == 20
    assert meeting.has_met.wait(30)
    meeting.barrier.abort()
    dataset.close()


# ------------------------------------------------------------ what is refused


def test_folder_with_several_layouts_is_an_error(tmp_path: Path) -> None:
    each(lines, ".jsonl")(tmp_path)
    each(array, ".npy")(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"contains 4 of jsonl, 4 of npy: choose the dataset with layout='jsonl' or layout='npy', or by a pattern of names$",
    ):
        RemoteDataset.from_urls(str(tmp_path))
    assert len(RemoteDataset.from_urls(str(tmp_path), layout="npy")) == NUM_SAMPLES
    with pytest.raises(ValueError, match="all shards of a dataset must have one format; these have jsonl, npy"):
        RemoteDataset.from_urls([str(tmp_path / "part-000.jsonl"), str(tmp_path / "part-000.npy")])
    with pytest.raises(ValueError, match="layout must be one of npy, parquet, tar, tfrecord, jsonl, mds, litdata, files"):
        RemoteDataset.from_urls(str(tmp_path), layout="csv")


def test_shards_of_another_format_beside_tar_files_are_refused_without_a_layout(tmp_path: Path) -> None:
    """Not so pictures, JSON, and the tables that img2dataset writes beside each tar file of the same name."""
    with TarWriter(tmp_path / "00000.tar") as tar:
        tar.write({"__key__": "0", "cls": 0})
    for name in ("photo.jpg", "00000_stats.json", "00000.parquet"):
        (tmp_path / name).touch()
    assert len(RemoteDataset.from_urls(str(tmp_path)).indexed()) == 1
    (tmp_path / "rows.parquet").touch()
    with pytest.raises(
        ValueError,
        match=r"contains 2 of parquet, 1 of tar: choose the dataset with layout='parquet' or layout='tar', or by a pattern of names$",
    ):
        RemoteDataset.from_urls(str(tmp_path))
    assert len(RemoteDataset.from_urls(str(tmp_path), layout="tar").indexed()) == 1


def test_other_files_beside_shards_of_a_given_layout_are_ignored(tmp_path: Path) -> None:
    for layout, number in (("tar", 4), ("tfrecord", 1)):
        (folder := tmp_path / layout).mkdir()
        if layout == "tar":
            with TarWriter(folder / "a.tar") as tar:
                for each in range(number):
                    tar.write({"__key__": str(each), "cls": each})
            assert len(TarDataset(folder / "a.tar")) == number  # creates an index in the folder
        else:
            with TFRecordWriter(folder / "a") as writer:  # a name without a suffix
                writer.write({"x": 1})
            (folder / "a.tfindex").write_text("0 5\n")
        (folder / "_SUCCESS").touch()
        assert len(RemoteDataset.from_urls(str(folder), layout=layout).indexed()) == number
        assert len(RemoteDataset.from_urls(str(folder), layout="files").indexed()) == 2


def test_line_may_begin_with_many_spaces(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n' + b" " * 1000 + b'{"a": 2}')
    assert [sample["a"] for sample in RemoteDataset.from_urls(str(tmp_path), shuffle=False)] == [1, 2]


@pytest.mark.parametrize("piece", [1, 7, 100, 4096])
def test_blank_lines_of_any_length_are_skipped(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(piece)
    monkeypatch.setattr(json_lines, "PIECE", piece)  # bytes per read
    for _ in range(30):
        texts = [rng.choice(["1", " 2", "", "  ", " " * 700, "\t\r", "33" * 200]) for _ in range(rng.randrange(12))]
        whole = "\n".join(texts).encode()
        index = JsonLines().index("x", len(whole), lambda at, size, whole=whole: memoryview(whole)[at : at + size])
        found = [whole[first:end].decode().strip() for first, end in itertools.pairwise(index.bounds.tolist())]
        assert found == [text.strip() for text in texts if text.strip()]


def test_error_explains_why_a_file_is_not_a_shard_of_the_layout(tmp_path: Path) -> None:
    for name, message in (
        ("x.parquet", "the end of a Parquet file is needed; there is b'no shard'"),
        ("x.npy", r"is not an \.npy file"),
        ("x.tfrecord", "record 0, at byte 0: the checksum of the record's length differs, or this is not a TFRecord file"),
        ("x.mds", "at byte 0: it says 544501614 samples"),
        ("x.jsonl", "sample 0, at byte 0: Expecting value"),
        ("x.jsonl.gz", "the gz stream is damaged or cut after 0 expanded bytes"),
        ("x.jsonl.zst", "the zst stream is damaged or cut after 0 expanded bytes"),
    ):
        (tmp_path / name).write_bytes(b"not no shard")
        with pytest.raises(ShardCorrupt, match=f"{name}: .*{message}" if name != "x.jsonl" else message):
            list(RemoteDataset.from_urls(str(tmp_path / name)))
    for fortran, words in ((np.asfortranarray(np.zeros((3, 2))), "in Fortran order"), (np.array("x"), "<U1 of shape")):
        np.save(tmp_path / "y.npy", fortran)
        with pytest.raises(ShardCorrupt, match=words):
            list(RemoteDataset.from_urls(str(tmp_path / "y.npy")))


@pytest.mark.parametrize("nbytes", [b"\xff", b'"1x"'])
def test_error_names_a_damaged_index_json(nbytes: bytes, tmp_path: Path) -> None:
    shard = b'{"format": "mds", "version": 2, "zip_data": null, "raw_data": {"basename": "x", "bytes": %b}, "samples": 1}' % nbytes
    (tmp_path / "index.json").write_bytes(b'{"shards": [%b]}' % shard)
    with pytest.raises(ShardCorrupt, match=r"index\.json: is not a valid index of MosaicML Streaming or LitData"):
        len(RemoteDataset.from_urls(str(tmp_path)))


def mds_of_one(path: Path, encoding: str, body: bytes) -> None:
    """Writes a shard of one sample with one column, "x"."""
    head = json.dumps({"column_names": ["x"], "column_encodings": [encoding], "column_sizes": [None]}).encode()
    sample = len(body).to_bytes(4, "little") + body
    begin = 12 + len(head)
    bounds = np.array([begin, begin + len(sample)], "<u4").tobytes()
    path.write_bytes((1).to_bytes(4, "little") + bounds + head + sample)


@pytest.mark.parametrize(("encoding", "body"), [("str_decimal", b"1.x"), ("str_int", b"1x"), ("pkl", b"x")])
def test_error_names_a_value_that_cannot_be_decoded(encoding: str, body: bytes, tmp_path: Path) -> None:
    mds_of_one(tmp_path / "x.mds", encoding, body)
    with pytest.raises(ShardCorrupt, match=rf"x\.mds: sample 0, at byte \d+: column 'x' \({encoding}\)"):
        list(RemoteDataset.from_urls(str(tmp_path / "x.mds"), layout=Mds(allow_pickle=True)))


def test_pickles_are_read_only_if_allowed(tmp_path: Path) -> None:
    import pickle

    mds_of_one(tmp_path / "x.mds", "pkl", pickle.dumps([1, 2]))
    with pytest.raises(ShardCorrupt, match=r"column 'x' \(pkl\): it is a pickle, which can run any code"):
        list(RemoteDataset.from_urls(str(tmp_path / "x.mds")))
    (found,) = RemoteDataset.from_urls(str(tmp_path / "x.mds"), layout=Mds(allow_pickle=True))
    assert found["x"] == [1, 2]


def test_unsupported_litdata_chunks_are_errors(tmp_path: Path) -> None:
    shutil.copytree(DATA / "litdata", tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "index.json").read_text())
    for change, words in (
        (
            {"encryption": {"algorithm": "fernet", "level": "file"}},
            "was written with encryption of level='file', which is not supported",
        ),
        ({"encryption": {"algorithm": "fernet", "level": "chunk"}}, "its chunks are encrypted by fernet: pass what decrypts them"),
        (
            {"encryption": {"algorithm": "fernet", "level": "sample"}},
            r"encrypted by fernet: pass what decrypts them, layout=LitData",
        ),
        ({"compression_level": "item"}, "compression_level='item', which is not supported: run optimize without it"),
        ({"item_loader": "TemporalArrayLoader"}, "item_loader=TemporalArrayLoader"),
        ({"item_loader": "TokensLoader"}, r"pass the number that makes a sample, layout=LitData\(block_size=...\)"),
    ):
        (tmp_path / "index.json").write_text(json.dumps({**index, "config": {**index["config"], **change}}))
        with pytest.raises(ValueError, match=words):
            RemoteDataset.from_urls(str(tmp_path))
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(ShardCorrupt, match="is not a valid index of MosaicML Streaming or LitData"):
        RemoteDataset.from_urls(str(tmp_path))
    (tmp_path / "index.json").write_text(json.dumps({**index, "chunks": []}))
    with pytest.raises(ObjectMissing, match="names no shard"):
        RemoteDataset.from_urls(str(tmp_path))


def test_encrypted_litdata_items_need_their_key(tmp_path: Path) -> None:
    key = base64.urlsafe_b64encode(bytes(32))
    with pytest.raises(ShardCorrupt, match=r"sample 0, at byte \d+: it was damaged, or encrypted with another key .*InvalidToken"):
        list(RemoteDataset.from_urls(str(DATA / "litdata_fernet"), layout=LitData(encryption=Fernet(key)), shuffle=False))
    with pytest.raises(ValueError, match="its items are encrypted by nothing: leave encryption= out"):
        RemoteDataset.from_urls(str(DATA / "litdata"), layout=LitData(encryption=Fernet(key)))
    with pytest.raises(
        TypeError, match=r"encryption must have a method decrypt\(bytes\), like LitData's FernetEncryption, got bytes"
    ):
        LitData(encryption=key)
    assert "Fernet" not in repr(LitData(encryption=Fernet(key)))
    with pytest.raises(ShardCorrupt, match=r"chunk-0-0\.bin: it was damaged, or encrypted with another key .*InvalidToken"):
        list(RemoteDataset.from_urls(str(DATA / "litdata_sealed"), layout=LitData(encryption=Fernet(key)), shuffle=False))
    view = RemoteDataset.from_urls(str(DATA / "litdata_fernet"), layout=LitData(encryption=Fernet(FERNET_KEY))).indexed()
    with ShmLoader(view, 4, seed=0, num_workers=1, multiprocessing_context="fork") as loader:
        assert sorted(concatenated(batch["label"].tolist() for batch in loader)) == [number - 3 for number in range(NUM_SAMPLES)]


class CountingFernet(Fernet):
    """Counts its decryptions."""

    num_decrypted = 0

    def decrypt(self, token: bytes | str, ttl: int | None = None) -> bytes:
        self.num_decrypted += 1
        return super().decrypt(token, ttl)


def test_encrypted_chunk_is_decrypted_once_and_cached_encrypted(tmp_path: Path) -> None:
    counted = CountingFernet(FERNET_KEY)
    chunks = RemoteDataset.from_urls(
        str(DATA / "litdata_sealed"), layout=LitData(encryption=counted), shuffle=False, cache_folder=str(tmp_path)
    )
    assert len(chunks.indexed()) == NUM_SAMPLES
    for num_decrypted in (8, 12):  # once to index each chunk and once to read it; the second pass has the indexes
        assert [sample["label"] for sample in chunks] == [number - 3 for number in range(NUM_SAMPLES)]
        assert counted.num_decrypted == num_decrypted
        chunks = RemoteDataset.from_urls(
            str(DATA / "litdata_sealed"), layout=LitData(encryption=counted), shuffle=False, cache_folder=str(tmp_path)
        )
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(kept) > 4000
    assert "näme 3".encode() not in kept


@pytest.mark.parametrize("name", ["litdata_tokens", "litdata_tokens_sealed"])
def test_token_index_applies_to_one_sample_length(name: str, tmp_path: Path) -> None:
    key = Fernet(FERNET_KEY) if name.endswith("sealed") else None
    for block_size in (10, 5, 10, 7):
        layout = LitData(block_size=block_size, encryption=key)
        dataset = RemoteDataset.from_urls(str(DATA / name), layout=layout, shuffle=False, cache_folder=tmp_path)
        found = [sample["value"] for sample in dataset]
        assert {len(value) for value in found} == {block_size}
        assert len(dataset) == len(found) >= 10 * NUM_SAMPLES // block_size - 5  # the rest of a chunk is not a sample


@pytest.mark.parametrize("cache_bytes", [1 << 20, 0])
@pytest.mark.parametrize("name", ["a.tfrecord", "a.jsonl", "a.npy", "a.wav"])
def test_shards_without_bytes_or_samples(name: str, cache_bytes: int, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    if name == "a.npy":
        np.save(tmp_path / name, np.zeros((0, 3)))
    dataset = RemoteDataset.from_urls(str(tmp_path), cache_bytes=cache_bytes)
    assert [sample["wav"] for sample in dataset] == [b""] * len(dataset)
    view = dataset.indexed()
    with ShmLoader(view, num_workers=0, seed=1) as loader:
        assert len(view) == len(dataset) == len(list(loader)) == (name == "a.wav")


@pytest.mark.parametrize("name", ["parquet", "litdata batch", "litdata sealed", "litdata rows"])
def test_layout_object_reused_for_a_second_dataset_keeps_nothing_of_the_first(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    case.write(tmp_path)
    layout = case.layout if case.layout is not None else Parquet() if name == "parquet" else LitData()

    def labels() -> list[int]:
        dataset = RemoteDataset.from_urls(str(tmp_path), layout=layout, shuffle=False)
        return [sample["label"] for sample in dataset]

    before = labels()
    one, other = sorted(path for path in tmp_path.iterdir() if path.name != "index.json")[:2]
    one.rename(tmp_path / "between")
    other.rename(one)
    (tmp_path / "between").rename(other)
    if (index := tmp_path / "index.json").exists():
        said = json.loads(index.read_text())
        for what in ("chunk_bytes", "chunk_size"):
            first, second = said["chunks"][:2]
            first[what], second[what] = second[what], first[what]
        index.write_text(json.dumps(said))
    after = labels()
    assert after != before, "the labels must change, because the shards were swapped"
    assert sorted(after) == sorted(before)


def test_frame_of_several_items_is_decompressed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expanded: list[int] = []
    real = litdata_frames.expanded_pieces
    monkeypatch.setattr(litdata_frames, "expanded_pieces", lambda kind, file: expanded.append(1) or real(kind, file))
    found = [sample["label"] for sample in RemoteDataset.from_urls(str(DATA / "litdata_batch"), shuffle=False)]
    assert found == [number - 3 for number in range(NUM_SAMPLES)]
    assert len(expanded) == 3 + 3 + 3 + 1  # chunks of 7, 7, 7 and 2 items, three per frame


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (8, 2, "at byte 8: it says 3 frames in version 2 of 7 items; only version 1 is known"),
        (12, 200, "at byte 8: it says 3 frames in version 1 of 200 items"),
        (20, 0, "at byte 8: it says 0 frames"),
        (31, 255, "at byte 24: its 3 frames do not contain its 7 items one after the other"),
        (60, 9, "at byte 24: its 3 frames do not contain its 7 items one after the other"),
        (130, 9, "sample 0, at byte 128: .*damaged or cut|sample 0, at byte 128: its frame does not expand to"),
    ],
)
def test_damaged_chunk_of_frames_is_an_error(at: int, value: int, words: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "litdata_batch", tmp_path, dirs_exist_ok=True)
    data = bytearray((tmp_path / "chunk-0-0.bin").read_bytes())
    data[at] = value
    (tmp_path / "chunk-0-0.bin").write_bytes(data)
    with pytest.raises(ShardCorrupt, match=f"chunk-0-0.bin: {words}"):
        list(RemoteDataset.from_urls(str(tmp_path), shuffle=False))


@pytest.mark.parametrize(("kind", "package"), OPTIONAL.items())
def test_missing_decompression_package_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"the package {package} is needed and is not installed: pip install 'shmload\["):
        list(RemoteDataset.from_urls(str(DATA / f"mds_{kind}")))


@pytest.mark.parametrize(("kind", "package"), OPTIONAL.items())
@pytest.mark.parametrize("harm", [lambda data: data[:-9], lambda data: b"\xff" * 9 + data[9:], lambda data: b""])
def test_damaged_compressed_shard_is_an_error(kind: str, package: str, harm: Any, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    shutil.copytree(DATA / f"mds_{kind}", tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"shard.00000.mds.{kind}"
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ShardCorrupt, match=rf"mds.{kind}: (the {kind} stream is damaged or cut after|expands to)"):
        list(RemoteDataset.from_urls(str(tmp_path), shuffle=False))


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "files"], ids=lambda case: case.name)
def test_shard_replaced_while_it_is_read_is_an_error(case: Case, data: Path) -> None:
    dataset = opened(case, data, cache_bytes=one_shard_cache_nbytes(case, data) if case.is_compressed else 0, shuffle=False)
    items = iter(dataset)
    next(items)
    paths = sorted(path for path in data.iterdir() if path.name != "index.json")
    # The last shard may have been copied already, to index it.
    last = paths[-2 if case.is_compressed and len(paths) == 4 and case.layout is None else -1]
    text = last.read_bytes()
    last.unlink()
    last.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    with pytest.raises(ShardCorrupt, match=f"{last.name}: was removed or written to since the dataset was created"):
        list(items)
    dataset.close()


FUZZED = [
    "jsonl",
    "npy",
    "parquet",
    "tfrecord",
    "mds",
    "litdata",
    "litdata rows",
    "litdata batch",
    "litdata sample",
    "jsonl.zst",
    "tar.gz",
]


@pytest.mark.parametrize("case", [BY_NAME[name] for name in FUZZED], ids=FUZZED)
def test_damaged_shard_is_an_error_or_its_samples_keep_their_structure(case: Case, data: Path) -> None:
    """Bytes are changed, cut or added anywhere: each read returns a sample with at most its values changed, or one error."""
    dice = random.Random(11)
    shard = next(path for path in sorted(data.iterdir()) if path.name != "index.json")
    whole, num_errors = shard.read_bytes(), 0
    for _ in range(150):
        text = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(text))
            text[at : at + dice.choice([1, 1, 1, 4])] = dice.randbytes(dice.choice([0, 1, 1, 4]))
            if not text:
                break
        if dice.random() < 0.3:
            text = text[: dice.randrange(len(text) + 1)]
        shard.write_bytes(text)
        with suppress(ShmloadError, ValueError):
            num_errors += 1
            dataset = opened(case, data, shuffle=False)
            found = list(dataset)
            dataset.close()
            num_errors -= 1
            assert len(found) <= NUM_SAMPLES + 150
    assert num_errors > 30


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes) -> None:
    with suppress(ValueError, IndexError):
        assert isinstance(example_features(data), dict)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_truncated_compressed_stream_is_an_error(kind: str, tmp_path: Path) -> None:
    BY_NAME[f"jsonl.{kind}"].write(tmp_path)
    text = (tmp_path / f"part-001.jsonl.{kind}").read_bytes()

    class Source:
        def __init__(self, data: bytes) -> None:
            self._data = data

        def read(self, size: int = -1) -> bytes:
            taken, self._data = self._data[:size], self._data[size:]
            return taken

    whole = b"".join(expanded_pieces(kind, Source(text)))
    assert whole.count(b"label") == 7
    for end in (len(text) - 1, len(text) * 3 // 4, 5):
        with pytest.raises(ValueError, match=f"the {kind} stream is damaged or cut after"):
            list(expanded_pieces(kind, Source(text[:end])))


# ------------------------------------------------------------ options


def test_only_the_chosen_columns_of_parquet_are_read(tmp_path: Path) -> None:
    each(table, ".parquet")(tmp_path)
    found = list(RemoteDataset.from_urls(str(tmp_path), layout=Parquet(columns=("label",)), shuffle=False))
    assert [plain(sample) for sample in found] == [{"label": number} for number in range(NUM_SAMPLES)]
    with pytest.raises(ValueError, match=r"columns names \['nothing'\], which do not exist; it has \['label'"):
        list(RemoteDataset.from_urls(str(tmp_path), layout=Parquet(columns=("nothing",))))


def test_type_of_a_number_does_not_depend_on_nulls_in_its_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = [0.5, 1.5, None, 2.5]
    pq.write_table(pa.table({"x": pa.array(values, pa.float32())}), tmp_path / "x.parquet", row_group_size=2)
    found = [sample["x"] for sample in RemoteDataset.from_urls(str(tmp_path), shuffle=False)]
    assert found == values
    assert [type(value) for value in found] == [np.float32, np.float32, type(None), np.float32]


def test_invalid_utf8_in_parquet_is_an_error(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"name": ["abcd", "mnopq"]}), path, use_dictionary=False, compression="none", write_statistics=False)
    assert path.read_bytes().count(b"mnopq") == 1
    path.write_bytes(path.read_bytes().replace(b"mnopq", b"mno\xffq"))
    with pytest.raises(ShardCorrupt, match=r"x\.parquet: row group 0, at byte \d+: .*UTF8"):
        list(RemoteDataset.from_urls(str(path)))


def test_parquet_footer_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"label": list(range(20))}), tmp_path / "x.parquet", row_group_size=2)
    view = RemoteDataset.from_urls(str(tmp_path)).indexed()
    assert len(view) == 20
    read: list[int] = []
    parsed = parquet_format.parquet_metadata

    def counted(*args: Any) -> Any:
        read.append(1)
        return parsed(*args)

    monkeypatch.setattr(parquet_format, "parquet_metadata", counted)
    assert [view[number]["label"] for number in range(20)] == list(range(20))
    assert len(read) == 1


def test_fields_are_selected_and_mapped(tmp_path: Path) -> None:
    each(lines, ".jsonl")(tmp_path)
    dataset = RemoteDataset.from_urls(str(tmp_path))
    view = dataset.indexed(fields=["__key__", "name"], decode={"name": str.upper})
    assert view[8] == {"__key__": "part-001-1", "name": "NÄME 8"}
    with pytest.raises(ValueError, match=r"part-000-0 of .* has no field 'nothing'; it has "):
        dataset.indexed(fields=["nothing"])[0]
    assert repr(view) == "<RemoteRecords of 4 shards>"
    dataset.close()


def test_feature_that_does_not_match_its_schema_is_an_error(tmp_path: Path) -> None:
    each(records, ".tfrecord")(tmp_path)
    for schema, words in (
        ({"nothing": "int64"}, "field 'nothing' is missing"),
        ({"x": str}, "field 'x' needs one value of str; the record has a float_list of 1 values"),
        ({"ids": ("int64", (2,))}, r"field 'ids' needs int64 of shape \(2,\); the record has an int64_list of 3 values"),
        ({"ids": ("bfloat16", (3,))}, r"field 'ids' needs bfloat16 of shape \(3,\); the record has an int64_list of 3 values"),
    ):
        with pytest.raises(ShardCorrupt, match=f"sample 0, at byte 0: {words}"):
            list(RemoteDataset.from_urls(str(tmp_path), layout=TFRecords(schema), shuffle=False))
    raw = next(iter(RemoteDataset.from_urls(str(tmp_path), layout=TFRecords(is_example=False), shuffle=False)))
    assert example_features(raw["data"])["label"] == [-3]


def test_schema_has_the_same_effect_on_remote_and_local_files(tmp_path: Path) -> None:
    record = {"small": 5, "big": 300, "below": -1, "flag": True, "real": 1.5, "reals": [1.0, 2.0], "bytes": b"\1\0\2\0"}
    path = tmp_path / "a.tfrecord"
    with TFRecordWriter(path) as writer:
        writer.write({**record, "two": [b"a", b"b"], "text": "é", "none": []})

    data = path.read_bytes()
    index = TFRecords().index(str(path), len(data), lambda at, nbytes: data[at : at + nbytes])

    def read(of: Any, schema: dict[str, Any]) -> Any:
        try:
            (found,) = of(schema).values()
        except (ShardCorrupt, SampleError):
            return "an error"
        return found if isinstance(found, (str, bytes)) else (found.dtype, found.tolist())

    def here(schema: dict[str, Any]) -> Any:
        return TFRecordDataset(path, schema)[0]

    def afar(schema: dict[str, Any]) -> Any:
        return TFRecords(schema).sample(index, 0, lambda at, nbytes: data[at : at + nbytes])

    kinds = ("int64", "uint64", "uint8", "bool", "float64", "float16")
    shapes: list[Any] = [(2,), (None,), (None, 2)]
    specs = [str, bytes, np.int16, *kinds, *itertools.product(kinds, shapes)]
    found = [
        (read(here, {name: spec}), read(afar, {name: spec})) for name in (*record, "two", "text", "none", "lacks") for spec in specs
    ]
    assert [one for one, _ in found] == [other for _, other in found]
    assert sum(one == "an error" for one, _ in found) < 0.9 * len(found)


def test_rows_of_each_dtype_are_read(tmp_path: Path) -> None:
    for made in (np.arange(5), np.arange(10).reshape(5, 2) > 3, np.arange(5, dtype=">c16"), np.zeros((5, 0), np.float16)):
        np.save(tmp_path / "x.npy", made)
        found = [sample["data"] for sample in RemoteDataset.from_urls(str(tmp_path / "x.npy"), shuffle=False, layout=NumpyRows())]
        assert np.array_equal(np.array(found), made)


@pytest.mark.slow(reason="starts two libraries that import for seconds")
def test_files_written_by_the_installed_libraries_are_read(tmp_path: Path) -> None:
    folder = os.environ.get("SHMLOAD_OTHER_LOADERS")
    if not folder or not os.path.isdir(folder):
        pytest.skip("needs mosaicml-streaming and litdata in a folder that SHMLOAD_OTHER_LOADERS names")
    script = Path(__file__).with_name("write_foreign.py")
    subprocess.run([sys.executable, str(script), str(tmp_path)], env={**os.environ, "PYTHONPATH": folder}, check=True)
    for case in (case for case in CASES if case.name.startswith(("mds", "litdata")) and "tokens" not in case.name):
        name = case.name.replace(" ", "_").replace(".", "_")
        found = list(RemoteDataset.from_urls(str(tmp_path / name), shuffle=False, **case.options()))
        assert len(found) == NUM_SAMPLES
        assert all(same(plain(sample), case.sample(number)) for number, sample in enumerate(found))
    tokens = RemoteDataset.from_urls(str(tmp_path / "litdata_tokens"), layout=LitData(block_size=10), shuffle=False)
    assert np.array_equal(np.concatenate([sample["value"] for sample in tokens]), np.arange(10 * NUM_SAMPLES))
