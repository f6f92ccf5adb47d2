"""The state of any rank resumes all ranks, also with another number of ranks: together, the samples before and after are all
samples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import BlockShuffle, LengthBuckets, Mix, ShmLoader, TokenBudget, Weighted
from shmload.growing import SampleCache
from shmload.pipeline import Collate, Conveyer, Partition, Permutation
from tests.growing.growing_kit import dataset_of, put, values_of

Make = Callable[[int, int, int, str], ShmLoader]  # (batch size of all ranks, rank, number of ranks, uneven)


def plain(n: int, **more: Any) -> Make:
    def make(size: int, rank: int, ranks: int, uneven: str) -> ShmLoader:
        options = {"seed": 3, "rank": rank, "world_size": ranks, "uneven": uneven, **more}
        if "batch_sampler" in options:
            return ShmLoader(range(n), **options)
        return ShmLoader(range(n), size // ranks, **options)

    return make


def lengths(n: int) -> list[int]:
    return [(7 * i) % 5 + 1 for i in range(n)]


ORDERS: dict[str, Callable[[int], Make]] = {
    "in order": lambda n: plain(n),
    "shuffled": lambda n: plain(n, shuffle=True),
    "blocks": lambda n: plain(n, sampler=BlockShuffle(n, block_size=3, window=2)),
    "weighted": lambda n: plain(n, sampler=Weighted([1.0 + i % 3 for i in range(n)], num_samples=n)),
    "buckets": lambda n: plain(n, batch_sampler=LengthBuckets(lengths(n), batch_size=3)),
    "budget": lambda n: plain(n, batch_sampler=TokenBudget(lengths(n), max_tokens=9)),
    "mix": lambda n: (
        lambda size, rank, ranks, uneven: ShmLoader(
            Mix([(range(n), n), (range(n, n + 2), 2)]),
            size // ranks,
            shuffle=True,
            seed=3,
            rank=rank,
            world_size=ranks,
            uneven=uneven,
        )
    ),
}


def advance(loaders: list[ShmLoader], steps: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Reads `steps` steps on all ranks; returns the rows of all ranks, and each rank's state afterwards."""
    passes: list[Any] = [iter(loader) for loader in loaders]
    got: list[int] = []
    for _ in range(steps):
        for loader, batches in zip(loaders, passes, strict=True):
            batch = next(batches, None)
            if batch is not None:
                got += batch.tolist()[: loader.valid]
    return got, [json.loads(json.dumps(loader.state_dict())) for loader in loaders]


def complete_pass(loaders: list[ShmLoader]) -> list[int]:
    """Returns the rows of one complete pass on all ranks."""
    return [row for loader in loaders for batch in loader for row in batch.tolist()[: loader.valid]]


