"""The order of a mixture: when an epoch ends, which sample each draw selects, and that no position depends on how it was reached."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload import Permutation, Schedule, StateMismatch
from shmload.schedule import mix_draws as drawn_module
from shmload.schedule import mix_order as order_module
from shmload.schedule.mix_draws import BLOCK, Drawn
from shmload.schedule.mix_order import MixOrder
from shmload.schedule.shares import Shares
from shmload.schedule.state import make_state, resume
from tests.schedule.mix_kit import IdealCounts, draws_of

slow = pytest.mark.slow(reason="draws more than 200,000 places of the order")
KEY = {"seed": 7, "epoch": 2}
members = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 3, 10, 0.1, 0.7, 3.14])), min_size=1, max_size=6)


def order_of(pairs: list[tuple[int, Any]], *, stop: Any = "first", shuffle: bool = True) -> MixOrder:
    return MixOrder([size for size, _ in pairs], {0: [weight for _, weight in pairs]}, stop=stop, shuffle=shuffle)


def whole(order: MixOrder, *, stop: int | None = None, seed: int = 7, epoch: int = 2) -> list[int]:
    return order.take(0, order.n if stop is None else stop, seed=seed, epoch=epoch).tolist()


def by_member(order: MixOrder, indices: list[int]) -> list[list[int]]:
    """Returns each member's own indices in their order, without the offsets of further rounds."""
    total, ends = sum(order.sizes), np.cumsum(order.sizes)
    found: list[list[int]] = [[] for _ in order.sizes]
    for index in indices:
        member = int(np.searchsorted(ends, index % total, side="right"))
        found[member].append(index % total - int(ends[member] - order.sizes[member]))
    return found


@settings(deadline=None)
@given(members)
def test_first_ends_before_any_sample_is_repeated(pairs: list[tuple[int, Any]]) -> None:
    order = order_of(pairs)
    samples = whole(order)
    assert len(samples) == order.n == len(set(samples))
    wanted = IdealCounts([[weight for _, weight in pairs]])
    assert all(wanted.of(i, order.n) <= size * wanted.unit for i, (size, _) in enumerate(pairs))
    assert any(wanted.of(i, order.n + 1) > size * wanted.unit for i, (size, _) in enumerate(pairs))


@settings(deadline=None)
@given(members)
def test_all_ends_when_every_member_was_read_completely(pairs: list[tuple[int, Any]]) -> None:
    order = order_of(pairs, stop="all")
    samples = whole(order)
    assert len(samples) == order.n == len(set(samples))
    for (size, _), got in zip(pairs, by_member(order, samples), strict=True):
        assert set(range(size)) == set(got[:size])
    wanted = IdealCounts([[weight for _, weight in pairs]])
    assert all(wanted.of(i, order.n) >= size * wanted.unit for i, (size, _) in enumerate(pairs))
    assert any(wanted.of(i, order.n - 1) < size * wanted.unit for i, (size, _) in enumerate(pairs))


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any), st.sampled_from(["first", "all"]))
def test_sizes_as_weights_yield_each_sample_once(sizes: list[int], stop: str) -> None:
    order = order_of([(size, size) for size in sizes], stop=stop)
    assert list(range(sum(sizes))) == sorted(whole(order))


def test_decimal_weights_end_at_the_expected_position() -> None:
    assert order_of([(100, 0.1), (200, 0.2), (700, 0.7)]).n == 1000
    assert order_of([(100, 0.1), (200, 0.2), (700, 0.7)], stop="all").n == 1000
    assert order_of([(100, 0.5), (1000, 0.5)]).n == 200
    assert order_of([(100, 0.5), (1000, 0.5)], stop="all").n == 2000


def test_repeat_has_all_positions() -> None:
    order = order_of([(3, 1), (2, 1)], stop="repeat")
    assert (order.n, order.is_endless) == (2**62, True)
    assert not order_of([(3, 1)]).is_endless
    far = order.take(2**62 - 5, 2**62, **KEY)
    assert all(far >= 0)
    assert {0, 1} == set(np.searchsorted([3, 5], far % 5, side="right").tolist())


