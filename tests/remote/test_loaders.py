"""The reading snippet of the documentation in torch's DataLoader and in ShmLoader, in both modes, with workers of every start
method.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmload import ShmLoader, StateMismatch
from shmload.pipeline import Items
from shmload.remote import RemoteDataset
from tests.remote.remote_kit import batch_labels, concatenated, write_packed

LOADERS = {
    "torch": lambda data, **options: torch.utils.data.DataLoader(data, batch_size=None, **options),
    "torch mode": lambda data, **options: ShmLoader(data, batch_size=None, **options),
    "seed mode": lambda data, **options: ShmLoader(data, batch_size=None, seed=5, **options),
    "torch mode, threads": lambda data, **options: ShmLoader(data, batch_size=None, **threads(**options)),
    "torch mode, backend chosen": lambda data, **options: ShmLoader(data, batch_size=None, **threads("auto", **options)),
}


def threads(backend: str = "thread", *, num_workers: int, **options: Any) -> dict[str, Any]:
    """Returns the options with worker threads, or those that "auto" chooses, if there are workers."""
    return {**options, "num_workers": num_workers, **({"backend": backend} if num_workers else {})}


def double(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(2 * array)


def pipeline(folder: Path, **options: Any) -> RemoteDataset:
    """Builds the snippet's dataset, with arrays in place of images."""
    return (
        RemoteDataset(None, str(folder), **options)
        .decode("pil")
        .to_tuple("npy;png", "cls")
        .map_tuple(double, lambda x: x)
        .batched(8)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_packed(tmp_path, [12, 20, 3, 15])
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_every_loader_yields_the_same_batches_for_any_number_of_workers(folder: Path, kind: str, num_workers: int) -> None:
    alone = pipeline(folder)
    first, second = batch_labels(alone), batch_labels(alone)
    loader = LOADERS[kind](pipeline(folder), num_workers=num_workers)
    assert len(loader) == 7
    assert [first, second] == [batch_labels(loader), batch_labels(loader)]
    assert list(range(50)) == sorted(concatenated(first))
    del loader


@pytest.mark.slow(reason="reads a dozen passes, most of them with two workers")
@pytest.mark.filterwarnings("ignore:.*persistent_workers")
@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=["0", "2", "stay"]
)
@pytest.mark.parametrize("num_read", [0, 1, 4, 7])
def test_torch_mode_resumes_in_the_order_of_the_states_epoch(folder: Path, num_read: int, workers: dict[str, Any]) -> None:
    def loader_of(data: RemoteDataset) -> ShmLoader[Any]:
        return ShmLoader(data, batch_size=None, **workers)

    alone = pipeline(folder)
    epochs = [batch_labels(alone) for _ in range(3)]
    with loader_of(pipeline(folder)) as loader:
        assert batch_labels(loader) == epochs[0]
        if num_read:
            batches = iter(loader)
            seen = [next(batches)[1].tolist() for _ in range(num_read)]
            assert seen == epochs[1][:num_read]
        state = loader.state_dict()
        rest = epochs[1][num_read:]
        with loader_of(pipeline(folder)) as resumed:
            resumed.load_state_dict(state)
            assert [batch_labels(resumed), batch_labels(resumed)] == [rest, epochs[2]]
        if num_read:
            assert [labels[1].tolist() for labels in batches] == rest
            assert batch_labels(loader) == epochs[2]
        loader.load_state_dict(state)
        assert [batch_labels(loader), batch_labels(loader)] == [rest, epochs[2]]


@pytest.mark.slow(reason="reads nine passes, most of them with two workers")
@pytest.mark.parametrize("kind", LOADERS)
def test_persistent_workers_follow_the_epoch(folder: Path, kind: str) -> None:
    alone = pipeline(folder)
    expected = [batch_labels(alone) for _ in range(3)]
    data = pipeline(folder)
    loader = LOADERS[kind](data, num_workers=2, persistent_workers=True)
    assert expected[:2] == [batch_labels(loader), batch_labels(loader)]
    (loader if kind == "seed mode" else data).set_epoch(0)
    assert [expected[0], expected[1]] == [batch_labels(loader), batch_labels(loader)]
    next(iter(loader))  # an abandoned pass counts, too
    (loader if kind == "seed mode" else data).set_epoch(2)
    assert expected[2] == batch_labels(loader)
    del loader


def double_of(sample: tuple[Any, Any]) -> tuple[Any, Any]:
    return torch.from_numpy(2 * sample[0]), sample[1]


@pytest.mark.slow(reason="workers start as new interpreters, which import all modules")
@pytest.mark.parametrize("kind", ["torch", "torch mode", "seed mode"])
def test_spawned_workers_read_the_same_batches(folder: Path, kind: str) -> None:
    data = RemoteDataset(None, str(folder)).decode().to_tuple("npy", "cls").map(double_of).batched(8)
    expected = batch_labels(data)
    data.set_epoch(0)
    loader = LOADERS[kind](data, num_workers=1, multiprocessing_context="spawn")
    assert expected == batch_labels(loader)
    del loader


@pytest.mark.slow(reason="kills a worker, which is replaced")
def test_killed_worker_is_replaced_and_no_sample_is_lost(folder: Path) -> None:
    alone = pipeline(folder, cache_bytes=100_000)
    expected = batch_labels(alone)
    with ShmLoader(pipeline(folder, cache_bytes=100_000), batch_size=None, seed=0, num_workers=2) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(np.asarray(batch[1]).tolist())
            if number == 1:
                os.kill(loader.stats()["workers"][0]["pid"], signal.SIGKILL)
    assert expected == found


