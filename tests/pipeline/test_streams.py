"""Streams with real workers, real kills and other libraries' iterables; test_expanded.py tests their items."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmload
from shmload.errors import StateMismatch, WorkerDied
from shmload.pipeline import (
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Filter,
    Items,
    Join,
    Map,
    Partition,
    Range,
    Scan,
    Shuffle,
    Stream,
    Zip,
)
from tests.pipeline import worker_items as items
from tests.pipeline.pipeline_kit import Add, plain

WORKERS = [0, 2]


def drawn(x: int) -> tuple[int, float, float, float]:
    return x, float(shmload.sample_rng().random()), float(np.random.rand()), torch.rand(1).item()


def numbers(n: int, function: Any, num_workers: int, **options: Any) -> Conveyer:
    stages = [DistributedBatchedMap(function, num_workers)] if num_workers else [Map(function)]
    return Conveyer([Stream(range(n), seed=5), *stages], block_size=4, **options)


def test_draws_of_a_block_do_not_depend_on_its_worker() -> None:
    before = np.random.get_state()[1].tobytes()  # type: ignore[union-attr]  # the legacy form
    with numbers(20, drawn, 0) as alone, numbers(20, drawn, 2) as shared:
        first, second = list(alone), list(alone)
        assert list(shared) == first
        assert list(shared) == second
    assert len({value for item in first + second for value in item[1:]}) == 2 * 3 * 20
    assert np.random.get_state()[1].tobytes() == before  # type: ignore[union-attr]  # a tuple


@pytest.mark.parametrize("num_workers", WORKERS)
def test_failing_iterable_gives_its_earlier_items_and_ends(num_workers: int) -> None:
    def breaks() -> Iterator[int]:
        yield from range(6)
        raise ValueError("torn")

    stages = [DistributedBatchedMap(Add(1), num_workers)] if num_workers else []
    with Conveyer([Stream(breaks), *stages], block_size=4) as pipeline:
        assert [pipeline() for _ in range(6)] == [x + (num_workers > 0) for x in range(6)]
        with pytest.raises(ValueError, match=r"(?s)torn.*shmload: item 6 of epoch 0 of the Stream"):
            pipeline()
        with pytest.raises(StopIteration):
            pipeline()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_failing_item_is_named_by_its_position_in_the_stream(num_workers: int) -> None:
    with numbers(10, items.fails_at_7, num_workers) as pipeline:
        assert [pipeline() for _ in range(7)] == list(range(7))
        with pytest.raises(ValueError, match=r"shmload: stage 1 \(\w+\), of item 7 of epoch 0 of the Stream"):
            pipeline()
        assert list(pipeline) == [8, 9]


def test_only_the_item_that_cannot_be_sent_is_lost() -> None:
    with Conveyer([Stream([0, 1, memoryview(b""), 3, 4, 5], n_workers=1)], block_size=4) as pipeline:
        assert [pipeline(), pipeline()] == [0, 1]
        with pytest.raises(
            TypeError, match=r"(?s)an item of the Stream, of type memoryview, cannot be pickled.*shmload: item 2 of epoch 0"
        ):
            pipeline()
        assert list(pipeline) == [3, 4, 5]


def test_items_are_unchanged_after_passing_through_workers() -> None:
    """The items are pickled twice. Neither pickle may swap bytes or lose a dtype that torch's pickle cannot read."""
    odd = [np.arange(3, dtype=">i4"), torch.ones(2, dtype=torch.uint8).to(torch.uint16)]
    with Conveyer([Stream(odd, n_workers=1)]) as pipeline:
        array, tensor = pipeline
    assert (array.dtype.str, array.tolist()) == (">i4", [0, 1, 2])
    assert (tensor.dtype, tensor.tolist()) == (torch.uint16, [1, 1])


def test_dead_worker_is_replaced_without_losing_items(tmp_path: Path) -> None:
    with numbers(30, items.KillsOnce(str(tmp_path)), 2) as pipeline:
        assert list(pipeline) == list(range(30))


def test_block_that_kills_its_worker_twice_is_lost_and_the_position_stays_right() -> None:
    with numbers(20, items.kills_at_9, 1) as pipeline:
        assert [pipeline() for _ in range(8)] == list(range(8))
        with pytest.raises(WorkerDied, match="sample <block 2> of epoch 0") as died:  # not every item of the block
            pipeline()
        assert died.value.__notes__[0].startswith("shmload: a block has 4 items; sample_timeout_s is the timeout of")
        assert [pipeline() for _ in range(3)] == [12, 13, 14]
        state = pipeline.state()
    assert (state["position"], state["counters"]) == (3, [3])


