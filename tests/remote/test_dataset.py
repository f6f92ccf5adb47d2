"""RemoteDataset: which samples each rank and worker reads, in which order, and the errors."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload.errors import ObjectMissing, ShardCorrupt
from shmload.formats import TarStream
from shmload.processes.ranks import OwnRank
from shmload.remote import RemoteDataset
from shmload.remote.listing import shards_in
from shmload.storage.local_store import LocalStore
from tests.remote.remote_kit import dataset_of, label, labels, watched, write_packed, write_plain


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    write_plain(tmp_path, [7, 1, 12, 5, 8, 3])
    return tmp_path


def items_by_rank_and_worker(dataset: RemoteDataset, world_size: int, num_workers: int, number: int) -> list[list[list[Any]]]:
    """Returns what each worker of each rank yields in a pass, as loaders would run them, in one process."""
    workers = range(num_workers)
    return [[list(dataset._items(number, rank, world_size, w, num_workers)) for w in workers] for rank in range(world_size)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    world_size=st.integers(1, 4),
    num_workers=st.integers(1, 4),
    batch_size=st.integers(1, 7),
    window=st.integers(1, 4),
    epoch=st.integers(0, 3),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
)
def test_every_sample_is_read_once_across_all_ranks_and_workers(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    world_size: int,
    num_workers: int,
    batch_size: int,
    window: int,
    epoch: int,
    uneven: Any,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    n = write_plain(folder, counts)
    dataset = RemoteDataset.from_urls(str(folder), window=window, uneven=uneven)
    batched = dataset.batched(batch_size, collation_fn=None)
    ranks = items_by_rank_and_worker(batched, world_size, num_workers, epoch)
    found = [[label(item) for worker in rank for batch in worker for item in batch] for rank in ranks]
    every = sorted(number for rank in found for number in rank)
    if uneven == "exact":
        assert list(range(n)) == every
        assert max(map(len, found)) - min(map(len, found)) <= 1
    else:
        assert len({len(rank) for rank in found}) == 1
        assert set(every) == set(range(n)) if uneven == "pad" else len(every) == len(set(every)) == n - n % world_size
        assert len(every) - len(set(every)) <= world_size
    for rank, workers in enumerate(ranks):
        batched._world = OwnRank(rank, world_size)
        assert len(batched) == sum(map(len, workers))
    dataset.close()


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_batches_are_the_same_for_any_number_of_workers(plain: Path, num_workers: int) -> None:
    dataset = RemoteDataset.from_urls(str(plain)).map(label).batched(5, collation_fn=None)
    alone = list(dataset)
    workers = [iter(dataset._items(0, 0, 1, worker, num_workers)) for worker in range(num_workers)]
    assert alone == [next(workers[turn % num_workers]) for turn in range(len(dataset))]


def test_sample_has_its_members_a_key_and_a_url(plain: Path) -> None:
    first = next(iter(RemoteDataset.from_urls(str(plain), shuffle=False)))
    assert list(first) == ["__key__", "__url__", "cls", "npy"]
    assert ("k00000", str(plain / "part-000000.tar"), b"0") == (first["__key__"], first["__url__"], first["cls"])


def test_each_pass_is_the_next_epoch_and_set_epoch_goes_back(plain: Path) -> None:
    dataset = RemoteDataset.from_urls(str(plain), seed=3)
    first, second, third = labels(dataset), labels(dataset), labels(dataset)
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert list(range(36)) == sorted(first) == sorted(second)
    dataset.set_epoch(1)
    assert second == labels(dataset)
    assert third == labels(dataset)
    with pytest.raises(ValueError, match=r"epoch must be in \[0, 2\^62\], got -1"):
        dataset.set_epoch(-1)


def test_order_depends_only_on_seed_and_epoch(plain: Path) -> None:
    first, other = RemoteDataset.from_urls(str(plain), seed=3), RemoteDataset.from_urls(str(plain), seed=4)
    order = labels(first)
    assert order == labels(RemoteDataset.from_urls(str(plain), seed=3))
    assert order != labels(other)


def test_samples_of_several_shards_are_mixed(tmp_path: Path) -> None:
    write_plain(tmp_path, [50] * 8)
    found = labels(RemoteDataset.from_urls(str(tmp_path), seed=1))
    same = sum(a // 50 == b // 50 for a, b in pairwise(found)) / len(found)
    assert same < 0.25  # 1 / 8 if they are mixed well, 1 if they are not mixed


def test_shuffle_false_keeps_the_shards_order(plain: Path) -> None:
    assert list(range(36)) == labels(RemoteDataset.from_urls(str(plain), shuffle=False))


def test_length_is_known_before_shards_are_read(tmp_path: Path) -> None:
    write_packed(tmp_path, [10, 7, 3])
    dataset, store = watched(tmp_path)
    assert (len(dataset), len(dataset.batched(3)), len(dataset.slice(3)), len(dataset.batched(3).repeat(2))) == (20, 7, 3, 14)
    assert (
        len(dataset.shuffle(10).batched(3, partial=False)),
        len(dataset.select(label).with_epoch(9)),
        len(dataset.select(label).with_length(5)),
    ) == (6, 9, 5)
    assert {"get"} == {method for method, _ in store.asked}  # only the manifest


@pytest.mark.parametrize(("method", "arguments"), [("select", (bool,)), ("unbatched", ()), ("then", (iter,))])
def test_length_is_unknown_after_stages_that_change_the_count(plain: Path, method: str, arguments: tuple[Any, ...]) -> None:
    dataset = getattr(RemoteDataset.from_urls(str(plain)), method)(*arguments)
    with pytest.raises(TypeError, match=f"items after {method} is not known before they are read: set it by with_length"):
        len(dataset)


def test_endless_dataset_has_no_length(plain: Path) -> None:
    with pytest.raises(TypeError, match=r"with repeat\(\) has no end, so it has no len\(\): give repeat a number"):
        len(RemoteDataset.from_urls(str(plain)).repeat())


def test_ranks_come_from_the_environment_or_the_arguments(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = RemoteDataset.from_urls(str(plain), rank=1, world_size=4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = RemoteDataset.from_urls(str(plain))
    assert labels(given) == labels(found)
    assert (len(given), len(found)) == (9, 9)


def test_spawned_worker_keeps_its_trainers_rank(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = RemoteDataset.from_urls(str(plain))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sent = pickle.dumps(dataset)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert len(pickle.loads(sent)) == 12


@pytest.mark.parametrize("is_worker", [False, True])
@pytest.mark.parametrize("of_rank", [None, 1])
def test_unpickled_dataset_reads_the_share_of_its_processes_rank(
    of_rank: int | None, is_worker: bool, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process gets it from torch.multiprocessing.spawn before it knows its rank, or is a worker that finds another rank in
    the environment.
    """
    made = RemoteDataset.from_urls(str(plain), shuffle=False), TarStream(sorted(plain.iterdir()))
    if of_rank is not None:
        monkeypatch.setenv("RANK", str(of_rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
    remote, stream = pickle.loads(pickle.dumps(made))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    if is_worker:
        monkeypatch.setattr("torch.utils.data.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1, seed=0))
    rank = 1 if is_worker and of_rank == 1 else 2
    assert remote._world() == stream._world() == (rank, 3)
    assert len(remote) == 12
    assert [sample["__key__"] for sample in stream] == [
        s["__key__"] for s in TarStream(made[1].paths[rank::3], rank=0, world_size=1)
    ]


def test_folder_of_a_bucket_is_read_by_its_manifest(tmp_path: Path) -> None:
    write_packed(tmp_path / "data", [4, 4])
    (tmp_path / "data" / "foreign.tar").write_bytes(b"no shard")
    (tmp_path / "data-other").mkdir()
    assert list(range(8)) == sorted(labels(RemoteDataset(None, str(tmp_path), "data")))


def test_shards_by_name_expand_braces(plain: Path) -> None:
    dataset = RemoteDataset.from_urls(str(plain / "part-{000000..000002}.tar"), shuffle=False)
    assert list(range(20)) == labels(dataset)
    assert list(range(8)) == labels(RemoteDataset.from_urls([f"file://{plain}/part-00000{n}.tar" for n in (0, 1)], shuffle=False))


def test_empty_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(
        ObjectMissing, match=r"contains no shards, neither manifest.json nor files of a known format, only 1 other objects"
    ):
        RemoteDataset(None, str(tmp_path))


def test_missing_folder_and_the_manifest_in_place_of_its_folder_are_errors(tmp_path: Path) -> None:
    write_packed(tmp_path, [])
    with pytest.raises(ObjectMissing, match="nowhere: there is no such folder, or it is empty"):
        RemoteDataset.from_urls(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"manifest\.json: is the manifest of a dataset: give the URL of its folder"):
        RemoteDataset.from_urls(str(tmp_path / "manifest.json"))


def test_manifest_without_shards_is_an_error(tmp_path: Path) -> None:
    write_packed(tmp_path, [])
    with pytest.raises(ObjectMissing, match="its manifest names no shard: pack at least one sample"):
        RemoteDataset(None, str(tmp_path))


def test_missing_shard_is_an_error(plain: Path) -> None:
    with pytest.raises(ObjectMissing, match="part-000009"):
        RemoteDataset.from_urls(str(plain / "part-00000{8,9}.tar".replace("8,9", "9,0")))


def test_folder_among_shards_is_refused(plain: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a shard of a known format, and a folder must be the only URL"):
        RemoteDataset.from_urls([str(plain), str(plain / "part-000000.tar")])


def test_numpy_integer_seed_equals_the_python_seed(plain: Path) -> None:
    dataset = RemoteDataset.from_urls(str(plain), seed=np.int64(7))  # type: ignore[arg-type]  # no int to mypy
    assert type(dataset.seed) is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be an int from 0 to"),
        ({"seed": 1.5}, "seed must be an int from 0 to"),
        ({"uneven": "no"}, 'uneven must be "pad", "drop" or "exact", got \'no\''),
        ({"rank": 1}, "rank and world_size go together; got rank=1, world_size=None"),
        ({"window": 0}, "window must be at least 1, or None, got 0"),
        ({"window": 4, "cache_bytes": 20000}, r"window=4 shards of up to \d+ bytes need \d+ bytes at once.*is 20000"),
    ],
)
def test_arguments_are_checked(plain: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RemoteDataset.from_urls(str(plain), **arguments)


def test_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ShardCorrupt, match=r"manifest.json: this is not a manifest of shards, which has format"):
        RemoteDataset(None, str(tmp_path))


def test_with_epoch_yields_the_given_number_of_items_across_epochs(plain: Path) -> None:
    dataset = RemoteDataset.from_urls(str(plain)).with_epoch(50)
    first, second = labels(dataset), labels(dataset)
    assert (len(dataset), len(first), len(second)) == (50, 50, 50)
    assert list(range(36)) == sorted(first[:36])
    assert list(range(36)) == sorted(second[:36])
    in_turn = [iter(dataset._items(0, 0, 1, worker, 3)) for worker in range(3)]
    assert first == [label(next(in_turn[turn % 3])) for turn in range(50)]


def test_repeat_yields_several_epochs_in_different_orders(plain: Path) -> None:
    dataset = RemoteDataset.from_urls(str(plain)).repeat(2)
    first, second = labels(dataset), labels(dataset)
    assert 72 == len(first) == len(dataset)
    orders = {tuple(part) for found in (first, second) for part in (found[:36], found[36:])}
    assert len(orders) == 4
    assert {tuple(range(36))} == {tuple(sorted(order)) for order in orders}


def test_repeat_of_nothing_ends(plain: Path) -> None:
    assert list(RemoteDataset.from_urls(str(plain)).select(lambda sample: False).repeat()) == []


def test_repr_names_shards_and_stages(tmp_path: Path) -> None:
    write_packed(tmp_path, [2])
    dataset = dataset_of(shards_in(LocalStore(tmp_path))).decode().to_tuple("cls")
    assert repr(dataset) == "<RemoteDataset of 1 shards, 10240 bytes.decode.to_tuple>"
