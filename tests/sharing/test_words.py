"""The words in shared memory by which ranks share a ring, tested in one process: a slot is reused only when every follower is
done with it.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shmload._core.filler import DONE, ERROR, WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.trainer import (
    FAILED,
    FILLING,
    READY,
    REPORT_ROUND,
    FollowerRing,
    Lease,
    Order,
    Share,
    TrainerRing,
    control_nbytes,
    share_nbytes,
)

NUM_SLOTS, NUM_FOLLOWERS, PAGE = 4, 2, os.sysconf("SC_PAGESIZE")
SIZES = {"order_capacity": 64, "text_capacity": 64, "layout_capacity": 64}


def memory(nbytes: int, *, private_of: int = -1) -> tuple[int, Mapping]:
    fd = os.memfd_create("ring") if private_of < 0 else private_of
    if private_of < 0:
        os.ftruncate(fd, nbytes)
    return fd, Mapping(fd, nbytes, private=private_of >= 0)


class SharedRing:
    """A leader, its worker and its followers, all in this process."""

    def __init__(self) -> None:
        self.fds = []
        nbytes = control_nbytes(NUM_SLOTS, 1, **SIZES)
        fd, control = memory(nbytes)
        share_fd, words = memory(share_nbytes(1 + NUM_FOLLOWERS, NUM_SLOTS))
        payload_fd, self.payload = memory(NUM_SLOTS * PAGE)
        self.fds = [fd, share_fd, payload_fd]
        self.leader = TrainerRing(control, num_slots=NUM_SLOTS, num_workers=1, **SIZES)
        self.share = Share(words, me=0, num_ranks=1 + NUM_FOLLOWERS, num_slots=NUM_SLOTS)
        self.leader.share(self.share)
        self.worker = WorkerRing(control, 0)
        self.told = [Share(words, me=rank) for rank in range(1, 1 + NUM_FOLLOWERS)]
        self.followers = [FollowerRing(control, told) for told in self.told]
        _, own = memory(NUM_SLOTS * PAGE, private_of=payload_fd)
        for slot in range(NUM_SLOTS):
            self.leader.set_payload(slot, own, b"payload", slot * PAGE, PAGE)
        for follower in self.followers:
            _, own = memory(NUM_SLOTS * PAGE, private_of=payload_fd)
            for slot in range(NUM_SLOTS):
                follower.set_payload(slot, own, slot * PAGE, PAGE)
        for told in (self.share, *self.told):
            told.report(REPORT_ROUND, 1)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def order(self, step: int) -> Order | None:
        order = Order(0, step, np.array([step], np.int64))
        return order if self.leader.post(order, is_packed=True) else None

    def fill(self) -> None:
        assert self.worker.claim()
        slot = self.worker.slot
        bytes_of = np.frombuffer(self.payload, np.uint8)
        bytes_of[slot * PAGE : (slot + 1) * PAGE] = self.worker.step % 251
        self.worker.finish(DONE)


def seen(lease: Lease) -> torch.Tensor:
    """Returns the slot's bytes as a tensor that holds the lease."""
    found: torch.Tensor = torch._C._from_dlpack(lease.capsule(0, 1, 8, (PAGE,)))
    return found


class Ranks(RuleBasedStateMachine):
    """Compares ranks with a model: which batch is ordered in which slot, and which ranks still need it."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = SharedRing()
        self.ordered: list[Order] = []  # not taken by the leader yet
        self.num_filled = 0  # number of batches
        self.num_ordered = 0
        self.taken = [0] * NUM_FOLLOWERS
        self.needed: dict[int, tuple[int, set[object]]] = {}  # slot -> batch, and the ranks that are not done with it
        self.held: dict[object, tuple[torch.Tensor, int, int]] = {}  # (rank, batch) -> bytes, slot, batch

    @rule()
    def order(self) -> None:
        order = self.ring.order(self.num_ordered)
        free = [slot for slot in range(NUM_SLOTS) if not self.needed.get(slot, (0, set()))[1]]
        assert (order is not None) == bool(free)
        if order is not None:
            assert order.slot in free
            self.needed[order.slot] = self.num_ordered, {"leader", *range(NUM_FOLLOWERS)}
            self.ordered.append(order)
            self.num_ordered += 1

    @precondition(lambda self: self.num_filled < self.num_ordered)
    @rule()
    def fill(self) -> None:
        self.ring.fill()
        self.num_filled += 1

    @precondition(lambda self: self.ordered and self.ordered[0].step < self.num_filled)
    @rule()
    def lead(self) -> None:
        order = self.ordered.pop(0)
        lease = self.ring.leader.take(order) or self.ring.leader.lease(order.slot)
        self.held["leader", order.step] = seen(lease), order.slot, order.step

    @rule(follower=st.integers(0, NUM_FOLLOWERS - 1), skips=st.booleans())
    def follow(self, follower: int, skips: bool) -> None:
        ring, step = self.ring.followers[follower], self.taken[follower]
        slot = ring.find(Order(0, step, np.array([step], np.int64)))
        assert (slot >= 0) == (step < self.num_ordered)
        if slot < 0:
            return
        assert self.needed[slot][0] == step
        assert ring.look(slot) == (READY if step < self.num_filled else FILLING)
        if step >= self.num_filled:
            return
        self.taken[follower] += 1
        if skips:
            ring.skip(slot)
            self.needed[slot][1].remove(follower)
            return
        self.held[follower, step] = seen(ring.lease(slot)), slot, step

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held, key=str)))
        _, slot, _ = self.held.pop(key)
        self.needed[slot][1].remove(key[0])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Checks that writes into a batch are visible to the writer only."""
        key = data.draw(st.sampled_from(sorted(self.held, key=str)))
        self.held[key][0][:] = 255
        found, slot, _ = self.held[key]
        self.held[key] = found, slot, 255

    @invariant()
    def what_is_held_is_the_batch_or_what_was_written(self) -> None:
        for values, _, value in self.held.values():
            assert bool((values == value % 256).all())

    def teardown(self) -> None:
        self.held.clear()
        self.ring.close()


