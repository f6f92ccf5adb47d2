"""States of one pipeline: when they can be taken, what is refused, and reconciling ranks that saved at different steps."""

from __future__ import annotations

import json
import logging
from itertools import islice
from typing import Any

import pytest

from shmload.errors import StateMismatch
from shmload.pipeline import Collate, Conveyer, Filter, Items, Join, Partition, Range, Scan, Stream, reconcile
from shmload.schedule.state_checksum import with_checksum
from tests.pipeline.pipeline_kit import Leaf, Spec, pulled

PLAIN = Leaf(12, True, False, 7)


@pytest.mark.parametrize("repeating", [False, True])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_state_can_be_taken_before_between_and_after_steps(batch_size: Any, repeating: bool) -> None:
    spec = Spec(Leaf(12, True, repeating, 7), batch_size=batch_size)
    expected = list(islice(spec.of_rank(0), 12))
    for num_done in range(len(expected) + 1):
        with spec.make() as pipeline, spec.make() as other:
            pulled(pipeline, num_done)
            state = json.loads(json.dumps(pipeline.state()))
            assert len(json.dumps(state)) <= 1024
            other.load_state(state)
            if not other.is_ended:
                assert pulled(other, len(expected) - num_done) == expected[num_done:]


@pytest.mark.parametrize("repeating", [False, True])
def test_steps_after_a_loaded_state_are_computed_again(repeating: bool) -> None:
    source = Range(40, repeating=repeating)
    with Conveyer([source, Collate(4)]) as pipeline, Conveyer([source, Collate(6)]) as other:
        assert pulled(pipeline, 1) == [[0, 1, 2, 3]]  # the steps at 4, 8, 12, ... are computed with it
        assert pulled(other, 1) == [[0, 1, 2, 3, 4, 5]]
        pipeline.load_state(other.state())
        assert pulled(pipeline, 2) == [[6, 7, 8, 9], [10, 11, 12, 13]]


def test_all_names_for_saving_and_loading_do_the_same() -> None:
    with Spec(PLAIN).make() as pipeline:
        pulled(pipeline, 3)
        state = pipeline.state_dict()
        assert state == pipeline.state()
        for load in (pipeline.load_state, pipeline.set_state, pipeline.load_state_dict):
            load(state)
            assert pipeline.state() == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 13}, "the state's position is 13, but an epoch has 12 items"),
        ({"epoch": 10**30}, "the state's epoch is 1000000000000000000000000000000, but 12 items allow at most"),
        ({"position": -1}, "position must not be negative, it is -1"),
        ({"position": "x"}, "position must be int, it is 'x'"),
        ({"position": True}, "position must be int, it is True"),
        ({"n": 13}, "n: saved 13, now 12"),
        ({"seed": 8}, "seed: saved 8, now 7"),
        ({"uneven": "drop"}, "uneven: saved 'drop', now 'pad'"),
        ({"order": "pipeline(Range(12))"}, "order: saved 'pipeline(Range(12))', now 'pipeline(Permutation(12"),
        ({"mode": "join"}, "this state is of mode 'join'"),
        ({"version": 2}, "this state has format version 2"),
        ({"counters": [1]}, "Permutation has no counters; the state has [1]"),
        ({"more": 1}, "more is unknown"),
    ],
)
def test_mismatched_state_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    spec = Spec(PLAIN, batch_size=2)
    with spec.make() as pipeline:
        pulled(pipeline, 2)
        before = pipeline.state()
        with pytest.raises(StateMismatch) as caught:
            pipeline.load_state(with_checksum({**before, **change}))
        assert message in str(caught.value)
        assert pipeline.state() == before
        assert pulled(pipeline, 9) == list(spec.of_rank(0, 0, 4))


@pytest.mark.parametrize("counters", [[], [3], [1, 1], [3, 0], ["x", 2], [2.0, 1], [3, -1, 1]])
def test_impossible_join_counters_are_refused(counters: list[Any]) -> None:
    with Conveyer([Join([(Conveyer([Range(4)]), 1), (Conveyer([Range(3)]), 1)])]) as pipeline:
        pulled(pipeline, 3)
        with pytest.raises(StateMismatch, match="counters"):
            pipeline.load_state(with_checksum({**pipeline.state(), "counters": counters}))
        state = pipeline.state()
        del state["counters"]
        expected = pulled(pipeline, 4)
        pipeline.load_state(with_checksum(state))  # the counters are then computed
        assert pulled(pipeline, 4) == expected


