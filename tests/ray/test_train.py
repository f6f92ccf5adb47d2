"""A ShmLoader under Ray Train stays one: each worker reads its part, and a checkpoint goes on with another number of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from shmload import ShmLoader, StateMismatch
from shmload.cluster import DpexDataLoader
from tests.integrations.integrations_kit import Numbers
from tests.ray.cluster_kit import Cluster
from tests.ray.ray_datasets import Rows
from tests.simulated_device.device import SimulatedDevice

if importlib.util.find_spec("ray") is None:
    pytest.skip('Ray is not installed: pip install "shmload[ray]"', allow_module_level=True)

from shmload.integrations import ray as module  # only where Ray is
from shmload.integrations.ray import prepare

CPU = torch.device("cpu")


class Place:
    """What Ray Train says to one of its workers."""

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        self.get_world_rank, self.get_world_size = lambda: rank, lambda: world_size


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process a worker of Ray Train."""

    def be(rank: int | None, world_size: int | None, device: Any = CPU) -> None:
        monkeypatch.setattr(module.ray.train, "get_context", lambda: Place(rank, world_size))
        monkeypatch.setattr(module.ray.train.torch, "get_device", lambda: device)

    return be


def indices(loader: ShmLoader[Any]) -> list[list[int]]:
    with loader:
        return [batch["index"].tolist() for batch in loader]


