"""States of one pipeline: when they may be taken, what is refused, copies for ranks that were apart."""

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
def test_a_state_may_be_taken_before_the_first_between_any_two_and_at_the_end(batch_size: Any, repeating: bool) -> None:
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
def test_steps_behind_a_state_are_not_those_that_were_worked_out_before(repeating: bool) -> None:
    source = Range(40, repeating=repeating)
    with Conveyer([source, Collate(4)]) as pipeline, Conveyer([source, Collate(6)]) as other:
        assert pulled(pipeline, 1) == [[0, 1, 2, 3]]  # and those at 4, 8, 12 ... with it
        assert pulled(other, 1) == [[0, 1, 2, 3, 4, 5]]
        pipeline.load_state(other.state())
        assert pulled(pipeline, 2) == [[6, 7, 8, 9], [10, 11, 12, 13]]


def test_every_spelling_of_saving_and_loading_is_the_same() -> None:
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
        ({"counters": [1]}, "a Permutation has no counters; the state has [1]"),
        ({"more": 1}, "more is unknown"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
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
def test_counters_that_cannot_be_a_joins_are_refused(counters: list[Any]) -> None:
    with Conveyer([Join([(Conveyer([Range(4)]), 1), (Conveyer([Range(3)]), 1)])]) as pipeline:
        pulled(pipeline, 3)
        with pytest.raises(StateMismatch, match="counters"):
            pipeline.load_state(with_checksum({**pipeline.state(), "counters": counters}))
        state = pipeline.state()
        del state["counters"]
        expected = pulled(pipeline, 4)
        pipeline.load_state(with_checksum(state))  # then they are worked out
        assert pulled(pipeline, 4) == expected


@pytest.mark.slow(reason="imports torch.distributed.checkpoint, which writes and reads files")
def test_a_state_goes_through_distributed_checkpoint(tmp_path: Any) -> None:
    from torch.distributed import checkpoint as dcp

    spec = Spec(PLAIN, batch_size=2)
    with spec.make() as pipeline, spec.make() as other:
        pulled(pipeline, 2)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save({"pipeline": pipeline}, checkpoint_id=tmp_path)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.load({"pipeline": other}, checkpoint_id=tmp_path)
        assert pulled(other, 9) == list(spec.of_rank(0, 0, 4))


def test_a_rank_that_has_less_than_others_saves_a_state_that_loses_nothing() -> None:
    spec = Spec(PLAIN, world=5, uneven="exact")
    with spec.make(4) as pipeline, spec.make(0) as other:
        assert len(pulled(pipeline, 2)) == 2
        assert pipeline.is_ended
        other.load_state(pipeline.state())
        assert pulled(other, 99) == list(spec.of_rank(0, 0, 10))
        assert next(pipeline, None) is None  # after as many calls the others have had theirs
        assert pipeline.state() == other.state()


# ------------------------------------------------------------ ranks that were apart


def test_ranks_that_saved_apart_go_on_with_the_least_far(caplog: pytest.LogCaptureFixture) -> None:
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
def test_ranks_that_saved_apart_in_one_block_go_on_where_the_last_of_them_was(source_and_stages: list[Any]) -> None:
    states = []
    for rank, num_done in ((0, 5), (1, 2)):
        with Conveyer([*source_and_stages, Partition(rank, 2), Collate(4)]) as pipeline:
            for _ in range(num_done):
                pipeline()
            states.append(pipeline.state())
    assert reconcile(states) == states[1]


def test_joins_that_saved_apart_are_reconciled_by_their_draws() -> None:
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
def test_states_that_are_not_of_one_job_are_refused(states: list[Any], message: str) -> None:
    with pytest.raises(StateMismatch) as caught:
        reconcile(states)
    assert message in str(caught.value)
