"""Any state may be loaded into any running loader: it then yields exactly the rest of the state's epoch, and complete epochs
afterwards.

For each kind of loader, every pair of a state's position and the running loader's is tested without workers, and again with
workers, where the pools divide the pairs among them. So each pool loads each state, and loads one at each position; the random
crossings draw the other combinations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from shmload import ShmLoader
from tests.resume import noisy_data as data
from tests.resume.noisy_data import rows

N, BATCH = 25, 3

KINDS: dict[str, Callable[..., ShmLoader]] = {
    "in order": lambda **k: ShmLoader(data.Noisy(N), BATCH, **k),
    "shuffled": lambda **k: ShmLoader(data.Noisy(N), BATCH, shuffle=True, **k),
    "a stateful sampler": lambda **k: ShmLoader(data.Noisy(N), BATCH, sampler=data.StatefulSampler(N), **k),
    "a stateful sampler, seed": lambda **k: ShmLoader(data.Noisy(N), BATCH, sampler=data.StatefulSampler(N), seed=3, **k),
    "a sampler, seed": lambda **k: ShmLoader(data.Noisy(N), BATCH, sampler=torch.utils.data.RandomSampler(range(N)), seed=3, **k),
    "seed": lambda **k: ShmLoader(data.Noisy(N), BATCH, shuffle=True, seed=3, **k),
    "a stateful dataset": lambda **k: ShmLoader(data.Counting(N), BATCH, shuffle=True, **k),
    "iterable, iterator": lambda **k: ShmLoader(data.StatefulIteratorLines(N), BATCH, **k),
    "iterable, dataset": lambda **k: ShmLoader(data.StatefulLines(N), BATCH, **k),
    "iterable, neither": lambda **k: ShmLoader(data.Lines(N), BATCH, **k),
}
POOLS = {
    "0": {"num_workers": 0},
    "1": {"num_workers": 1},
    "3": {"num_workers": 3},
    "1 persistent": {"num_workers": 1, "persistent_workers": True},
    "3 persistent": {"num_workers": 3, "persistent_workers": True},
}


def not_iterated(loader: ShmLoader) -> Any:
    return None


def iterator_made(loader: ShmLoader) -> Any:
    return iter(loader)


def in_the_middle(loader: ShmLoader) -> Any:
    iterator = iter(loader)
    rows(islice(iterator, 4))
    return iterator


def at_the_last_batch(loader: ShmLoader) -> Any:
    iterator = iter(loader)
    num_read = 0
    while num_read < N:
        num_read += len(next(iterator))
    return iterator


def ended(loader: ShmLoader) -> Any:
    rows(loader)
    return None


def in_the_next_epoch(loader: ShmLoader) -> Any:
    rows(loader)
    iterator = iter(loader)
    rows(islice(iterator, 1))
    return iterator


def abandoned(loader: ShmLoader) -> Any:
    in_the_middle(loader)
    return None


PLACES = [not_iterated, iterator_made, in_the_middle, at_the_last_batch, ended, in_the_next_epoch]
RUNNING = [*PLACES, abandoned]
WITH_WORKERS = [pool for pool, options in POOLS.items() if options["num_workers"]]


def places_of(pool: str, state: int) -> list[Callable[[ShmLoader], Any]]:
    """Returns the positions of the running loader at which a pool loads the state of that number."""
    if pool not in WITH_WORKERS:
        return RUNNING
    share = WITH_WORKERS.index(pool)
    return [place for k, place in enumerate(RUNNING) if (k + state) % len(WITH_WORKERS) == share]


def test_pools_with_workers_divide_the_pairs_and_load_each_state_and_at_each_position() -> None:
    loaded = {pool: [(state, place) for state in range(len(PLACES)) for place in places_of(pool, state)] for pool in WITH_WORKERS}
    every = [pair for pairs in loaded.values() for pair in pairs]
    assert len(every) == len(set(every)) == len(PLACES) * len(RUNNING)
    for pairs in loaded.values():
        assert {state for state, _ in pairs} == set(range(len(PLACES)))
        assert {place for _, place in pairs} == set(RUNNING)


def states_of(make: Callable[[], ShmLoader]) -> Iterator[tuple[str, dict[str, Any], list[int]]]:
    """Yields, for each position, its name, the state there, and the remaining batches of the epoch (or of the next one at its
    end).
    """
    for place in PLACES:
        with make() as loader:
            iterator = place(loader)
            state = json.loads(json.dumps(loader.state_dict()))
            rest = rows(loader if iterator is None else iterator)
            if not rest and loader.seed is not None:  # in seed mode, the last batch is the epoch's end
                rest = rows(loader)
            yield place.__name__, state, rest


@pytest.mark.slow(reason="reads three passes, in most cases with a worker")
@pytest.mark.parametrize("pool", ["0", "1", "1 persistent"])
@pytest.mark.parametrize("kind", ["a stateful sampler", "iterable, iterator", "iterable, dataset"])
def test_state_between_passes_is_current_even_with_rare_snapshots(kind: str, pool: str) -> None:
    torch.manual_seed(4)
    with KINDS[kind](**POOLS[pool], snapshot_every_n_steps=2) as loader:
        rows(loader)
        state = loader.state_dict()
        expected = rows(loader)
        loader.load_state_dict(state)
        assert rows(loader) == expected
    assert sorted(expected) == list(range(N))


@pytest.mark.slow(reason="makes, reads and resumes many loaders, in most cases with workers")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_state_loaded_into_any_running_loader_yields_exactly_the_rest(kind: str, pool: str) -> None:
    def make() -> ShmLoader:
        return KINDS[kind](**POOLS[pool])

    torch.manual_seed(4)
    wrong = []
    for number, (name, state, expected) in enumerate(states_of(make)):
        with make() as loader:
            for place in places_of(pool, number):
                held = place(loader)
                loader.load_state_dict(state)
                got = rows(loader)
                if got != expected:
                    wrong.append(f"{name} on {place.__name__}: {got} in place of {expected}")
                if (following := sorted(rows(loader))) != list(range(N)):
                    wrong.append(f"{name} on {place.__name__}, the next epoch: {following}")
                del held
    assert wrong == []
