"""A pass resumes over samplers that change when a pass begins. Each resume begins its sampler once, as far as the sampler knows."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from shmload import ShmLoader

N = 24


class Counts(Sampler[int]):
    """Counts its passes in an attribute."""

    def __init__(self) -> None:
        self.num_passes = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return iter(random.Random(self.num_passes).sample(range(N), N))


class DrawsToo(Counts):
    """Draws from a generator of its own and from the global ones when a pass begins."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        return iter([order[place] for place in self.rng.permutation(N)[torch.randperm(N).numpy()]])


class HasAState(Counts):
    """Has its state saved, like samplers of torchdata, and goes on where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.order, self.at, self.begins_at = random.Random(3), list(range(N)), 0, 0

    def __iter__(self) -> Iterator[int]:
        if not self.begins_at:
            self.own.shuffle(self.order)
        at, self.begins_at = self.begins_at, 0
        for self.at in range(at + 1, N + 1):
            yield self.order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": list(self.order), "own": repr(self.own.getstate())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at, self.order[:] = state["at"], state["order"]
        self.own.setstate(ast.literal_eval(state["own"]))


class SetsItsEpoch(DistributedSampler[int]):
    """Goes on to its next epoch by itself."""

    def __init__(self) -> None:
        super().__init__(range(N), num_replicas=1, rank=0)  # type: ignore[arg-type]  # a range is enough of a Dataset

    def __iter__(self) -> Iterator[int]:
        self.set_epoch(self.epoch + 1)
        return super().__iter__()


class BatchesOf(Sampler[list[int]]):
    """A batch sampler that is not torch's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return N // 4

    def __iter__(self) -> Iterator[list[int]]:
        keys = list(self.sampler)
        return iter([keys[first : first + 4] for first in range(0, N, 4)])


ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sampler": lambda sampler: {"batch_size": 4, "sampler": sampler},
    "torch's batches": lambda sampler: {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)},
    "own batches": lambda sampler: {"batch_sampler": BatchesOf(sampler)},
}


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        *((kind, arguments) for kind in (Counts, DrawsToo, SetsItsEpoch) for arguments in ARGUMENTS),
        (HasAState, "sampler"),  # a batch sampler that is not torch's must save its sampler's state itself
        (HasAState, "torch's batches"),
    ],
)
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_rest_of_the_first_pass_and_later_ones_are_as_undisturbed(
    kind: Callable[[], Any], arguments: str, seed: int | None, num_workers: int
) -> None:
    def loader() -> ShmLoader[Any]:
        return ShmLoader(range(N), **ARGUMENTS[arguments](kind()), seed=seed, num_workers=num_workers)

    torch.manual_seed(1)
    with loader() as saved:
        batches = iter(saved)
        head = numbers([next(batches) for _ in range(2)])
        state = saved.state_dict()
        rest = numbers(batches)
        next_state = torch.get_rng_state()
        after = numbers(saved)
    assert sorted(number for batch in head + rest for number in batch) == list(range(N))
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert numbers(resumed) == rest
        torch.set_rng_state(next_state)
        assert numbers(resumed) == after


class KeepsItsGenerator(Counts):
    """Draws from a generator of its own, whose state is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.own.sample(range(N), N))


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_sampler_that_begins_otherwise_than_in_the_saved_run_is_reported(
    arguments: str, seed: int | None, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def loader(kind: Callable[[], Any]) -> ShmLoader[Any]:
        return ShmLoader(range(N), **ARGUMENTS[arguments](kind()), seed=seed, num_workers=num_workers)

    for kind, passes_before in [(Counts, 0), (KeepsItsGenerator, 0), (KeepsItsGenerator, 1)]:
        with loader(kind) as saved, loader(kind) as resumed:
            for _ in range(passes_before):
                numbers(saved)
            batches = iter(saved)
            next(batches)
            state = json.loads(json.dumps(saved.state_dict()))
            rest = numbers(batches)
            resumed.load_state_dict(state)
            assert (numbers(resumed) == rest) is (passes_before == 0)
        reports = [
            record.message for record in caplog.records if "has not begun with the batches of the saved run" in record.message
        ]
        assert len(reports) == passes_before


@pytest.mark.parametrize("seed", [None, 5])
def test_epoch_that_a_sampler_counts_is_in_the_state_of_a_later_pass(seed: int | None) -> None:
    with ShmLoader(range(N), 4, sampler=SetsItsEpoch(), seed=seed) as saved:
        numbers(saved)
        batches = iter(saved)
        next(batches)
        state = saved.state_dict()
        rest = numbers(batches)
    with ShmLoader(range(N), 4, sampler=SetsItsEpoch(), seed=seed) as resumed:
        resumed.load_state_dict(state)
        assert numbers(resumed) == rest
