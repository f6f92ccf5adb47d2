"""The interpretation of a snapshot's words, on constructed snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from shmload.engine.stats import HUNG_S, describe
from tests.top.live_kit import SECOND, slot, snapshot_with, worker

ORDERED, LEASED, DRAINING = 2, 3, 4
ANY = 2**64 - 1


def ordered(order: int, **words: Any) -> dict[str, Any]:
    return slot(**{"state": ORDERED, "order": order, "nrows": 8, "num_chunks": 4, "num_open": 4, **words})


def test_ordered_slot_is_ready_when_every_chunk_is_final() -> None:
    slots = [slot(), slot(state=1), ordered(5), ordered(6, num_open=0, num_final=4), slot(state=LEASED), slot(state=DRAINING)]
    assert describe(snapshot_with(slots=slots))["slots"] == {
        "free": 1,
        "held": 1,
        "ordered": 2,
        "leased": 1,
        "draining": 1,
        "parked": 0,
        "filling": 1,
        "ready": 1,
    }


def test_slots_are_listed_in_the_order_of_their_orders() -> None:
    slots = [
        ordered(9, epoch=1, step=1),
        ordered(8, epoch=1, step=0, num_open=1, num_final=1, claims=[(1, 0, 2), (0, 2, 4)], ordered_ns=9 * SECOND),
    ]
    first, second = describe(snapshot_with(10, slots=slots))["orders"]
    assert first == {"epoch": 1, "step": 0, "num_rows": 8, "num_chunks": 4, "num_chunks_done": 1, "age_s": 1.0, "workers": [0, 1]}
    assert (second["step"], second["workers"]) == (1, [])


def test_rates_are_of_the_interval() -> None:
    before = snapshot_with(10, batches=5, samples=50, nbytes=5000, workers=[worker(num_samples=50)])
    seen = snapshot_with(12, batches=7, samples=70, nbytes=9000, workers=[worker(num_samples=80, busy_ns=SECOND)])
    found = describe(seen, before)
    assert (found["interval_s"], found["batches_per_s"], found["samples_per_s"], found["nbytes_per_s"]) == (2, 1, 10, 2000)
    assert (found["batches"], found["samples"], found["nbytes"]) == (7, 70, 9000)
    assert (found["workers"][0]["samples_per_s"], found["workers"][0]["busy_share"]) == (15, 0.5)


def test_first_snapshot_covers_the_rings_lifetime() -> None:
    found = describe(snapshot_with(12, owner_start_ns=2 * SECOND, samples=50))
    assert (found["interval_s"], found["age_s"], found["samples_per_s"]) == (10, 10, 5)


def test_two_snapshots_of_the_same_moment_give_no_rates() -> None:
    found = describe(snapshot_with(10, samples=9), snapshot_with(10))
    assert (found["samples_per_s"], found["interval_s"]) == (0, 0)


def states_of(workers: list[dict[str, Any]], slots: list[dict[str, Any]], **words: Any) -> list[tuple[str, float | None]]:
    found = describe(snapshot_with(10, workers=workers, slots=slots, **words))["workers"]
    return [(one["state"], one["for_s"]) for one in found]


def test_worker_is_decoding_if_its_row_is_in_its_chunk() -> None:
    held = ordered(7, claims=[(0, 2, 4)])
    at_row_3 = worker(now=7 << 16 | 3, since_ns=6 * SECOND, claimed_ns=5 * SECOND)
    of_an_earlier_chunk = worker(now=7 << 16 | 1, since_ns=6 * SECOND, claimed_ns=5 * SECOND)
    of_an_earlier_order = worker(now=6 << 16 | 3, since_ns=6 * SECOND, claimed_ns=5 * SECOND)
    collating = worker(now=0, since_ns=6 * SECOND, claimed_ns=5 * SECOND)
    assert states_of([at_row_3], [held]) == [("decoding", 4.0)]
    for one in (of_an_earlier_chunk, of_an_earlier_order, collating):
        assert states_of([one], [held]) == [("filling", 5.0)]


def test_rows_are_stored_in_sixteen_bits() -> None:
    held = ordered(7, nrows=200_000, num_chunks=2, claims=[(0, 100_000, 200_000)])
    assert states_of([worker(now=7 << 16 | (150_000 & 0xFFFF), since_ns=SECOND)], [held]) == [("decoding", 9.0)]


def test_worker_without_a_claim_is_starting_waiting_or_leaving() -> None:
    workers = [worker(started_ns=0, pid=0), worker()]
    assert states_of(workers, [slot()]) == [("starting", None), ("waiting", None)]
    assert states_of(workers, [slot()], is_closing=True) == [("starting", None), ("leaving", None)]


def test_surplus_worker_is_leaving_and_then_omitted() -> None:
    workers = [worker(), worker(), worker(started_ns=0, pid=0)]
    assert states_of(workers, [slot()], num_wanted=1) == [("waiting", None), ("leaving", None), ("not wanted", None)]


def test_worker_may_still_fill_an_abandoned_order() -> None:
    drained = slot(state=DRAINING, order=3, num_chunks=1, claims=[(0, 0, 4)])
    assert states_of([worker(now=3 << 16, since_ns=9 * SECOND)], [drained]) == [("decoding", 1.0)]
    gone = slot(state=0, order=3, num_chunks=1, claims=[(0, 0, 4)])
    assert states_of([worker(now=3 << 16, since_ns=9 * SECOND)], [gone]) == [("waiting", None)]


def test_worker_that_has_not_started_has_no_pid() -> None:
    found = describe(snapshot_with(workers=[worker(pid=0), worker(pid=44)]))["workers"]
    assert [one["pid"] for one in found] == [None, 44]


@pytest.mark.parametrize("awaited", [2, ANY, 0])
def test_trainer_waits_for_the_slowest_sample(awaited: int) -> None:
    held = ordered(7, epoch=1, step=3, num_open=0, num_final=2, claims=[(0, 0, 2), (1, 2, 4)])
    workers = [worker(now=7 << 16 | 0, since_ns=9 * SECOND), worker(now=7 << 16 | 3, since_ns=2 * SECOND, index=17)]
    seen = snapshot_with(10, awaited=awaited, waiting_since_ns=4 * SECOND, slots=[slot(), held, ordered(8)], workers=workers)
    found = describe(seen)
    assert found["waits_for"] == {"for_s": 6.0, "epoch": 1, "step": 3, "worker": 1}
    assert found["is_hung"]


def test_unclaimed_batch_is_awaited_without_a_worker() -> None:
    found = describe(snapshot_with(10, awaited=1, waiting_since_ns=9 * SECOND, slots=[ordered(7)]))
    assert found["waits_for"] == {"for_s": 1.0, "epoch": 0, "step": 0, "worker": None}
    nothing = describe(snapshot_with(10, awaited=ANY, waiting_since_ns=9 * SECOND))
    assert nothing["waits_for"] == {"for_s": 1.0, "epoch": None, "step": None, "worker": None}


def test_running_trainer_waits_for_nothing() -> None:
    found = describe(snapshot_with(10, awaited=1, slots=[ordered(7)]))
    assert found["waits_for"] is None
    assert not found["is_hung"]


def test_loader_is_hung_a_fixed_time_after_the_first_worker_was_ready() -> None:
    def is_hung(at_s: float, **words: Any) -> bool:
        return bool(describe(snapshot_with(at_s, waiting_since_ns=1, **words))["is_hung"])

    ready = [worker(started_ns=2 * SECOND), worker(started_ns=0)]
    assert not is_hung(1.9 + HUNG_S, workers=ready)
    assert is_hung(2 + HUNG_S, workers=ready)
    assert not is_hung(100 + HUNG_S, workers=[worker(started_ns=0)])


def test_position_is_that_of_the_newest_batch_within_its_pass() -> None:
    assert describe(snapshot_with(num_steps=9)).items() >= {"epoch": None, "step": None, "num_steps": 9}.items()
    found = describe(snapshot_with(batches=1, epoch=4, step=6, step_stride=3, slots=[ordered(7, epoch=4, step=10)]))
    assert found.items() >= {"epoch": 4, "step": 2, "num_steps": None}.items()
    assert (found["orders"][0]["epoch"], found["orders"][0]["step"]) == (4, 4)


def test_size_of_a_ring_includes_control_block_and_segments() -> None:
    slots = [
        slot(payload_path="a", payload_offset=100, payload_nbytes=100),
        slot(payload_path="a", payload_offset=0, payload_nbytes=100),
        slot(payload_path="b", payload_offset=0, payload_nbytes=50),
        slot(payload_path=""),
    ]
    assert describe(snapshot_with(slots=slots))["memory"]["ring_nbytes"] == 4096 + 200 + 50


def test_modes_and_names_are_described() -> None:
    assert describe(snapshot_with(is_static=True)).items() >= {"mode": "torch", "dataset": "Rows", "read_by": "read_into"}.items()
    assert describe(snapshot_with())["mode"] == "seed"


def test_cluster_pool_shows_its_actors_nodes_and_received_bytes() -> None:
    def far(node: str, fetched: int, remote: int, num_actors: int = 1) -> dict[str, Any]:
        return worker(node=node, nbytes_fetched=fetched, nbytes_remote=remote, num_actors=num_actors)

    before = snapshot_with(10, workers=[far("aa", 100, 0), far("bb", 50, 50), worker()])
    seen = snapshot_with(12, workers=[far("aa", 300, 0), far("bb", 150, 150, num_actors=3), worker()])
    report = describe(seen, before)
    assert report["cluster"] == {
        "nodes": {"aa": 1, "bb": 1},
        "num_actors": 2,
        "num_replaced": 2,
        "nbytes_fetched": 450,
        "nbytes_remote": 150,
        "nbytes_fetched_per_s": 150.0,
        "nbytes_remote_per_s": 50.0,
    }
    assert describe(seen)["cluster"]["nbytes_fetched_per_s"] == 450 / 12
    assert [one["node"] for one in report["workers"]] == ["aa", "bb", None]
    assert describe(snapshot_with())["cluster"] is None