@pytest.mark.slow(reason="hypothesis reads and resumes many worlds of loaders")
@pytest.mark.parametrize("uneven", ["exact", "pad", "drop"])
@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), n=st.integers(1, 45))
def test_any_ranks_state_resumes_the_remaining_samples(order: str, uneven: str, data: Any, n: int) -> None:
    ranks, ranks_after = data.draw(st.sampled_from([(1, 2), (2, 2), (2, 1), (2, 3), (3, 3), (3, 2), (3, 1)]))
    size = 6 * data.draw(st.integers(1, 2))
    make = ORDERS[order](n)
    steps = data.draw(st.integers(0, n // 3 + 2))

    def ranks_of(count: int) -> list[ShmLoader]:
        return [make(size, rank, count, uneven) for rank in range(count)]

    everything = Counter(complete_pass(ranks_of(1))) if uneven != "drop" else None
    before, states = advance(ranks_of(ranks), steps)
    rests = []
    for state in states:
        loaders = ranks_of(ranks_after)
        for loader in loaders:
            loader.load_state_dict(state)
        rest = Counter(complete_pass(loaders))
        rests.append(rest)
        if everything is not None and state["epoch"] == 0:
            assert everything == Counter(before) + rest
    assert rests.count(rests[0]) == len(rests)
    if everything is not None and states[0]["epoch"] == 1:
        assert everything == Counter(before)


def test_rank_without_rows_in_the_last_step_resumes_with_the_others() -> None:
    def ranks_of() -> list[ShmLoader]:
        return [ShmLoader(range(25), 6, seed=3, uneven="exact", rank=rank, world_size=2) for rank in range(2)]

    _, states = advance(ranks_of(), 2)
    assert states[0] == states[1]
    for state in states:
        loaders = ranks_of()
        for loader in loaders:
            loader.load_state_dict(state)
        assert complete_pass(loaders) == [24]
        assert sorted(complete_pass(loaders)) == list(range(25)), "the next epoch must be complete"
    _, states = advance(ranks_of(), 3)
    assert states[0] == states[1]
    assert states[0]["epoch"] == 1


def test_any_ranks_state_resumes_a_growing_dataset(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path, capacity_bytes=1 << 20)
    put(cache, range(25))

    def ranks_of() -> list[ShmLoader]:
        options = {"seed": 3, "uneven": "exact", "world_size": 2}
        return [ShmLoader(dataset_of(cache, run="a"), 6, rank=rank, **options) for rank in range(2)]

    for steps in (2, 3):
        loaders, before = ranks_of(), []
        passes = [iter(loader) for loader in loaders]
        for batches in passes * steps:
            before += [value for batch in [next(batches, None)] if batch is not None for value in values_of(batch)]
        for loader in loaders:
            state, again = loader.state_dict(), ranks_of()
            for other in again:
                other.load_state_dict(state)
            rest = [value for other in again for batch in other for value in values_of(batch)]
            assert list(range(25)) == sorted(before + rest if steps == 2 else before)
            assert ([24] if steps == 2 else list(range(25))) == sorted(rest)


@pytest.mark.parametrize("collate", [True, False])
@pytest.mark.parametrize("n", [24, 25, 26, 29])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_ranks_state_resumes_a_pipeline(n: int, ranks: int, collate: bool) -> None:
    def ranks_of(count: int) -> list[Conveyer]:
        return [
            Conveyer(
                [
                    Permutation(n, seed=1, repeating=False),
                    Partition(rank, count, uneven="exact"),
                    *([Collate(12 // count)] if collate else []),
                ]
            )
            for rank in range(count)
        ]

    def rows(item: Any) -> list[int]:
        return item.tolist() if collate else [item]

    for steps in range(n // (12 if collate else ranks) + 3):
        pipelines, before = ranks_of(ranks), []
        for _ in range(steps):
            for pipeline in pipelines:
                before += [row for item in [next(pipeline, None)] if item is not None for row in rows(item)]
        states = [pipeline.state() for pipeline in pipelines]
        assert states.count(states[0]) == ranks
        for count in (1, 2, 3):
            again = ranks_of(count)
            for pipeline in again:
                pipeline.load_state(json.loads(json.dumps(states[0])))
            rest = [row for pipeline in again for item in pipeline for row in rows(item)]
            is_over = states[0]["position"] == n
            assert sorted(before + ([] if is_over else rest)) == list(range(n))
            following = [row for pipeline in again for item in pipeline for row in rows(item)]
            assert sorted(following) == list(range(n))
            [pipeline.close() for pipeline in again]
        [pipeline.close() for pipeline in pipelines]


@pytest.mark.parametrize("collate", [True, False])
def test_rank_without_samples_in_an_epoch_stays_in_step_with_the_others(collate: bool) -> None:
    end: list[Any] = [Collate(1)] if collate else []
    pipelines = [Conveyer([Permutation(2, repeating=False), Partition(rank, 3, uneven="exact"), *end]) for rank in range(3)]
    for _ in range(2):
        assert [len(list(pipeline)) for pipeline in pipelines] == [1, 1, 0]
        assert len({json.dumps(pipeline.state()) for pipeline in pipelines}) == 1
