"""Events that recorders hold of a ring driven by the test, read at any moment; and invalid blocks."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmload._core.events import EVENT_NBYTES, KINDS, Recorders
from shmload._core.filler import DONE, ERROR, ROOM, VOID, WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.trainer import Order, TrainerRing, control_nbytes
from shmload.engine.tracing.event_log import EVENT, EventLog

SIZES = {"order_capacity": 64, "text_capacity": 64, "layout_capacity": 64}
KIND_OF = {name: number for number, name in KINDS.items()}
ABI_AT, WORKERS_AT, OFFSETS_AT, EVENTS_AT = 8, 16, 32, 112  # offsets in shml_header


def memory(nbytes: int) -> Mapping:
    fd = os.memfd_create("recorders")
    os.ftruncate(fd, nbytes)
    mapping = Mapping(fd, nbytes)
    os.close(fd)
    return mapping


class Ring:
    """A trainer, a worker and a event_log over one control block."""

    def __init__(self) -> None:
        self.control = memory(control_nbytes(3, 1, **SIZES))
        self.trainer = TrainerRing(self.control, num_slots=3, num_workers=1, **SIZES)
        payload = memory(3 * 4096)
        for slot in range(3):
            self.trainer.set_payload(slot, payload, b"x", slot * 4096, 4096)
        self.trainer.accept_layout(b"", is_packed=False)
        self.trainer.expect(4, 4096)
        self.worker = WorkerRing(self.control, 0)
        self.step = 0

    def batch(self, own: int = DONE) -> int:
        """Runs one batch from its order to its release, or until it is dropped. Returns its order number."""
        order = Order(7, self.step, np.arange(4))
        self.step += 1
        assert self.trainer.post(order, is_packed=False) > 0
        while self.worker.claim():
            number = self.worker.order
            self.worker.finish(own)
        if own != DONE:
            self.trainer.free(order.slot)
            return number
        lease = self.trainer.lease(order.slot)
        self.trainer.count_batch(order, 64)
        del lease
        assert self.trainer.num_leased == 0
        return number


def kinds(event_log: EventLog, owner: int) -> list[int]:
    return event_log.events(owner)["kind"].tolist()


def test_batch_leaves_an_event_for_each_step() -> None:
    ring = Ring()
    event_log = EventLog(ring.control, with_history=False)
    number = ring.batch()
    event_log.drain()
    assert kinds(event_log, 1) == [KIND_OF["publish"], KIND_OF["deliver"], KIND_OF["lease"]]
    assert set(kinds(event_log, 0)) == {KIND_OF["chunk"]}
    for owner in range(2):
        events = event_log.events(owner)
        assert set(events["order"].tolist()) == {number}
        assert set(events["epoch"].tolist()) == {7}
        assert set(events["step"].tolist()) == {0}
        assert (events["begin_ns"] <= events["end_ns"]).all()
        assert (events["begin_ns"] > 0).all()
    chunks, trainers = event_log.events(0), event_log.events(1)
    assert chunks["rows"].sum() == 4
    assert set(chunks["amount"].tolist()) == {DONE}
    assert trainers["amount"].tolist() == [0, 64, 0]
    assert trainers["place"].tolist() == [len(chunks), 0, 0]


def test_wait_for_orders_is_one_event_that_ends_with_a_claim() -> None:
    ring = Ring()
    for on in (True, False, True, False, True, False):
        ring.worker.waiting(on)
    event_log = EventLog(ring.control, with_history=True)
    event_log.drain()
    assert kinds(event_log, 0) == []
    ring.batch()
    event_log.drain()
    assert kinds(event_log, 0)[0] == KIND_OF["idle"]
    assert kinds(event_log, 0).count(KIND_OF["idle"]) == 1
    idle, first = event_log.events(0)[:2]
    assert idle["end_ns"] == first["begin_ns"]
    assert idle["order"] == 0


def test_trainer_waits_and_abandoned_orders_are_recorded() -> None:
    ring = Ring()
    order = Order(0, 3, np.arange(4))
    ring.trainer.post(order, is_packed=False)
    ring.trainer.begin_wait(order.slot)
    ring.trainer.end_wait()
    ring.trainer.end_wait()
    ring.trainer.begin_wait(-2)
    ring.trainer.end_wait()
    ring.trainer.void()
    event_log = EventLog(ring.control, with_history=True)
    event_log.drain()
    assert kinds(event_log, 1) == [KIND_OF[name] for name in ("publish", "wait", "wait", "abandon")]
    waits = event_log.events(1)[1:3]
    assert waits["step"].tolist() == [3, 0]
    assert waits["order"].tolist() == [1, 0]


def test_waits_are_recorded_within_a_claim_and_refused_outside() -> None:
    ring = Ring()
    with pytest.raises(RuntimeError, match="the worker has no claim"):
        ring.worker.waited(ROOM, 1)
    ring.trainer.post(Order(0, 0, np.arange(4)), is_packed=False)
    assert ring.worker.claim()
    ring.worker.waited(ROOM, 1)
    event_log = EventLog(ring.control, with_history=True)
    event_log.drain()
    assert kinds(event_log, 0) == [KIND_OF["room"]]
    assert event_log.events(0)["begin_ns"].tolist() == [1]


def test_start_is_recorded_from_its_known_begin_but_not_before_the_ring() -> None:
    ring = Ring()
    ring.worker.announce()
    ring.worker.announce(1)
    event_log = EventLog(ring.control, with_history=True)
    event_log.drain()
    (start,) = event_log.events(0)
    assert start["kind"] == KIND_OF["start"]
    assert start["begin_ns"] == Recorders(ring.control).owner_start_ns
    assert Recorders(ring.control).pids() == [os.getpid()]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    with_history=st.booleans(),
    acts=st.lists(st.one_of(st.integers(1, 900), st.sampled_from(["drain", "if due"])), max_size=12),
    own=st.sampled_from([DONE, VOID, ERROR]),
)
def test_events_read_at_any_moment_are_complete_in_order_and_missing_ones_counted(
    with_history: bool, acts: list[Any], own: int
) -> None:
    ring = Ring()
    if acts:
        for _ in range(len(acts) * 40):
            ring.batch(own)
    event_log = EventLog(ring.control, with_history=with_history)
    before = Recorders(ring.control).heads()
    num_before = sum(len(event_log.events(owner)) for owner in range(2))
    for act in acts:
        if act == "drain":
            event_log.drain()
        elif act == "if due":
            event_log.drain_if_due()
        else:
            for _ in range(act):
                ring.batch(own)
    event_log.drain()
    heads = Recorders(ring.control).heads()
    num_read = 0
    for owner in range(2):
        events = event_log.events(owner)
        num_read += len(events)
        assert (np.diff(events["begin_ns"].astype(np.int64)) >= 0).all() or owner == 1
        orders = events["order"].astype(np.int64)
        assert (np.diff(orders) >= 0).all()
    held = sum(min(head, event_log.capacity - 1) for head in before)
    assert num_before == (held if with_history else 0)
    assert num_read - num_before + event_log.num_lost == sum(heads) - sum(before)


def test_overwritten_events_are_counted() -> None:
    ring = Ring()
    event_log = EventLog(ring.control, with_history=False)
    for _ in range(event_log.capacity):
        ring.batch()
    assert event_log.drain() == 3 * event_log.capacity
    assert len(event_log.events(1)) == event_log.capacity - 1
    assert event_log.num_lost == 2 * event_log.capacity + 1 + Recorders(ring.control).heads()[0] - len(event_log.events(0))


def test_few_new_events_are_not_read_yet() -> None:
    ring = Ring()
    event_log = EventLog(ring.control, with_history=False)
    ring.batch()
    event_log.drain_if_due()
    assert len(event_log.events(1)) == 0
    for _ in range(event_log.capacity // 4):
        ring.batch()
    event_log.drain_if_due()
    assert len(event_log.events(1)) > 0
    assert event_log.num_lost == 0


def test_event_layout_equals_the_header() -> None:
    assert EVENT_NBYTES == EVENT.itemsize == 64


# ---------------------------------------------------------------- invalid blocks


def words(at: int, kind: str, *values: int) -> tuple[int, bytes]:
    return at, struct.pack(f"<{len(values)}{kind}", *values)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (words(0, "Q", 1), "the memory is not the control block of a loader"),
        (
            words(ABI_AT, "I", 999),
            "the control block has layout version 999, and this shmload reads version .*: use the shmload that the loader runs",
        ),
        (words(WORKERS_AT, "I", 15_999), "is damaged: it claims 15999 workers"),
        (words(WORKERS_AT, "I", 0xFFFFFFFF), "is damaged: it claims 4294967295 workers"),
        (words(EVENTS_AT, "Q", 1 << 63), "is damaged"),
        (words(EVENTS_AT, "Q", 0), "is damaged"),
        (words(EVENTS_AT, "Q", 520), "is damaged"),
        (words(EVENTS_AT + 8, "Q", 0), "is damaged: .* and 0 events each"),
        (words(EVENTS_AT + 8, "Q", 500), "is damaged: .* and 500 events each"),
        (words(EVENTS_AT + 8, "Q", (1 << 32) + 512), "is damaged"),
        (words(OFFSETS_AT, "Q", 1 << 40), "is damaged"),
    ],
)
def test_damaged_block_is_refused(damage: tuple[int, bytes], message: str) -> None:
    ring = Ring()
    at, raw = damage
    memoryview(ring.control)[at : at + len(raw)] = raw
    with pytest.raises(ValueError, match=message):
        Recorders(ring.control)


def test_memory_too_small_for_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="the memory is not the control block of a loader"):
        Recorders(memory(64))


def test_missing_recorder_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="recorder 2 does not exist: there are 2"):
        Recorders(Ring().control).read(2, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(12, 127), st.binary(min_size=1, max_size=8)), max_size=4), st.integers(0, 2**64 - 1))
def test_damage_never_causes_reads_outside_the_block(damages: list[tuple[int, bytes]], head: int) -> None:
    """Proved when run under the address sanitizer; otherwise only a crash would show."""
    ring = Ring()
    ring.batch()
    view = memoryview(ring.control)
    for at, raw in damages:
        view[at : at + len(raw)] = raw
    try:
        recorders = Recorders(ring.control)
    except ValueError:
        return
    offset = struct.unpack_from("<Q", view, EVENTS_AT)[0]
    view[offset : offset + 8] = struct.pack("<Q", head)
    for owner in range(recorders.num_workers + 1):
        for since in (0, max(head - 3, 0), 2**64 - 1):
            first, raw = recorders.read(owner, since)
            assert len(raw) % EVENT_NBYTES == 0
            assert len(raw) <= recorders.capacity * EVENT_NBYTES
            assert first >= since