def test_stream_can_start_workers() -> None:
    with Conveyer([Stream(range(6), n_workers=1), Map(lambda x: os.getpid())]) as pipeline:
        assert os.getpid() not in list(pipeline)


def test_take_reads_no_item_after_its_last_one() -> None:
    """A further item of live data may never come."""
    items, read = iter(range(10)), []

    def live() -> Iterator[int]:
        for x in range(5):
            read.append(x)
            yield x

    assert list(Stream(items).take(3)) == [0, 1, 2]
    assert next(items) == 3
    assert list(Stream(live).skip(1).take(2).enumerate(7).skip(1)) == [(8, 2)]
    assert read == [0, 1, 2]


def test_second_epoch_of_an_iterator_is_an_error() -> None:
    with Conveyer([Stream(iter(range(3)))]) as pipeline:
        assert list(pipeline) == [0, 1, 2]
        with pytest.raises(ValueError, match="can be read only once"):
            next(iter(pipeline))


def test_ranks_need_the_first_items_again_to_pad_the_last_step() -> None:
    once = Conveyer([Stream(iter(range(3))), Partition(0, 2)])
    with once, pytest.raises(ValueError, match="cannot be read again"):
        list(once)
    for rank, expected in enumerate(([0, 2], [1, 0])):
        with Conveyer([Stream(range(3)), Partition(rank, 2)]) as pipeline:
            assert list(pipeline) == expected


class StatefulIterator:
    """An iterator with its own state."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.num_read = n, 0, 0

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> int:
        if self.at == self.n:
            raise StopIteration
        self.at, self.num_read = self.at + 1, self.num_read + 1
        return self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "words": ["a", b"b", np.arange(2)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["words"][2].tolist() == [0, 1]
        self.at = state["at"]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_resume_from_an_iterators_state_rereads_at_most_a_block(num_workers: int) -> None:
    stages = [DistributedBatchedMap(Add(0), num_workers)] if num_workers else []
    with Conveyer([Stream(lambda: StatefulIterator(100)), *stages, Collate(5)], block_size=8) as pipeline:
        consumed = [plain(pipeline()) for _ in range(7)]
        state = json.loads(json.dumps(pipeline.state()))
        rest = [plain(batch) for batch in pipeline]
    made: list[StatefulIterator] = []

    def own() -> StatefulIterator:
        made.append(StatefulIterator(100))
        return made[-1]

    with Conveyer([Stream(own), Collate(5)], block_size=8) as again:
        again.load_state(state)
        assert again.state() == state
        assert [plain(batch) for batch in again] == rest
    assert list(chain.from_iterable(consumed + rest)) == list(range(100))
    assert [one.num_read for one in made] == [100 - 32]  # item 35 is in block 4


class RestartingIterable:
    """An iterable whose state at a pass's end has the start of the next pass, as stateful datasets do."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.epoch = n, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield self.at - 1 + 100 * self.epoch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("n", [9, 10, 11, 12])
@pytest.mark.parametrize("num_consumed", [1, 3, 4])
def test_resume_after_the_last_batch_repeats_no_item(num_consumed: int, n: int) -> None:
    one, other = (Conveyer([Stream(RestartingIterable(n)), Filter(lambda x: True), Collate(3)], block_size=4) for _ in range(2))
    consumed = [x for _, batch in zip(range(num_consumed), one, strict=False) for x in batch.tolist()]
    other.load_state(json.loads(json.dumps(one.state())))
    rest = [x for batch in other for x in batch.tolist()]
    assert rest == (list(range(len(consumed), n)) if len(consumed) < n else list(range(100, 100 + n)))


def test_iterator_states_are_kept_only_for_possible_resume_blocks() -> None:
    with Conveyer([Stream(lambda: StatefulIterator(1000))], block_size=2) as pipeline:
        for _ in range(500):
            pipeline()
        assert len(pipeline.engine.blocks.feed.own) < 10  # type: ignore[attr-defined]  # the engine's type here is the base


