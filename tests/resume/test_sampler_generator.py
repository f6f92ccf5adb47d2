"""A sampler with a generator of its own continues in the order of the saved run, in any epoch, and its later epochs are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from shmload import ShmLoader

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