@pytest.mark.slow(reason="imports torch.distributed.checkpoint, which writes and reads files")
def test_state_survives_distributed_checkpoint(tmp_path: Any) -> None:
    from torch.distributed import checkpoint as dcp

    spec = Spec(PLAIN, batch_size=2)
    with spec.make() as pipeline, spec.make() as other:
        pulled(pipeline, 2)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save({"pipeline": pipeline}, checkpoint_id=tmp_path)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.load({"pipeline": other}, checkpoint_id=tmp_path)
        assert pulled(other, 9) == list(spec.of_rank(0, 0, 4))


def test_state_of_a_rank_with_fewer_items_loses_nothing() -> None:
    spec = Spec(PLAIN, world=5, uneven="exact")
    with spec.make(4) as pipeline, spec.make(0) as other:
        assert len(pulled(pipeline, 2)) == 2
        assert pipeline.is_ended
        other.load_state(pipeline.state())
        assert pulled(other, 99) == list(spec.of_rank(0, 0, 10))
        assert next(pipeline, None) is None  # after as many calls, the other ranks got their batch
        assert pipeline.state() == other.state()


# ------------------------------------------------------------ ranks that saved at different steps


def test_ranks_that_saved_at_different_steps_resume_at_the_earliest(caplog: pytest.LogCaptureFixture) -> None:
    spec = Spec(PLAIN, world=3, batch_size=1)
    states = []
    for rank, num_done in enumerate((2, 1, 2)):
        with spec.make(rank) as pipeline:
            pulled(pipeline, num_done)
            states.append(pipeline.state())
    with caplog.at_level(logging.WARNING, "shmload"):
        assert reconcile(states) == states[1]
    assert "ranks had saved between position 3 of epoch 0 and position 6 of epoch 0" in caplog.text
    caplog.clear()
    assert reconcile(states[::2]) == states[0]
    assert caplog.text == ""


def odd(x: int) -> bool:
    return x % 2 == 1


@pytest.mark.parametrize(
    "source_and_stages",
    [
        [Items(range(100)), Filter(odd)],
        [Stream(range(100).__iter__), Filter(odd)],
        [Items(range(100)), Scan(lambda total, x: (total + x, x), 0)],
    ],
)
def test_ranks_that_saved_in_one_block_resume_at_the_latest(source_and_stages: list[Any]) -> None:
    states = []
    for rank, num_done in ((0, 5), (1, 2)):
        with Conveyer([*source_and_stages, Partition(rank, 2), Collate(4)]) as pipeline:
            for _ in range(num_done):
                pipeline()
            states.append(pipeline.state())
    assert reconcile(states) == states[1]


def test_joins_that_saved_at_different_steps_are_reconciled_by_their_draws() -> None:
    pipeline = Join([(Conveyer([Range(4)]), 1), (Conveyer([Range(3)]), 1)])
    states = []
    for _ in range(3):
        pipeline()
        states.append(pipeline.state())
    pipeline.close()
    assert reconcile(states[::-1]) == states[0]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "reconcile needs the state of each rank; got none"),
        ([3], "reconcile takes states of a Conveyer or a Join as state() returns them; got 3"),
        ([{"mode": "join", "members": [1]}], "reconcile takes states"),
        ([{"mode": "seed"}], "reconcile takes states"),
        ([Conveyer([Range(3)]).state(), Conveyer([Range(4)]).state()], "states 0 and 1 are of different pipelines"),
        ([Join([(Conveyer([Range(n)]), 1)]).state() for n in (3, 4)], "Give the states of the ranks of one job"),
    ],
)
def test_states_of_different_jobs_are_refused(states: list[Any], message: str) -> None:
    with pytest.raises(StateMismatch) as caught:
        reconcile(states)
    assert message in str(caught.value)
