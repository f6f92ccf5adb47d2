"""Unordered workers (`in_order=False`): every item comes once in any order, and a resume has exactly the rest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shmload
from shmload.errors import WorkerDied
from shmload.pipeline import (
    BatchMap,
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Filter,
    Items,
    Join,
    Partition,
    Permutation,
    Range,
    Scan,
    Stream,
)
from tests.pipeline import worker_items as items
from tests.pipeline.pipeline_kit import Add, plain


class WaitsForAnother:
    """A function that finishes its first item only after another item is done in another worker."""

    def __init__(self, path: Path) -> None:
        self.fifo = path
        os.mkfifo(path)

    def __call__(self, x: int) -> int:
        if x == 0:
            self.fifo.read_bytes()  # until a writer has closed it
        if x == 5:
            self.fifo.write_bytes(b"done")
        return x


def test_slow_item_does_not_delay_the_others(tmp_path: Path) -> None:
    waits = DistributedBatchedMap(WaitsForAnother(tmp_path / "fifo"), 2, timeout=60, in_order=False)
    with Conveyer([Range(12, repeating=False), waits], block_size=1) as pipeline:
        found = list(pipeline)
    assert sorted(found) == list(range(12))
    assert found.index(0) > found.index(5)  # in order, it would never have come


def drawn(x: int) -> tuple[int, float]:
    return x, float(shmload.sample_rng().random())


@pytest.mark.parametrize("source", [Permutation(40, repeating=False), Stream(range(40))], ids=["placed", "streamed"])
def test_items_equal_those_of_an_ordered_pipeline(source: Any) -> None:
    state = torch.get_rng_state()
    epochs = []
    for in_order in (True, False):
        workers = DistributedBatchedMap(drawn, 2, in_order=in_order)
        with Conveyer([source, workers, Filter(bool)], block_size=3) as pipeline:
            epochs.append([sorted(pipeline) for _ in range(2)])
    assert epochs[0] == epochs[1]
    assert torch.equal(torch.get_rng_state(), state)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 30), st.integers(1, 5), st.integers(0, 2), st.booleans(), st.integers(1, 3))
def test_resume_has_exactly_the_rest(
    num_consumed: int, block_size: int, then_workers: int, is_streamed: bool, batch_size: int
) -> None:
    def make(num_workers: int) -> Conveyer:
        source = Stream(range(30)) if is_streamed else Range(30, repeating=False)
        workers = DistributedBatchedMap(Add(100), max(num_workers, 1), in_order=not num_workers)
        return Conveyer([source, workers, Collate(batch_size)], block_size=block_size)

    with make(2) as pipeline:
        iterator = iter(pipeline)
        consumed = [x for _ in range(min(num_consumed, 29 // batch_size)) for x in plain(next(iterator))]
        state = json.loads(json.dumps(pipeline.state()))
        rest = [x for batch in pipeline for x in plain(batch)]
    assert sorted(consumed + rest) == list(range(100, 130))
    with make(max(then_workers, 1)) as again:
        again.load_state(state)
        assert again.state() == state
        twice = [x for batch in again for x in plain(batch)]
        assert sorted(consumed + twice) == list(range(100, 130))
        assert sorted(x for batch in again for x in plain(batch)) == list(range(100, 130))


def test_state_of_an_ordered_pipeline_can_be_loaded() -> None:
    def make(in_order: bool) -> Conveyer:
        return Conveyer(
            [Range(20, repeating=False), DistributedBatchedMap(Add(0), 1, in_order=in_order), Filter(bool)], block_size=4
        )

    with make(True) as pipeline, make(False) as other:
        assert [pipeline() for _ in range(6)] == list(range(1, 7))
        other.load_state(pipeline.state())
        assert sorted(other) == list(range(7, 20))


def test_worker_that_dies_is_replaced_and_no_item_is_lost(tmp_path: Path) -> None:
    workers = DistributedBatchedMap(items.KillsOnce(str(tmp_path)), 2, in_order=False)
    with Conveyer([Range(30, repeating=False), workers], block_size=2) as pipeline:
        assert sorted(pipeline) == list(range(30))


def test_only_the_block_that_kills_its_worker_twice_is_lost() -> None:
    workers = DistributedBatchedMap(items.kills_at_9, 1, in_order=False)
    found, lost = [], []
    with Conveyer([Range(20, repeating=False), workers], block_size=2) as pipeline:
        while True:
            try:
                found.append(pipeline())
            except WorkerDied as error:
                lost.append(str(error))
            except StopIteration:
                break
    assert len(lost) == 1
    assert "sample <block 4> of epoch 0" in lost[0]
    assert sorted(found) == [x for x in range(20) if x not in (8, 9)]


def test_failing_item_raises_and_the_others_follow() -> None:
    workers = DistributedBatchedMap(items.fails_at_7, 2, in_order=False)
    found = []
    with Conveyer([Range(20, repeating=False), workers], block_size=3) as pipeline:
        with pytest.raises(ValueError, match="of item 7 of epoch 0"):
            while True:
                found.append(pipeline())
        found += list(pipeline)
    assert sorted(found) == [x for x in range(20) if x != 7]


def test_endless_source_continues_after_a_resume() -> None:
    with Conveyer([Range(5), DistributedBatchedMap(Add(0), 2, in_order=False)], block_size=1) as pipeline:
        found = [pipeline() for _ in range(50)]
        state = pipeline.state()
        pipeline.load_state(json.loads(json.dumps(state)))
        assert pipeline.state() == state
        found += [pipeline() for _ in range(50)]
        later = pipeline.state()
    for saved, num_items in ((state, 50), (later, 100)):
        num_partial, *pairs = saved["counters"][1:]
        whole = pairs[2 * num_partial :]
        assert saved["epoch"] * 5 + saved["position"] + num_partial + sum(whole[1::2]) == num_items  # one item is one block


def test_stages_that_need_an_order_are_refused() -> None:
    workers = DistributedBatchedMap(Add(0), 1, in_order=False)
    with pytest.raises(ValueError, match="in another order on each rank"):
        Conveyer([Range(5), Partition(0, 2), workers])
    with pytest.raises(ValueError, match="a Scan would carry"):
        Conveyer([Range(5), workers, Scan(lambda s, x: (s, x))])
    with pytest.raises(ValueError, match="leave out BatchMap"):
        Conveyer([Range(5), workers, Collate(2), BatchMap(plain)])
    with pytest.raises(ValueError, match="gives items in the order in which they are done"):
        Join([(Conveyer([Items([1]), workers]), 1)])
