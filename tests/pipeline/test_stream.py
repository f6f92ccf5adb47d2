"""Random compositions compared with plain lists: streams, ranks, lengths, and resumes anywhere on any number of ranks."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Map, Partition, Permutation, Range
from shmload.schedule.state_checksum import with_checksum
from tests.pipeline.pipeline_kit import Leaf, Spec, known_item, plain, pulled, specs

slow = pytest.mark.slow(reason="hypothesis reads many pipelines")
MOST = 30  # steps to read of an endless pipeline
PLAIN = Leaf(10, True, False, 7)


def ranks_of(spec: Spec, stack: ExitStack) -> list[Conveyer]:
    return [stack.enter_context(spec.make(rank)) for rank in range(spec.world)]


@slow
@settings(deadline=None, max_examples=200)
@given(specs())
@example(Spec(PLAIN, world=3, batch_size=2))
@example(Spec(PLAIN, world=3, batch_size=2, uneven="exact"))
@example(Spec(PLAIN, world=4, batch_size=3, uneven="drop"))
@example(Spec(PLAIN, world=4))
@example(Spec(PLAIN, world=4, uneven="exact"))
def test_each_rank_gets_its_part_of_the_stream(spec: Spec) -> None:
    with ExitStack() as stack:
        for rank, pipeline in enumerate(ranks_of(spec, stack)):
            for epoch in range(1 if spec.source.length is None else 2):
                expected = list(islice(spec.of_rank(rank, epoch), MOST))
                assert expected == pulled(pipeline, MOST)
                if spec.source.length is None or len(expected) == MOST:
                    break
                assert len(expected) == len(pipeline)
                with pytest.raises(StopIteration):
                    pipeline()


@slow
@settings(deadline=None, max_examples=200)
@given(specs(), st.integers(0, MOST), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2))
@example(Spec(PLAIN, world=2, batch_size=2), 1, 2, 0, 1)
@example(Spec(PLAIN, world=4, batch_size=1), 1, 3, 1, 0)
@example(Spec(PLAIN, world=8), 1, 1, 7, 2)
@example(Spec(Leaf(9, False, False, 0), world=2, batch_size=2, uneven="exact"), 2, 2, 0, 0)
def test_any_number_of_ranks_resumes_at_any_step_with_exactly_the_rest(
    spec: Spec, num_steps: int, world: int, saver: int, num_epochs: int
) -> None:
    saver %= spec.world
    with ExitStack() as stack:
        pipeline = stack.enter_context(spec.make(saver))
        for _ in range(0 if pipeline.is_endless else num_epochs):
            pipeline.begin_next_epoch()
        done = len(pulled(pipeline, num_steps))
        state = pipeline.state()
        assert state == pipeline.state(), "taking a state changes nothing"
        position = state["position"] if pipeline.is_ended else done * spec.stride
        other = spec.on(world)
        if other.rule != spec.rule:  # only a Partition has a policy to compare
            return
        for rank, resumed in enumerate(ranks_of(other, stack)):
            pulled(resumed, rank)  # a running pipeline also jumps to the state
            for _ in range(2):
                resumed.load_state(state)
                rest = list(islice(other.of_rank(rank, state["epoch"], position), MOST // 2))
                assert resumed.is_ended == (not rest)
                assert resumed.is_ended or state == resumed.state()
                is_over = next(other.steps(state["epoch"], position), None) is None  # otherwise other ranks have some left
                expected = list(islice(other.of_rank(rank, state["epoch"] + 1), MOST // 2)) if is_over else rest
                assert expected == pulled(resumed, MOST // 2)


@slow
@settings(deadline=None, max_examples=60)
@given(specs())
def test_all_ranks_save_the_same_state_after_equal_steps(spec: Spec) -> None:
    with ExitStack() as stack:
        pipelines = ranks_of(spec, stack)
        for _ in range(12):
            assert all(pipeline.state() == pipelines[0].state() for pipeline in pipelines)
            if any(pipeline.is_ended for pipeline in pipelines):
                break
            for pipeline in pipelines:
                pipeline()


@settings(deadline=None, max_examples=60)
@given(specs(sources=st.builds(Leaf, st.integers(1, 40), st.booleans(), st.just(False), st.just(1))))
@example(Spec(Leaf(10, True, False, 1), world=3, batch_size=2))  # 4 are left for the last step
def test_ranks_are_disjoint_and_complete_by_policy(spec: Spec) -> None:
    factor = 2 if spec.doubles and spec.batch_size else 1
    everything = [(x + sum(spec.numbers)) * factor for x in range(spec.source.n)]
    with ExitStack() as stack:
        parts = []
        for pipeline in ranks_of(spec, stack):
            parts.append([])
            for batch in pipeline:
                parts[-1] += plain(batch)[: pipeline.valid]
    got = sorted(x for part in parts for x in part)
    if spec.rule != "drop":
        assert sorted(everything) == got
    else:
        assert len(set(got)) == len(got) == spec.source.n // spec.stride * spec.stride
        assert set(got) <= set(everything)


@pytest.mark.slow(reason="hypothesis, and each example starts a worker for each of two pipelines")
@settings(deadline=None, max_examples=8)
@given(specs(num_workers=1), st.integers(0, 12), st.integers(1, 3))
def test_workers_give_the_same_and_resume_anywhere(spec: Spec, num_steps: int, world: int) -> None:
    with ExitStack() as stack:
        pipeline = stack.enter_context(spec.make())
        done = pulled(pipeline, num_steps)
        assert list(islice(spec.of_rank(0), num_steps)) == done
        state = pipeline.state()
        other = spec.on(world)
        if pipeline.is_ended or other.rule != spec.rule:
            return
        resumed = stack.enter_context(other.make(world - 1))
        resumed.load_state(state)
        expected = list(islice(other.of_rank(world - 1, 0, len(done) * spec.stride), 12))
        assert expected == pulled(resumed, 12)


@pytest.mark.slow(reason="starts two workers for each of two pipelines, and resumes one twice")
@pytest.mark.parametrize("repeating", [False, True])
@pytest.mark.parametrize("num_done", [*range(1, 30, 7), 99, 100, 101, 150])
def test_items_fetched_in_groups_resume_between_any_two(num_done: int, repeating: bool) -> None:
    spec = Spec(Leaf(200, True, repeating, 3), num_workers=2)
    with spec.make() as pipeline, spec.on(3).make(1) as other:
        done = pulled(pipeline, num_done)
        assert list(islice(spec.of_rank(0), num_done)) == done
        if num_done == 150:
            assert pipeline.engine.rounds > 1, "items without cost are fetched in groups by now"
        state = pipeline.state()
        assert num_done == state["position"]
        rest = list(islice(spec.of_rank(0, 0, num_done), 60))
        assert rest == pulled(pipeline, 60)
        for resumed in (pipeline, pipeline):
            resumed.load_state(state)
            assert rest == pulled(resumed, 60)
        other.load_state(state)
        assert list(islice(spec.on(3).of_rank(1, 0, num_done), 40)) == pulled(other, 40)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_draws_for_an_item_differ_by_epoch_and_survive_a_resume(num_workers: int) -> None:
    def make(batch_size: int) -> Conveyer:
        stage = DistributedBatchedMap(known_item, num_workers) if num_workers else Map(known_item)
        return Conveyer([Permutation(6, seed=5), stage, Collate(batch_size)])

    with make(3) as pipeline, make(2) as other:
        noise: dict[int, list[float]] = {}
        for batch in islice(pipeline, 8):
            for x, drawn in zip(batch["x"].tolist(), batch["noise"].tolist(), strict=True):
                noise.setdefault(x, []).append(drawn)
        assert all(len(set(drawn)) == 4 for drawn in noise.values())
        other.load_state(with_checksum({**other.state(), "position": 4, "epoch": 1}))
        batch = other()
        assert batch["noise"].tolist() == [noise[x][1] for x in batch["x"].tolist()]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 12, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_range_through_maps_collate_and_partition_gives_every_item(batch_size: int, world: int) -> None:
    """Checks what the tests of the Conveyer library check."""
    found: list[int] = []
    for rank in range(world):
        stages = [Range(12, repeating=False), Map(lambda x: x * 2), Partition(rank, world, uneven="exact")]
        with Conveyer([*stages, Collate(batch_size)]) as pipeline:
            found += [x for batch in pipeline for x in batch.tolist()]
    assert sorted(found) == list(range(0, 24, 2))


def test_streams_depend_on_the_seed() -> None:
    def stream(seed: int) -> Any:
        with Conveyer([Permutation(50, seed=seed), Collate(10)]) as pipeline:
            return pulled(pipeline, 10)

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)
    first = stream(1)
    assert first[:5] != first[5:], "each epoch has its own order"


def test_large_permutation_has_all_its_items() -> None:
    with Conveyer([Permutation(5000, repeating=False), Collate(500)]) as pipeline:
        batches = [batch.tolist() for batch in pipeline]
    assert sorted(x for batch in batches for x in batch) == list(range(5000))
    assert max(batches[0]) > 4000, "all of it is permuted"


def test_far_position_of_a_huge_epoch_is_found_at_once() -> None:
    with Conveyer([Permutation(1 << 62, seed=1), Collate(3)]) as pipeline:
        pipeline.load_state(with_checksum({**pipeline.state(), "position": (1 << 62) - 12}))
        assert len({x for _ in range(3) for x in pipeline().tolist()}) == 9
