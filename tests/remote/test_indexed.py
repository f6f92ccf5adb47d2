"""The indexed view: a TarDataset whose shards come from the store."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload import ShmLoader
from shmload.errors import ShardCorrupt
from shmload.formats import TarDataset, TarWriter
from shmload.formats.encryption import SampleCipher
from shmload.remote import RemoteDataset, RemoteSamples
from shmload.remote.listing import shards_in
from tests.remote.remote_kit import NBYTES, CountedStore, concatenated, dataset_of, watched, write_packed, write_plain

slow = pytest.mark.slow(reason="starts workers, which fetch the samples one by one")
SCHEMA = {"npy": ("float32", (8,)), "cls": "int64", "__key__": str}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_packed(tmp_path, [5] * 8)
    return tmp_path


def view_of(folder: Path, **options: Any) -> RemoteSamples:
    return RemoteDataset(None, str(folder), **options).indexed(schema=SCHEMA)


def numbers(loader: Any) -> list[list[int]]:
    return [batch["cls"].tolist() for batch in loader]


@pytest.mark.parametrize("cache_bytes", [1 << 30, NBYTES // 2], ids=["whole shards", "sample by sample"])
def test_samples_equal_those_of_a_tar_dataset(folder: Path, cache_bytes: int) -> None:
    local = TarDataset(folder / ("0" * 16) / "shard-000002.tar", cache=False)
    view = RemoteDataset(None, str(folder), cache_bytes=cache_bytes).indexed()
    assert len(view) == 40
    for row in range(5):
        expected, found = local[row], view[10 + row]
        assert (expected["__key__"], expected["cls"]) == (found["__key__"], found["cls"])
        assert expected["npy"].tolist() == found["npy"].tolist()
    assert view[39]["cls"] == view[-1]["cls"] == 39
    with pytest.raises(IndexError, match="index 40 is out of range: the dataset has 40 samples"):
        view[40]
    view._source.local.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("cache_bytes", [1 << 30, NBYTES // 2], ids=["whole shards", "sample by sample"])
def test_shuffle_is_exact_over_all_samples(folder: Path, num_workers: int, cache_bytes: int) -> None:
    with ShmLoader(view_of(folder, cache_bytes=cache_bytes), batch_size=6, shuffle=True, seed=3, num_workers=num_workers) as loader:
        assert len(loader) == 7
        found = []
        for batch in loader:
            found += batch["cls"].tolist()
            assert batch["npy"][:, 3].tolist() == batch["cls"].tolist()
            assert [f"k{number:05d}" for number in batch["cls"].tolist()] == list(batch["__key__"])
            del batch
    assert list(range(40)) == sorted(found) != found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_block_shuffle_reads_whole_shards_within_the_budget(folder: Path, num_workers: int) -> None:
    dataset, store = watched(folder, cache_bytes=6 * NBYTES)
    view = dataset.indexed(schema=SCHEMA)
    with ShmLoader(view, batch_size=6, sampler=view.block_shuffle(), seed=3, num_workers=num_workers) as loader:
        for _ in range(2):
            found = concatenated(numbers(loader))
            assert list(range(40)) == sorted(found)
            assert len({number // 5 for number in found[:10]}) == 2
    if num_workers == 0:
        assert store.count("range") == 0
    dataset.close()


def test_block_shuffle_resumes_on_a_different_number_of_ranks(folder: Path) -> None:
    def loader(batch_size: int, **options: Any) -> ShmLoader[Any]:
        view = view_of(folder)
        return ShmLoader(view, batch_size=batch_size, sampler=view.block_shuffle(2), seed=3, **options)

    with loader(8) as alone:
        items = iter(alone)
        first = [next(items)["cls"].tolist() for _ in range(2)]
        state, rest = alone.state_dict(), numbers(items)
    found = []
    for rank in range(2):
        with loader(4, rank=rank, world_size=2) as half:
            half.load_state_dict(state)
            found.append(numbers(half))
    assert rest == [a + b for a, b in zip(*found, strict=True)]
    assert list(range(40)) == sorted(concatenated(first + rest))


def test_pickle_of_a_view_does_not_contain_its_shards(folder: Path) -> None:
    dataset = RemoteDataset(None, str(folder))
    view = dataset.indexed(schema=SCHEMA)
    assert view[7]["cls"] == 7
    again = pickle.loads(pickle.dumps(view))
    assert again[7]["cls"] == 7
    assert repr(again) == "<RemoteSamples of 8 shards>"
    again._source.local.close()


def test_plain_shards_have_an_indexed_view(tmp_path: Path) -> None:
    write_plain(tmp_path, [3, 4])
    view = RemoteDataset.from_urls(str(tmp_path)).indexed(fields={"label": "cls"})
    assert [view[3]["label"], view[6]["label"]] == [3, 6]


NUM_VALUES = 1000  # values of a sample: 4,000 bytes
SHARD = 8 * 5632 + 2048  # the approximate size of a shard
LARGE = {"npy": ("float32", (NUM_VALUES,)), "cls": "int64"}
CACHES = {"none": 0, "less than a sample": 500, "less than a shard": SHARD // 2, "a shard": SHARD * 3 // 2, "half": SHARD * 3}


@pytest.fixture
def counted(tmp_path: Path) -> CountedStore:
    """Returns a store of six shards with eight samples each, which counts the bytes read."""
    (tmp_path / "shards").mkdir()
    write_plain(tmp_path / "shards", [8] * 6, 4 * NUM_VALUES)
    (tmp_path / "log").touch()
    return CountedStore(tmp_path / "shards", tmp_path / "log")


def checked_numbers(loader: Any, most: int = 1000) -> list[list[int]]:
    """Returns the numbers of the batches, and checks that their arrays match."""
    found = []
    for batch in islice(loader, most):
        assert (batch["npy"] == batch["cls"][:, None]).all()
        found.append(batch["cls"].tolist())
    return found


@pytest.mark.parametrize("is_blocks", [False, True], ids=["shuffle", "block shuffle"])
@pytest.mark.parametrize("num_workers", [0, 2, pytest.param(1, marks=slow), pytest.param(4, marks=slow)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("cache", CACHES)
def test_samples_without_cache_room_are_read_one_by_one_with_range_requests(
    counted: CountedStore, cache: str, num_workers: int, is_blocks: bool
) -> None:
    dataset = dataset_of(shards_in(counted), cache_bytes=CACHES[cache])
    assert dataset.num_samples == 48
    nbytes, indexed = sum(p.stat().st_size for p in counted.root.iterdir()), counted.num_read()
    assert indexed <= nbytes
    view = dataset.indexed(schema=LARGE)
    order: dict[str, Any] = {"sampler": view.block_shuffle()} if is_blocks else {"shuffle": True}
    with ShmLoader(view, batch_size=4, seed=1, num_workers=num_workers, **order) as loader:
        assert list(range(48)) == sorted(concatenated(checked_numbers(loader)))
    # workers read ahead into the next epoch, and a shard that is evicted may be fetched more than once
    assert counted.num_read() - indexed <= (3 if is_blocks and CACHES[cache] > SHARD else 2) * nbytes
    dataset.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_blocks", [False, True], ids=["shuffle", "block shuffle"])
@pytest.mark.parametrize("cache", ["less than a shard", "half"])
def test_resume_on_more_ranks_reads_the_rest_through_a_small_cache(
    counted: CountedStore, tmp_path: Path, cache: str, is_blocks: bool, num_workers: int
) -> None:
    def loader(rank: int, world_size: int, batch_size: int) -> ShmLoader[Any]:
        dataset = dataset_of(shards_in(counted), cache_bytes=CACHES[cache], cache_folder=tmp_path / "cache", window=None)
        view = dataset.indexed(schema=LARGE)
        order: dict[str, Any] = {"sampler": view.block_shuffle(2)} if is_blocks else {"shuffle": True}
        return ShmLoader(view, batch_size=batch_size, seed=1, num_workers=num_workers, rank=rank, world_size=world_size, **order)

    found, states = [], []
    for rank in range(2):
        with loader(rank, 2, 4) as half:
            found += checked_numbers(half, 2)
            states.append(half.state_dict())
    assert states[0] == states[1]
    for rank in range(4):
        with loader(rank, 4, 2) as quarter:
            quarter.load_state_dict(states[0])
            found += checked_numbers(quarter)
    assert list(range(48)) == sorted(concatenated(found))


@pytest.mark.parametrize("fields", [None, {"cls": "cls", "npy": "npy"}], ids=["fields of the schema", "more fields"])
def test_single_reads_fetch_only_the_members_named_in_the_schema(tmp_path: Path, fields: Any) -> None:
    write_packed(tmp_path, [5], nbytes=1 << 16)
    store = CountedStore(tmp_path, tmp_path / "log")
    dataset = dataset_of(shards_in(store), cache_bytes=NBYTES)
    view = dataset.indexed(schema={"cls": "int64", "__key__": str}, fields=fields)
    assert view[3] == {"cls": 3, "__key__": "k00003"}
    assert store.num_read() == 1
    with ShmLoader(view, batch_size=5) as loader:
        assert [batch["cls"].tolist() for batch in loader] == [[0, 1, 2, 3, 4]]
    assert store.num_read() == 6
    dataset.close()


def test_single_reads_fetch_gaps_between_members_only_if_small(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "part-000000.tar") as writer:
        for number, nbytes in enumerate((10_000, 1 << 20)):
            writer.write({"__key__": f"k{number}", "cls": number, "mp4": bytes(nbytes), "txt": "caption"})
    store = CountedStore(tmp_path, tmp_path / "log")
    dataset = dataset_of(shards_in(store), cache_bytes=NBYTES)
    view = dataset.indexed(schema={"cls": "int64", "txt": str})
    before = dataset.num_samples and store.num_read()
    assert view[0] == {"cls": 0, "txt": "caption"}
    assert 10_000 < store.num_read() - before < 20_000
    before = store.num_read()
    assert view[1] == {"cls": 1, "txt": "caption"}
    assert store.num_read() - before == 1 + len("caption")
    dataset.close()


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("way", ["a file", "whole shards", "alone", "encrypted"])
def test_schema_types_do_not_depend_on_how_a_sample_is_read(way: str, decode: bool, tmp_path: Path) -> None:
    written = {"txt": "täxt".encode(), "note": "nöte".encode(), "x": np.arange(4, dtype="<i2").tobytes()}
    key = bytes(range(32)) if way == "encrypted" else None
    if key is not None:
        encrypt = SampleCipher(key).encrypt
        written = {f"{name}.enc": encrypt(data, f"k.{name}.enc".encode(), "0" * 16) for name, data in written.items()}
    with TarWriter(tmp_path / "x.tar") as writer:
        writer.write({"__key__": "k", **written})
    schema = {"txt": str, "note": str, "raw": bytes, "bytes": bytes, "pairs": ("int16", (2, 2)), "all": ("int16", (None,))}
    fields = {"txt": "txt", "note": "note", "raw": "note", "bytes": "txt", "pairs": "x", "all": "x"}
    options: dict[str, Any] = {"fields": fields, "schema": schema, "decode": decode}
    remote = RemoteDataset.from_urls(str(tmp_path / "x.tar"), cache_bytes=0 if way == "alone" else 1 << 20, key=key)
    view = TarDataset(tmp_path / "x.tar", **options) if way == "a file" else remote.indexed(**options)
    with ShmLoader(view, batch_size=1, num_workers=0) as loader:
        (batch,) = loader
        found = {name: value[0] for name, value in batch.items()}
    assert (found["txt"], found["note"]) == ("täxt", "nöte")
    assert (found["raw"], found["bytes"]) == ("nöte".encode(), "täxt".encode())
    assert (found["pairs"].tolist(), found["all"].tolist()) == ([[0, 1], [2, 3]], [0, 1, 2, 3])
    remote.close()


def test_single_read_of_a_sample_without_a_member_is_an_error(tmp_path: Path) -> None:
    write_packed(tmp_path, [5])
    dataset = RemoteDataset(None, str(tmp_path), cache_bytes=NBYTES // 2)
    with pytest.raises(ShardCorrupt, match=r"field 'txt' of sample 'k00003' at byte \d+: there is no member txt, only cls, npy"):
        dataset.indexed(schema={"txt": str})[3]
    dataset.close()