def test_seed_mode_resumes_in_the_middle_of_an_epoch(folder: Path) -> None:
    with ShmLoader(pipeline(folder), batch_size=None, seed=5, num_workers=0) as loader:
        items = iter(loader)
        for _ in range(9):  # 7 batches of the first epoch, 2 of the second
            try:
                next(items)
            except StopIteration:
                items = iter(loader)
                next(items)
        state = loader.state_dict()
        rest = batch_labels(items)
    with ShmLoader(pipeline(folder), batch_size=None, seed=5, num_workers=0) as other:
        other.load_state_dict(state)
        assert rest == batch_labels(other)


def noisy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array) + torch.rand(())


def test_augmentation_in_seed_mode_does_not_depend_on_the_number_of_workers(folder: Path) -> None:
    data = RemoteDataset(None, str(folder)).decode().to_tuple("npy", "cls").map_tuple(noisy).batched(8)
    found = []
    for num_workers in (0, 2):
        with ShmLoader(data, batch_size=None, seed=5, num_workers=num_workers) as loader:
            found.append([batch[0].tolist() for batch in loader])
    assert found[0] == found[1]


@pytest.mark.parametrize(("method", "arguments"), [("select", (bool,)), ("repeat", (2,)), ("with_epoch", (5,)), ("unbatched", ())])
def test_seed_mode_refuses_stages_without_random_access(folder: Path, method: str, arguments: tuple[Any, ...]) -> None:
    data = getattr(pipeline(folder), method)(*arguments)
    with pytest.raises(ValueError, match=f"needs the k-th item of an epoch, which is unknown after {method}"):
        ShmLoader(data, batch_size=None, seed=1)


def test_sample_dropped_by_a_stage_is_an_error_in_seed_mode(folder: Path) -> None:
    data = RemoteDataset(None, str(folder)).map(lambda sample: None)
    with (
        ShmLoader(data, batch_size=None, seed=1) as loader,
        pytest.raises(ValueError, match="the stages made 0 items of its 1 samples, and seed mode needs one"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_a_torch_mode_loader_divide_an_epoch(folder: Path, world_size: int) -> None:
    found = []
    for rank in range(world_size):
        data = pipeline(folder, rank=rank, world_size=world_size, uneven="exact")
        found.append(concatenated(batch_labels(torch.utils.data.DataLoader(data, batch_size=None))))
    assert list(range(50)) == sorted(concatenated(found))


def test_dataset_of_another_rank_is_refused_if_the_loader_divides_samples(folder: Path) -> None:
    ranks = [{"rank": rank, "world_size": 3} for rank in range(3)]
    for given, other in zip(ranks, [{}, ranks[0], ranks[1]], strict=True):
        data = pipeline(folder, **given)
        with pytest.raises(
            ValueError, match=f"for rank {given['rank']} of 3, .* also give the loader rank={given['rank']}, world_size=3"
        ):
            ShmLoader(data, batch_size=None, seed=1, **other)
    found = []
    for given in ranks:
        with ShmLoader(pipeline(folder, **given), batch_size=None, seed=1, uneven="exact", **given) as loader:
            found += concatenated(batch_labels(loader))
    assert sorted(found) == list(range(50))


@pytest.mark.parametrize("uneven", ["drop", "exact"])
def test_dataset_divided_in_another_way_is_refused_if_the_loader_divides_samples(folder: Path, uneven: Any) -> None:
    data = pipeline(folder, rank=0, world_size=3, uneven=uneven)
    with pytest.raises(ValueError, match=f"has uneven='{uneven}', .* by uneven='pad': give the loader uneven='{uneven}', too"):
        ShmLoader(data, batch_size=None, seed=1, rank=0, world_size=3)
    with ShmLoader(data, batch_size=None, seed=1, rank=0, world_size=3, uneven=uneven) as loader:
        assert len(loader) == len(data)


@pytest.mark.parametrize("seed", [None, 3], ids=["torch mode", "seed mode"])
@pytest.mark.parametrize("changed", [{"seed": 1}, {"shuffle": False}, {"window": 3}, {"cache_bytes": 10_000}], ids=str)
def test_state_of_another_order_of_the_shards_is_refused(folder: Path, changed: dict[str, Any], seed: int | None) -> None:
    """A state counts items, so in another order some would be lost; the room for copies of shards determines the order, too."""
    with ShmLoader(pipeline(folder), batch_size=None, seed=seed) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        ShmLoader(pipeline(folder, **changed), batch_size=None, seed=seed) as other,
        pytest.raises(StateMismatch, match=r"dataset: saved '.*', now '"),
    ):
        other.load_state_dict(state)
    with ShmLoader(pipeline(folder), batch_size=None, seed=seed) as same:
        same.load_state_dict(state)
        assert len(list(same)) == 6


def test_pipeline_state_of_another_order_of_the_shards_is_refused(folder: Path) -> None:
    with Items(pipeline(folder)).conveyer() as one:
        one()
        state = one.state()
    with Items(pipeline(folder, cache_bytes=10_000)).conveyer() as other, pytest.raises(StateMismatch, match="order: saved"):
        other.load_state(state)


@pytest.mark.parametrize("has_cache_folder", [False, True])
def test_cached_items_of_shards_are_found_again(folder: Path, tmp_path: Path, has_cache_folder: bool) -> None:
    """The folder with copies of shards is another one in each run, unless it is given."""
    for _ in range(2):
        options = {"cache_folder": tmp_path / "shards"} if has_cache_folder else {}
        assert len(list(Items(pipeline(folder, shuffle=False, **options)).cache(tmp_path / "items"))) == 7
    assert len(list((tmp_path / "items").glob("*.sqlite"))) == 1
