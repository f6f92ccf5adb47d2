"""A sampler with a generator of its own continues in the order of the saved run, in any epoch, and its later epochs are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from shmload import ShmLoader, StateMismatch

DATA = list(range(24))


class DrawsAtOnce(Sampler[int]):
    """Draws its order in `__iter__` itself, and not with its first index."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(DATA), generator=self.generator).tolist())


SAMPLERS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "random": lambda generator: {"sampler": RandomSampler(DATA, generator=generator)},
    "with replacement": lambda generator: {"sampler": RandomSampler(DATA, replacement=True, generator=generator)},
    "weighted": lambda generator: {"sampler": WeightedRandomSampler([1.0, 2.0] * 12, 24, generator=generator)},
    "subset": lambda generator: {"sampler": SubsetRandomSampler(range(3, 20), generator=generator)},
    "draws at once": lambda generator: {"sampler": DrawsAtOnce(generator)},
    "in a batch sampler": lambda generator: {"batch_sampler": BatchSampler(RandomSampler(DATA, generator=generator), 4, False)},
}
MODES: dict[str, dict[str, Any]] = {"torch mode": {}, "seed mode": {"seed": 5}}


def loader_of(kind: str, mode: str, num_workers: int, **more: Any) -> ShmLoader[Any]:
    order = SAMPLERS[kind](torch.Generator().manual_seed(2))
    size = {} if "batch_sampler" in order else {"batch_size": 4}
    return ShmLoader(DATA, num_workers=num_workers, **order, **size, **MODES[mode], **more)


def rest(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch.tolist()]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow(reason="starts workers"))])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_run_continues_in_the_order_of_the_sampler_s_own_generator(kind: str, mode: str, num_workers: int) -> None:
    with loader_of(kind, mode, num_workers) as undisturbed:
        epochs = [rest(undisturbed) for _ in range(4)]
    for epoch, taken in ((0, 2), (1, 1), (1, 3), (1, 0), (2, 0)):
        with loader_of(kind, mode, num_workers) as first:
            for _ in range(epoch):
                rest(first)
            before = rest(islice(iter(first), taken)) if taken else []
            state = json.loads(json.dumps(first.state_dict()))
            assert before == epochs[epoch][: len(before)]
        with loader_of(kind, mode, num_workers) as second:
            second.load_state_dict(state)
            assert before + rest(second) == epochs[epoch]
            assert rest(second) == epochs[epoch + 1], "the epoch after a resumed one"
            second.load_state_dict(state)
            assert before + rest(second) == epochs[epoch], "a state loaded into a used loader"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sampler_that_draws_from_the_global_generator_continues_in_a_loader_with_its_own(num_workers: int) -> None:
    def make() -> ShmLoader[Any]:
        sampler = WeightedRandomSampler([1.0, 2.0] * 12, 24)
        return ShmLoader(DATA, 4, sampler=sampler, generator=torch.Generator().manual_seed(2), num_workers=num_workers)

    torch.manual_seed(6)
    with make() as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        expected = rest(iterator)
    torch.manual_seed(7)
    with make() as loader:
        loader.load_state_dict(state)
        assert rest(loader) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_resumes", [1, 2])
@pytest.mark.parametrize("first", [0, 2, 6])
def test_state_saved_before_the_first_batch_continues_a_sampler_that_moves_with_its_next_batch(
    first: int, num_resumes: int, num_workers: int, mode: str
) -> None:
    """Until then, torchdata's sampler returns the state from before the one that was loaded, or that of the pass before."""

    def make() -> ShmLoader[Any]:
        sampler = StatefulDistributedSampler(DATA, num_replicas=1, rank=0, shuffle=False)
        return ShmLoader(DATA, 4, sampler=sampler, num_workers=num_workers, **MODES[mode])

    with make() as loader:
        if first == 6:  # a whole pass
            rest(loader)
        iterator = iter(loader)
        for _ in range(first % 6):
            next(iterator)
        state = loader.state_dict()
    for _ in range(num_resumes):
        with make() as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            state = loader.state_dict()
            got = rest(iterator)
        assert got == DATA[first % 6 * 4 :]


def test_state_with_every_generator_has_the_documented_size() -> None:
    class DrawsAnywhere(DrawsAtOnce):
        """Its order comes from any generator, so all of their states are saved."""

        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(DATA, len(DATA)))

    sampler = DrawsAnywhere(torch.Generator())
    with ShmLoader(DATA, batch_size=4, sampler=sampler, generator=torch.Generator()) as loader:
        next(iter(loader))
        assert len(json.dumps(loader.state_dict())) <= 18 * 1024


def random_batches(batch_size: int) -> Any:
    return BatchSampler(RandomSampler(range(40)), batch_size, False)


SAVED: dict[str, dict[str, Any]] = {
    "random": {"batch_size": 4, "sampler": RandomSampler(range(40))},
    "own": {"batch_size": 4, "sampler": list(range(40))},
    "batches": {"batch_sampler": random_batches(4)},
    "distributed": {"batch_size": 4, "sampler": DistributedSampler(range(40), 2, 0)},
}


@pytest.mark.parametrize("seed", [None, 5], ids=["torch mode", "seed mode"])
@pytest.mark.parametrize(
    ("saved", "changed"),
    [
        ("random", {"batch_size": 8}),
        ("random", {"drop_last": True}),
        ("random", {"sampler": SequentialSampler(range(40))}),
        ("random", {"sampler": RandomSampler(range(40), num_samples=30)}),
        ("random", {"sampler": list(range(40))}),
        ("own", {"batch_size": 8}),
        ("own", {"sampler": RandomSampler(range(40))}),
        ("batches", {"batch_sampler": random_batches(8)}),
        ("distributed", {"sampler": DistributedSampler(range(40), 4, 0)}),
        ("distributed", {"sampler": DistributedSampler(range(40), 2, 0, seed=3)}),
    ],
    ids=range(10),
)
def test_state_of_another_order_is_refused(saved: str, changed: dict[str, Any], seed: int | None) -> None:
    """A position counts batches: in another order, or with batches of another size, samples would be lost."""
    with ShmLoader(range(40), seed=seed, **SAVED[saved]) as loader:
        next(iter(loader))
        state = loader.state_dict()
        with ShmLoader(range(40), seed=seed, **{**SAVED[saved], **changed}) as other:
            with pytest.raises(StateMismatch, match=r"batch_size: saved|drop_last: saved|index_sampler: saved|order: saved"):
                other.load_state_dict(state)
            assert len(list(other)) == len(other)  # unchanged
        with ShmLoader(range(40), seed=seed, **SAVED[saved]) as other:
            other.load_state_dict(state)
            assert len(list(other)) == len(loader) - 1


@pytest.mark.parametrize("seed", [None, 5], ids=["torch mode", "seed mode"])
def test_state_of_a_longer_dataset_is_refused(seed: int | None) -> None:
    with (
        ShmLoader(range(40), 4, sampler=range(40), seed=seed) as loader,
        ShmLoader(range(41), 4, sampler=range(41), seed=seed) as other,
    ):
        next(iter(loader))
        with pytest.raises(StateMismatch, match="n: saved 40, now 41"):
            other.load_state_dict(loader.state_dict())
