"""A run stopped and resumed in another program yields the same as the undisturbed run, for the rest of the pass and two more
passes.

Each case is a kind of loader, a pool of workers, and the position where the state was taken. The resumed program has other seeds
and does not restore generators itself. torchdata's loader is tested for the same promise where it keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from shmload import ShmLoader
from shmload.schedule.state_checksum import CHECK, with_checksum
from shmload.schedule.state_codec import opened, sealed
from tests.resume import noisy_data as data
from tests.resume.noisy_data import seed_all

N, BATCH = 14, 3
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


class Drawing:
    """An iterator that draws its samples from torch's global generator and saves the generator's state."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> Drawing:
        return self

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[int(torch.randint(len(self.numbers), ()))]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(state["generator"])


class DrawingLines(IterableDataset):
    """An iterable dataset whose iterator saves the generator."""

    def mine(self) -> range:
        info = get_worker_info()
        return range(N) if info is None else range(info.id, N, info.num_workers)

    def __iter__(self) -> Iterator[int]:
        return Drawing(self.mine())


class ItsOwnIterator(DrawingLines):
    """A dataset that is its own iterator, and can be read once."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> ItsOwnIterator:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.mine()):
            raise StopIteration
        self.at += 1
        return self.mine()[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Continuing(DrawingLines):
    """A dataset whose next iterator begins at a loaded state, also if that is the end."""

    def __init__(self) -> None:
        self.at, self.start = 0, 0

    def __iter__(self) -> Iterator[int]:
        first, self.start = self.start, 0
        for number in range(first, len(self.mine())):
            self.at = number + 1
            yield self.mine()[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class SavesTorchsGenerator(Dataset):
    """A map dataset that draws, and whose state is torch's global generator."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(torch.randint(1000, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["generator"])


class DrawsEachIndex(Sampler[int]):
    """Draws when each index is requested, not all at once."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield int(torch.randint(N, ()))


class DrawnOrder(Sampler[int]):
    """Draws its order from the generators of random and numpy."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(data.GlobalSampler(N))


def collate_unchanged(samples: Any) -> Any:
    return (
        samples
        if isinstance(samples, int)
        else [sample.tolist() if isinstance(sample, torch.Tensor) else sample for sample in samples]
    )


def seeded_generator() -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(4)}


Make = Callable[..., Any]
KINDS: dict[str, Callable[[Make], Make]] = {
    "in order": lambda make: lambda **k: make(range(N), BATCH, **k),
    "shuffled": lambda make: lambda **k: make(range(N), BATCH, shuffle=True, **k),
    "shuffled, generator": lambda make: lambda **k: make(range(N), BATCH, shuffle=True, **seeded_generator(), **k),
    "no batches": lambda make: lambda **k: make(range(N), None, shuffle=True, **k),
    "noisy": lambda make: lambda **k: make(data.Noisy(N), BATCH, shuffle=True, **k),
    "noisy, generator": lambda make: lambda **k: make(data.Noisy(N), BATCH, shuffle=True, **seeded_generator(), **k),
    "weights": lambda make: (
        lambda **k: make(range(N), BATCH, sampler=torch.utils.data.WeightedRandomSampler(torch.arange(1.0, N + 1), N), **k)
    ),
    "a sampler of random and numpy": lambda make: lambda **k: make(range(N), BATCH, sampler=DrawnOrder(), **k),
    "a stateful sampler": lambda make: lambda **k: make(data.Noisy(N), BATCH, sampler=data.StatefulSampler(N), **k),
    "a stateful sampler, generator": lambda make: (
        lambda **k: make(data.Noisy(N), BATCH, sampler=data.StatefulSampler(N), **seeded_generator(), **k)
    ),
    "a stateful dataset": lambda make: lambda **k: make(data.Counting(N), BATCH, shuffle=True, **k),
    "a dataset that keeps torch's generator": lambda make: lambda **k: make(SavesTorchsGenerator(), BATCH, **k),
    "it, shuffled": lambda make: lambda **k: make(SavesTorchsGenerator(), BATCH, shuffle=True, **k),
    "it, shuffled, generator": lambda make: (
        lambda **k: make(SavesTorchsGenerator(), BATCH, shuffle=True, **seeded_generator(), **k)
    ),
    "iterable, iterator": lambda make: lambda **k: make(data.StatefulIteratorLines(N), BATCH, **k),
    "iterable, iterator, generator": lambda make: lambda **k: make(data.StatefulIteratorLines(N), BATCH, **seeded_generator(), **k),
    "iterable, dataset": lambda make: lambda **k: make(data.StatefulLines(N), BATCH, **k),
    "iterable, dataset continues": lambda make: lambda **k: make(Continuing(), BATCH, **k),
    "iterable, neither": lambda make: lambda **k: make(data.Lines(N), BATCH, **k),
    "iterable, neither, generator": lambda make: lambda **k: make(data.Lines(N), BATCH, **seeded_generator(), **k),
    "iterable, draws": lambda make: lambda **k: make(DrawingLines(), BATCH, **k),
    "iterable, draws, generator": lambda make: lambda **k: make(DrawingLines(), BATCH, **seeded_generator(), **k),
    "iterable, its own iterator": lambda make: lambda **k: make(ItsOwnIterator(), BATCH, **k),
}
WITH_WORKERS = pytest.mark.slow(reason="starts workers")
POOLS: dict[str, dict[str, Any]] = {
    "0": {"num_workers": 0},
    "2": {"num_workers": 2},
    "2 persistent": {"num_workers": 2, "persistent_workers": True},
}
# Number of batches read; -1: the pass has ended.
PLACES = {"begun": 0, "first": 1, "middle": 3, "last": 5, "ended": -1, "before": None}


