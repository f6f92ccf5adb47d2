"""The tuning controller on a simulated pipeline: it converges to the right worker pool, stays there, and follows changes of the
load.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.engine.tuning.tuning_decision import LOOK, Limits, RateWindow, Setting, TuningHistory, decide
from tests.engine.tuning_kit import Pipeline

LOADS = [(0.01, 0.002), (0.01, 0.0095), (0.01, 0.0105), (0.01, 0.035), (0.01, 0.1), (0.01, 0.3), (0.05, 0.12), (0.3, 1.0)]
MOST = Setting(16, 2)
LIMITS = Limits(Setting(1, 2), MOST, 128, 128, 0.0)


def pipeline(step_s: float, work_s: float, first: int = 2, **options: object) -> Pipeline:
    settings: dict[str, Any] = {"setting": Setting(first, 2), "most": MOST, **options}
    return Pipeline(lambda now: step_s, lambda now: work_s, **settings)


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("first", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_controller_converges_to_within_one_worker_of_the_optimum(load: tuple[float, float], first: int, seed: int) -> None:
    model = pipeline(*load, first, seed=seed)
    num_looks = 20  # of 4 windows; doubling from 1 to 16, with each step tried twice, takes fewer
    settled_s = num_looks * LOOK * max(0.5, 8 * load[0])
    model.run(2 * settled_s)
    best = min(max(ceil(load[1] / load[0]), 1), 16)
    assert abs(model.setting.num_workers - best) <= max(1, best // 5)
    assert [decision for at, decision in model.decisions if at > settled_s] == []


def test_far_too_large_pool_is_halved() -> None:
    model = pipeline(0.01, 0.012, 16)
    model.run(60)
    assert [decision.setting.num_workers for _, decision in model.decisions] == [8, 4, 2]
    assert model.decisions[0][1].reason == "the trainer does not wait, 16 workers are busy 8%: 8 keep up"


def test_controller_follows_rising_and_falling_load() -> None:
    model = Pipeline(lambda now: 0.01 if 40 <= now < 80 else 0.05, lambda now: 0.06, setting=Setting(2, 2), most=MOST)
    model.run(40)
    assert model.setting.num_workers == 2
    model.run(80)
    assert 6 <= model.setting.num_workers <= 8
    model.run(120)
    assert model.setting.num_workers <= 4
    assert len(model.decisions) <= 6


def test_useless_workers_are_removed_and_not_tried_again() -> None:
    model = pipeline(0.01, 0.08, 2, num_cpus=4)
    model.run(200)
    assert [decision.setting.num_workers for _, decision in model.decisions] == [4, 8, 4]
    reason = model.decisions[-1][1].reason
    assert reason.startswith("8 workers gave ")
    assert reason.endswith(": back to 4")


def test_too_small_pool_is_not_tried_again() -> None:
    now, memory, found = Setting(8, 2), TuningHistory(), []
    for _ in range(60):
        keeps_up = now.num_workers == 8
        window = RateWindow(0.5, 0.0, 1.0, 50) if keeps_up else RateWindow(0.5, 0.1, 0.8, 40)
        memory, decision = decide(now, memory, window, LIMITS)
        if decision is not None:
            now = decision.setting
            found.append(decision.reason)
    assert found == [
        "the trainer does not wait, 8 workers are busy 25%: 4 keep up",
        "with 4 workers the trainer waits 20% of the time: back to 8",
    ]


def test_nothing_changes_if_the_trainer_hardly_waits() -> None:
    now, memory = Setting(8, 2), TuningHistory()
    for _ in range(40):
        memory, decision = decide(now, memory, RateWindow(0.5, 0.01, 1.0, 50), LIMITS)  # 2% of the time
        assert decision is None


def test_bursts_raise_the_prefetch_factor_before_workers_are_added() -> None:
    model = pipeline(0.01, 0.01, 3, most=Setting(3, 8), burst=0.05)
    model.run(100)
    assert model.setting.num_workers == 3
    assert model.setting.prefetch > 2
    assert "batches ahead a worker, to even out what comes in bursts" in model.decisions[0][1].reason
    deaf = pipeline(0.01, 0.01, 3, most=Setting(3, 2), burst=0.05)
    deaf.run(100)
    assert model.num_delivered > 1.05 * deaf.num_delivered


def test_scarce_memory_lowers_the_prefetch_factor_at_once() -> None:
    model = pipeline(0.01, 0.03, 4, most=Setting(4, 8), room=6)
    model.run(60)
    assert [Setting(4, 1)] == [decision.setting for _, decision in model.decisions]
    assert model.decisions[0][1].reason == "memory is short: there is room for 6 batches, 8 are ordered ahead"


def test_slowly_starting_workers_are_added_only_for_a_large_gain() -> None:
    slow = pipeline(0.01, 0.0115, 1, start_s=30.0)
    slow.run(60)
    assert slow.decisions == []
    quick = pipeline(0.01, 0.0115, 1)
    quick.run(60)
    assert quick.setting.num_workers == 2


@settings(deadline=None)
@given(
    windows=st.lists(
        st.builds(
            lambda seconds, waits, busy, num: RateWindow(seconds, seconds * waits, busy, num),
            st.floats(0.5, 100),
            st.floats(0, 1),
            st.floats(0, 100),
            st.integers(1, 10_000),
        ),
        max_size=60,
    ),
    first=st.integers(1, 6),
    room=st.integers(1, 20),
)
def test_setting_stays_within_its_limits(windows: list[RateWindow], first: int, room: int) -> None:
    now, memory = Setting(first, 2), TuningHistory()
    limits = Limits(Setting(1, 1), Setting(6, 8), 20, room, 0.1)
    for window in windows:
        memory, decision = decide(now, memory, window, limits)
        if decision is not None:
            assert decision.setting != now
            assert decision.reason
            now = decision.setting
            assert 1 <= now.num_workers <= 6
            assert 1 <= now.prefetch <= 8
            assert now.num_ahead <= 20


def test_single_outlier_window_changes_nothing() -> None:
    """Simulates a window with a validation, where the trainer is away for minutes."""
    now, memory = Setting(4, 2), TuningHistory()
    steady = RateWindow(0.5, 0.01, 1.8, 50)
    for number in range(40):
        window = RateWindow(300.0, 0.01, 2.0, 60) if number % 13 == 5 else steady
        memory, decision = decide(now, memory, window, LIMITS)
        assert decision is None
