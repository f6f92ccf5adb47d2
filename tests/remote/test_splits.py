"""Parts of a dataset are disjoint, complete together and the same everywhere, and they are ordinary datasets."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from shmload import Mix, ShmLoader
from shmload.remote import RemoteDataset
from tests.remote.layout_kit import CASES, NUM_SAMPLES
from tests.remote.remote_kit import labels, write_packed, write_plain

COUNTS = (11, 1, 30, 23, 5)
TOTAL = sum(COUNTS)
CACHES = pytest.mark.parametrize("cache_bytes", [0, 40_000, 1 << 30])


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    write_packed(tmp_path / "data", COUNTS)
    return str(tmp_path / "data")


@CACHES
def test_parts_together_have_every_sample_once(bucket: str, cache_bytes: int) -> None:
    dataset = RemoteDataset.from_urls(bucket, cache_bytes=cache_bytes)
    parts = dataset.split({"train": 0.7, "val": 0.2, "test": 0.1}, seed=5)
    assert [len(part) for part in parts.values()] == [49, 14, 7]
    found = {name: sorted(labels(part)) for name, part in parts.items()}
    assert sorted(label for part in found.values() for label in part) == list(range(TOTAL))
    again = RemoteDataset.from_urls(bucket, seed=9).split({"train": 0.7, "val": 0.2, "test": 0.1}, seed=5)
    assert {name: sorted(labels(part)) for name, part in again.items()} == found
    other = dataset.split({"train": 0.7, "val": 0.2, "test": 0.1}, seed=6)
    assert sorted(labels(other["train"])) != found["train"]
    for part in (*parts.values(), *again.values(), *other.values(), dataset):
        part.close()


@CACHES
@pytest.mark.parametrize("has_schema", [False, True])
def test_part_is_read_by_index(bucket: str, cache_bytes: int, has_schema: bool) -> None:
    part = RemoteDataset.from_urls(bucket, cache_bytes=cache_bytes).split({"some": 0.4, "more": 0.5})["more"]
    expected = sorted(labels(part))
    options: Any = {"schema": {"cls": "int64", "npy": ("float32", (8,))}} if has_schema else {}
    view = part.indexed(**options)
    assert len(view) == len(part) == 35
    assert [int(view[index]["cls"]) for index in range(35)] == expected
    assert int(view[-1]["cls"]) == expected[-1]
    for order in ({"shuffle": True}, {"sampler": view.block_shuffle(2)}):
        with ShmLoader(part.indexed(schema={"cls": "int64"}), batch_size=4, seed=2, num_workers=2, **order) as loader:
            assert sorted(label for batch in loader for label in batch["cls"].tolist()) == expected
    with pytest.raises(IndexError):
        view[35]
    part.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_divide_a_part(bucket: str, world_size: int) -> None:
    expected: list[int] = []
    found: list[int] = []
    for rank in range(world_size):
        dataset = RemoteDataset.from_urls(bucket, rank=rank, world_size=world_size, uneven="exact", seed=3)
        part = dataset.decode().map(label_of).split({"train": 0.6})["train"]
        found += list(part)
        whole = RemoteDataset.from_urls(bucket).split({"train": 0.6})["train"]
        expected = sorted(labels(whole))
        for each in (dataset, part, whole):
            each.close()
    assert sorted(found) == expected


def label_of(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("parquet", "jsonl.gz", "mds")], ids=lambda case: case.name
)
def test_parts_of_existing_datasets(case: Any, tmp_path: Path) -> None:
    case.write(tmp_path)
    parts = RemoteDataset.from_urls(str(tmp_path), **case.options()).split({"a": 20, "b": 3})
    found = {name: [sample["name"] for sample in part] for name, part in parts.items()}
    assert [len(names) for names in found.values()] == [20, 3]
    assert sorted(found["a"] + found["b"]) == sorted(case.sample(number)["name"] for number in range(NUM_SAMPLES))
    view = parts["b"].indexed(fields=["name"])
    assert sorted(view[index]["name"] for index in range(3)) == sorted(found["b"])
    for part in parts.values():
        part.close()


def test_part_of_a_part_is_the_same_in_another_process(bucket: str) -> None:
    part = RemoteDataset.from_urls(bucket).split({"a": 0.5})["a"].split({"b": 10})["b"]
    assert len(part) == 10
    copy = pickle.loads(pickle.dumps(part))
    assert sorted(labels(copy)) == sorted(labels(part))
    loader = ShmLoader(part.decode().map(label_of), batch_size=2, num_workers=2)
    assert sorted(label for batch in loader for label in batch.tolist()) == sorted(labels(part))
    loader.close()
    part.close()


def test_streams_of_parts_have_separate_caches(tmp_path: Path) -> None:
    for name, count in (("a", 40), ("b", 20)):
        (tmp_path / name).mkdir()
        write_plain(tmp_path / name, [count // 2, count // 2])
    members = [RemoteDataset.from_urls(str(tmp_path / name), cache_bytes=room) for name, room in (("a", 1 << 20), ("b", 25_000))]
    views = [(member.indexed(schema={"cls": "int64"}), weight) for member, weight in zip(members, (0.7, 0.3), strict=True)]
    with ShmLoader(Mix(views), batch_size=10, seed=1, num_workers=2) as loader:
        assert sum(len(batch["cls"]) for batch in loader) > 40
    for member in members:
        member.close()


@pytest.mark.parametrize("parts", [{}, {"a": 0.9, "b": 0.2}, {"a": 71}, {"a": 0.001}, {"a": -0.5}])
def test_invalid_shares_are_errors(bucket: str, parts: dict[str, float]) -> None:
    dataset = RemoteDataset.from_urls(bucket)
    with pytest.raises(
        ValueError, match="split: each part needs at least one sample, and all parts together at most the 70 samples"
    ):
        dataset.split(parts)
    dataset.close()