@pytest.mark.slow(reason="two runs of Ray Train on a cluster, whose workers import torch")
def test_batches_under_ray_train_are_exact_and_a_checkpoint_goes_on_with_another_number_of_workers(
    cluster: Cluster, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.ray.train_program", cluster.address, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=environment, check=True, timeout=220, stderr=subprocess.DEVNULL)
    given = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    expected = {}
    for rank in range(2):
        with ShmLoader(Rows(), 4, shuffle=True, seed=3, rank=rank, world_size=2) as loader:
            expected[f"two-{rank}"] = [[batch["index"].tolist(), batch["drawn"].tolist()] for batch in loader][:3]
    with ShmLoader(Rows(), 8, shuffle=True, seed=3) as loader:
        expected["one-0"] = [[batch["index"].tolist(), batch["drawn"].tolist()] for batch in loader][3:]
    shards = [given.pop(f"rows-{rank}") for rank in range(2)]
    assert sorted(shards[0] + shards[1]) == sorted([*range(20), *range(20)])  # of two epochs
    assert {len(set(shard)) for shard in shards} == {10}, "with preserve_order each epoch's parts are the same"
    assert expected == given


def test_a_seeded_loader_takes_rank_and_world_size_of_the_worker_and_keeps_its_place(place: Any) -> None:
    place(1, 2)
    loader = ShmLoader(Rows(), 4, shuffle=True, seed=3)
    prepared = prepare(loader)
    assert type(prepared) is ShmLoader
    assert (prepared.rank, prepared.world_size, prepared.seed, len(prepared)) == (1, 2, 3, 8)
    whole = indices(ShmLoader(Rows(), 4, shuffle=True, seed=3, rank=1, world_size=2))
    assert whole == indices(prepared)
    with ShmLoader(Rows(), 4, shuffle=True, seed=3, rank=1, world_size=2) as begun:
        next(iter(begun))
        assert whole[1:] == indices(prepare(begun))


def test_ranks_that_were_given_stay(place: Any) -> None:
    place(3, 4)
    prepared = prepare(ShmLoader(Rows(), 4, seed=3, rank=1, world_size=2))  # two workers of a tensor-parallel group read the same
    assert (prepared.rank, prepared.world_size) == (1, 2)


def test_a_place_within_an_epoch_that_was_divided_otherwise_is_refused(place: Any) -> None:
    place(0, 2)
    with ShmLoader(Rows(), 4, seed=3) as begun:
        next(iter(begun))
        with pytest.raises(StateMismatch, match="global"):
            prepare(begun)


@pytest.mark.parametrize("shuffle", [False, True])
def test_in_torch_mode_samples_are_divided_as_ray_divides_them(place: Any, shuffle: bool) -> None:
    place(1, 2)
    prepared = prepare(ShmLoader(Numbers(61), 4, shuffle=shuffle, drop_last=True))
    sampler: Any = DistributedSampler(Rows(), 2, 1, shuffle=shuffle)  # type: ignore[arg-type]  # no Dataset of torch's
    for epoch in range(2):
        sampler.set_epoch(epoch)
        prepared.set_epoch(epoch)
        assert list(BatchSampler(sampler, 4, True)) == [batch["index"].tolist() for batch in prepared]
    prepared.close()


class NumbersLoader(ShmLoader[Any]):
    """Its constructor does not take a ShmLoader's arguments."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(Numbers(num_samples), 4, shuffle=True)
        self.name = "numbers"


def test_a_loader_whose_constructor_takes_other_arguments_stays_what_it_is(place: Any) -> None:
    place(1, 2)
    dataset: Any = Numbers(61)  # which is none of torch's
    divided = prepare(NumbersLoader(61))
    on_cluster = prepare(DpexDataLoader(dataset, True, "head:6379", 4, shuffle=True, num_workers=1))
    assert (type(divided), divided.name, len(divided)) == (NumbersLoader, "numbers", 8)
    assert (type(on_cluster), on_cluster.head_address, on_cluster.backend.address, len(on_cluster)) == (
        DpexDataLoader,
        "head:6379",
        "head:6379",
        8,
    )
    assert indices(divided) == indices(prepare(ShmLoader(dataset, 4, shuffle=True)))


@pytest.mark.parametrize("seed", [None, 3])
def test_with_a_sampler_of_the_users_a_loader_keeps_its_place_too(place: Any, seed: int | None) -> None:
    place(1, 2)
    mine: Any = DistributedSampler(Numbers(61), 2, 1, seed=5)  # type: ignore[arg-type]
    loader = ShmLoader(Numbers(61), 4, sampler=mine, seed=seed)
    whole = indices(loader)
    assert indices(prepare(ShmLoader(Numbers(61), 4, sampler=mine, seed=seed))) == whole
    with ShmLoader(Numbers(61), 4, sampler=mine, seed=seed) as begun:
        next(iter(begun))
        state = begun.state_dict()
    gone_on = ShmLoader(Numbers(61), 4, sampler=mine, seed=seed)
    gone_on.load_state_dict(state)
    assert indices(prepare(gone_on)) == whole[1:]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_state_that_would_be_lost_as_samples_are_divided_is_refused(place: Any, seed: int | None) -> None:
    place(1, 2)
    loader = ShmLoader(Numbers(61), 4, sampler=SequentialSampler(Numbers(61)), seed=seed)  # type: ignore[arg-type]
    prepared = prepare(loader)
    with prepared:
        batches = iter(prepared)
        next(batches)
        state = prepared.state_dict()
        rest = [batch["index"].tolist() for batch in batches]
    loader.load_state_dict(state)
    with pytest.raises(StateMismatch, match="load the state into what prepare returns"):
        prepare(loader)
    again = prepare(ShmLoader(Numbers(61), 4, sampler=SequentialSampler(Numbers(61)), seed=seed))  # type: ignore[arg-type]
    again.load_state_dict(state)
    assert indices(again) == rest


def test_an_order_that_is_divided_already_or_is_to_stay_is_left_alone(place: Any) -> None:
    place(1, 2)
    mine: Any = DistributedSampler(Rows(), 2, 0, shuffle=False)  # type: ignore[arg-type]
    assert prepare(ShmLoader(Rows(), 4, sampler=mine)).sampler is mine
    batches = BatchSampler(mine, 4, False)
    assert prepare(ShmLoader(Rows(), batch_sampler=batches)).batch_sampler is batches
    assert isinstance(prepare(ShmLoader(Rows(), 4, shuffle=True), add_dist_sampler=False).sampler, RandomSampler)
    place(0, 1)
    assert isinstance(prepare(ShmLoader(Rows(), 4)).sampler, SequentialSampler)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 61, 61)}, "a WeightedRandomSampler that"),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(61)), 4, False)}, "a BatchSampler that"),
        ({"sampler": RandomSampler(range(61), replacement=True)}, "a RandomSampler with replacement"),
    ],
)
def test_an_order_that_rays_own_would_throw_away_is_refused(
    place: Any, options: dict[str, Any], named: str, seed: int | None
) -> None:
    place(0, 2)
    with pytest.raises(ValueError, match=named):
        prepare(ShmLoader(Rows(), seed=seed, **options))


@pytest.mark.parametrize("seed", [None, 3])
def test_batches_arrive_on_the_workers_gpu(place: Any, seed: int | None) -> None:
    place(0, 1, torch.device("cuda", 0))
    loader = ShmLoader(Rows(), 4, seed=seed)
    assert prepare(loader).device == torch.device("cuda", 0)
    assert prepare(loader, move_to_device=False).device is None
    mine = SimulatedDevice()
    assert prepare(ShmLoader(Rows(), 4, seed=seed, device=mine)).device is mine


def test_what_is_no_worker_or_no_shm_loader_is_refused(place: Any) -> None:
    place(None, None)
    with pytest.raises(RuntimeError, match=r"this process is no worker of a TorchTrainer"):
        prepare(ShmLoader(Rows(), 4))
    with pytest.raises(TypeError, match=r"give a DataLoader to ray.train.torch.prepare_data_loader"):
        prepare(torch.utils.data.DataLoader([1, 2]))  # type: ignore[type-var]  # what it refuses
