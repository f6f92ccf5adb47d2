"""State: small, JSON-serializable, independent of the number of ranks, and refused with every difference named."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.errors import StateMismatch
from shmload.schedule.schedule import Schedule
from shmload.schedule.state import check_state, compare_state, make_state, resume
from shmload.schedule.state_checksum import with_checksum

SCHEDULE = Schedule(1000, batch_size=12, world_size=2, seed=7, shuffle=True)


def global_rows(schedule, epoch, step):
    """Returns the real rows of the steps from `step` on, over all ranks in order."""
    return [
        schedule.batch(epoch, s, rank)[: schedule.num_valid(s, rank)].tolist()
        for s in range(step, schedule.num_steps)
        for rank in range(schedule.world_size)
    ]


def test_state_holds_the_documented_fields():
    assert {**make_state(SCHEDULE, epoch=3, step=5), "check": 0} == {
        "version": 1,
        "schedule": 1,
        "mode": "seed",
        "seed": 7,
        "epoch": 3,
        "position": 120,
        "n": 1000,
        "global_batch": 24,
        "shuffle": True,
        "uneven": "pad",
        "check": 0,
    }


@settings(deadline=None)
@given(
    n=st.integers(0, 300), step=st.integers(0, 300), epoch=st.integers(0, 2**63), uneven=st.sampled_from(["pad", "drop", "exact"])
)
def test_state_survives_json_and_restores_its_step(n, step, epoch, uneven):
    schedule = Schedule(n, batch_size=3, world_size=2, seed=1, shuffle=True, uneven=uneven)
    step = min(step, schedule.num_steps)
    state = json.loads(json.dumps(make_state(schedule, epoch=epoch, step=step)))
    assert (epoch, step) == resume(state, schedule)


def test_largest_state_fits_in_a_kibibyte():
    schedule = Schedule(2**62, batch_size=2**31, world_size=2**31, seed=2**64 - 1, shuffle=False, uneven="exact")
    assert len(json.dumps(make_state(schedule, epoch=2**64 - 1, step=1))) <= 1024


def test_state_contains_no_numpy_numbers():
    json.dumps(make_state(SCHEDULE, epoch=np.int64(3), step=np.int64(5)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 24])
@pytest.mark.parametrize("step", [0, 1, 20, 41, 42])
def test_other_numbers_of_ranks_read_exactly_the_rest(world_size, step):
    state = make_state(SCHEDULE, epoch=2, step=step)
    other = Schedule(1000, batch_size=24 // world_size, world_size=world_size, seed=7, shuffle=True)
    expected = [index for rows in global_rows(SCHEDULE, 2, step) for index in rows]
    epoch, first = resume(state, other)
    assert expected == [index for rows in global_rows(other, epoch, first) for index in rows]


def test_every_difference_is_named_with_both_values_and_a_remedy():
    state = make_state(Schedule(999, batch_size=4, seed=8, shuffle=False, drop_last=True), epoch=0, step=1)
    with pytest.raises(StateMismatch) as caught:
        compare_state(state, SCHEDULE)
    assert str(caught.value) == (
        "the state belongs to another order: seed: saved 8, now 7; n: saved 999, now 1000; "
        "global_batch: saved 4, now 24; shuffle: saved False, now True; uneven: saved 'drop', now 'pad'. "
        "Remedy: build the loader with the saved values, or start a new run without this state; "
        "global_batch is batch_size * world_size, here 12 * 2: change both together and it stays"
    )
    with pytest.raises(StateMismatch, match=r"another order: n: saved 5, now 1000\. Remedy: .* without this state$"):
        resume(with_checksum({**make_state(SCHEDULE, epoch=0, step=0), "n": 5}), SCHEDULE)


def test_position_between_steps_is_refused():
    with pytest.raises(StateMismatch, match=r"position fits no step: .* no step starts at position 25"):
        resume(with_checksum({**make_state(SCHEDULE, epoch=0, step=0), "position": 25}), SCHEDULE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "torch"}, "this state is of mode 'torch', the loader is in mode 'seed': build the loader as it was"),
        ({"version": 2}, "format version 2, this shmload reads up to 1: install a newer one"),
        ({"seed": "7"}, "seed must be int, it is '7'"),
        ({"epoch": -1}, "epoch must not be negative, it is -1"),
        ({"shuffle": 1}, "shuffle must be bool, it is 1"),
        ({"n": True}, "n must be int, it is True"),
        ({"counters": 3}, "counters must be list, it is 3"),
        ({"extra": 3}, r"extra is unknown\. Load what state_dict\(\) returned"),
    ],
)
def test_invalid_state_is_refused(change, message):
    with pytest.raises(StateMismatch, match=message):
        check_state({**make_state(SCHEDULE, epoch=0, step=0), **change})


def test_missing_fields_are_all_named():
    with pytest.raises(StateMismatch, match=r"epoch is missing; global_batch is missing; .*version is missing"):
        check_state({})
    with pytest.raises(StateMismatch, match=r"a state is a dict as state_dict\(\) returns it, got NoneType"):
        check_state(None)


def test_children_are_stored_only_if_given():
    state = make_state(SCHEDULE, epoch=0, step=1, children={"a": {"position": 3}})
    assert state["children"] == {"a": {"position": 3}}
    assert check_state(state) is state
    assert not {"counters", "children"} & make_state(SCHEDULE, epoch=0, step=1).keys()
