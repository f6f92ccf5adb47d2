"""Schedule: ranks divide each epoch without loss or repetition, and no batch depends on how it was reached."""

import dataclasses
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.schedule.permutation import Permutation
from shmload.schedule.schedule import Schedule

RULES = ("pad", "drop", "exact")
sizes = {"n": st.integers(0, 150), "batch_size": st.integers(1, 9), "world_size": st.integers(1, 9)}


def read(schedule, *, epoch=0):
    """Returns all batches of an epoch: [step][rank], an index array each."""
    return [[schedule.batch(epoch, step, rank) for rank in range(schedule.world_size)] for step in range(schedule.num_steps)]


def real_rows(schedule, batches):
    """Returns the rows that are not padding, in order, one list per step."""
    return [
        [index for rank, batch in enumerate(batches_of_step) for index in batch[: schedule.num_valid(step, rank)].tolist()]
        for step, batches_of_step in enumerate(batches)
    ]


@settings(deadline=None)
@given(**sizes, uneven=st.sampled_from(RULES), shuffle=st.booleans(), epoch=st.integers(0, 2**63))
def test_ranks_are_disjoint_and_together_complete(n, batch_size, world_size, uneven, shuffle, epoch):
    schedule = Schedule(n, batch_size=batch_size, world_size=world_size, seed=5, shuffle=shuffle, uneven=uneven)
    seen = [index for rows in real_rows(schedule, read(schedule, epoch=epoch)) for index in rows]
    order = Permutation(n, seed=5, epoch=epoch).take(0, n).tolist() if n and shuffle else list(range(n))
    kept = n - n % schedule.global_batch if uneven == "drop" else n
    assert order[:kept] == seen


@settings(deadline=None)
@given(**sizes, uneven=st.sampled_from(RULES))
def test_ranks_have_equal_numbers_of_steps_and_rows_unless_exact(n, batch_size, world_size, uneven):
    schedule = Schedule(n, batch_size=batch_size, world_size=world_size, seed=0, shuffle=True, uneven=uneven)
    for step, batches in enumerate(read(schedule)):
        lengths = [len(batch) for batch in batches]
        assert lengths == [schedule.num_rows(step, rank) for rank in range(world_size)]
        if step < n // schedule.global_batch:
            assert [batch_size] * world_size == lengths
        assert max(lengths) - min(lengths) <= (uneven == "exact")
        assert all(a >= b for a, b in pairwise(lengths))
    steps = [schedule.num_steps_of(rank) for rank in range(world_size)]
    assert max(steps) == schedule.num_steps
    assert max(steps) - min(steps) <= (uneven == "exact" and 0 < n % schedule.global_batch < world_size)


