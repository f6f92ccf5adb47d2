"""shmload's own orders through the loader: sharded, resumable anywhere, independent of the number of workers."""

from __future__ import annotations

import copy
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmload import BlockShuffle, LengthBuckets, ShmLoader, StateMismatch, TokenBudget, Weighted
from shmload.tools.audit.verify import read_folder, verify
from tests.loader.seeded_data import InBatches, InPlace, Ragged

LENGTHS = np.random.default_rng(0).integers(1, 60, 100)
SAMPLERS: dict[str, Any] = {
    "blocks": lambda: BlockShuffle(100, block_size=7, window=3),
    "weighted": lambda: Weighted(LENGTHS),
    "without replacement": lambda: Weighted(LENGTHS, replacement=False),
}
BATCHES: dict[str, Any] = {
    "buckets": lambda: LengthBuckets(LENGTHS, batch_size=8, window=3, group=2),
    "budget": lambda: TokenBudget(LENGTHS, max_tokens=200, window=3, group=2),
}
KINDS = [*SAMPLERS, *BATCHES]


def loader_of(kind: str, *, seed: int | None = 7, **options: Any) -> ShmLoader[int]:
    order = {"sampler": SAMPLERS[kind](), "batch_size": 8} if kind in SAMPLERS else {"batch_sampler": BATCHES[kind]()}
    return ShmLoader(range(100), **{**order, "seed": seed, **options})  # type: ignore[arg-type]  # a range is a dataset


def plain_of(*, rank: int = 0, world_size: int = 1, **options: Any) -> ShmLoader[int]:
    """Returns a loader of one rank with 13 batches of 8, of which the last has one sample."""
    dataset: Any = range(97)
    return ShmLoader(dataset, 8 // world_size, seed=7, shuffle=True, rank=rank, world_size=world_size, **options)


def epoch_of(loader: ShmLoader[int]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def step_by_step(loaders: list[ShmLoader[int]], num_steps: int = 10**9) -> list[list[int]]:
    """Returns the valid rows of the batches, in the order of steps and ranks."""
    got, passing = [], [iter(loader) for loader in loaders]
    for _ in range(num_steps):
        for loader, batches in zip(loaders, passing, strict=True):
            batch = next(batches, None)
            if batch is not None and loader.valid:
                got.append(batch.tolist())
            elif batch is None and loader is loaders[-1]:
                return got
    return got


@pytest.mark.parametrize("kind", KINDS)
def test_batches_equal_the_orders_for_any_number_of_workers(kind: str) -> None:
    with loader_of(kind) as inline, loader_of(kind, num_workers=2) as crewed:
        epochs = [epoch_of(inline) for _ in range(3)]
        assert epochs == [epoch_of(crewed) for _ in range(3)]
    if kind in BATCHES:
        order = BATCHES[kind]()
        count = order.num_batches(seed=7, epoch=1)
        assert epochs[1] == [order.batch(number, seed=7, epoch=1).tolist() for number in range(count)]
    else:
        assert [i for batch in epochs[1] for i in batch] == SAMPLERS[kind]().take(0, 100, seed=7, epoch=1).tolist()
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_resume_at_any_step_continues_the_same_stream(kind: str, num_workers: int) -> None:
    with loader_of(kind) as loader:
        first = epoch_of(loader)
        second = epoch_of(loader)
    for stop in (0, 1, len(first) - 1, len(first)):
        with loader_of(kind) as loader:
            passing = iter(loader)
            for _ in range(stop):
                next(passing)
            state = json.loads(json.dumps(loader.state_dict()))
        assert len(json.dumps(state)) <= 1024
        with loader_of(kind, num_workers=num_workers) as loader:
            loader.load_state_dict(state)
            assert state == loader.state_dict()
            assert (first[stop:] or second) == epoch_of(loader)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (3, 2)])
