"""Which part waited for which, on constructed snapshots, and in loaders whose workers have ended."""

from __future__ import annotations

import os
import time
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload import ShmLoader
from shmload.engine.bottleneck import Bottleneck, ring_remedy
from shmload.engine.engine import Engine
from shmload.engine.ring_reader import RingReader
from shmload.engine.time_shares import TimeShares, beginning, shares
from tests.top.live_kit import SECOND, snapshot_with, worker
from tests.top.live_program import Rows

READY = [worker(), worker()]


def parts(*four: float, workers_busy: float) -> TimeShares:
    return TimeShares(*four, workers_busy)


def busy(share: float, seconds: float = 10.0) -> list[dict[str, object]]:
    return [worker(busy_ns=int(share * seconds * SECOND)) for _ in range(2)]


def test_always_waiting_trainer_means_slow_workers() -> None:
    found = shares(snapshot_with(10), snapshot_with(20, wait_ns=10 * SECOND, workers=busy(1.0)))
    assert found == parts(0, 100, 0, 0, workers_busy=100)
    assert found.bottleneck == "decode"


def test_waiting_trainer_and_idle_workers_mean_slow_hand_off() -> None:
    found = shares(snapshot_with(10), snapshot_with(20, wait_ns=10 * SECOND, workers=busy(0.2)))
    assert found == parts(0, 100, 0, 0, workers_busy=20)
    assert found.bottleneck == "hand-off"


def remedy(bottleneck: Bottleneck, **seen: Any) -> str | None:
    given = {"num_slots": 5, "num_leased": 1, "busy_shares": [0.5, 0.5], "in_turn": True, "has_collate_fn": False}
    return ring_remedy(bottleneck, **{**given, **seen})


def test_the_remedy_for_slow_hand_off_names_slots_that_the_program_holds() -> None:
    assert remedy("hand-off") == "use larger batches or a larger `prefetch_factor`"
    holds = "the program holds 4 of 5 slots: release batches earlier, or use a larger `prefetch_factor`"
    assert remedy("hand-off", num_leased=4) == holds


def test_the_remedy_for_slow_hand_off_names_the_only_slow_worker() -> None:
    assert "worker 1 is slower than the others" in str(remedy("hand-off", busy_shares=[0.01, 0.99, 0.02]))
    for seen in (
        {"busy_shares": [0.99]},
        {"busy_shares": []},
        {"busy_shares": [0.9, 0.8, 0.1]},
        {"busy_shares": [0.1, 0.9], "in_turn": False},
    ):
        assert remedy("hand-off", **seen) == "use larger batches or a larger `prefetch_factor`"


def test_the_remedy_names_a_collate_fn() -> None:
    assert str(remedy("decode", has_collate_fn=True)).endswith("; the `collate_fn` runs in the workers, too: time it by itself")
    assert "collate_fn" not in str(remedy("hand-off", has_collate_fn=True))


def test_there_is_no_remedy_where_nothing_waits() -> None:
    assert [remedy(name, num_leased=4, has_collate_fn=True) for name in ("trainer", "none", "unknown")] == [None] * 3


@pytest.mark.parametrize(
    ("runnable_s", "asleep", "bottleneck"), [(1, 70, "source"), (7, 10, "decode"), (30, 0, "decode"), (None, 0, "decode")]
)
def test_workers_that_sleep_wait_for_storage(runnable_s: int | None, asleep: float, bottleneck: str) -> None:
    at = None if runnable_s is None else SECOND
    before = snapshot_with(10, workers=[worker(runnable_ns=at) for _ in range(2)])
    end = None if runnable_s is None else (1 + runnable_s) * SECOND
    after = [worker(busy_ns=8 * SECOND, runnable_ns=end) for _ in range(2)]
    found = shares(before, snapshot_with(20, wait_ns=10 * SECOND, workers=after))
    assert found == parts(0, 100, 0, 0, workers_busy=80)._replace(workers_asleep=asleep)
    assert found.bottleneck == bottleneck


def test_time_of_a_replacement_counts_from_its_begin() -> None:
    before = snapshot_with(10, workers=[worker(pid=7, runnable_ns=90 * SECOND)])
    after = snapshot_with(20, wait_ns=10 * SECOND, workers=[worker(pid=8, busy_ns=10 * SECOND, runnable_ns=9 * SECOND)])
    assert shares(before, after).workers_asleep == 10


def test_idle_workers_and_a_busy_program_mean_a_slow_program() -> None:
    found = shares(snapshot_with(10), snapshot_with(20, workers=busy(0.1)))
    assert found == parts(0, 0, 90, 10, workers_busy=10)
    assert found.bottleneck == "trainer"