@settings(deadline=None)
@given(**sizes)
def test_padding_comes_from_the_start_of_the_epoch_and_wraps(n, batch_size, world_size):
    schedule = Schedule(n, batch_size=batch_size, world_size=world_size, seed=1, shuffle=True)
    rows = [index for batches in read(schedule) for batch in batches for index in batch.tolist()]
    assert -(-n // world_size) * world_size == len(rows)
    order = Permutation(n, seed=1).take(0, n).tolist() if n else []
    assert [order[position % n] for position in range(len(rows))] == rows


def test_padding_larger_than_the_dataset_repeats_it():
    schedule = Schedule(2, batch_size=1, world_size=7, seed=0, shuffle=False)
    assert [schedule.batch(0, 0, rank).item() for rank in range(7)] == [0, 1, 0, 1, 0, 1, 0]
    assert [schedule.num_valid(0, rank) for rank in range(7)] == [1, 1, 0, 0, 0, 0, 0]


def test_exact_leaves_late_ranks_without_a_last_step():
    schedule = Schedule(10, batch_size=2, world_size=4, seed=0, shuffle=False, uneven="exact")
    assert [batch.tolist() for batch in read(schedule)[1]] == [[8], [9], [], []]
    assert [schedule.num_steps_of(rank) for rank in range(4)] == [2, 2, 1, 1]


def test_single_rank_gets_a_short_last_batch_as_in_torch():
    schedule = Schedule(10, batch_size=4, seed=0, shuffle=False)
    assert [batches[0].tolist() for batches in read(schedule)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@settings(deadline=None)
@given(**sizes, uneven=st.sampled_from(RULES))
def test_drop_last_is_the_same_as_uneven_drop(n, batch_size, world_size, uneven):
    common = {"batch_size": batch_size, "world_size": world_size, "seed": 0, "shuffle": True}
    a = Schedule(n, **common, drop_last=True, uneven=uneven)
    b = Schedule(n, **common, uneven="drop")
    assert a.num_steps == b.num_steps == n // (batch_size * world_size)
    assert a.rest_rule == b.rest_rule == "drop"


@settings(deadline=None)
@given(**sizes, shuffle=st.booleans(), step=st.integers(0, 30), most=st.integers(-1, 7), rank=st.integers(0, 7))
def test_batches_computed_together_equal_single_ones(n, batch_size, world_size, shuffle, step, most, rank):
    schedule = Schedule(n, batch_size=batch_size, world_size=world_size, seed=3, shuffle=shuffle)
    rank %= world_size
    block = schedule.batches(2, step, rank, most)
    num_whole = n // schedule.global_batch
    assert (max(min(max(most, 1), num_whole - step), 0), batch_size) == block.shape
    for number, row in enumerate(block, step):
        assert schedule.batch(2, number, rank).tolist() == row.tolist()


@settings(deadline=None)
@given(n=st.integers(0, 400), world_size=st.sampled_from([2, 3, 4, 6, 8, 12, 24]), uneven=st.sampled_from(RULES))
def test_global_batches_do_not_depend_on_the_number_of_ranks(n, world_size, uneven):
    one = Schedule(n, batch_size=24, seed=8, shuffle=True, uneven=uneven)
    many = Schedule(n, batch_size=24 // world_size, world_size=world_size, seed=8, shuffle=True, uneven=uneven)
    assert real_rows(one, read(one, epoch=2)) == real_rows(many, read(many, epoch=2))


@pytest.mark.parametrize("n", [1000, 70_000, 10**12, 2**62])
@pytest.mark.parametrize("shuffle", [True, False])
def test_seek_equals_iteration(n, shuffle):
    schedule = Schedule(n, batch_size=6, world_size=3, seed=2, shuffle=shuffle)
    iterated = read(Schedule(1000, batch_size=6, world_size=3, seed=2, shuffle=shuffle)) if n == 1000 else None
    for step in (0, 1, schedule.num_steps // 2, schedule.num_steps - 1):
        position = schedule.position(step)
        stop = min(position + 18, n)
        expected = Permutation(n, seed=2).take(position, stop) if shuffle else np.arange(position, stop)
        batches = [schedule.batch(0, step, rank) for rank in range(3)]
        assert expected.tolist() == np.concatenate(batches)[: stop - position].tolist()
        if iterated:
            assert [a.tolist() for a in iterated[step]] == [b.tolist() for b in batches]


@settings(deadline=None)
@given(**sizes, uneven=st.sampled_from(RULES))
def test_every_step_is_found_from_its_position(n, batch_size, world_size, uneven):
    schedule = Schedule(n, batch_size=batch_size, world_size=world_size, seed=0, shuffle=True, uneven=uneven)
    positions = [schedule.position(step) for step in range(schedule.num_steps + 1)]
    assert list(range(schedule.num_steps + 1)) == [schedule.step_at(position) for position in positions]
    for position in set(range(-2, n + 20)) - set(positions):
        with pytest.raises(ValueError, match=f"no step starts at position {position}; .* end at {positions[-1]}"):
            schedule.step_at(position)


def test_epochs_and_seeds_differ_and_their_sums_do_not_matter():
    def first(seed, epoch):
        return tuple(Schedule(10**5, batch_size=32, seed=seed, shuffle=True).batch(epoch, 0).tolist())

    assert len({first(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


@pytest.mark.parametrize(("step", "rank"), [(-1, 0), (3, 0), (0, -1), (0, 2)])
def test_invalid_steps_and_ranks_are_refused(step, rank):
    schedule = Schedule(10, batch_size=2, world_size=2, seed=0, shuffle=True)
    for ask in (schedule.num_rows, schedule.num_valid, lambda *place: schedule.batch(0, *place)):
        with pytest.raises(IndexError, match=rf"step must be in \[0, 3\) and rank in \[0, 2\), got step={step}, rank={rank}"):
            ask(step, rank)
    with pytest.raises(IndexError, match=r"step must be in \[0, 3\], got 4"):
        schedule.position(4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n": -1}, ValueError, r"n must be in \[0, 2\^62\], got -1; give the number of samples"),
        ({"batch_size": 0}, ValueError, r"batch_size must be in \[1, 2147483648\], got 0; a batch has at least one"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer, got 2.0 of type float"),
        ({"seed": -3}, ValueError, r"seed must be in \[0, 2\^64 - 1\], got -3; seed % 2\*\*64 is in range"),
        ({"seed": None}, TypeError, "seed must be an integer, got None"),
        ({"world_size": 0}, ValueError, "world_size must be in .*; without torch.distributed world_size is 1"),
        ({"shuffle": None}, TypeError, "shuffle must be True or False, got None"),
        ({"drop_last": 1}, TypeError, "drop_last must be True or False, got 1"),
        ({"uneven": "even"}, ValueError, "uneven must be one of 'pad', 'drop', 'exact', got 'even'"),
        ({"version": 2}, ValueError, "version must be 1, .* got 2; a newer one needs a newer shmload"),
    ],
)
def test_invalid_arguments_raise_explanatory_errors(change, error, message):
    with pytest.raises(error, match=message):
        Schedule(**{"n": 10, "batch_size": 2, "seed": 0, "shuffle": True, **change})


def test_schedule_is_a_value():
    schedule = Schedule(np.int64(10), batch_size=np.int32(2), seed=0, shuffle=True)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert len({schedule, dataclasses.replace(schedule), dataclasses.replace(schedule, seed=1)}) == 2
    assert type(schedule.n) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.n = 5


def test_empty_dataset_has_no_steps():
    for uneven in RULES:
        assert Schedule(0, batch_size=2, seed=0, shuffle=True, uneven=uneven).num_steps == 0