@pytest.mark.slow(reason="hypothesis walks over real rings")
def test_slot_is_reused_only_when_every_rank_is_done_with_it() -> None:
    run_state_machine_as_test(Ranks, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))  # type: ignore[no-untyped-call]  # hypothesis's own


@pytest.fixture
def ring() -> SharedRing:
    return SharedRing()


def test_slot_held_by_a_follower_is_not_reused(ring: SharedRing) -> None:
    order = ring.order(0)
    assert order is not None
    ring.fill()
    held = [seen(follower.lease(order.slot)) for follower in ring.followers]
    lease = ring.leader.take(order) or ring.leader.lease(order.slot)
    del lease
    assert all(ring.order(step) for step in range(1, NUM_SLOTS))
    while held:
        assert not ring.share.is_passed(order.slot)
        assert ring.order(NUM_SLOTS) is None
        held.pop()
    assert ring.share.is_passed(order.slot)
    ring.close()


def test_round_that_followers_have_left_is_not_awaited(ring: SharedRing) -> None:
    for step in range(NUM_SLOTS):
        ring.order(step)
    ring.leader.void()
    assert ring.leader.drain() == 0
    assert ring.order(9) is None
    ring.share.round = 2
    for told in ring.told:
        assert ring.order(9) is None
        told.round = 2
        told.report(REPORT_ROUND, 2)
    order = ring.order(9)
    assert order is not None
    assert [follower.find(Order(0, 9, [9])) for follower in ring.followers] == [order.slot] * NUM_FOLLOWERS
    ring.close()


def test_failed_batch_fails_for_followers_and_is_kept_until_they_have_passed_it(ring: SharedRing) -> None:
    order = ring.order(0)
    assert order is not None
    assert ring.worker.claim()
    ring.worker.write_error(b"why")
    ring.worker.finish(ERROR)
    ring.leader.free(order.slot)
    for follower in ring.followers:
        assert follower.look(order.slot) == FAILED
        assert follower.failure(order.slot) == b"why"
        assert not ring.share.is_passed(order.slot)
        follower.skip(order.slot)
    assert ring.share.is_passed(order.slot)
    ring.close()


def test_rewritten_order_keeps_its_position_and_is_ready_once_refilled(ring: SharedRing) -> None:
    order = Order(0, 0, np.array([4, 5], np.int64))
    slot = ring.leader.hold()
    ring.leader.publish(slot, epoch=0, step=0, indices=order.indices, nrows=2, nchunks=2)
    assert ring.worker.claim()
    ring.worker.finish(DONE)
    assert ring.worker.claim()
    ring.worker.ask_repack()
    ring.worker.finish(DONE)
    (follower, *_) = ring.followers
    assert follower.find(order) == slot
    assert follower.look(slot) == FILLING  # the leader has not ordered it again yet
    ring.leader.publish(slot, epoch=0, step=0, indices=order.indices, nrows=2, is_packed=True)
    assert follower.look(slot) == FILLING
    ring.fill()
    assert follower.find(order) == slot
    assert follower.look(slot) == READY
    ring.close()


def test_follower_has_one_lease_per_slot_which_keeps_the_payload(ring: SharedRing) -> None:
    ring.order(0)
    ring.fill()
    follower = ring.followers[0]
    slot = follower.find(Order(0, 0, [0]))
    lease = follower.lease(slot)
    held = seen(lease)
    del lease
    assert not follower.is_free(slot)
    with pytest.raises(ValueError, match=f"slot {slot} is already leased"):
        follower.lease(slot)
    with pytest.raises(ValueError, match=f"cannot change the payload of slot {slot} while it is leased"):
        follower.set_payload(slot, ring.payload, 0, PAGE)
    del held
    assert follower.is_free(slot)
    ring.close()


def test_batch_ordered_again_after_an_interrupt_takes_no_slot_from_others(ring: SharedRing) -> None:
    for step in range(NUM_SLOTS):
        ring.order(step)
    follower = ring.followers[0]
    first = follower.find(Order(0, 0, [0]))
    for _ in range(NUM_SLOTS):
        ring.fill()
    ring.leader.lease(first)  # interrupted before the lease is counted
    for each in ring.followers:
        assert each.find(Order(0, 0, [0])) == first
        each.skip(first)
    for _ in range(2):  # no other slot is free
        again = ring.order(0)
        assert again is not None
        assert again.slot == first
        assert follower.find(Order(0, 0, [0])) == -1
        ring.fill()
        ring.leader.lease(again.slot)
    assert follower.look(follower.find(Order(0, 1, [1]))) == READY
    ring.close()


def test_memory_that_is_not_a_shared_ring_is_refused(ring: SharedRing) -> None:
    _, words = memory(4096)
    with pytest.raises(ValueError, match="the memory is not one in which ranks share a ring"):
        Share(words, me=0)
    with pytest.raises(ValueError, match=r"3 ranks need .* bytes to share 999 slots, the mapping has 4096"):
        Share(words, me=0, num_ranks=3, num_slots=999)
    with pytest.raises(ValueError, match="the memory is not a control block of this version of shmload"):
        FollowerRing(words, ring.told[0])
    with pytest.raises(ValueError, match="rank 7 is out of range: 3 ranks share the ring"):
        Share(ring.share.memory, me=7)
    ring.close()
