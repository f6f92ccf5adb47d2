"""torch's DataPipes are sharded among workers and shuffled with a seed that all workers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper
from torch.utils.data.datapipes.map import SequenceWrapper

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import batches, observed, outcomes, same_as_torch

NUM_WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
N = 13


def numbers() -> Any:
    return IterableWrapper(list(range(N)))


def double(x: int) -> int:
    return 2 * x


def of_worker(x: int) -> Any:
    info = get_worker_info()
    return x, -1 if info is None else info.id


@NUM_WORKERS
def test_every_worker_yields_everything_without_a_sharding_filter(num_workers: int) -> None:
    found = same_as_torch(lambda kind: batches(kind(Mapper(numbers(), double), batch_size=3, num_workers=num_workers)))
    assert len(sum(found, [])) == N * max(num_workers, 1)  # noqa: RUF017  # a few


@NUM_WORKERS
@pytest.mark.parametrize("batch_size", [None, 3])
def test_sharding_filter_divides_samples_among_workers(num_workers: int, batch_size: int | None) -> None:
    def program(kind: Any) -> Any:
        pipe = Mapper(numbers().sharding_filter(), of_worker)
        return batches(kind(pipe, batch_size=None, num_workers=num_workers))

    found = same_as_torch(program)
    assert list(range(N)) == sorted(index for index, _ in found)
    assert [index % num_workers if num_workers else -1 for index, _ in sorted(found)] == [w for _, w in sorted(found)]


@NUM_WORKERS
@pytest.mark.parametrize("shuffle", [None, True, False])
def test_shuffler_has_the_same_seed_in_every_worker(num_workers: int, shuffle: bool | None) -> None:
    def program(kind: Any) -> Any:
        pipe = numbers().shuffle().sharding_filter()
        loader = kind(pipe, batch_size=2, num_workers=num_workers, shuffle=shuffle)
        return [batches(loader) for _ in range(2)]

    for found in same_as_torch(program):
        assert list(range(N)) == sorted(index for batch in found for index in batch)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_persistent_workers_reshuffle_every_epoch(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        pipe = numbers().shuffle().sharding_filter()
        loader = kind(pipe, batch_size=2, num_workers=num_workers, shuffle=True, persistent_workers=True)
        return [batches(loader) for _ in range(3)]

    first, second, third = same_as_torch(program)
    assert first != second != third


@pytest.mark.parametrize("num_workers", [0, 2])
def test_generator_seeds_the_shuffling(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        pipe = numbers().shuffle().sharding_filter()
        generator = torch.Generator().manual_seed(5)
        loader = kind(pipe, num_workers=num_workers, generator=generator)
        return [batches(loader) for _ in range(2)], generator.get_state().sum()

    same_as_torch(program)


def test_shuffle_without_a_shuffler_adds_one_and_warns() -> None:
    def program(kind: Any) -> Any:
        return batches(kind(numbers(), shuffle=True))

    expected, got = observed(program, DataLoader), observed(program, ShmLoader)
    assert expected == got
    assert any("does not contain a `Shuffler`" in text for _, text in got[1])


class Sharded(MapDataPipe):
    """A map-style pipe whose samples tell how it was sharded."""

    def __init__(self) -> None:
        self.sharding = (0, 0)

    def apply_sharding(self, num_of_instances: int, instance_id: int) -> None:
        self.sharding = (num_of_instances, instance_id)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index, self.sharding


class SeededPipe(IterDataPipe):
    """A pipe that yields the seed it got."""

    seed = 0

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        yield from [self.seed] * 3


@NUM_WORKERS
@pytest.mark.parametrize("shuffle", [False, True])
def test_map_style_pipe_is_read_by_index(num_workers: int, shuffle: bool) -> None:
    def program(kind: Any) -> Any:
        return batches(kind(SequenceWrapper(range(N)), batch_size=2, num_workers=num_workers, shuffle=shuffle))

    same_as_torch(program)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_map_style_pipe_is_sharded(num_workers: int) -> None:
    found = same_as_torch(lambda kind: list(kind(Sharded(), batch_size=None, num_workers=num_workers)))
    assert [max(num_workers, 1)] * 6 == [sharding[0] for _, sharding in found]


@NUM_WORKERS
def test_random_pipe_gets_a_seed_from_the_shared_seed(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(SeededPipe(), batch_size=None, num_workers=num_workers)
        return [batches(loader) for _ in range(2)]

    seeds = same_as_torch(program)
    assert len(set(seeds[0])) == 1
    assert seeds[0] != seeds[1]


def seen_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    pipe = info.dataset._datapipe  # type: ignore[attr-defined]  # torch wraps a pipe, for pickling
    pipe.sharding_seen = pipe.sharding


class Remembering(Sharded):
    sharding_seen = None

    def __getitem__(self, index: int) -> Any:
        return index, self.sharding, self.sharding_seen


def test_worker_init_fn_is_called_when_the_pipe_is_sharded() -> None:
    def program(kind: Any) -> Any:
        return outcomes(iter(kind(Remembering(), batch_size=None, num_workers=2, worker_init_fn=seen_dataset)))

    assert same_as_torch(program)[:2] == [[0, [2, 0], [2, 0]], [1, [2, 1], [2, 1]]]