def without_noise(kind: str, pool: str, epochs: list[Any]) -> list[Any]:
    """Removes draws in the trainer, whose generators the program must restore itself."""
    if pool != "0" or "oisy" not in kind + KINDS_OF_NOISE.get(kind, ""):
        return epochs
    return [[[sample[0] for sample in batch] for batch in epoch] for epoch in epochs]


KINDS_OF_NOISE = dict.fromkeys(
    [name for name in KINDS if name.startswith(("a stateful sampler", "iterable, iterator", "iterable, neither"))]
    + ["iterable, dataset"],
    "noisy",
)


def run_and_resume(make: Make, place: str, *, is_same_loader: bool = False) -> tuple[list[Any], list[Any]]:
    """Returns what the undisturbed run yielded after a state (the rest of the pass, two more passes), and what the resumed one
    yielded.
    """
    seed_all(5)
    loader, stop = make(collate_fn=collate_unchanged), PLACES[place]
    if stop is not None:  # None: before the first pass
        list(loader)
    iterator = None if stop in (-1, None) else iter(loader)
    if iterator is not None:
        list(islice(iterator, stop))
    state = loader.state_dict()
    if isinstance(loader, ShmLoader):
        state = json.loads(json.dumps(state))
    expected = [list(loader if iterator is None else iterator), list(loader), list(loader)]
    seed_all(99)
    again = loader if is_same_loader else make(collate_fn=collate_unchanged)
    again.load_state_dict(state)
    got = [list(again) for _ in range(3)]
    del iterator, loader, again
    return expected, got


# In the trainer, a dataset's draws change the generators that torch's samplers are seeded from: without a generator of its own,
# an order after the resumed pass depends on what the program restores. torchdata keeps an iterator's state from before the first
# pass, because its state_dict() makes the iterator; a loader in torch mode makes none before it is iterated, as in torch.
def num_comparable(kind: str, pool: str, place: str) -> int:
    if pool != "0":
        return 3
    if place == "before" and kind.startswith("iterable, draws"):
        return 0
    return 1 if kind in ("noisy", "it, shuffled") else 3


QUICK = [
    ("iterable, draws, generator", "0", "ended"),
    ("it, shuffled", "0", "ended"),
    ("shuffled", "0", "ended"),
    ("shuffled", "0", "middle"),
    ("weights", "0", "ended"),
    ("a sampler of random and numpy", "0", "ended"),
    ("iterable, dataset continues", "0", "ended"),
    ("iterable, its own iterator", "0", "ended"),
]


def check(kind: str, pool: str, place: str, *, is_same_loader: bool = False) -> None:
    make = KINDS[kind](ShmLoader)
    expected, got = run_and_resume(lambda **k: make(**POOLS[pool], **k), place, is_same_loader=is_same_loader)
    expected, got = without_noise(kind, pool, expected), without_noise(kind, pool, got)
    num = num_comparable(kind, pool, place)
    assert got[:num] == expected[:num]


@pytest.mark.parametrize(("kind", "pool", "place"), QUICK)
def test_resumed_run_yields_the_same_as_the_undisturbed_one(kind: str, pool: str, place: str) -> None:
    check(kind, pool, place)


@pytest.mark.parametrize(
    ("workers", "every"), [(0, 1), pytest.param(2, 1, marks=WITH_WORKERS), pytest.param(2, 15, marks=WITH_WORKERS)]
)
def test_dataset_that_saves_torchs_generator_repeats_a_pass_from_its_start(workers: int, every: int) -> None:
    """Same as torchdata's test_map_iterrupted_shuffle."""
    loader = ShmLoader(
        SavesTorchsGenerator(), shuffle=True, num_workers=workers, collate_fn=collate_unchanged, snapshot_every_n_steps=every
    )
    iterator = iter(loader)
    begun = loader.state_dict()
    expected = list(islice(iterator, 4))
    middle = loader.state_dict()
    loader.load_state_dict(middle)
    expected += list(loader)
    loader.load_state_dict(begun)
    assert list(loader) == expected


