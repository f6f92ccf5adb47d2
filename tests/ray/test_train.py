"""A ShmLoader under Ray Train remains a ShmLoader: each worker reads its part, and a checkpoint resumes with another number of
workers.
"""

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

from shmload.integrations import ray as module  # imported only if Ray is installed
from shmload.integrations.ray import prepare

CPU = torch.device("cpu")


class FakeTrainContext:
    """Replaces the context that Ray Train gives to a worker."""

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        self.get_world_rank, self.get_world_size = lambda: rank, lambda: world_size


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes this process a worker of Ray Train."""

    def be(rank: int | None, world_size: int | None, device: Any = CPU) -> None:
        monkeypatch.setattr(module.ray.train, "get_context", lambda: FakeTrainContext(rank, world_size))
        monkeypatch.setattr(module.ray.train.torch, "get_device", lambda: device)

    return be


def indices(loader: ShmLoader[Any]) -> list[list[int]]:
    with loader:
        return [batch["index"].tolist() for batch in loader]


@pytest.mark.slow(reason="two runs of Ray Train on a cluster, whose workers import torch")
def test_ray_train_delivers_exact_batches_and_resumes_with_another_number_of_workers(cluster: Cluster, tmp_path: Path) -> None:
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
    assert sorted(shards[0] + shards[1]) == sorted([*range(20), *range(20)])  # the samples of two epochs
    assert {len(set(shard)) for shard in shards} == {10}, "with preserve_order, the parts are the same in each epoch"
    assert expected == given


def test_seeded_loader_takes_the_workers_rank_and_world_size_and_keeps_its_position(place: Any) -> None:
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


def test_given_rank_is_kept(place: Any) -> None:
    place(3, 4)
    prepared = prepare(ShmLoader(Rows(), 4, seed=3, rank=1, world_size=2))  # e.g. two workers of a tensor-parallel group
    assert (prepared.rank, prepared.world_size) == (1, 2)


def test_position_within_an_epoch_divided_differently_is_refused(place: Any) -> None:
    place(0, 2)
    with ShmLoader(Rows(), 4, seed=3) as begun:
        next(iter(begun))
        with pytest.raises(StateMismatch, match="global"):
            prepare(begun)


@pytest.mark.parametrize("shuffle", [False, True])
def test_torch_mode_divides_samples_as_ray_does(place: Any, shuffle: bool) -> None:
    place(1, 2)
    prepared = prepare(ShmLoader(Numbers(61), 4, shuffle=shuffle, drop_last=True))
    sampler: Any = DistributedSampler(Rows(), 2, 1, shuffle=shuffle)  # type: ignore[arg-type]  # no Dataset of torch's
    for epoch in range(2):
        sampler.set_epoch(epoch)
        prepared.set_epoch(epoch)
        assert list(BatchSampler(sampler, 4, True)) == [batch["index"].tolist() for batch in prepared]
    prepared.close()


class NumbersLoader(ShmLoader[Any]):
    """A loader whose constructor takes other arguments than ShmLoader's."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(Numbers(num_samples), 4, shuffle=True)
        self.name = "numbers"


def test_loader_with_another_constructor_keeps_its_class(place: Any) -> None:
    place(1, 2)
    dataset: Any = Numbers(61)  # not a torch Dataset
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
def test_loader_with_a_custom_sampler_keeps_its_position(place: Any, seed: int | None) -> None:
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
def test_dividing_samples_is_refused_if_it_would_lose_a_state(place: Any, seed: int | None) -> None:
    place(1, 2)
    loader = ShmLoader(Numbers(61), 4, sampler=SequentialSampler(Numbers(61)), seed=seed)  # type: ignore[arg-type]
    prepared = prepare(loader)
    with prepared:
        batches = iter(prepared)
        next(batches)
        state = prepared.state_dict()
        rest = [batch["index"].tolist() for batch in batches]
    with pytest.raises(StateMismatch, match="index_sampler: saved"):
        loader.load_state_dict(state)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match="load the state into what prepare returns"):
        prepare(loader)
    again = prepare(ShmLoader(Numbers(61), 4, sampler=SequentialSampler(Numbers(61)), seed=seed))  # type: ignore[arg-type]
    again.load_state_dict(state)
    assert indices(again) == rest


def test_order_that_is_divided_already_or_must_stay_is_unchanged(place: Any) -> None:
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
        ({"sampler": WeightedRandomSampler([1.0] * 61, 61)}, "WeightedRandomSampler gives"),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(61)), 4, False)}, "BatchSampler gives"),
        ({"sampler": RandomSampler(range(61), replacement=True)}, "a RandomSampler with replacement"),
        ({"sampler": RandomSampler(range(61), num_samples=8)}, "the sampler chooses 8 of the dataset's 61 samples"),
        ({"sampler": SequentialSampler(range(9))}, "the sampler chooses 9 of the dataset's 61 samples"),
    ],
)
def test_sampler_that_rays_own_would_discard_is_refused(place: Any, options: dict[str, Any], named: str, seed: int | None) -> None:
    place(0, 2)
    with pytest.raises(ValueError, match=named):
        prepare(ShmLoader(Rows(), seed=seed, **options))


@pytest.mark.parametrize("seed", [None, 3])
def test_batches_are_delivered_on_the_workers_gpu(place: Any, seed: int | None) -> None:
    place(0, 1, torch.device("cuda", 0))
    loader = ShmLoader(Rows(), 4, seed=seed)
    assert prepare(loader).device == torch.device("cuda", 0)
    assert prepare(loader, move_to_device=False).device is None
    mine = SimulatedDevice()
    assert prepare(ShmLoader(Rows(), 4, seed=seed, device=mine)).device is mine


def test_prepare_refuses_non_workers_and_other_loaders(place: Any) -> None:
    place(None, None)
    with pytest.raises(RuntimeError, match=r"this process is not a worker of a TorchTrainer"):
        prepare(ShmLoader(Rows(), 4))
    with pytest.raises(TypeError, match=r"got DataLoader, which ray.train.torch.prepare_data_loader takes"):
        prepare(torch.utils.data.DataLoader([1, 2]))  # type: ignore[type-var]  # what it refuses