@pytest.mark.parametrize("size", [1, 7, 1000, pytest.param(70_000, marks=slow)])
def test_each_round_of_a_member_is_a_different_permutation(size: int) -> None:
    order = order_of([(size, 2), (5, 1)], stop="repeat")
    took = np.array(by_member(order, whole(order, stop=(2 * size + size // 2) * 3 // 2 + 4))[0])
    assert len(took) >= 2 * size
    for turn in range(-(-len(took) // size)):
        got = took[turn * size : (turn + 1) * size]
        assert Permutation(size, **KEY, stream=2**61 + turn).take(0, len(got)).tolist() == got.tolist()


def test_members_of_equal_size_have_different_orders() -> None:
    first, second = by_member(order := order_of([(50, 1), (50, 1)]), whole(order))
    assert first != second


def test_index_of_a_repeated_sample_includes_its_round() -> None:
    order = order_of([(4, 1), (2, 1)], stop="repeat", shuffle=False)
    assert whole(order, stop=14) == [0, 4, 1, 5, 2, 10, 3, 11, 6, 16, 7, 17, 8, 22]


def test_without_shuffling_members_are_read_in_their_own_order() -> None:
    order = order_of([(30, 3), (10, 1)], shuffle=False)
    assert [list(range(30)), list(range(10))] == by_member(order, whole(order))
    assert whole(order) == whole(order, seed=1, epoch=9)


def test_epochs_and_seeds_change_the_samples_and_not_the_members() -> None:
    order = order_of([(3000, 3), (1000, 1)])
    found = [whole(order, seed=seed, epoch=epoch) for seed in (0, 2**64 - 1) for epoch in (0, 1)]
    assert len(set(map(tuple, found))) == 4
    assert len({tuple(index >= 3000 for index in each) for each in found}) == 1


@pytest.mark.parametrize("sizes", [[300, 200], [30_000, 70_000, 9]])
def test_any_part_equals_that_part_of_the_whole(sizes: list[int]) -> None:
    pairs = list(zip(sizes, [3.14, 2, 0.01], strict=False))
    n = 4 * BLOCK + 100
    expected = whole(order_of(pairs, stop="repeat"), stop=n)
    rng = np.random.default_rng(1)
    order = order_of(pairs, stop="repeat")
    for start, stop in np.sort(rng.integers(0, n, (40, 2))).tolist():
        got = order.take(start, stop, **KEY)
        assert got.dtype == np.int64
        assert expected[start:stop] == got.tolist()
        assert expected[start : start + 9] == order_of(pairs, stop="repeat").take(start, start + 9, **KEY).tolist()


def test_returned_array_belongs_to_the_caller() -> None:
    order = order_of([(3000, 3), (1000, 1)])
    expected = whole(order)
    order.take(0, 64, **KEY)[:] = -1
    assert expected == whole(order)


@settings(deadline=None, max_examples=30)
@given(members, st.integers(0, 3 * BLOCK), st.booleans())
def test_resume_at_any_position_continues_as_if_undisturbed(pairs: list[tuple[int, Any]], position: int, looked: bool) -> None:
    order = order_of(pairs, stop="repeat")
    expected = order.take(position, position + 500, **KEY).tolist() if looked else None
    counters = order.counters_at(position, **KEY)
    again = order_of(pairs, stop="repeat")
    again.go_on_at(position, counters, epoch=2)
    assert counters == again.counters_at(position, **KEY)
    got = again.take(position, position + 500, **KEY).tolist()
    assert (expected or order.take(position, position + 500, **KEY).tolist()) == got
    assert order.take(0, 50, **KEY).tolist() == again.take(0, 50, **KEY).tolist()


def test_resume_at_a_distant_position_skips_draws_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, position = [(1000, 3.141592653589793), (1000, 2.718281828459045)], 10**12 + 17
    share = Shares.of([[weight for _, weight in pairs]])
    first = share.cumulative(0, position) // share.total
    order = order_of(pairs, stop="repeat")
    order.go_on_at(position, [first, position - first], epoch=0)
    made = []
    monkeypatch.setattr(order._drawn, "_make", lambda *args: made.append(args) or Drawn._make(order._drawn, *args))
    assert len(order.take(position, position + 100, **KEY)) == 100
    assert [position] == [start for start, _, _ in made]


def test_positions_with_small_weights_are_found_without_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_of([(10**18, 3), (10**18, 1)], stop="repeat")
    made = []
    monkeypatch.setattr(order._drawn, "_make", lambda *args: made.append(args) or Drawn._make(order._drawn, *args))
    position = 10**17 + 1
    assert order.counters_at(position, **KEY) == [75 * 10**15 + 1, 25 * 10**15]
    assert len(made) <= 2
    indices = order.take(position - 1, position + 7, **KEY)
    assert [i < 10**18 for i in whole(order, stop=8)] == [i < 10**18 for i in indices.tolist()]


def test_old_checkpoints_are_thinned_out_and_positions_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_module, "BLOCK", 16)
    monkeypatch.setattr(drawn_module, "MAX_KNOWN", 8)
    monkeypatch.setattr(drawn_module, "MAX_DRAWN", 2)
    monkeypatch.setattr(order_module, "BLOCK", 16)
    monkeypatch.setattr(order_module, "MAX_BLOCKS", 2)
    weights = {0: [3.14, 2.72, 0.577]}
    shares = Shares.of([weights[0]])
    expected, drawn = draws_of(shares, 1600), Drawn(shares, 1600)
    order = MixOrder([100, 100, 100], weights, stop="repeat", shuffle=True)
    indices = MixOrder([100, 100, 100], weights, stop="repeat", shuffle=True).take(0, 1600, **KEY).tolist()
    for position in [*range(0, 1600, 7), *range(1599, 0, -31)]:
        block = drawn.block_at(position)
        assert expected[block.start : block.stop] == block.members.tolist()
        assert block.start <= position < block.stop
        assert np.bincount(expected[:position], minlength=3).tolist() == drawn.counters_at(position).tolist()
        assert indices[position : position + 20] == order.take(position, min(position + 20, 1600), **KEY).tolist()
        assert len(drawn._known) <= 8
        assert len(drawn._blocks) <= 2
        assert len(order._blocks) <= 2


@pytest.mark.parametrize("counters", [[6, 5], [5], [3, 2, 5], [8, 2], [5.0, 5], [-1, 11]])
def test_impossible_counters_are_refused(counters: list[Any]) -> None:
    order = order_of([(100, 1), (100, 1)])
    with pytest.raises(
        StateMismatch, match="counters must be the draws of 2 members before position 10, each within one of its share; got"
    ):
        order.go_on_at(10, counters, epoch=0)


def test_curricula_change_the_shares_and_the_end() -> None:
    order = MixOrder([100, 100], {0: [1, 1], 40: [0, 1]}, stop="first", shuffle=False)
    assert order.n == 40 + 80
    of_first, of_second = by_member(order, whole(order))
    assert (list(range(20)), list(range(100))) == (of_first, of_second)
    back = {0: [1, 1], 60: [1, 0], 40: [0, 1]}
    assert MixOrder([100, 100], back, stop="first", shuffle=False).n == 60 + 80
    assert MixOrder([100, 40], back, stop="all", shuffle=False).n == 60 + 80


@pytest.mark.parametrize("weights", [{0: [1, 1], 40: [0, 1]}, {0: [1e-300, 1]}, {0: [1, 2**60 - 1]}], ids=str)
def test_all_requires_weights_that_reach_every_member(weights: dict[int, list[Any]]) -> None:
    with pytest.raises(ValueError, match=r'stop="all" waits until .* which member 0 never will with the weights that hold'):
        MixOrder([100, 100], weights, stop="all", shuffle=False)


def test_empty_member_with_a_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="member 1 of the mixture has a weight, but no samples: leave it out"):
        MixOrder([3, 0], {0: [1, 0], 9: [1, 1]}, stop="first", shuffle=False)
    assert MixOrder([3, 0], {0: [1, 0]}, stop="first", shuffle=False).n == 3


def test_identities_distinguish_mixtures() -> None:
    base = {"pairs": [(30, 3), (10, 1)], "stop": "first", "shuffle": True}
    changes: list[dict[str, Any]] = [
        {},
        {"pairs": [(30, 2), (10, 1)]},
        {"pairs": [(31, 3), (10, 1)]},
        {"pairs": [(10, 1), (30, 3)]},
        {"stop": "all"},
        {"shuffle": False},
    ]
    orders = [order_of(**{**base, **change}) for change in changes]
    orders += [MixOrder([30, 10], {0: [3, 1], 8: [1, 1]}, stop="first", shuffle=True)]
    assert len(orders) == len({order.identity for order in orders})
    many = [order_of([(30 + size, 1)] * 200) for size in range(2)]
    assert many[0].identity != many[1].identity
    assert max(len(order.identity) for order in [*orders, *many]) < 300


def test_copy_is_the_same_order() -> None:
    order = order_of([(300, 3), (100, 1)], stop="all")
    expected = whole(order)
    for again in (pickle.loads(pickle.dumps(order)), copy.deepcopy(order)):
        assert (expected, order.identity) == (whole(again), again.identity)
    assert repr(order) == f"<{order.identity}>"


@settings(deadline=None, max_examples=30)
@given(members, st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 10))
def test_any_number_of_ranks_resumes_with_the_same_samples(
    pairs: list[tuple[int, Any]], before: int, after: int, step: int
) -> None:
    def schedule(ranks: int) -> Schedule:
        order = order_of(pairs, stop="all")
        return Schedule(order.n, batch_size=12 // ranks, seed=7, shuffle=False, world_size=ranks, order=order)

    def rows(of: Schedule, first: int) -> list[list[int]]:
        return [
            [index for rank in range(of.world_size) for index in of.batch(2, number, rank)[: of.num_valid(number, rank)].tolist()]
            for number in range(first, of.num_steps)
        ]

    one, other = schedule(before), schedule(after)
    step = min(step, one.num_steps)
    state = make_state(one, epoch=2, step=step)
    assert len(state["counters"]) == len(pairs)
    assert sum(state["counters"]) == state["position"]
    assert (2, step) == resume(state, other)
    assert rows(one, step) == rows(other, step)


def test_child_forked_while_a_thread_draws_can_draw() -> None:
    order = MixOrder([300, 100], {0: [3, 1]}, stop="first", shuffle=False)
    with order._lock:  # as another thread of the parent holds it
        child = os.fork()
        if not child:
            signal.alarm(30)  # ends the child if it waits forever
            os._exit(int(order.take(0, 4, seed=7, epoch=0).tolist() != [0, 1, 300, 2]))
    assert os.waitpid(child, 0)[1] == 0
