"""Batches made by an order are divided among ranks without repetition or loss, also when the number of ranks changes midway."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import LengthBuckets, Schedule, StateMismatch, TokenBudget
from shmload.schedule.keyed_batches import BatchSchedule, KeyedBatches
from shmload.schedule.state import make_state, resume

RULES = ("pad", "drop", "exact")
LENGTHS = np.random.default_rng(1).integers(1, 50, 137)
ORDERS: dict[str, KeyedBatches] = {
    "buckets": LengthBuckets(LENGTHS, batch_size=5, window=4, group=2),
    "budget": TokenBudget(LENGTHS, max_tokens=100, window=4, group=2),
}


def schedule_of(kind: str = "buckets", **options: Any) -> BatchSchedule:
    return BatchSchedule(ORDERS[kind], **{"seed": 7, **options})


def sequence(kind: str, epoch: int) -> list[list[int]]:
    order = ORDERS[kind]
    count = order.num_batches(seed=7, epoch=epoch)
    return [order.batch(number, seed=7, epoch=epoch).tolist() for number in range(count)]


def read(schedule: BatchSchedule, epoch: int, *, start: int = 0, num_steps: int = 10**9) -> tuple[Any, int]:
    """Returns the batches with valid rows of all ranks, step by step from a position on, and the position reached."""
    got, position = [], start
    for _ in range(num_steps):
        ranks = [r for r in range(schedule.world_size) if position < schedule.end_of(epoch, r)]
        if not ranks:
            break
        batches = [schedule.batch(epoch, position, rank).tolist() for rank in ranks]
        valid = [schedule.num_valid(epoch, position, rank) for rank in ranks]
        assert all(count in (0, len(batch)) for count, batch in zip(valid, batches, strict=True))
        got += [batch for count, batch in zip(valid, batches, strict=True) if count]
        position += schedule.stride
    return got, position


@settings(deadline=None)
@given(kind=st.sampled_from(list(ORDERS)), world_size=st.integers(1, 40), uneven=st.sampled_from(RULES), epoch=st.integers(0, 3))
def test_ranks_divide_one_sequence(kind: str, world_size: int, uneven: Any, epoch: int) -> None:
    whole = sequence(kind, epoch)
    got, _ = read(schedule_of(kind, world_size=world_size, uneven=uneven), epoch)
    kept = len(whole) // world_size * world_size if uneven == "drop" else len(whole)
    assert whole[:kept] == got


def test_default_rank_is_the_first() -> None:
    assert schedule_of(world_size=2).batch(0, 2).tolist() == sequence("buckets", 0)[2]


@settings(deadline=None)
@given(kind=st.sampled_from(list(ORDERS)), world_size=st.integers(1, 40), uneven=st.sampled_from(RULES))
def test_ranks_have_equal_numbers_of_steps_unless_exact(kind: str, world_size: int, uneven: Any) -> None:
    schedule = schedule_of(kind, world_size=world_size, uneven=uneven)
    count = ORDERS[kind].num_batches(seed=7, epoch=0)
    steps = [-(-schedule.end_of(0, rank) // schedule.stride) for rank in range(world_size)]
    expected = {
        "pad": [-(-count // world_size)] * world_size,
        "drop": [count // world_size] * world_size,
        "exact": [len(range(rank, count, world_size)) for rank in range(world_size)],
    }
    assert expected[uneven] == steps


def test_padding_repeats_the_epochs_first_batches() -> None:
    schedule = schedule_of(world_size=60)
    whole = sequence("buckets", 0)
    assert [whole[rank % 28] for rank in range(60)] == [schedule.batch(0, 0, rank).tolist() for rank in range(60)]
    assert [schedule.num_valid(0, 0, rank) for rank in (28, 59)] == [0, 0]


@settings(deadline=None)
@given(
    kind=st.sampled_from(list(ORDERS)),
    before=st.integers(1, 9),
    after=st.integers(1, 9),
    num_steps=st.integers(0, 40),
    uneven=st.sampled_from(["pad", "exact"]),
)
def test_any_number_of_ranks_resumes_with_exactly_the_rest(kind: str, before: int, after: int, num_steps: int, uneven: Any) -> None:
    first = schedule_of(kind, world_size=before, uneven=uneven)
    head, position = read(first, 1, num_steps=num_steps)
    if position >= len(sequence(kind, 1)):
        return
    second = schedule_of(kind, world_size=after, uneven=uneven)
    epoch, step = resume(make_state(first, epoch=1, step=position), second)
    tail, _ = read(second, epoch, start=step)
    assert sequence(kind, 1) == head + tail


def test_next_index_follows_the_concatenated_batches() -> None:
    flat = [index for batch in sequence("budget", 0) for index in batch]
    schedule, place = schedule_of("budget", world_size=3), 0
    for step in range(0, schedule.end_of(0, 0), 3):
        for rank in range(3):
            for row in range(schedule.num_valid(0, step, rank)):
                for distance in (1, 2, 30):
                    expected = flat[(place + row + distance) % len(flat)]
                    assert expected == schedule.index_after(0, step, rank, row, distance)
            place += schedule.num_valid(0, step, rank)


def test_state_counts_batches() -> None:
    state = make_state(schedule_of(world_size=2), epoch=3, step=6)
    assert (state["position"], state["n"], state["global_batch"], state["epoch"]) == (6, 137, 0, 3)
    assert state["order"] == ORDERS["buckets"].identity
    assert "counters" not in state


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (schedule_of("budget"), r"order: saved 'length_buckets\(n=137, .*now 'token_budget\(n=137, "),
        (schedule_of(seed=8), r"seed: saved 7, now 8\. Remedy: build the loader with the saved values"),
        (schedule_of(uneven="drop"), "uneven: saved 'pad', now 'drop'"),
        (
            Schedule(137, batch_size=5, seed=7, shuffle=False),
            r"global_batch: saved 0, now 5; order: saved 'length.*now None\. .*without this state$",
        ),
    ],
)
def test_state_of_other_batches_is_refused(other: Any, message: str) -> None:
    with pytest.raises(StateMismatch, match=message):
        resume(make_state(schedule_of(), epoch=0, step=2), other)


def test_state_of_a_plain_run_is_refused() -> None:
    plain = make_state(Schedule(137, batch_size=5, seed=7, shuffle=False), epoch=0, step=2)
    with pytest.raises(StateMismatch, match=r"global_batch: saved 5, now 0; .*order: saved None, now 'length_buckets"):
        resume(plain, schedule_of())