def test_another_number_of_ranks_resumes_with_exactly_the_rest(kind: str, before: int, after: int) -> None:
    with loader_of(kind) as loader:
        whole = epoch_of(loader)
    for num_steps in range(len(whole) // before):
        first = [loader_of(kind, rank=rank, world_size=before) for rank in range(before)]
        head = step_by_step(first, num_steps)
        states = [loader.state_dict() for loader in first]
        assert all(states[0] == state for state in states)
        second = [loader_of(kind, rank=rank, world_size=after) for rank in range(after)]
        for loader in second:
            loader.load_state_dict(states[0])
        assert whole == head + step_by_step(second)


@pytest.mark.parametrize("make", [partial(loader_of, "buckets"), plain_of], ids=["buckets", "plain"])
def test_ranks_stay_in_step_when_one_has_nothing_left(make: Any) -> None:
    with make(uneven="exact") as loader:
        whole = epoch_of(loader)
        second = epoch_of(loader)
        loader.set_epoch(0)
        passing = iter(loader)
        for _ in whole[:-1]:
            next(passing)
        state = loader.state_dict()
    ranks = [make(uneven="exact", rank=rank, world_size=2) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(state)
    assert [whole[-1:], []] == [epoch_of(loader) for loader in ranks]
    assert sum(second, []) == sum(step_by_step(ranks), [])  # noqa: RUF017  # a few short lists


def test_batches_of_an_incomplete_step_are_dropped_on_other_ranks() -> None:
    with loader_of("buckets", uneven="drop") as loader:
        passing = iter(loader)
        for _ in range(12):
            next(passing)
        state = loader.state_dict()
        second = (next(passing), epoch_of(loader))[1]
    with loader_of("buckets", uneven="drop", rank=0, world_size=2) as loader:
        loader.load_state_dict(state)
        assert second[:12:2] == epoch_of(loader)


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_last_step_follows_the_uneven_rule(uneven: str, num_workers: int) -> None:
    loaders = [loader_of("buckets", rank=r, world_size=4, uneven=uneven, num_workers=num_workers) for r in range(4)]
    got = [epoch_of(loader) for loader in loaders]  # 13 batches
    assert {"pad": [4] * 4, "drop": [3] * 4, "exact": [4, 3, 3, 3]}[uneven] == [len(batches) for batches in got]
    assert [len(batches) for batches in got] == [len(loader) for loader in loaders]
    if uneven == "pad":
        assert got[1][3] == got[0][0]
        assert [loader.valid for loader in loaders] == [len(got[0][3]), 0, 0, 0]
    else:
        assert all(loader.valid == len(batches[-1]) for loader, batches in zip(loaders, got, strict=True))
    for loader in loaders:
        loader.close()


def test_length_is_that_of_the_next_epoch() -> None:
    order = BATCHES["budget"]()
    counts = [order.num_batches(seed=7, epoch=epoch) for epoch in range(40)]
    assert len(set(counts)) > 1
    with loader_of("budget") as loader:
        for epoch in (0, 1, 5, 17, 39):
            loader.set_epoch(epoch)
            assert counts[epoch] == len(loader) == len(epoch_of(loader))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_sample_is_substituted_by_the_next_of_the_order(num_workers: int) -> None:
    dataset = _Fails(13)
    order = BATCHES["buckets"]()
    flat = [i for number in range(13) for i in order.batch(number, seed=7, epoch=0).tolist()]
    flat[flat.index(13)] = flat[(flat.index(13) + 1) % 100]
    with ShmLoader(dataset, batch_sampler=order, seed=7, on_error="substitute", num_workers=num_workers) as loader:
        assert flat == [i for batch in epoch_of(loader) for i in batch]


class _Fails:
    def __init__(self, index: int) -> None:
        self.index = index

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            raise ValueError("unreadable")
        return index


@pytest.mark.parametrize("data", [InPlace, InBatches, Ragged])
def test_batches_of_any_size_fit(data: Any) -> None:
    order = TokenBudget([1 + i % 40 for i in range(50)], max_tokens=60, window=3, group=1)
    expected = [order.batch(number, seed=7, epoch=0).tolist() for number in range(order.num_batches(seed=7, epoch=0))]
    assert len({len(batch) for batch in expected}) >= 5
    with ShmLoader(data(), batch_sampler=order, seed=7, num_workers=2) as loader:
        for indices, batch in zip(expected, loader, strict=True):
            found = batch[1][0] if data is Ragged else batch["label"] if data is InPlace else batch.label
            assert indices == found.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_order_is_an_ordinary_sampler_in_torch_mode(kind: str) -> None:
    def epochs(**options: Any) -> Any:
        torch.manual_seed(4)
        with loader_of(kind, seed=None, **options) as loader:
            return [epoch_of(loader) for _ in range(2)]

    first, second = epochs()
    assert first != second
    assert [first, second] == epochs()


@pytest.mark.parametrize("kind", ["blocks", "budget"])
def test_resume_in_torch_mode_replays_the_order(kind: str) -> None:
    torch.manual_seed(4)
    with loader_of(kind, seed=None) as loader:
        passing = iter(loader)
        next(passing)
        next(passing)
        state = loader.state_dict()
        rest = [batch.tolist() for batch in passing]
    with loader_of(kind, seed=None) as loader:
        loader.load_state_dict(state)
        assert rest == epoch_of(loader)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_audit_finds_nothing_wrong(kind: str, world_size: int, tmp_path: Path) -> None:
    """Steps are recorded by number; only the order knows which samples they have."""

    def ranks() -> list[ShmLoader[int]]:
        return [loader_of(kind, rank=rank, world_size=world_size, audit=tmp_path) for rank in range(world_size)]

    first = ranks()
    step_by_step(first, 2)
    again = ranks()
    for before, after in zip(first, again, strict=True):
        after.load_state_dict(before.state_dict())
        before.close()
        for _ in range(2):
            epoch_of(after)
        after.close()
    report, loaders = verify(read_folder(tmp_path))
    assert report.num_found.total() == 0
    assert len(loaders) == 1
    assert [epoch.epoch for epoch in report.loaders[0].epochs] == [0, 1]


class _Unsendable(BlockShuffle):
    def __reduce__(self) -> Any:
        raise AssertionError("a sampler stays in the trainer")


def test_order_is_not_sent_to_workers() -> None:
    loader = ShmLoader(_Fails(-1), sampler=_Unsendable(100, block_size=7), seed=7, num_workers=1)
    pickle.dumps(loader._config().job())


def test_state_of_another_order_is_refused() -> None:
    states = {kind: loader_of(kind).state_dict() for kind in KINDS}
    for kind, state in states.items():
        for other in KINDS:
            if other != kind:
                with pytest.raises(StateMismatch, match="order: saved '"):
                    loader_of(other).load_state_dict(state)


def test_copy_of_a_loader_continues() -> None:
    with loader_of("budget") as loader:
        passing = iter(loader)
        next(passing)
        with copy.copy(loader) as other:
            assert [batch.tolist() for batch in passing] == epoch_of(other)
