"""States of a Join: small, plain data, and refused where they do not fit."""

from __future__ import annotations

import io
import json
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shmload.errors import StateMismatch
from shmload.pipeline import Conveyer, Join, Permutation, Range
from shmload.schedule.mix_draws import Drawn
from shmload.schedule.state_checksum import with_checksum
from tests.pipeline.pipeline_kit import join_of_ranges as joined


def far(pipeline: Any, count: int) -> Any:
    """Returns a state as after about `count` draws of each member, at every depth."""
    state = pipeline.state()

    def moved(of: Join, entry: list[Any]) -> list[Any]:
        mark, _, *members = entry
        made = []
        for member, (_, inner) in zip(of.members, members, strict=True):
            if isinstance(member, Join):
                made.append([count, moved(member, inner)])
            elif member.is_endless and len(inner) == 4:
                made.append([count, [inner[0], count // 20, count % 20, [count // 4] * 4]])
            else:
                made.append([count, [inner[0], count // 10, count % 10]])
        return [mark, count, *made]

    return with_checksum({**state, "members": moved(pipeline, state["members"])})


def test_state_stays_small_at_any_position_and_depth() -> None:
    def over_a_join() -> Conveyer:
        return Conveyer([Join([(Conveyer([Permutation(5)]), 1) for _ in range(4)])])

    for make, num_members in (
        (lambda: Join([(Conveyer([Permutation(10)]), 1) for _ in range(100)]), 100),
        (lambda: Join([(Join([(Conveyer([Permutation(10)]), 1) for _ in range(5)]), 1) for _ in range(5)]), 30),
        (lambda: Join([(over_a_join(), 1) for _ in range(10)]), 50),
    ):
        pipeline = make()
        state = far(pipeline, 10**12)
        assert len(json.dumps(state)) <= 1024 + 64 * num_members
        pipeline.load_state(state)
        assert state == pipeline.state()
        pipeline()
        pipeline.close()


def test_conveyer_over_a_nested_join_keeps_the_counters_of_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = [0.333331, 0.71], [0.123456789, 0.98765]
    made: list[int] = []
    make_block = Drawn._make

    def noted(self: Drawn, start: int, counters: Any, stop: int) -> Any:
        made.append(stop - start)
        return make_block(self, start, counters, stop)

    def make() -> Conveyer:
        members = Join([(Conveyer([Permutation(7, seed=m)]), w) for m, w in enumerate(inner)])
        return Conveyer([Join([(members, outer[0]), (Conveyer([Permutation(9)]), outer[1])])])

    with make() as pipeline, make() as other:
        list(islice(pipeline, 100))
        state = json.loads(json.dumps(pipeline.state()))
        assert len(state["counters"]) == 4
        other.load_state(state)
        assert list(islice(pipeline, 50)) == list(islice(other, 50))
        far = 10**12
        of_inner = round(far * outer[0] / sum(outer))
        first = round(of_inner * inner[0] / sum(inner))
        epoch, position = divmod(far, state["n"])
        counters = [of_inner, far - of_inner, first, of_inner - first]
        monkeypatch.setattr(Drawn, "_make", noted)
        other.load_state(with_checksum({**state, "epoch": epoch, "position": position, "counters": counters}))
        other()
        assert other.state()["counters"][:2] != counters[:2]
        assert sum(made) < 50_000, "nothing is recomputed from the start"


def test_state_survives_torch_save_as_plain_data() -> None:
    with joined((4, 1), (3, 2)) as pipeline:
        list(islice(pipeline, 2))
        file = io.BytesIO()
        torch.save(pipeline.state(), file)
        file.seek(0)
        assert pipeline.state() == torch.load(file, weights_only=True)


HOSTILE = [None, [], 3, "x", {}, {"mode": "join"}, {"mode": "join", "version": 1}, {"mode": "seed"}]


@pytest.mark.parametrize("state", HOSTILE, ids=repr)
def test_invalid_state_is_refused(state: Any) -> None:
    with joined((4, 1)) as pipeline, pytest.raises(StateMismatch):
        pipeline.load_state(state)


def test_newer_format_is_named() -> None:
    with joined((4, 1)) as pipeline, pytest.raises(StateMismatch, match="has format version 2, this shmload reads 1"):
        pipeline.load_state({**pipeline.state(), "version": 2})


PATHS = [(), (0,), (1,), (2,), (2, 0), (2, 1), (2, 1, 0), (2, 1, 1), (2, 1, 2), (3, 1, 0), (3, 1, 1), (3, 1, 2, 0), (3, 1, 2, 1, 1)]
WRONG = [None, -1, "x", 1.5, [], [1], {}, 10**30, True, [[]]]


@pytest.mark.slow(reason="hypothesis damages many states, each of its own pipeline")
@settings(deadline=None, max_examples=150)
@given(st.sampled_from(PATHS), st.sampled_from(WRONG))
def test_damaged_state_is_refused_and_changes_nothing(path: tuple[int, ...], wrong: Any) -> None:
    inner = Join([(Conveyer([Permutation(5)]), 1), (Conveyer([Permutation(4)]), 2)])
    with Join([(Conveyer([Permutation(6)]), 2), (inner, 1)]) as pipeline:
        list(islice(pipeline, 3))
        before = pipeline.state()
        expected = list(islice(pipeline, 4))
        pipeline.load_state(before)
        damaged = json.loads(json.dumps(before))
        if path:
            where = damaged["members"]
            for at in path[:-1]:
                where = where[at]
            if where[path[-1]] == wrong or (path in [(1,), (3, 1, 1)] and type(wrong) is int and wrong >= 0):
                return
            where[path[-1]] = wrong
        else:
            damaged["members"] = wrong
        with pytest.raises(StateMismatch):
            pipeline.load_state(damaged)
        assert before == pipeline.state()
        assert expected == list(islice(pipeline, 4))


def test_state_of_another_join_names_the_member() -> None:
    with joined((4, 1), (3, 2)) as pipeline:
        other = Join([(Conveyer([Range(4, repeating=False)]), 1), (Conveyer([Permutation(3, repeating=False)]), 2)])
        with pytest.raises(StateMismatch, match=r"belongs to another pipeline, member 1; this one is pipeline\(Perm"):
            other.load_state(pipeline.state())
        with pytest.raises(StateMismatch, match="belongs to another Join: its members, weights or stop rule differ"):
            joined((4, 2), (3, 2)).load_state(pipeline.state())
