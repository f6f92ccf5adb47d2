"""Join: proportions at every prefix, ends, nesting, states."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from shmload.errors import SampleError
from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Join, Map, Partition, Range, Shuffle
from shmload.pipeline.compose import compose
from shmload.pipeline.draws import Draws
from shmload.schedule.permutation import MAX_N
from tests.pipeline.pipeline_kit import Add, Joined, Leaf, plain, turns
from tests.pipeline.pipeline_kit import join_of_ranges as joined

slow = pytest.mark.slow(reason="hypothesis reads many joins")
POSITIVE = st.one_of(
    st.integers(1, 10**6), st.floats(1e-6, 1e6), st.sampled_from([1e-300, 5e-324, 1e300, 0.1, 1 / 3, Fraction(1, 3), 10**400])
)


def once(n: int) -> Conveyer:
    return Conveyer([Range(n, repeating=False)])


@slow
@settings(deadline=None)
@given(st.lists(POSITIVE, min_size=1, max_size=6), st.integers(0, 60))
@example([1e-300, 1], 60)
@example([1, 10**400], 60)
def test_every_prefix_is_within_one_item_of_the_weights(weights: list[Any], num_draws: int) -> None:
    pipeline = Join([(Conveyer([Range(3)]), weight) for weight in weights])
    exact = [Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    counts = [0] * len(weights)
    for done in range(1, num_draws + 1):
        pipeline()
        counts[pipeline.last_member] += 1
        assert all(abs(x - weight / sum(exact) * done) < 1 for x, weight in zip(counts, exact, strict=True))
    pipeline.close()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_lengths_as_weights_give_one_epoch_of_each(sizes: list[int]) -> None:
    with joined(*((n, n) for n in sizes)) as pipeline:
        everything = sorted(1000 * member + x for member, n in enumerate(sizes) for x in range(n))
        for _ in range(2):
            assert len(pipeline) == sum(sizes)
            assert everything == sorted(pipeline)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("first", [0, 1000, 1, 1001]),
        ("all", [0, 1000, 1, 1001, 2, 1000, 3, 1001]),
        ("repeat", [0, 1000, 1, 1001, 2, 1000, 3, 1001, 0, 1000]),
    ],
)
def test_stop_rule_determines_the_end(stop: Any, expected: list[int]) -> None:
    with joined((4, 1), (2, 1), stop=stop) as pipeline:
        assert expected == list(islice(pipeline, 10))
        assert pipeline.is_ended == (stop != "repeat")


def test_members_continue_in_the_next_epoch_where_they_stopped() -> None:
    with joined((5, 1), (2, 1)) as pipeline:
        assert list(pipeline) == [0, 1000, 1, 1001]
        with pytest.raises(StopIteration):
            pipeline()
        assert list(pipeline) == [2, 1000, 3, 1001]
        assert list(pipeline) == [4, 1000, 0, 1001]


def test_endless_member_with_stop_all_or_first() -> None:
    def make(stop: Any) -> Join:
        return Join([(Conveyer([Range(3)]), 1), (once(2), 1)], stop=stop)

    assert (make("all").is_endless, len(make("all"))) == (True, 5)
    assert len(make("first")) == 4
    assert Join([(Conveyer([Range(3)]), 1)]).is_endless


def test_joins_nest() -> None:
    inner = joined((2, 2), (4, 4))
    with Join([(inner, 6), (Conveyer([Range(3, repeating=False), Map(Add(5000))]), 3)]) as pipeline:
        assert len(pipeline) == 9
        assert sorted(pipeline) == [0, 1, 1000, 1001, 1002, 1003, 5000, 5001, 5002]
        assert 3 * len(list(islice(pipeline, 9))) == 27


@slow
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4),
    st.sampled_from(["first", "all", "repeat"]),
    st.integers(0, 30),
)
def test_join_alone_and_in_a_conveyer_give_and_resume_the_same(pairs: Any, stop: Any, num_done: int) -> None:
    spec = Joined(tuple(Leaf(n, True, False, number) for number, (n, _) in enumerate(pairs)), tuple(w for _, w in pairs), stop)
    if spec.length == 0:
        return
    with spec.stage() as by_itself, Conveyer([spec.stage()]) as over_one, spec.stage() as resumed:
        expected = list(islice(spec.values(), num_done + 20))
        got: list[int] = []
        while len(got) < num_done:
            got += islice(by_itself, num_done - len(got))
        state = by_itself.state()
        while len(got) < num_done + 20:
            got += islice(by_itself, num_done + 20 - len(got))
        assert expected == got
        one: list[int] = []
        while len(one) < num_done + 20:
            one += islice(over_one, num_done + 20 - len(one))
        assert expected == one
        for _ in range(2):
            resumed.load_state(json.loads(json.dumps(state)))
            assert state == resumed.state()
            rest: list[int] = []
            while len(rest) < 20:
                rest += islice(resumed, 20 - len(rest))
            assert expected[num_done:] == rest


def test_copy_of_a_join_has_a_position_of_its_own() -> None:
    join = Join([(once(6), 2), (Conveyer([Range(3, repeating=False), Map(Add(10))]), 1)])
    whole = list(Join([(once(6), 2), (Conveyer([Range(3, repeating=False), Map(Add(10))]), 1)]))
    first = [join() for _ in range(4)]
    copied = copy.copy(join)
    assert (first + list(copied), first + list(join)) == (whole, whole)


def test_items_of_a_join_are_found_in_any_order() -> None:
    def pipeline() -> Any:
        return Join([(once(3000), 2), (Conveyer([Range(3000, repeating=False), Map(Add(10000))]), 3)])

    source = compose([pipeline()]).source
    found = list(pipeline())
    places = np.random.default_rng(0).permutation(len(found)).tolist()
    assert [source.at(place) for place in places] == [found[place] for place in places]
    assert sorted(Conveyer([pipeline(), Shuffle()])) == sorted(found)


def test_batches_of_several_pipelines_take_turns() -> None:
    pairs = [(Conveyer([Range(6, repeating=False), Map(Add(100 * m)), Collate(2)]), 1) for m in range(3)]
    with Join(pairs) as pipeline:
        members = [(pipeline().tolist()[0] // 100, pipeline.last_member) for _ in range(9)]
    assert [m for m, _ in members] == [m for _, m in members] == turns([1, 1, 1], 9)


class Failing:
    def __call__(self, x: int) -> int:
        raise KeyError(x)


def test_failed_item_uses_up_its_members_turn() -> None:
    with Join([(once(4), 1), (Conveyer([Range(4), Map(Failing())]), 1)]) as pipeline:
        assert pipeline() == 0
        with pytest.raises(KeyError):
            pipeline()
        assert [pipeline(), pipeline.state()["members"][3][0]] == [1, 1]


def test_member_that_skips_its_last_items_begins_its_next_epoch() -> None:
    def no_threes(x: int) -> int:
        if x == 3:
            raise ValueError
        return x

    skipping = Conveyer([Range(4, repeating=False), Map(no_threes), Collate(1)], on_error="skip")
    with Join([(skipping, 1), (once(8), 1)], stop="repeat") as pipeline:
        firsts = [plain(pipeline()) for _ in range(12)][::2]
    assert firsts == [[0], [1], [2], [0], [1], [2]]


def test_member_that_skips_everything_is_an_error() -> None:
    nothing = Conveyer([Range(4, repeating=False), Map(Failing()), Collate(2)], on_error="skip")
    with Join([(nothing, 1)]) as pipeline, pytest.raises(SampleError, match="has skipped a whole epoch"):
        pipeline()


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize("weight", [0, -1, 0.0, float("nan"), float("inf"), -float("inf"), "1", None])
def test_weights_are_positive_and_finite(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"Join needs (finite weights of 0 or more; got|weights above 0; member 1 has)"):
        Join([(once(1), 1), (once(1), weight)])


def refusals() -> dict[str, Any]:
    twice = once(3)
    return {
        "Join needs at least one (pipeline, weight); got none": [],
        "Join needs pairs of a Conveyer, pipeline or Join and its weight; member 0 is 3": [3],
        "Join needs pairs of a Conveyer, pipeline or Join and its weight; member 1 is ([1], 1)": [(once(1), 1), ([1], 1)],
        "the same pipeline is in a Join twice: make one for each, or add up the weights": [(twice, 1), (twice, 1)],
        "member 0 has a stage that makes more or fewer items, and how many it gives is not known": [
            (Range(3, repeating=False).filter(bool), 1)
        ],
        'member 0 gives some ranks more than others (uneven="exact")': [
            (Conveyer([Range(3, repeating=False), Partition(0, 2, uneven="exact")]), 1)
        ],
        "member 0 of the Join gives nothing: not even one batch of all ranks is full": [
            (Conveyer([Range(3, repeating=False), Collate(4, False)]), 1)
        ],
    }


@pytest.mark.parametrize("message", refusals())
def test_what_cannot_be_joined_is_refused(message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Join(refusals()[message])
    assert message in str(caught.value)


def test_unknown_stop_rule_is_refused() -> None:
    with pytest.raises(ValueError, match='stop is "first", "all" or "repeat"; got \'last\''):
        joined((1, 1), stop="last")


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (Conveyer([Range(4), Collate(2)]), "member 0 of the Join has a Collate of its own"),
        (Conveyer([Range(4), Partition(0, 2)]), "member 0 of the Join has a Partition of its own"),
        (Conveyer([Range(4)], max_restarts=1), "member 0 of the Join has options (max_restarts)"),
        (Conveyer([Range(1 << 61)]), "keys up to 9223372036854775808, which counts a member's items times the number"),
    ],
)
def test_join_inside_a_conveyer_needs_members_of_single_items_of_all_ranks(member: Conveyer, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Conveyer([Join([(member, 1), *((once(1), 1) for _ in range(3))])])
    assert message in str(caught.value)


def test_workers_of_members_add_up_in_the_conveyer_around_a_join() -> None:
    def member(**options: Any) -> Conveyer:
        return Conveyer([Range(4), DistributedBatchedMap(str, **options)])

    inner = Join([(member(n_workers=2, timeout=5, buffer_size=7), 1), (member(n_workers=1, timeout=8), 1), (once(3), 1)])
    pool = Conveyer([inner, DistributedBatchedMap(str, 3, buffer_size=2, timeout=1)]).plan.pool
    assert (pool.num_workers, pool.buffer_size, pool.timeout_s) == (6, 9, 9)
    assert None is Conveyer([inner, DistributedBatchedMap(str, 3, timeout=None)]).plan.pool.timeout_s
    assert Conveyer([Join([(once(3), 1)])]).plan.pool.num_workers == 0


def test_join_of_endless_members_is_endless() -> None:
    draws = Draws([MAX_N, MAX_N], [1, 2], "first")
    assert draws.is_endless
    assert sorted({draws.member_at(position) for position in range(6)}) == [0, 1]
