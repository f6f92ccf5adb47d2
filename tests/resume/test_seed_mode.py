"""In seed mode, a state is a position in a formula: small, fast to load, and independent of the hardware."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload import ShmLoader
from tests.resume import noisy_data as data

slow = pytest.mark.slow(reason="most cases start workers for their loaders")


class Logged(data.Noisy):
    """Records what is read in a file that all processes share."""

    def __init__(self, n: int, path: str) -> None:
        super().__init__(n)
        self.path = path

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.path, "a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def make(n: int = 50, batch_size: int = 6, **more: Any) -> ShmLoader:
    return ShmLoader(data.Noisy(n), batch_size, **{"shuffle": True, "seed": 11, **more})


def stream(loader: ShmLoader, num_batches: int) -> list[Any]:
    got: list[Any] = []
    while len(got) < num_batches:
        for batch in loader:
            got.append(batch.tolist())
            if len(got) == num_batches:
                break
    return got


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with make() as loader:
        return stream(loader, 32)


@pytest.mark.slow(reason="hypothesis, and each example is up to five loaders, most with workers")
@given(
    stops=st.lists(st.integers(0, 8), min_size=1, max_size=4), workers=st.lists(st.sampled_from([0, 1, 2]), min_size=5, max_size=5)
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_number_of_resumes_at_any_position_yields_the_same_stream(
    expected: list[Any], stops: list[int], workers: list[int]
) -> None:
    got: list[Any] = []
    state: dict[str, Any] | None = None
    for stop, count in zip([*stops, 32 - sum(stops)], workers, strict=False):
        with make(num_workers=count, prefetch_factor=3 if count else None) as loader:
            if state is not None:
                loader.load_state_dict(state)
                assert loader.state_dict() == state
            got += stream(loader, max(stop, 0))
            state = json.loads(json.dumps(loader.state_dict()))
            assert len(json.dumps(state)) <= 1024
    assert got == expected[: len(got)]


@pytest.mark.slow(reason="workers start as new interpreters, which import all modules")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_state_resumes_with_another_start_method(expected: list[Any], method: str) -> None:
    with make() as loader:
        stream(loader, 5)
        state = loader.state_dict()
    with make(num_workers=2, multiprocessing_context=method) as loader:
        loader.load_state_dict(state)
        assert stream(loader, 10) == expected[5:15]


@pytest.mark.slow(reason="reads by up to eight ranks, three times over")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 3), (8, 1)])
@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_global_batches_resume_with_another_world_size(before: int, after: int, uneven: str) -> None:
    def steps(world_size: int, state: dict[str, Any] | None, stop: int | None) -> tuple[list[Any], dict[str, Any]]:
        """Reads the global batches; returns them and the first rank's state at the end."""
        ranks = [make(100, 24 // world_size, rank=rank, world_size=world_size, uneven=uneven) for rank in range(world_size)]
        for loader in ranks if state is not None else []:
            loader.load_state_dict(state)
        found: list[Any] = []
        for parts in zip(*ranks, strict=uneven != "exact"):
            valid = [loader.valid for loader in ranks]
            found.append([row for part, count in zip(parts, valid, strict=True) for row in part[:count].tolist()])
            if len(found) == stop:
                break
        return found, ranks[0].state_dict()

    whole, _ = steps(before, None, None)
    first, state = steps(before, None, 2)
    rest, _ = steps(after, state, None)
    full = slice(0, 4)  # the rest of the last step is divided by the world size
    assert [sorted(b) for b in [*first, *rest][full]] == [sorted(b) for b in whole[full]]


@slow
@pytest.mark.parametrize("workers", [0, 2])
def test_no_consumed_sample_is_read_again(tmp_path: Any, workers: int) -> None:
    path = tmp_path / "read"
    with ShmLoader(Logged(60, str(path)), 6, shuffle=True, seed=3) as loader:
        consumed = [i for _, batch in zip(range(4), loader, strict=False) for i in batch[:, 0].int().tolist()]
        state = loader.state_dict()
    path.unlink()
    with ShmLoader(Logged(60, str(path)), 6, shuffle=True, seed=3, num_workers=workers) as loader:
        loader.load_state_dict(state)
        for _, _batch in zip(range(2), loader, strict=False):  # batches read ahead are of this epoch
            pass
    read = {int(line) for line in path.read_text().split()}
    assert len(read) >= 12
    assert not read & set(consumed)


@slow
@pytest.mark.parametrize("kind", ["torch's", "global", "stateful"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 3, 7])
def test_custom_sampler_resumes(kind: str, workers: int, stop: int) -> None:
    def loader() -> ShmLoader:
        sampler: Any = {
            "torch's": lambda: torch.utils.data.RandomSampler(range(40)),
            "global": lambda: data.GlobalSampler(40),
            "stateful": lambda: data.StatefulSampler(40),
        }[kind]()
        return ShmLoader(data.Noisy(), 6, sampler=sampler, seed=3, num_workers=workers)

    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    with loader() as one:
        iterator = iter(one)
        for _ in range(stop):
            next(iterator)
        state = json.loads(json.dumps(one.state_dict()))
        expected = [batch.tolist() for batch in iterator]
    with loader() as other:
        other.load_state_dict(state)
        if stop == 7:  # the end of an epoch, which differs
            assert other.state_dict()["epoch"] == 1
            return
        assert [batch.tolist() for batch in other] == expected


@slow
@pytest.mark.parametrize("workers", [0, 2])
def test_grown_dataset_is_read_completely_in_the_next_epoch(workers: int) -> None:
    dataset = list(range(10))
    with ShmLoader(dataset, 4, seed=1, shuffle=True, num_workers=workers) as loader:
        assert sorted(i for batch in loader for i in batch.tolist()) == list(range(10))
        dataset += range(10, 17)
        assert sorted(i for batch in loader for i in batch.tolist()) == list(range(17))
        assert len(loader) == 5


@pytest.mark.slow(reason="starts workers, by spawn and forkserver, too")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("workers", "method"), [(1, "fork"), (2, "fork"), (4, "fork"), (1, "spawn"), (2, "spawn"), (2, "forkserver")]
)
def test_global_generators_draw_the_same_for_any_number_of_workers(expected: list[Any], workers: int, method: str) -> None:
    """Python's random, numpy's and torch's global generators: Noisy draws from all three and leaves half of a pair of gaussians."""
    with make(num_workers=workers, multiprocessing_context=method) as loader:
        assert stream(loader, 18) == expected[:18]


@pytest.mark.slow(reason="kills all workers again and again, and they are replaced")
def test_global_generators_draw_the_same_after_workers_were_killed(expected: list[Any]) -> None:
    with make(num_workers=2) as loader:
        got, batches = [], _for_ever(loader)
        for number in range(18):
            got.append(next(batches).tolist())
            if number % 4 == 0:  # all workers, so that the trainer has to wait for new ones
                for pid in loader._builder.last.pool.pids:
                    with suppress(ProcessLookupError):  # may not have been replaced yet
                        os.kill(pid, signal.SIGKILL)
        assert got == expected[:18]
        assert loader.stats()["num_restarts"] >= 2


def _for_ever(loader: ShmLoader) -> Iterator[Any]:
    while True:
        yield from loader
