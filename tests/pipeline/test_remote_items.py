"""Remote shards as a pipeline's source: items by index, in workers, resumed on other workers and ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmload.pipeline import Cache, Collate, Conveyer, DistributedBatchedMap, Items, Map, Partition, Repeat, Shuffle, Take
from shmload.remote import RemoteDataset
from tests.remote.remote_kit import label, write_packed

N = 40
slow = pytest.mark.slow(reason="starts workers")


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Path]:
    write_packed(tmp_path, [5] * 8)
    return tmp_path


def decoded(shards: Path, **options: Any) -> RemoteDataset:
    return RemoteDataset(None, str(shards), **options).decode()


def labels(stages: list[Any], **options: Any) -> list[int]:
    """Returns the labels of one epoch."""
    with Conveyer([*stages, Map(label)], **options) as pipeline:
        return list(pipeline)


def test_items_of_a_remote_dataset_keep_its_order(shards: Path) -> None:
    dataset = decoded(shards, seed=5)
    epochs = [[label(item) for item in dataset] for _ in range(2)]
    with Conveyer([Items(dataset), Map(label)]) as pipeline:
        assert [list(pipeline), list(pipeline)] == epochs
        assert len(pipeline) == N
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(N))
    assert epochs[0] != epochs[1]
    assert labels([Items(dataset), Repeat(2)]) == epochs[0] + epochs[1], "Repeat continues with the next epoch's order"
    with Conveyer([Items(dataset, repeating=True), Map(label)]) as pipeline:
        assert [pipeline() for _ in range(2 * N)] == epochs[0] + epochs[1]


def test_position_stages_and_the_datasets_own_stages(shards: Path) -> None:
    dataset = decoded(shards, shuffle=False).to_tuple("cls").slice(3, None).batched(4)
    numbers = [list(column) for (column,) in Conveyer([Items(dataset), Take(2)])]
    assert numbers == [[3, 4, 5, 6], [7, 8, 9, 10]]
    order = labels([Items(decoded(shards, shuffle=False)), Shuffle(1)])
    assert list(range(N)) == sorted(order) != order


@slow
@pytest.mark.parametrize("cache_bytes", [1 << 30, 10_000], ids=["whole shards", "sample by sample"])
def test_workers_read_remote_items_by_random_access(shards: Path, cache_bytes: int) -> None:
    def stages(n_workers: int) -> list[Any]:
        mapped = [DistributedBatchedMap(label, n_workers)] if n_workers else [Map(label)]
        return [Items(decoded(shards, cache_bytes=cache_bytes)), Shuffle(2), *mapped, Collate(3)]

    with Conveyer(stages(0)) as pipeline:
        expected = [batch.tolist() for _ in range(2) for batch in pipeline]
    with Conveyer(stages(2)) as pipeline:
        assert [batch.tolist() for _ in range(2) for batch in pipeline] == expected
        assert len(pipeline.stats()["workers"]) == 2


@slow
def test_state_resumes_on_other_workers_and_ranks(shards: Path) -> None:
    def made(rank: int, world: int, n_workers: int) -> Conveyer:
        dataset = decoded(shards, rank=rank, world_size=world)
        stages = [Items(dataset, n_workers=n_workers), Shuffle(), Partition(rank, world), Map(label), Collate(12 // world)]
        return Conveyer(stages)

    with made(0, 1, 0) as alone:
        epochs = [[x for batch in alone for x in batch.tolist()] for _ in range(2)]
    two = [made(rank, 2, 1) for rank in range(2)]
    for pipeline in two:
        for _ in pipeline:
            pass
        iter(pipeline)
    consumed = [x for pipeline in two for x in pipeline().tolist()]
    states = [json.loads(json.dumps(pipeline.state())) for pipeline in two]
    assert states[0] == states[1]
    for pipeline in two:
        pipeline.close()
    rest: list[int] = []
    for rank, n_workers in enumerate((0, 1, 2)):
        with made(rank, 3, n_workers) as pipeline:
            pipeline.load_state(states[0])
            for batch in pipeline:
                rest += batch.tolist()[: pipeline.valid]
    assert sorted(consumed) == sorted(epochs[1][:12])
    assert sorted(rest) == sorted(epochs[1][12:])


def test_unsupported_stages_of_remote_items_are_refused(shards: Path) -> None:
    with pytest.raises(ValueError, match="which is unknown after select"):
        Items(decoded(shards).select(bool))
    with pytest.raises(ValueError, match=r"Cache.* would be cached again"):
        Conveyer([Items(decoded(shards)), Cache()])
    assert labels([Items(decoded(shards, shuffle=False)), Cache()]) == list(range(N))


@slow
def test_indexed_view_decodes_in_place_in_workers(shards: Path) -> None:
    view = RemoteDataset(None, str(shards)).indexed(schema={"npy": ("float32", (8,)), "cls": "int64"})
    with Conveyer([Items(view, n_workers=2), Shuffle(), Collate(7)]) as pipeline:
        found = []
        for batch in pipeline:
            found += batch["cls"].tolist()
            assert batch["npy"][:, 3].tolist() == batch["cls"].tolist()
    assert found == list(Conveyer([Items(range(N)), Shuffle()]))