@pytest.mark.slow(reason="starts workers")
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", ["iterable, draws, generator", "it, shuffled, generator", "shuffled, generator"])
def test_finished_pass_with_the_same_generator_resumes_as_with_torchdata(kind: str, pool: str) -> None:
    """Same as torchdata's TestSnapshotEnd, with two further passes."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(loader: Make) -> Make:
        return lambda **k: KINDS[kind](loader)(**POOLS[pool], **k)

    for loader in (ShmLoader, StatefulDataLoader):
        if loader is StatefulDataLoader and pool == "0" and kind.endswith("shuffled, generator"):
            continue  # torchdata's loader restarts the finished pass to reach its end, which changes the generator
        expected, got = run_and_resume(make(loader), "ended")
        assert got == expected, loader


def test_state_of_the_first_format_is_loaded() -> None:
    """Such a state lacks the generators of later epochs: only the rest of the pass is exact."""
    with ShmLoader(range(N), BATCH, shuffle=True) as loader:
        iterator = iter(loader)
        list(islice(iterator, 2))
        state = loader.state_dict()
        expected = [batch.tolist() for batch in iterator]
    details = opened(state["details"], is_trusted=False)
    del details["generators"], details["ahead"], state[CHECK]
    old = with_checksum({**state, "version": 1, "details": sealed(details)})
    seed_all(99)
    with ShmLoader(range(N), BATCH, shuffle=True) as loader:
        loader.load_state_dict(old)
        assert [batch.tolist() for batch in loader] == expected


def test_seeds_set_after_a_resume_take_effect() -> None:
    with ShmLoader(range(N), BATCH, shuffle=True) as loader:
        list(loader)
        state = loader.state_dict()
    with ShmLoader(range(N), BATCH, shuffle=True) as loader:
        loader.load_state_dict(state)
        list(loader)
        torch.manual_seed(7)
        got = [batch.tolist() for batch in loader]
    torch.manual_seed(7)
    assert got == [batch.tolist() for batch in torch.utils.data.DataLoader(range(N), BATCH, shuffle=True)]


def test_run_resumed_repeatedly_equals_the_undisturbed_one() -> None:
    seed_all(5)
    loader = ShmLoader(range(N), BATCH, shuffle=True)
    list(loader)
    state = loader.state_dict()
    expected = [[batch.tolist() for batch in loader] for _ in range(4)]
    got = []
    for stop in (5, 2, 5, 5, 5):  # the second pass is abandoned in the middle
        seed_all(99)
        loader = ShmLoader(range(N), BATCH, shuffle=True)
        loader.load_state_dict(json.loads(json.dumps(state)))
        iterator = iter(loader)
        got += [batch.tolist() for batch in islice(iterator, stop)]
        if stop == 5:
            got += [batch.tolist() for batch in iterator]
        state = loader.state_dict()
    assert got == [batch for epoch in expected for batch in epoch]


@pytest.mark.parametrize(("workers", "then_workers"), [(0, 1), (1, 0), (1, 1), (0, 0)])
@pytest.mark.parametrize("taken", [0, 1])
def test_resume_with_and_without_workers_draws_the_same_epochs_in_one_process(taken: int, workers: int, then_workers: int) -> None:
    def make(num_workers: int) -> ShmLoader[Any]:
        start = {"multiprocessing_context": "fork"} if num_workers else {}
        return ShmLoader(range(6), 1, shuffle=True, num_workers=num_workers, **start)

    torch.manual_seed(5)
    with make(workers) as loader:
        undisturbed = [[int(batch) for batch in loader] for _ in range(3)]
    torch.manual_seed(5)
    with make(workers) as loader:
        batches = iter(loader)
        first = [int(next(batches)) for _ in range(taken)]
        state = loader.state_dict()
    with make(then_workers) as again:
        again.load_state_dict(state)
        epochs = [[int(batch) for batch in again] for _ in range(3)]
    assert [first + epochs[0], *epochs[1:]] == undisturbed


# a third of all combinations, which contains each pair of values
THIRD = [
    (kind, pool, place)
    for i, kind in enumerate(KINDS)
    for j, pool in enumerate(POOLS)
    for k, place in enumerate(PLACES)
    if (i + j + k) % 3 == 0
]


@pytest.mark.slow(reason="starts workers for most of its loaders")
@pytest.mark.parametrize(("kind", "pool", "place"), THIRD)
def test_any_state_in_torch_mode_resumes_the_undisturbed_run(kind: str, pool: str, place: str) -> None:
    check(kind, pool, place)
