"""In torch mode, a resumed loader continues as one that was never stopped: order, workers' random streams, later epochs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from shmload import ShmLoader
from shmload.errors import SampleError, StateMismatch
from shmload.modes.pass_progress import Done
from shmload.schedule.state_codec import opened
from tests.resume import noisy_data as data
from tests.resume.noisy_data import seed_all

slow = pytest.mark.slow(reason="most cases start workers for their loaders")
Make = Callable[[], ShmLoader]


def global_generator_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_globals(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def run(make: Make, stop: int, epochs: int = 3) -> tuple[dict[str, Any], tuple[Any, ...], list[Any]]:
    """Runs without a stop; returns the state after batch `stop` of the second epoch, and all batches after it."""
    seed_all(5)
    with make() as loader:
        for _ in loader:
            pass
        taken: list[Any] = []
        state, states = loader.state_dict(), global_generator_states()
        for epoch in range(epochs - 1):
            for i, batch in enumerate(loader):
                taken.append(batch.tolist())
                if epoch == 0 and i + 1 == stop:
                    state, states, taken = loader.state_dict(), global_generator_states(), []
        return json.loads(json.dumps(state)), states, taken


def resumed(make: Make, state: dict[str, Any], states: tuple[Any, ...], epochs: int = 2) -> list[Any]:
    seed_all(99)
    with make() as loader:
        set_globals(states)
        loader.load_state_dict(state)
        return [batch.tolist() for _ in range(epochs) for batch in loader]


CASES: dict[str, Callable[..., ShmLoader]] = {
    "sequential": lambda **k: ShmLoader(data.Noisy(), 6, **k),
    "shuffled": lambda **k: ShmLoader(data.Noisy(), 6, shuffle=True, **k),
    "own generator": lambda **k: ShmLoader(data.Noisy(), 6, shuffle=True, generator=torch.Generator().manual_seed(3), **k),
    "drop_last": lambda **k: ShmLoader(data.Noisy(), 6, shuffle=True, drop_last=True, **k),
    "a global sampler": lambda **k: ShmLoader(data.Noisy(), 6, sampler=data.GlobalSampler(40), **k),
    "weights": lambda **k: ShmLoader(
        data.Noisy(), 6, sampler=torch.utils.data.WeightedRandomSampler(torch.arange(1.0, 41), 35), **k
    ),
    "no batches": lambda **k: ShmLoader(data.Noisy(12), None, shuffle=True, **k),
    "reseeding": lambda **k: ShmLoader(data.Reseeding(), 6, shuffle=True, **k),
    "a stateful sampler": lambda **k: ShmLoader(data.Noisy(), 6, sampler=data.StatefulSampler(40), **k),
}


@slow
@pytest.mark.parametrize("stop", [0, 1, 4, 6, 7])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_resumed_run_continues_as_if_never_stopped(case: str, workers: int, stop: int) -> None:
    make = lambda: CASES[case](num_workers=workers)  # noqa: E731  # a name for one expression
    state, states, expected = run(make, stop)
    if case != "reseeding":  # the state contains generators that the dataset seeds: 3.4 KB for each worker and generator
        assert len(json.dumps(state)) <= 16384
    assert resumed(make, state, states) == expected


@slow
@pytest.mark.parametrize("stop", [1, 4])
def test_persistent_workers_continue_in_later_epochs(stop: int) -> None:
    make = lambda: ShmLoader(  # noqa: E731  # a name for one expression
        data.Noisy(), 6, shuffle=True, num_workers=2, persistent_workers=True, generator=torch.Generator().manual_seed(3)
    )
    state, states, expected = run(make, stop)
    assert resumed(make, state, states) == expected


@pytest.mark.slow(reason="workers start as new interpreters, which import all modules")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_method_does_not_matter(method: str) -> None:
    make = lambda: ShmLoader(data.Noisy(), 6, shuffle=True, num_workers=2)  # noqa: E731  # a name for one expression
    state, states, expected = run(make, 3, epochs=2)
    other = lambda: ShmLoader(data.Noisy(), 6, shuffle=True, num_workers=2, multiprocessing_context=method)  # noqa: E731  # a name for one expression
    assert resumed(other, state, states, epochs=1) == expected


@slow
@pytest.mark.parametrize("every", [0, 2, 3, 100, None])
def test_resume_works_with_rare_snapshots(every: int | None) -> None:
    make = lambda: ShmLoader(data.Noisy(), 6, shuffle=True, num_workers=2, snapshot_every_n_steps=every)  # noqa: E731  # a name for one expression
    state, states, expected = run(make, 5)
    assert opened(state["details"], is_trusted=False)["snapshot"] == {0: 0, 2: 4, 3: 3, 100: 0, None: 0}[every]
    assert resumed(make, state, states) == expected


@pytest.mark.parametrize("every", [1, 3])
def test_snapshot_is_taken_of_workers_without_state(every: int) -> None:
    """Without a snapshot, all batches since the epoch's start would be read again."""
    with ShmLoader(range(40), 4, num_workers=1, snapshot_every_n_steps=every) as loader:
        for _ in zip(range(8), loader, strict=False):
            pass
        assert opened(loader.state_dict()["details"], is_trusted=False)["snapshot"] == 8 - 8 % every


