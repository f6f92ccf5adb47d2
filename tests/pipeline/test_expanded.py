"""Pipelines whose stages change the number of items, compared with plain generators: streams, ranks, resumes, failures."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count, islice
from random import SystemRandom
from threading import Barrier
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

import shmload
from shmload import ShmLoader, sample_rng
from shmload.errors import SampleError, StateMismatch
from shmload.pipeline import (
    AsyncMap,
    BatchMap,
    Bucket,
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Enumerate,
    Filter,
    FlatMap,
    Generate,
    Items,
    Map,
    Pack,
    Partition,
    Range,
    Scan,
    Shuffle,
    Skip,
    Stream,
    Take,
    Zip,
)
from tests.pipeline.pipeline_kit import ROWS, Add, Leaf, plain

slow = pytest.mark.slow(reason="hypothesis pulls from many pipelines")
MOST = 25  # steps to read of an endless pipeline


@dataclass(frozen=True)
class Divisible:
    """A function for Filter."""

    by: int

    def __call__(self, x: int) -> bool:
        return x % self.by == 0


@dataclass(frozen=True)
class Copies:
    """A function for FlatMap: gives up to `most` - 1 copies of each item."""

    most: int

    def __call__(self, x: int) -> Iterator[int]:
        return (x * 10 + number for number in range(x % self.most))


@dataclass(frozen=True)
class Total:
    """A function for Scan."""

    a: int

    def __call__(self, total: int, x: int) -> tuple[int, int]:
        total = (total + self.a * x) % 1000
        return total, total


Step = tuple[str, int]


@dataclass(frozen=True)
class Streamed:
    """A stream of numbers, some of which are skipped."""

    n: int
    num_skipped: int
    is_numbered: bool
    is_stateful: bool
    repeating: bool = False

    @property
    def length(self) -> int:
        return self.n

    def stages(self) -> list[Any]:
        end = self.n + self.num_skipped
        source = Stream(Counting(end + 3) if self.is_stateful else lambda: iter(range(end + 3)))
        numbered = [Enumerate(5), Map(sum)] if self.is_numbered else []
        return [source, Take(end), *([Skip(self.num_skipped)] if self.num_skipped else []), *numbered]

    def values(self) -> Iterator[int]:
        """Yields its items, epoch after epoch."""
        while True:
            yield from (x + self.num_skipped + (x + 5) * self.is_numbered for x in range(self.n))


@dataclass
class Counting:
    """An iterable that continues from its own state, and then must not be read from the start."""

    n: int
    at: int = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": np.int64(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


STREAMS = st.builds(Streamed, st.integers(1, 25), st.integers(0, 3), st.booleans(), st.booleans())


@dataclass(frozen=True)
class ExpandedPipeline:
    """A random pipeline, and its model in plain Python."""

    row: Any
    steps: tuple[Step, ...]
    block: int = 4
    world: int = 1
    uneven: Any = "pad"
    batch_size: int | None = None
    is_partial: bool = True
    num_workers: int = 0

    def make(self, rank: int = 0) -> Conveyer:
        kinds: dict[str, Callable[[int], Any]] = {
            "filter": lambda a: Filter(Divisible(a)),
            "flat": lambda a: FlatMap(Copies(a)),
            "map": lambda a: Map(Add(a)),
            "scan": lambda a: Scan(Total(a), 0),
        }
        stages = [*self.row.stages(), *(kinds[what](a) for what, a in self.steps)]
        if self.num_workers:
            stages.insert(len(self.row.stages()), DistributedBatchedMap(Add(0), self.num_workers))
        if self.world > 1:
            stages.append(Partition(rank, self.world, uneven=self.uneven))
        if self.batch_size:
            stages.append(Collate(self.batch_size, self.is_partial))
        return Conveyer(stages, block_size=self.block)

    @property
    def stride(self) -> int:
        return (self.batch_size or 1) * self.world

    def epoch(self, number: int) -> Iterator[int]:
        """Yields the items of an epoch."""
        n = self.row.length
        values = self.row.values() if n is None else islice(self.row.values(), number * n, (number + 1) * n)
        for what, a in self.steps:
            values = {"filter": _filtered, "flat": _flat, "map": _mapped, "scan": _scanned}[what](values, a)
        return values

    def divided(self, items: list[int], *, is_endless: bool) -> Iterator[list[list[int]]]:
        """Yields for each step what every rank gets."""
        rule = "drop" if self.batch_size and not self.is_partial else self.uneven if self.world > 1 else "pad"
        for first in range(0, len(items), self.stride):
            part, size = items[first : first + self.stride], self.batch_size or 1
            if len(part) < self.stride:
                if is_endless or rule == "drop":
                    return
                if rule == "exact":
                    yield [each.tolist() for each in np.array_split(np.array(part), self.world)]
                    return
                size = -(-len(part) // self.world)
                part = part + [None] * (size * self.world - len(part))  # type: ignore[list-item]  # filled by the caller, which knows the epoch
            yield [part[rank * size : (rank + 1) * size] for rank in range(self.world)]

    def of_epoch(self, number: int, first: int = 0, most: int = MOST) -> list[list[list[int]]]:
        """Returns the steps of an epoch from an item on."""
        is_endless = self.row.length is None
        whole = list(islice(self.epoch(number), first + most * self.stride if is_endless else None))
        steps = list(islice(self.divided(whole[first:], is_endless=is_endless), most if is_endless else None))
        fill = iter(whole * (self.world + 1))
        return [[[next(fill) if x is None else x for x in part] for part in step] for step in steps]


def _filtered(values: Iterator[int], a: int) -> Iterator[int]:
    return (x for x in values if x % a == 0)


def _flat(values: Iterator[int], a: int) -> Iterator[int]:
    return (x * 10 + number for x in values for number in range(x % a))


def _mapped(values: Iterator[int], a: int) -> Iterator[int]:
    return (x + a for x in values)


def _scanned(values: Iterator[int], a: int) -> Iterator[int]:
    total = 0
    for x in values:
        total = (total + a * x) % 1000
        yield total


STEPS = st.lists(st.tuples(st.sampled_from(["filter", "flat", "map"]), st.integers(1, 3)), min_size=1, max_size=4).filter(
    lambda steps: any(what != "map" for what, _ in steps)
)


TAILS = st.lists(st.tuples(st.sampled_from(["map", "scan"]), st.integers(1, 3)), max_size=2)


@st.composite
def expanded_pipelines(draw: Callable[..., Any]) -> ExpandedPipeline:
    row = draw(st.one_of(ROWS, STREAMS))
    steps = tuple(draw(STEPS))
    if row.length is None:  # keeps every item, because a filter might drop them all
        steps = tuple((what, a if what == "map" else 1 if what == "filter" else 3) for what, a in steps)
        steps = tuple(step for step in steps if step[0] != "flat") or (("filter", 1),)
        steps = (*steps, ("filter", 1))
    if draw(st.booleans()):
        steps = (*steps, ("scan", draw(st.integers(1, 3))), *draw(TAILS))
    return ExpandedPipeline(
        row,
        steps,
        block=draw(st.integers(1, 9)),
        world=draw(st.integers(1, 3)),
        uneven=draw(st.sampled_from(["pad", "drop", "exact"])),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 4))),
        is_partial=draw(st.booleans()),
    )


def taken(pipeline: Conveyer, most: int) -> list[list[int]]:
    return [plain(each) for each in islice(pipeline, most)]


EXAMPLE = ExpandedPipeline(Leaf(20, False, False, 3), (("filter", 2), ("flat", 3)), world=2, batch_size=3)


@slow
@settings(deadline=None, max_examples=150)
@given(expanded_pipelines())
@example(EXAMPLE)
@example(replace(EXAMPLE, uneven="exact"))
@example(replace(EXAMPLE, uneven="drop", batch_size=None))
def test_each_rank_gets_its_part_of_the_output(spec: ExpandedPipeline) -> None:
    with ExitStack() as stack:
        for rank in range(spec.world):
            pipeline = stack.enter_context(spec.make(rank))
            for epoch in range(1 if spec.row.length is None else 2):
                expected = [step[rank] for step in spec.of_epoch(epoch) if step[rank]]
                assert taken(pipeline, len(expected) + (spec.row.length is not None)) == expected


@slow
@settings(deadline=None, max_examples=150)
@given(expanded_pipelines(), st.integers(0, 12), st.integers(1, 3), st.integers(0, 2), st.integers(0, 1))
@example(EXAMPLE, 1, 3, 1, 0)
def test_any_number_of_ranks_can_resume_at_any_step(
    spec: ExpandedPipeline, num_steps: int, world: int, saver: int, epoch: int
) -> None:
    with ExitStack() as stack:
        pipeline = stack.enter_context(spec.make(saver % spec.world))
        epoch = 0 if pipeline.is_endless else epoch
        for _ in range(epoch):
            pipeline.begin_next_epoch()
        steps = [step for step in spec.of_epoch(epoch) if len(step[-1]) == (spec.batch_size or 1)]
        num_steps = min(num_steps, len(steps))
        assert taken(pipeline, num_steps) == [step[saver % spec.world] for step in steps[:num_steps]]
        state = json.loads(json.dumps(pipeline.state()))
        on = replace(spec, world=world)
        expected = on.of_epoch(epoch, num_steps * spec.stride)
        for rank in range(world):
            again = stack.enter_context(on.make(rank))
            again.load_state(state)
            assert again.state() == {**state, "uneven": again.state()["uneven"]} or spec.uneven != "pad"
            mine = [step[rank] for step in expected if step[rank]]
            assert taken(again, len(mine)) == mine


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_expand_the_same_items(num_workers: int) -> None:
    spec = replace(EXAMPLE, num_workers=num_workers, world=1)
    with spec.make() as pipeline:
        assert [taken(pipeline, 99) for _ in range(2)] == [[step[0] for step in spec.of_epoch(epoch)] for epoch in range(2)]


def fails_at_7(x: int) -> Any:
    if x == 7:
        raise ValueError("seven")
    return [x]


@pytest.mark.parametrize("stage", [Map(fails_at_7), Filter(fails_at_7), FlatMap(fails_at_7)], ids=["map", "filter", "flat map"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_failing_item_raises_in_its_place_and_the_next_follows(stage: Any, num_workers: int) -> None:
    workers = [DistributedBatchedMap(Add(0), num_workers)] if num_workers else []
    with Conveyer([Range(10, repeating=False), *workers, Filter(bool), stage], block_size=4) as pipeline:
        assert len([pipeline() for _ in range(6)]) == 6
        with pytest.raises(ValueError, match=r"seven\nshmload: stage \d \(\w+\), of item 7 of epoch 0"):
            pipeline()
        assert len(list(pipeline)) == 2


async def add_one(x: int) -> int:
    return x


def inside(x: int) -> list[int]:
    with Conveyer([Range(5, repeating=False), Filter(lambda _: True)]) as other:
        return [x + 0 * sum(other)]


HOLDING: dict[str, list[Any]] = {
    "Shuffle": [Shuffle(buffer_size=6)],
    "FlatMap before Shuffle": [FlatMap(lambda x: [x, x]), Shuffle(buffer_size=4)],
    "AsyncMap": [AsyncMap(add_one)],
    "a pipeline in a function": [FlatMap(inside)],
}


@pytest.mark.parametrize("kind", HOLDING)
def test_error_after_a_buffering_stage_names_its_own_item(kind: str) -> None:
    for block_size in (10, 256):
        stages = [Range(20, repeating=False), *HOLDING[kind], Map(fails_at_7)]
        with Conveyer(stages, block_size=block_size) as pipeline, pytest.raises(ValueError, match=r"\(Map\), of item 7 of epoch 0"):
            list(pipeline)


def test_bucket_batch_that_cannot_be_collated_is_named_by_its_first_item() -> None:
    rows = [{"n": 0}, {"n": 5, "x": 1}, {"n": 0}, {"n": 5}, {"n": 0}]
    stages = [Items(rows), Bucket(lambda row: row["n"], [1], 2)]
    with Conveyer(stages) as pipeline, pytest.raises(SampleError, match=r"collating a batch of Bucket, of item 1 of epoch 0"):
        list(pipeline)


def test_stage_that_raises_stop_iteration_is_an_error_with_its_name() -> None:
    message = r"the function of stage 1 \(Filter\) raised StopIteration"
    stages = [Range(3, repeating=False), Filter(lambda x: next(iter(())))]
    with Conveyer(stages) as pipeline, pytest.raises(RuntimeError, match=message):
        pipeline()


def test_none_is_an_item_like_any_other() -> None:
    with Conveyer([Items([None, 1, None], repeating=False), Filter(lambda x: True)]) as pipeline:
        assert list(pipeline) == [None, 1, None]


def test_shuffle_buffer_gives_each_item_once_in_a_new_order_each_epoch() -> None:
    with Conveyer([Range(100, repeating=False), Shuffle(buffer_size=20)], block_size=50) as pipeline:
        first, second = list(pipeline), list(pipeline)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first != sorted(first)
    with Conveyer([Range(100, repeating=False), Shuffle(buffer_size=20)], block_size=50) as again:
        assert list(again) == first


@pytest.mark.parametrize("buffer_size", [1, 2, 7])
def test_shuffle_buffer_draws_one_of_the_next_buffer_size_items(buffer_size: int) -> None:
    with Conveyer([Range(400, repeating=False), Shuffle(buffer_size=buffer_size)], block_size=400) as pipeline:
        order = list(pipeline)
    assert max(item - place for place, item in enumerate(order)) == buffer_size - 1, "no item comes before it was in the buffer"
    assert (order == sorted(order)) == (buffer_size == 1)


@pytest.mark.parametrize("strategy", ["greedy", "best_fit"])
def test_packed_windows_hold_every_token_once_and_mark_sequences(strategy: str) -> None:
    rng = np.random.default_rng(5)
    texts = [rng.integers(1, 1000, rng.integers(0, 23)) for _ in range(60)]
    with Conveyer([Items(texts), Pack(8, strategy=strategy), Collate(4)], block_size=16) as pipeline:
        batches = list(pipeline)
    windows = [{name: batch[name][row] for name in batch} for batch in batches for row in range(len(batch["tokens"]))]
    pieces = []
    for window in windows:
        segments = window["segment_ids"]
        assert window["tokens"].shape == (8,)
        assert (window["tokens"][segments == 0] == 0).all()
        for number in range(1, int(segments.max()) + 1):
            part = segments == number
            assert window["position_ids"][part].tolist() == list(range(int(part.sum())))
            pieces.append(window["tokens"][part].tolist())
    expected = [text[first : first + 8].tolist() for text in texts for first in range(0, len(text), 8)]
    assert sorted(pieces) == sorted(expected)


def test_empty_sequence_is_left_out_of_windows() -> None:
    with Conveyer([Items([[1, 2], [], [3]]), Pack(4)]) as pipeline:
        assert [window["tokens"].tolist() for window in pipeline] == [[1, 2, 3, 0]]


def test_best_fit_is_the_window_with_the_least_room() -> None:
    with Conveyer([Items([[1] * 5, [2] * 4, [3] * 2, [4] * 1]), Pack(6, strategy="best_fit")]) as pipeline:
        assert [window["tokens"].tolist() for window in pipeline] == [[1, 1, 1, 1, 1, 4], [2, 2, 2, 2, 3, 3]]


@pytest.mark.parametrize("strategy", ["greedy", "best_fit"])
def test_sequence_is_copied_before_the_next_is_read(strategy: str) -> None:
    buffer = np.zeros(2, np.int64)

    def refilled(number: int) -> Any:
        buffer[:] = number
        return buffer

    with Items([1, 2, 3, 4]).map(refilled).pack(4, strategy=strategy).conveyer() as pipeline:
        assert [window["tokens"].tolist() for window in pipeline] == [[1, 1, 2, 2], [3, 3, 4, 4]]


def length_of(text: str) -> int:
    return len(text)


@pytest.mark.parametrize("sizes", [{"batch_size": 3}, {"max_tokens": 24}], ids=str)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_buckets_give_each_item_once_in_batches_of_similar_length(sizes: dict[str, int], num_workers: int) -> None:
    rng = np.random.default_rng(3)
    texts = ["x" * int(length) for length in rng.integers(1, 30, 100)]
    workers = [DistributedBatchedMap(str, num_workers)] if num_workers else []
    with Conveyer([Items(texts), *workers, Bucket(length_of, (8, 16), **sizes)], block_size=50) as pipeline:
        batches = [(batch, pipeline.valid) for batch in pipeline]
    assert sorted(text for batch, _ in batches for text in batch) == sorted(texts)
    assert all(valid == len(batch) for batch, valid in batches)
    for batch, _ in batches:
        assert len({np.searchsorted((8, 16), len(text)) for text in batch}) == 1
        if "batch_size" in sizes:
            assert len(batch) <= 3
        else:
            assert len(batch) == 1 or len(batch) * max(map(len, batch)) <= 24
    with Conveyer([Items(texts), Bucket(length_of, (8, 16), **sizes)], block_size=50) as again:
        for batch, _ in batches[:4]:
            assert again() == batch
        state = again.state()
    with Conveyer([Items(texts), Bucket(length_of, (8, 16), **sizes)], block_size=50) as rest:
        rest.load_state(state)
        assert list(rest) == [batch for batch, _ in batches[4:]]


def row_of(x: int) -> dict[str, Any]:
    return {"x": np.full(3, float(x)), "pid": 0}


def mixed(batch: dict[str, Any]) -> dict[str, Any]:
    """Mixes neighboring samples and records the process."""
    share = float(shmload.sample_rng().random())
    return {"x": share * batch["x"] + (1 - share) * batch["x"].flip(0), "pid": os.getpid()}


def test_batch_map_gives_the_same_in_workers_and_in_the_trainer() -> None:
    found = []
    for num_workers in (0, 1, 2):
        rows = DistributedBatchedMap(row_of, num_workers) if num_workers else Map(row_of)
        with Conveyer([Range(12, repeating=False), rows, Collate(4), BatchMap(mixed)]) as pipeline:
            batches = list(pipeline)
        assert [(batch["pid"] == os.getpid()) for batch in batches] == [num_workers == 0] * 3
        found.append([batch["x"].tolist() for batch in batches])
    assert found[0] == found[1] == found[2]
    assert found[0][0] != [[float(x)] * 3 for x in range(4)]


async def answer(x: int) -> int:
    """Answers later requests sooner."""
    waiting[0] += 1
    waiting[1] = max(waiting)
    for _ in range(20 - x % 20):
        await asyncio.sleep(0)
    waiting[0] -= 1
    if x == 13:
        raise LookupError("thirteen")
    return x * x


waiting = [0, 0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_async_requests_overlap_and_answers_keep_their_order(num_workers: int) -> None:
    workers = [DistributedBatchedMap(Add(0), num_workers)] if num_workers else []
    waiting[:] = [0, 0]
    with Conveyer([Range(40, repeating=False), *workers, AsyncMap(answer, in_flight=5)], block_size=20) as pipeline:
        found = []
        for x in range(40):
            if x == 13:
                with pytest.raises(LookupError, match="thirteen") as raised:
                    pipeline()
                assert "(AsyncMap), of item 13 of epoch 0" in str(raised.value)
            else:
                found.append(pipeline())
    assert found == [x * x for x in range(40) if x != 13]
    if not num_workers:
        assert waiting == [0, 5]


async def drawn_around_a_request(x: int) -> tuple[int, float, float, float]:
    kept = sample_rng()
    before = sample_rng().random()
    await asyncio.sleep(SystemRandom().random() / 500)
    answers = await asyncio.gather(answered_draw())
    return x, before, answers[0], kept.random()


async def answered_draw() -> float:
    await asyncio.sleep(SystemRandom().random() / 500)
    return sample_rng().random()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_item_draws_its_own_numbers_after_a_request_too(num_workers: int) -> None:
    """The answers come in another order in every run."""

    def items(first: int) -> list[Any]:
        workers = [DistributedBatchedMap(Add(0), num_workers)] if num_workers else []
        with Conveyer([Range(40, repeating=False), *workers, AsyncMap(drawn_around_a_request)], block_size=10) as pipeline:
            for _ in range(first):
                pipeline()
            state = pipeline.state()
        with Conveyer([Range(40, repeating=False), AsyncMap(drawn_around_a_request)], block_size=10) as pipeline:
            pipeline.load_state(state)
            return list(pipeline)

    whole = items(0)
    assert (items(0), items(13)) == (whole, whole[13:])
    assert len({value for item in whole for value in item[1:]}) == 120


async def with_draw(item: Any) -> Any:
    return item, sample_rng().random()


def test_two_async_stages_draw_different_numbers() -> None:
    items = list(Items(range(40)).async_map(with_draw).filter(lambda _: True).async_map(with_draw))
    assert len({value for (_, first), second in items for value in (first, second)}) == 80


@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_the_item_is_lost_whose_filter_has_no_truth_value(num_workers: int) -> None:
    stages: list[Any] = [Range(6, repeating=False), Filter(lambda x: np.array([True, True]) if x == 2 else True)]
    if num_workers:
        stages.insert(1, DistributedBatchedMap(Add(0), num_workers))
    with Conveyer(stages) as pipeline:
        iterator = iter(pipeline)
        assert [next(iterator), next(iterator)] == [0, 1]
        with pytest.raises(ValueError, match=r"stage \d \(Filter\), of item 2 of epoch 0"):
            next(iterator)
        assert [pipeline(), pipeline(), pipeline()] == [3, 4, 5]


def test_loader_within_a_coroutine_draws_for_its_own_samples() -> None:
    class Noise:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> float:
            return sample_rng().random()

    expected = next(iter(ShmLoader(Noise(), batch_size=3, seed=7))).tolist()

    async def read(x: int) -> Any:
        sample_rng()
        await asyncio.sleep(0)
        return next(iter(ShmLoader(Noise(), batch_size=3, seed=7))).tolist()

    with Conveyer([Items([1, 2]), AsyncMap(read)]) as pipeline:
        assert list(pipeline) == [expected, expected]


def test_async_requests_of_two_threads_overlap() -> None:
    both = Barrier(2, timeout=30)

    async def meets_the_other(x: int) -> int:
        both.wait()
        return x + 1

    def read() -> list[int]:
        with Conveyer([Items([1]), AsyncMap(meets_the_other)]) as pipeline:
            return list(pipeline)

    with ThreadPoolExecutor(2) as threads:
        assert [each.result() for each in [threads.submit(read) for _ in range(2)]] == [[2], [2]]


def test_async_map_works_while_an_event_loop_runs() -> None:
    """Runs in the loop of a notebook, or inside another request."""

    async def added(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    async def inner(x: int) -> int:
        task = asyncio.current_task()
        with Conveyer([Items([x, x]), AsyncMap(added)]) as pipeline:
            found = sum(pipeline)
        await asyncio.sleep(0)
        return found if asyncio.current_task() is task else -1

    assert asyncio.run(inner(1)) == 4
    with Conveyer([Items([1, 2]), AsyncMap(inner)]) as pipeline:
        assert list(pipeline) == [4, 6]


def test_interrupt_of_requests_is_raised_once_and_leaves_none_pending() -> None:
    armed, add_one = [True], []

    async def interrupted(x: int) -> int:
        await asyncio.sleep(0)
        if x == 2 and armed.pop() if armed else False:
            raise KeyboardInterrupt  # as a signal does in whatever code runs
        await asyncio.sleep(0.001)
        add_one.append(x)
        return x

    with Conveyer([Items(range(5)), AsyncMap(interrupted)]) as pipeline:
        with pytest.raises(KeyboardInterrupt):
            pipeline()
        assert list(pipeline) == list(range(5))
    assert sorted(add_one) == list(range(5))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_cancelled_request_is_a_failing_item(num_workers: int) -> None:
    async def cancelled(x: int) -> int:
        if x == 2:
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            await task
        return x

    with Conveyer([Items(range(5), n_workers=num_workers), AsyncMap(cancelled)]) as pipeline:
        assert [pipeline(), pipeline()] == [0, 1]
        with pytest.raises(RuntimeError, match=r"(?s)waited for was cancelled.*\(AsyncMap\), of item 2 of epoch 0"):
            pipeline()
        assert list(pipeline) == [3, 4]


def test_generated_items_depend_on_their_position() -> None:
    with Conveyer([Generate(Add(5), 3)]) as pipeline:
        assert [list(pipeline), list(pipeline)] == [[5, 6, 7], [8, 9, 10]]
    with Conveyer([Generate(Add(5), 3, repeating=True)]) as endless:
        assert list(islice(endless, 7)) == list(range(5, 12))


def test_methods_make_the_same_stages() -> None:
    made = Items(list(range(10))).map(Add(1)).filter(Divisible(2)).shuffle(buffer_size=3).batch(2)
    assert [type(stage).__name__ for stage in made.stages] == ["Items", "Map", "Filter", "Shuffle", "Collate"]
    assert sorted(x for batch in made for x in batch.tolist()) == [2, 4, 6, 8, 10]
    assert list(Items("abc").zip(Items("xy").map(str.upper)).take(1)) == [("a", "X")]
    assert list(Items("ab").chain(Items("c")).skip(1).enumerate(1)) == [(1, "b"), (2, "c")]
    assert list(Items("ab").interleave(Items("xyz"), block_length=2)) == ["a", "b", "x", "y", "z"]
    with made.conveyer(block_size=4) as pipeline:
        assert isinstance(pipeline.state(), dict)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Range(3), Filter(bool), Enumerate()], r"stage 2, Enumerate, needs the position of each item.*stage 1 \(Filter\)"),
        ([Range(3), Filter(bool), Take(2)], "needs the position of each item"),
        ([Range(3), Filter(bool), Shuffle()], "needs the position of each item"),
        ([Range(3), Collate(2), Filter(bool)], "stage 2, Filter, comes after Collate"),
        ([Range(3), BatchMap(mixed)], "stage 1, BatchMap, is a function of batches where they are made: it follows Collate"),
        ([Range(3), Collate(2), Map(mixed), BatchMap(mixed)], "it follows Collate, before any Map of whole batches"),
        ([Range(3), Filter(bool), Collate(2), BatchMap(mixed)], "needs batches that workers make whole"),
        ([Zip([Range(3), Filter(bool)])], "member 0 of the Zip has a stage that makes more or fewer items"),
    ],
)
def test_invalid_stage_order_is_refused(stages: list[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Conveyer(stages)


def test_state_of_other_stages_or_blocks_is_refused() -> None:
    with Conveyer([Range(9, repeating=False), Filter(bool)], block_size=4) as pipeline:
        pipeline()
        state = pipeline.state()
    for stages, block in (([Range(9, repeating=False), Filter(bool)], 5), ([Range(9, repeating=False), FlatMap(list)], 4)):
        with Conveyer(stages, block_size=block) as other, pytest.raises(StateMismatch, match="another order"):
            other.load_state(state)


@pytest.mark.parametrize("options", [{"on_error": "skip"}, {"max_bad": 3}, {"audit": "folder"}], ids=str)
def test_options_that_blocks_do_not_support_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="workers make blocks of items here"):
        Conveyer([Range(9), Filter(bool), Collate(2)], **options)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("num_dropped", [2, 40])
def test_endless_pipeline_without_items_logs_one_warning(
    num_dropped: int, in_order: bool, caplog: pytest.LogCaptureFixture
) -> None:
    num_seen = count(1)
    workers = DistributedBatchedMap(Add(0), 1, in_order=in_order)
    dropping = Filter(lambda x: next(num_seen) > num_dropped)
    with Conveyer([Items(range(3), repeating=True), workers, dropping], block_size=2) as pipeline:
        assert pipeline() in range(3)
    words = "a whole epoch has passed without any item after Filter of blocks of 2 of Items(range of 3"
    assert [words in record.getMessage() for record in caplog.records] == [True] * (num_dropped > 2)


def test_length_after_a_filter_is_unknown() -> None:
    with Conveyer([Range(9), Filter(bool)]) as pipeline, pytest.raises(TypeError, match="not known before they are read"):
        len(pipeline)