def test_nobody_waits_if_both_are_busy() -> None:
    found = shares(snapshot_with(10), snapshot_with(20, wait_ns=SECOND // 5, workers=busy(1.0)))
    assert found == parts(0, 2, 0, 98, workers_busy=100)
    assert found.bottleneck == "none"


def test_idle_workers_count_only_while_the_trainer_does_not_wait() -> None:
    found = shares(snapshot_with(10), snapshot_with(20, wait_ns=4 * SECOND, workers=busy(0.5)))
    assert found == parts(0, 40, 30, 30, workers_busy=50)


def test_unfinished_wait_counts() -> None:
    before = snapshot_with(10, waiting_since_ns=8 * SECOND, wait_ns=SECOND)
    assert shares(before, snapshot_with(20, waiting_since_ns=8 * SECOND, wait_ns=SECOND)).trainer_waits == 100
    assert shares(before, snapshot_with(20, wait_ns=4 * SECOND)).trainer_waits == 10
    assert shares(snapshot_with(10), snapshot_with(20, waiting_since_ns=15 * SECOND)).trainer_waits == 50


def test_unfinished_claim_counts_as_busy() -> None:
    claimed = [worker(claimed_ns=10 * SECOND), worker(claimed_ns=15 * SECOND)]
    assert shares(snapshot_with(10), snapshot_with(20, workers=claimed)).workers_wait == 25


def test_time_before_the_first_worker_is_ready_is_start_up() -> None:
    before = snapshot_with(10, workers=[worker(started_ns=0), worker(started_ns=0)])
    late = [worker(started_ns=14 * SECOND, busy_ns=6 * SECOND), worker(started_ns=0)]
    found = shares(before, snapshot_with(20, wait_ns=9 * SECOND, workers=late))
    assert found == parts(40, 50, 0, 10, workers_busy=100)
    assert shares(before, snapshot_with(20, wait_ns=10 * SECOND, workers=before["workers"])) == parts(
        100, 0, 0, 0, workers_busy=100
    )
    assert parts(100, 0, 0, 0, workers_busy=100).bottleneck == "unknown"


def test_rounded_parts_sum_to_the_whole() -> None:
    before = snapshot_with(0, workers=[worker(started_ns=0)])
    found = shares(before, snapshot_with(10, wait_ns=6670 * SECOND // 1000, workers=[worker(started_ns=3335 * SECOND // 1000)]))
    assert found == parts(33.4, 33.4, 33.2, 0, workers_busy=0)


def test_replaced_worker_is_not_start_up() -> None:
    replaced = [worker(started_ns=18 * SECOND), worker(started_ns=18 * SECOND)]
    assert shares(snapshot_with(10), snapshot_with(20, workers=replaced)).start_up == 0


def test_nothing_is_counted_before_the_ring_was_made() -> None:
    seen = snapshot_with(10, owner_start_ns=2 * SECOND, wait_ns=3 * SECOND, batches=7, workers=[worker(started_ns=4 * SECOND)])
    begin = beginning(seen)
    assert begin["time_ns"] == 2 * SECOND
    assert begin["batches"] == begin["wait_ns"] == 0
    assert shares(begin, seen) == parts(25, 12.5, 62.5, 0, workers_busy=0)


words = st.integers(0, 2**64 - 1)
workers = st.builds(worker, busy_ns=words, claimed_ns=words, started_ns=st.one_of(st.just(0), words))
snapshots = st.builds(
    snapshot_with, at_s=st.floats(0, 1e6), wait_ns=words, waiting_since_ns=words, workers=st.tuples(workers, workers).map(list)
)


@given(snapshots, snapshots)
def test_parts_sum_to_the_whole_for_any_words(before: dict[str, object], seen: dict[str, object]) -> None:
    found = shares(before, seen)
    assert sum(found.parts.values()) == pytest.approx(100, abs=1e-9)
    assert all(0 <= share <= 100 for share in found)
    assert found.bottleneck in get_args(Bottleneck)


@pytest.mark.parametrize("seed", [None, 1])
def test_workers_that_slept_are_known_after_they_have_ended(seed: int | None) -> None:
    with ShmLoader(Rows(20, lambda index: time.sleep(0.05)), batch_size=2, num_workers=2, seed=seed) as loader:
        for _ in loader:
            pass
    assert loader.stats()["bottleneck"] == "source"


def test_ids_of_another_pid_namespace_are_not_taken_for_processes_here() -> None:
    with ShmLoader(Rows(20), batch_size=2, num_workers=1, seed=1) as loader:
        next(iter(loader))
        engine = loader._builder.last
        assert isinstance(engine, Engine)
        known, foreign = (RingReader(engine.control).snapshot(pid)["workers"][0]["runnable_ns"] for pid in (os.getpid(), 1))
    assert known > 0
    assert foreign is None