class WithoutLength:
    """A sampler whose number of indices is not known."""

    def __iter__(self) -> Any:
        return iter(range(10))


class WrongLength(WithoutLength):
    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize(
    "options",
    [
        {"snapshot_every_n_steps": 3},
        {"generator": 3, "shuffle": True},
        {"snapshot_every_n_steps": 3, "sampler": WithoutLength()},
        {"snapshot_every_n_steps": 3, "sampler": WrongLength()},
    ],
    ids=["rare", "generator", "sampler without a length", "sampler with another length"],
)
def test_persistent_workers_continue_after_a_state_between_passes(options: dict[str, Any]) -> None:
    def make() -> ShmLoader:
        own = {"generator": torch.Generator().manual_seed(3)} if "generator" in options else {}
        return ShmLoader(data.Noisy(10), 2, num_workers=1, persistent_workers=True, **{**options, **own})

    with make() as loader:
        for _ in loader:
            pass
        state = json.loads(json.dumps(loader.state_dict()))
        expected = [batch.tolist() for batch in loader]
    with make() as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == expected


class Unreadable(data.Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise ValueError("torn")
        return super().__getitem__(index)


def test_after_a_failed_batch_the_next_worker_takes_its_turn() -> None:
    with ShmLoader(Unreadable(8), 1, num_workers=2) as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        with pytest.raises(ValueError, match="torn"):
            next(iterator)
        state = loader.state_dict()
        expected = [batch.tolist() for batch in iterator]
    with ShmLoader(Unreadable(8), 1, num_workers=2) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == expected


class UnreadableAfterDraw(data.Counting):
    """Counts and draws before it raises: a failed batch has changed its worker's state."""

    def __getitem__(self, index: int) -> torch.Tensor:
        read = torch.cat([super().__getitem__(index), torch.tensor(data.noise())])
        if index in (2, 3):
            raise ValueError("torn")
        return read


@pytest.mark.parametrize("size", [0, 1 << 16], ids=["small", "large"])
@pytest.mark.parametrize(
    "options", [{}, {"on_error": "skip"}, {"on_error": "skip", "max_bad": 1}], ids=["raise", "skip", "max_bad"]
)
def test_worker_continues_after_its_failed_batch(options: dict[str, Any], size: int) -> None:
    def taken(loader: ShmLoader, limit: int) -> list[Any]:
        iterator, batches = iter(loader), []
        while len(batches) < limit:
            try:
                batches.append(next(iterator).tolist())
            except StopIteration:
                break
            except (ValueError, SampleError):
                batches.append(None)
        return batches

    def make() -> ShmLoader:
        seed_all(5)
        return ShmLoader(UnreadableAfterDraw(10, size), 2, num_workers=2, **options)

    with make() as loader:
        expected = taken(loader, 10)
    assert len(expected) == (4 if options == {"on_error": "skip"} else 5)
    with make() as loader:
        assert taken(loader, 2) == expected[:2]
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        assert taken(loader, 10) == expected[2:]


class DrawsOnlyAtBad(data.Noisy):
    """Draws before it raises, and in the last samples; those between do not change the worker's state."""

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = data.noise() if index == 3 or index > 7 else []
        if index == 3:
            raise ValueError("torn")
        return torch.tensor([float(index), *drawn])


def test_draws_of_a_skipped_sample_are_in_the_state_after_its_batch() -> None:
    def make() -> ShmLoader:
        seed_all(5)
        return ShmLoader(DrawsOnlyAtBad(10), 2, num_workers=1, on_error="skip")

    with make() as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        state = loader.state_dict()
        expected = [batch.tolist() for batch in iterator]
    with make() as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == expected


class FailsToUnpickle:
    """Fails to unpickle in the trainer if its index is 2."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> Any:
        return unpickle, (self.index,)


def unpickle(index: int) -> int:
    if index == 2:
        raise ValueError("cannot be unpickled")
    return index


def test_worker_continues_after_a_failed_first_batch_without_slot_memory() -> None:
    def make() -> ShmLoader:
        seed_all(5)
        return ShmLoader(UnreadableAfterDraw(10, 1 << 16), 2, sampler=[2, 3, 4, 5, 6], num_workers=1)

    with make() as loader:
        iterator = iter(loader)
        with pytest.raises(ValueError, match="torn"):
            next(iterator)
        state = loader.state_dict()
        expected = [batch.tolist() for batch in iterator]
    with make() as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == expected


def test_worker_continues_after_a_batch_that_the_trainer_could_not_unpickle() -> None:
    def batches(loader: ShmLoader) -> Iterator[Any]:
        iterator = iter(loader)
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return
            except ValueError:
                yield None

    def make() -> ShmLoader:
        seed_all(5)
        return ShmLoader(data.Noisy(5), 1, num_workers=1, collate_fn=collate_unpicklable)

    with make() as loader:
        expected = list(batches(loader))
    assert expected[2] is None
    with make() as loader:
        assert [batch for _, batch in zip(range(3), batches(loader), strict=False)] == expected[:3]
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        assert list(batches(loader)) == expected[3:]


def collate_unpicklable(samples: list[torch.Tensor]) -> list[Any]:
    return [FailsToUnpickle(int(samples[0][0])), samples[0].tolist()]


class SamplerWithCountedStates(data.StatefulSampler):
    """A sampler whose state holds an object that counts how many states are alive."""

    alive: WeakSet[Any] = WeakSet()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kept": CountedState()}


class CountedState:
    def __init__(self) -> None:
        SamplerWithCountedStates.alive.add(self)

    def __deepcopy__(self, _: Any) -> CountedState:
        return CountedState()


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "snapshot_every_n_steps": 4}, {"seed": 1}, {"num_workers": 1, "seed": 1}]
)
def test_old_states_of_a_sampler_are_not_kept(options: dict[str, Any]) -> None:
    with ShmLoader(range(100), 2, sampler=SamplerWithCountedStates(100), **options) as loader:
        for number, _ in enumerate(loader):
            assert len(SamplerWithCountedStates.alive) < 12, number


@slow
def test_run_may_be_resumed_repeatedly() -> None:
    make = lambda: ShmLoader(data.Noisy(60), 6, shuffle=True, num_workers=2)  # noqa: E731  # a name for one expression
    seed_all(5)
    with make() as loader:
        expected = [b.tolist() for b in loader]
    seed_all(5)
    with make() as loader:
        got = [b.tolist() for _, b in zip(range(2), loader, strict=False)]
        state = loader.state_dict()
    for _ in range(3):
        seed_all(77)
        with make() as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict() == state
            got += [b.tolist() for _, b in zip(range(2), loader, strict=False)]
            state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        got += [b.tolist() for b in loader]
    assert got == expected


@slow
@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 1)])
def test_order_continues_with_another_number_of_workers(workers: tuple[int, int]) -> None:
    state, states, expected = run(lambda: ShmLoader(data.Noisy(), 6, shuffle=True, num_workers=workers[0]), 3, epochs=2)
    got = resumed(lambda: ShmLoader(data.Noisy(), 6, shuffle=True, num_workers=workers[1]), state, states, epochs=1)
    assert [[row[0] for row in batch] for batch in got] == [[row[0] for row in batch] for batch in expected]


@slow
def test_loading_does_not_change_the_trainers_generators() -> None:
    state, _, _ = run(lambda: ShmLoader(data.Noisy(), 6, shuffle=True, num_workers=2), 3)
    seed_all(4)
    expected = data.noise()
    seed_all(4)
    with ShmLoader(data.Noisy(), 6, shuffle=True, num_workers=2) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        assert data.noise() == expected


@slow
def test_state_dict_changes_nothing() -> None:
    def epochs(asks: bool) -> list[Any]:
        seed_all(8)
        got = []
        with ShmLoader(data.Noisy(), 6, shuffle=True, num_workers=2) as loader:
            for _ in range(2):
                if asks:
                    loader.state_dict()
                for batch in loader:
                    got.append(batch.tolist())
                    if asks:
                        loader.state_dict()
        return got

    assert epochs(True) == epochs(False)


@slow
def test_returned_state_does_not_change_later() -> None:
    with ShmLoader(data.Counting(), 6, shuffle=True, num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        text = repr(state)
        for _ in iterator:
            pass
        assert repr(state) == text


@slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [0, 100_000])
def test_stateful_dataset_resumes(workers: int, size: int) -> None:
    make = lambda: ShmLoader(data.Counting(40, size), 6, num_workers=workers)  # noqa: E731  # a name for one expression
    with make() as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        next(iterator)
        later = loader.state_dict()
        expected = [b.tolist() for b in iterator]
    assert state != later
    with make() as loader:
        loader.load_state_dict(later)
        assert [b.tolist() for b in loader] == expected
        assert all(
            len(s["dataset"]["ballast"]) == size for s in opened(loader.state_dict()["details"], is_trusted=False)["workers"]
        )


def test_state_of_another_loader_is_refused_with_the_reason() -> None:
    with ShmLoader(data.Noisy(), 6) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for other, text in [
        (ShmLoader(data.Noisy(41), 6), "n: saved 40, now 41"),
        (ShmLoader(data.Noisy(), 7), "batch_size: saved 6, now 7"),
        (ShmLoader(data.Noisy(), 6, drop_last=True), "drop_last: saved False, now True"),
    ]:
        with pytest.raises(StateMismatch, match=text):
            other.load_state_dict(state)
    with pytest.raises(StateMismatch, match="format version 3"):
        loader.load_state_dict({**state, "version": 3})
    with pytest.raises(StateMismatch, match="got a dict with the keys"):
        loader.load_state_dict({"_snapshot": 1})
    with pytest.raises(StateMismatch, match="got list"):
        loader.load_state_dict([1])
    with ShmLoader(data.Noisy(), 6, seed=1) as seeded:
        with pytest.raises(StateMismatch, match="of mode 'torch'"):
            seeded.load_state_dict(state)
        with pytest.raises(StateMismatch, match="of mode 'seed'"):
            loader.load_state_dict(seeded.state_dict())


def _dataset_of(make: Any) -> Any:
    return make(data.Counting(), batch_size=6, num_workers=2)


def _sampler_of(make: Any) -> Any:
    sampler = StatefulDistributedSampler(data.Counting(), num_replicas=2, rank=1, shuffle=True, seed=4)
    return make(data.Counting(), batch_size=3, sampler=sampler, num_workers=2)


def _own_sampler_of(make: Any) -> Any:
    return make(data.Counting(), batch_size=6, sampler=data.StatefulSampler(40), num_workers=2)


@slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("stop", [1, 3, 6])
@pytest.mark.parametrize("kind", [_dataset_of, _sampler_of, _own_sampler_of])
def test_resumed_batches_equal_those_of_torchdatas_loader(kind: Callable[[Any], Any], stop: int) -> None:
    def after(make: Any) -> list[Any]:
        loader = kind(make)
        for _ in zip(range(stop), loader, strict=False):
            pass
        state = loader.state_dict()
        again = kind(make)
        again.load_state_dict(state)
        return [batch.tolist() for batch in again]

    assert after(ShmLoader) == after(StatefulDataLoader)


def test_finished_steps_are_a_prefix_and_single_later_steps() -> None:
    done = Done(2, {4})
    assert [step in done for step in range(6)] == [True, True, False, False, True, False]
    done.add(3)
    assert (done.first, done.beyond) == (2, {3, 4})
    done.add(2)
    assert (done.first, done.beyond) == (5, set())


class ContinuesAfterItsEnd:
    """A stateful sampler whose next pass continues from a loaded state, so that it is empty after the end of a pass."""

    def __init__(self) -> None:
        self.at, self.start = 0, 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        first, self.start = self.start, 0
        for self.at in range(first + 1, 7):
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


@pytest.mark.parametrize("seed", [None, 3])
def test_state_between_passes_starts_a_full_pass_of_a_sampler_at_its_end(seed: int | None) -> None:
    loader = ShmLoader(range(6), 2, sampler=ContinuesAfterItsEnd(), seed=seed)
    expected = [batch.tolist() for batch in loader]
    again = ShmLoader(range(6), 2, sampler=ContinuesAfterItsEnd(), seed=seed)
    again.load_state_dict(loader.state_dict())
    assert [[batch.tolist() for batch in again] for _ in range(2)] == [expected, expected]


class InterruptedDataset:
    """Numbers, one of which is interrupted while it is read, once."""

    def __init__(self) -> None:
        self.is_over = False

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 7 and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return index


@pytest.mark.parametrize("collate_fn", [None, torch.tensor])
@pytest.mark.parametrize("seed", [None, 3])
def test_state_after_an_interrupt_has_the_interrupted_batch_to_come(seed: int | None, collate_fn: Any) -> None:
    def make() -> ShmLoader[Any]:
        return ShmLoader(InterruptedDataset(), 3, seed=seed, shuffle=False, collate_fn=collate_fn)

    loader, got = make(), []
    with pytest.raises(KeyboardInterrupt):
        for batch in loader:
            got += batch.tolist()
    resumed = make()
    resumed.dataset.is_over = True
    resumed.load_state_dict(loader.state_dict())
    assert got + [number for batch in resumed for number in batch.tolist()] == list(range(12))


class ShuffleBuffer(torch.utils.data.IterableDataset):
    """Numbers that pass through a buffer from which `random`, numpy and torch choose."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        held = list(range(5))
        for number in range(5, 24):
            at = self.draw(5)
            yield held[at]
            held[at] = number
        yield from held


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "draw", [random.randrange, np.random.randint, lambda end: int(torch.randint(end, ()))], ids=["random", "numpy", "torch"]
)
def test_buffer_that_draws_from_global_generators_is_filled_as_in_the_saved_run(
    draw: Callable[[int], int], num_workers: int
) -> None:
    with ShmLoader(ShuffleBuffer(draw), 3, num_workers=num_workers) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
        saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
        expected = [batch.tolist() for batch in batches]
    random.seed(1)
    with ShmLoader(ShuffleBuffer(draw), 3, num_workers=num_workers) as resumed:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == expected