def test_state_that_only_pickle_can_write_is_refused_when_taken() -> None:
    class UnserializableState(StatefulIterator):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": object}

    with (
        Conveyer([Stream(lambda: UnserializableState(9))], block_size=2) as pipeline,
        pytest.raises(TypeError, match="only pickle"),
    ):
        list(pipeline)
    with pytest.raises(TypeError, match=r"Scan\(initial\) is saved"):
        Scan(lambda s, x: (s, x), object())


class Epochs:
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (self.epoch * 10 + x for x in range(3))


def test_set_epoch_of_an_iterable_is_called() -> None:
    with Conveyer([Stream(Epochs())]) as pipeline:
        assert [list(pipeline) for _ in range(2)] == [[0, 1, 2], [10, 11, 12]]


class ShuffledWithState:
    """An iterable whose order depends on the epoch, and whose state contains it, as those of stateful datasets do."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = random.Random(self.epoch).sample(range(6), 6)
        while self.at < 6:
            self.at += 1
            yield self.epoch, order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def test_state_of_an_iterable_does_not_undo_its_set_epoch() -> None:
    expected = [[(epoch, x) for x in random.Random(epoch).sample(range(6), 6)] for epoch in range(3)]
    with Conveyer([Stream(ShuffledWithState())], block_size=2) as pipeline:
        assert [list(pipeline) for _ in range(3)] == expected


@pytest.mark.parametrize("num_done", range(6, 13))
def test_resume_in_a_later_epoch_of_an_iterable_with_set_epoch_reads_the_rest(num_done: int) -> None:
    one, other = (Conveyer([Stream(ShuffledWithState())], block_size=2) for _ in range(2))
    with one, other:
        for _ in range(num_done):
            try:
                one()
            except StopIteration:
                one.begin_next_epoch()
                one()
        other.load_state(json.loads(json.dumps(one.state())))
        assert list(other) == list(one)


def test_large_items_travel_to_the_workers_and_back() -> None:
    with Conveyer(
        [Stream(lambda: (np.full(1 << 20, i, np.uint8) for i in range(6))), DistributedBatchedMap(sum_of, 2)]
    ) as pipeline:
        assert list(pipeline) == [i << 20 for i in range(6)]


def sum_of(x: Any) -> int:
    return int(x.sum(dtype=np.int64))


def test_torch_iterable_dataset_is_read() -> None:
    class Lines(torch.utils.data.IterableDataset[str]):
        def __iter__(self) -> Iterator[str]:
            yield from ("a", "bc", "def")

    assert next(iter(Stream(Lines()).map(len).batch(2))).tolist() == [1, 2]


def test_invalid_streams_are_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match="Stream needs an iterable"):
        Stream(3)
    with pytest.raises(TypeError, match="Stream"):
        Items(iter([1]))
    with pytest.raises(ValueError, match=r"stage 1, Shuffle, .* have no positions: give it a buffer_size"):
        Conveyer([Stream([1, 2]), Shuffle()])
    with pytest.raises(ValueError, match="a Stream or a Scan, whose state"):
        Join([(Conveyer([Stream([1])]), 1)])
    with pytest.raises(ValueError, match=r"stage 2, Scan, follows one that decodes into the batch"):
        Conveyer([Range(3), DistributedBatchedMap(items.Squares(), 1), Scan(lambda s, x: (s, x)), Collate(2)])
    with pytest.raises(ValueError, match="member 1 of the Zip is a Stream"):
        Conveyer([Zip(Range(3), Stream([1]))])
    with pytest.raises(ValueError, match=r"stage 2, Filter, comes after stage 1 \(Scan\)"):
        Conveyer([Range(3), Scan(lambda s, x: (s, x)), Filter(bool)])


def test_class_can_be_the_iterator_factory() -> None:
    def made() -> Conveyer:
        return Conveyer([Stream(count), Filter(lambda x: x % 3), Collate(2)], block_size=4)

    with made() as pipeline, made() as again:
        assert [plain(pipeline()) for _ in range(2)] == [[1, 2], [4, 5]]
        again.load_state(pipeline.state())
        assert plain(again()) == plain(pipeline()) == [7, 8]


def test_factory_that_returns_no_iterator_is_an_error() -> None:
    with Conveyer([Stream(lambda: 3)]) as pipeline, pytest.raises(TypeError, match="makes an iterator; it gave int"):
        pipeline()


def total(state: Any, x: int) -> tuple[Any, int]:
    if x == 3:
        raise ValueError("three")
    return state + x, state + x


def test_failing_scan_loses_the_item_and_keeps_its_state() -> None:
    with Conveyer([Range(6, repeating=False), Scan(total, 0)], block_size=4) as pipeline:
        assert [pipeline() for _ in range(3)] == [0, 1, 3]
        with pytest.raises(ValueError, match=r"three\n(.*\n)*shmload: stage 1 \(Scan\), of an item of block 0 of epoch 0"):
            pipeline()
        assert list(pipeline) == [7, 12]


def test_scan_can_begin_with_an_array() -> None:
    with Conveyer([Range(3, repeating=False), Scan(lambda s, x: (s + x, int(s.sum())), np.zeros(2))]) as pipeline:
        assert list(pipeline) == [0, 0, 2]


def test_scan_function_must_return_a_pair() -> None:
    with Conveyer([Range(6), Scan(lambda s, x: x, 0)]) as pipeline, pytest.raises(TypeError, match=r"gives \(state, item\)"):
        pipeline()


def test_state_without_scan_values_is_refused_and_changes_nothing() -> None:
    with Conveyer([Range(9, repeating=False), Scan(total, 0)]) as pipeline:
        first = pipeline.state()
        without = {name: value for name, value in first.items() if name not in ("children", "check")}
        with pytest.raises(StateMismatch):
            pipeline.load_state(shmload.schedule.state_checksum.with_checksum(without))
        assert pipeline() == 0


def of_shards(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"x": shard * 100 + i} for i in range(10))


def resumed(make: Any, num_epochs: int, num_steps: int) -> tuple[list[Any], list[Any]]:
    """Returns the rest of an epoch and the next one, of an uninterrupted pipeline and of one resumed from its state."""
    with make().conveyer(block_size=4) as pipeline:
        for _ in range(num_epochs):
            list(pipeline)
        iterator = iter(pipeline)
        for _ in range(num_steps):
            next(iterator)
        state = json.loads(json.dumps(pipeline.state()))
        expected = [str(item) for _ in range(2) for item in pipeline]
    with make().conveyer(block_size=4) as again:
        again.load_state(state)
        return [str(item) for _ in range(2) for item in again], expected


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_hugging_face_streams_resume(num_steps: int, is_shuffled: bool) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra shmload[huggingface]")

    def make() -> Any:
        made = datasets.IterableDataset.from_generator(of_shards, gen_kwargs={"shards": [0, 1, 2]})
        if is_shuffled:  # its own state loses what its buffer holds
            return Stream(made.shuffle(seed=3, buffer_size=5), resume="count").batch(4)
        return Stream(made).batch(4)

    found, expected = resumed(make, 2, num_steps)
    assert found == expected
    assert len(found) == 16 - num_steps


def test_torchdata_nodes_resume() -> None:
    nodes = pytest.importorskip("torchdata.nodes", reason="the extra shmload[integrations]")

    def make() -> Any:
        return Stream(nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(30)), 3, drop_last=False))).map(sum)

    found, expected = resumed(make, 1, 5)
    assert found == expected
    assert len(found) == 15


class Failing:
    """An iterable of numbers that fails at one of them, once it is told to."""

    def __init__(self) -> None:
        self.fails_at = -1

    def __iter__(self) -> Iterator[int]:
        for number in range(12):
            if number == self.fails_at:
                self.fails_at = -1
                raise ConnectionError("reset")
            yield number


@pytest.mark.parametrize("num_done", range(4, 9))
@pytest.mark.parametrize("fails_at", [4, 5])
def test_error_of_reading_hides_no_item_at_which_a_resume_continues(fails_at: int, num_done: int) -> None:
    with Conveyer([Stream(Failing())], block_size=4) as pipeline:
        for _ in range(num_done):
            pipeline()
        state = pipeline.state()
    source = Failing()
    with Conveyer([Stream(source)], block_size=4) as pipeline:
        pipeline.load_state(state)
        source.fails_at = fails_at
        if num_done > fails_at and num_done < 8:
            with pytest.raises(ConnectionError, match="reset"):
                pipeline()
            assert [pipeline() for _ in range(12 - num_done)] == list(range(num_done, 12))
        elif num_done <= fails_at:
            assert [pipeline() for _ in range(fails_at - num_done)] == list(range(num_done, fails_at))
            with pytest.raises(ConnectionError, match="reset"):
                pipeline()
