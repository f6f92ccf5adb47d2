"""The engine of one loader: orders in, batches out, over one ring and one worker pool.

    submit ──▶ backlog ──publish──▶ slot ──workers──▶ ready ──next──▶ tensors ──last alias dies──▶ free slot ──▶ backlog ...

Orders are delivered in the order they were submitted. They queue here, apart from slots, so that a sampler is asked at the pace
its user expects whatever the ring's size. The trainer does its share of the protocol only inside these calls: there is no thread.
One round is: take in freed slots, settle what workers ask for, publish, look at the next batch, see to deaths, and only then
sleep, on a bell that a worker rings when it completes the slot that is slept for. When all goes well, a batch takes two native
calls instead, `TrainerRing.post` and `TrainerRing.take`: a trainer of small batches spends its time on the steps between.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from shmload import faults
from shmload._core.trainer import ANY_SLOT, FAILED, FILLING, HELD, ORDERED, READY, REPACK, Lease, Order
from shmload.batch.deliver import LeasedBatch, copied, deliver_rows, unpack
from shmload.batch.layout import Layout
from shmload.device.pending_copies import Releases
from shmload.engine.parts import DeviceFeed, EngineOptions, Holders, Hook, Parts
from shmload.engine.ring import NOTHING, BadSamples, Delivery, Turns
from shmload.engine.stats import RingReader, add_memory
from shmload.errors import WorkerDied
from shmload.shm import owners
from shmload.worker.pool import STOP_GRACE_S, interrupts_held
from shmload.worker.reader import Failure, Job
from shmload.worker.snapshot import AFRESH, END, NO_NEWS, Note, load_note

log = logging.getLogger("shmload")

WAIT_S = 0.02  # the longest sleep between looks at deaths and lost bells
DEATH_LOOK_S = 0.02  # how often deaths are looked for while batches keep coming


class Engine:
    """What passes through one ring and its worker pool.

    Args:
        job: what workers do with an order.
        bad_samples: what is done about samples that cannot be read.
        hooks: who takes part in the work.

    Attributes:
        on_delivery: called after each batch; None: nobody looks.
        turns: of those who ask for batches; it is their iterator's.
        shared_by: ranks that read the ring.
        lost: an order that has left the queue and comes to nothing, until `take_lost` is asked.
        lost_note: what the worker said of itself with the last that came to nothing.
    """

    def __init__(self, job: Job, options: EngineOptions, bad_samples: BadSamples, hooks: Sequence[Hook] = ()) -> None:
        self._options, self._bad_samples, self._hooks = options, bad_samples, tuple(hooks)
        self._queue: deque[Order] = deque()  # submitted and not delivered
        self._backlog: deque[Order] = deque()  # its tail: not published
        self.lost: Order | None = None
        self.lost_note: Note | None = None
        self._death_look = 0.0
        self.on_delivery: Callable[[], None] | None = None
        self._broken: Callable[[], WorkerDied] | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self.turns = Turns()
        self.shared_by = options.num_ranks
        self._has_layout = job.plan.rows is not None or job.plan.is_whole
        self._has_notes = job.seed is None
        parts = self._parts = Parts(job, options, self._hooks, self._order_in)
        assert parts.pool is not None
        self.control, self.num_slots, self.pool = parts.control, parts.num_slots, parts.pool
        self.worker_set = parts.worker_set
        self._ring, self._memory, self._writer, self._supervisor = (parts.ring, parts.memory, parts.writer, parts.supervisor)
        self._ready, self._grants, self._orders = parts.ready, parts.grants, parts.orders
        self._pending_copies, self._copy_out = parts.pending_copies, parts.copy_out
        self.releases: Releases | None = None if parts.pending_copies is None else parts.pending_copies.releases
        self.holders = next((hook for hook in self._hooks if isinstance(hook, Holders)), None)
        # what is sent ahead is copied by us alone
        self._names_streams = options.calls is not None and options.num_sent is None
        self._feed = None if options.num_sent is None else DeviceFeed(self, options)

    # ------------------------------------------------------------ orders

    def submit(self, order: Order) -> None:
        """Queues an order behind those submitted before; it is published as soon as a slot is free."""
        if self._is_closed:
            raise self._why_closed()
        try:
            self._queue.append(order)
            if self._backlog or not self._writer.post(order):
                self._backlog.append(order)
                self._publish()
        except BaseException:  # ^C, or what another signal handler raises, may come at any line
            self._mend()
            raise

    @property
    def num_queued(self) -> int:
        """Orders submitted and not delivered; what was sent ahead to a device is not delivered."""
        return len(self._queue) if self._feed is None else len(self._queue) + len(self._feed.ahead)

    @property
    def front(self) -> Order | None:
        """The order that `next` will deliver."""
        if self._feed is not None and self._feed.ahead:
            return self._feed.ahead[0].order
        return self._queue[0] if self._queue else None

    def _publish(self) -> None:
        while self._backlog:
            slot = self._ring.hold()
            if slot < 0:
                owners.settle()
                slot = self._ring.hold()
            if slot < 0:
                return
            order = self._backlog[0]
            self._writer.write(order, slot)
            self._backlog.popleft()

    # ------------------------------------------------------------ delivery

    def next(self, *, in_order: bool = True) -> Delivery:
        """Waits for the oldest order and delivers it.

        Args:
            in_order: False: for any order that is done, the oldest of these first.
        Returns:
            the order and its batch, whose arrays alias the slot until their last alias dies.
        Raises:
            whatever the dataset raised for one of its samples; that batch is then lost and the next call goes on behind it.
            WorkerDied: a worker ended and may not be replaced, or a sample killed its worker twice.
            RuntimeError: the loader is closed, or `timeout` has passed.
        """
        if self._is_closed:
            raise self._why_closed()
        if self._copy_out.refused is not None:
            self._copy_out.raise_refused()
        if self._pending_copies is not None:
            self._pending_copies.look()
        return self._next_with_hooks(in_order) if self._hooks else self._take(in_order)

    def _next_with_hooks(self, in_order: bool) -> Delivery:
        """The same; what may raise has done so before others hear of the batch."""
        front = self.front
        assert front is not None
        for hook in self._hooks:
            hook.before_next(front)
        try:
            delivery = self._take(in_order)
        finally:
            for hook in self._hooks:
                hook.after_next(is_gone=self.front is not front)
        for hook in self._hooks:
            hook.delivered(delivery[0])
        return delivery

    def _take(self, in_order: bool) -> Delivery:
        try:
            if self._feed is not None:
                return self._feed.next(in_order)
            if in_order and not self._backlog:
                order = self._queue[0]
                lease = self._ring.take(order) or self._slept(order)
                if lease is not None:
                    return self._deliver(order, lease, NO_NEWS if lease.has_note else None)
            order, is_ready = self.awaited(in_order)
            return self.deliver(order) if is_ready else (order, NOTHING, self.lost_note)
        except BaseException:  # ^C, or what another signal handler raises, may come at any line
            self._mend()
            raise

    def _slept(self, order: Order) -> Lease | None:
        """The lease of an order for which nothing is to be done but to sleep; None: look at it all, one by one.

        What runs after a wake-up is in no cache, so it is as little as can be: half of what `awaited` does.
        """
        if self._pending_copies is not None or self._options.timeout_s or self._memory.is_sparse:
            return None
        ring, ready = self._ring, self._ready
        if ring.must_look:
            self._see_to_deaths()
        try:
            while ring.must_sleep(order):
                if not ready.wait(WAIT_S):
                    self._see_to_deaths()
        finally:
            ring.end_wait()
        return ring.take(order, True)

    def awaited(self, in_order: bool) -> tuple[Order, bool]:
        """The order that is next, and True as soon as it is ready; False, and it is gone, if all of its samples are skipped."""
        began = 0.0
        ring = self._ring
        self.work()
        try:
            while True:
                order = self._queue[0] if in_order else self._first_done()
                if order.slot >= 0:
                    found = ring.look(order.slot)
                    if found == READY:
                        return order, True
                    if found != FILLING:
                        if self._settle(order, found):
                            continue
                        self._queue.remove(order)
                        return order, False
                if order.slot < 0 and self._pending_copies is not None and self._pending_copies.wait():
                    self._round()
                    continue
                began = began or monotonic()
                ring.begin_wait(order.slot if in_order and order.slot >= 0 else ANY_SLOT)
                self._ready.drain()
                self._round()
                if self._is_done(order if in_order else self._first_done()):
                    continue
                if self._memory.is_sparse and ring.counters()["batches"]:  # workers should not share the processors over the first
                    self._memory.reserve_more()
                    continue
                was_rung = self._ready.wait(WAIT_S)
                now = monotonic()
                if not was_rung or now - self._death_look > DEATH_LOOK_S:
                    self._see_to_deaths()
                if self._options.timeout_s and now - began > self._options.timeout_s:
                    raise RuntimeError(f"DataLoader timed out after {self._options.timeout_s} seconds")
        finally:
            ring.end_wait()

    def _is_done(self, order: Order) -> bool:
        return order.slot >= 0 and self._ring.look(order.slot) != FILLING

    def _first_done(self) -> Order:
        return next((order for order in self._queue if self._is_done(order)), self._queue[0])

    def _why_closed(self) -> BaseException:
        return RuntimeError("this loader is closed: make a new one") if self._broken is None else self._broken()

    def deliver(self, order: Order) -> Delivery:
        """Delivers a ready order with whatever its worker sent along."""
        slot = order.slot
        dumped = self._ring.note(slot) if self._has_notes else b""
        if dumped[:1] == END:
            self._ring.free(slot)
            self._queue.remove(order)
            return order, NOTHING, load_note(dumped, None)
        lease = self._ring.lease(slot)
        return self._deliver(order, lease, load_note(dumped, lease.bytes_at))

    def _deliver(self, order: Order, lease: Lease, note: Note | None) -> Delivery:
        nbytes = lease.used_nbytes  # set by the worker that packed the batch, whatever the order asked for
        try:
            if note is not None and note.has_ended:
                batch = NOTHING
            elif nbytes:
                batch = unpack(LeasedBatch(lease))
            else:
                assert self._writer.layout is not None
                batch, nbytes = deliver_rows(self._writer.layout, lease, order.nrows)
            if self._names_streams:
                assert self._pending_copies is not None
                self._pending_copies.releases.delivered(lease.slot)
            del lease
            is_last_slot = self._ring.count_batch(order, nbytes)
            if is_last_slot and batch is not NOTHING and self._copy_out.must_copy(self._who_holds):
                batch = copied(batch)
        except Exception:  # an object in it does not unpickle, say: it would not the next time either
            self._lose(order, note)
            raise
        self._supervisor.num_vain = 0
        self._queue.remove(order)
        if self.on_delivery is not None:
            self.on_delivery()
        return order, batch, note

    def _lose(self, order: Order, note: Note | None) -> None:
        self._queue.remove(order)
        self.lost, self.lost_note = order, note

    def work(self) -> None:
        """Does what there is to do, and waits for nothing."""
        self._round()
        if monotonic() - self._death_look > DEATH_LOOK_S:
            self._see_to_deaths()

    def first_ready(self, in_order: bool) -> Order | None:
        """The order that would be next, if it is ready."""
        if not self._queue:
            return None
        order = self._queue[0] if in_order else self._first_done()
        return order if order.slot >= 0 and self._ring.look(order.slot) == READY else None

    def take_lost(self) -> Order | None:
        """The order that the exception of `next` has ended, if it has; the second time None."""
        lost, self.lost = self.lost, None
        return lost

    def _mend(self) -> None:
        """Makes orders and slots agree again after ^C at any line of `next` or `submit`: nothing queued is lost or made twice."""
        with interrupts_held():
            for slot in range(self.num_slots):
                if self._ring.state(slot) == HELD:
                    self._ring.free(slot)
            for order in self._queue:
                if order.slot >= 0 and self._ring.state(order.slot) != ORDERED:
                    order.slot = -1
            self._backlog = deque(order for order in self._queue if order.slot < 0)

    def _who_holds(self) -> str:
        """What a warning adds about those who hold slots."""
        return "".join(hook.who_holds() for hook in self._hooks) or "; shmload.debug.enable() says where they were taken"

    def _settle(self, order: Order, found: int) -> bool:
        """Sees to a batch that will not become ready by itself.

        Returns:
            True: it was ordered anew; False: every one of its samples was bad, so there will be none.
        Raises:
            what failed, for good.
        """
        ring, slot = self._ring, order.slot
        if found == REPACK:
            self._writer.write_packed(order, self._ring.counters()["batches"])
            return True
        assert found == FAILED
        _, text = ring.failure(slot)
        if text == b"":  # opened again, because the text was another chunk's
            self._writer.ring_workers(order, 1)
            return True
        bad: Sequence[int]
        error: Callable[[], BaseException]
        if text is None:
            bad, error = self._supervisor.death_over(slot)
            note: Note | None = AFRESH
        else:
            failure = Failure.loads(text)
            bad, error = failure.rows, failure.exception
            note = load_note(failure.worker, partial(ring.bytes_at, slot))
        try:
            if not bad:
                raise error()
            order.indices = self._bad_samples.replaced(order, bad, error)
            ring.count_bad_samples(self._bad_samples.count)
        except Exception:
            self._give_up(order, slot)
            self._lose(order, note)
            raise
        if order.nrows == 0:
            self._give_up(order, slot)
            self.lost_note = note
            return False
        self._writer.write(order, slot)
        return True

    def _give_up(self, order: Order, slot: int) -> None:
        """Frees the slot of an order that has failed for good; in torch mode its worker may wait to hear of that."""
        self._ring.free(slot)
        if order.worker >= 0:
            self._writer.ring_workers(order, 1)

    def _round(self) -> None:
        """Everything the trainer can act upon without waiting."""
        ring = self._ring
        if ring.is_draining:
            ring.drain()
        if not self._has_layout:
            text = ring.proposal
            if text is not None:
                with interrupts_held():
                    self._accept(text)
        while (slot := ring.needy()) >= 0:
            with interrupts_held():
                self._memory.answer_need(slot)
            self._ring_grants()
        if self._pending_copies is not None:
            self._pending_copies.pins.register()
        if self._backlog:
            self._publish()

    def _accept(self, text: bytes) -> None:
        """Settles the layout that a worker has proposed; no text: samples have no fixed rows."""
        nrows = max(self._options.max_rows, *(order.nrows for order in self._queue), 1)
        self._writer.settle(Layout.loads(text) if text else None, nrows)
        self._has_layout = True
        self._ring_grants()

    def _ring_grants(self) -> None:
        for _ in range(self._options.num_workers):
            self._grants.post()

    # ------------------------------------------------------------ deaths

    def _see_to_deaths(self) -> None:
        if self._is_closed:  # by another thread, while this one waits
            raise self._why_closed()
        self._death_look = monotonic()
        self._ring.look_again(DEATH_LOOK_S)
        for hook in self._hooks:
            hook.look()
        if self._options.config.sample_timeout_s is not None:
            with interrupts_held():
                num_timed_out = sum(map(self._supervisor.end_if_timed_out, range(self._ring.num_workers)))
            for bell in self._orders if num_timed_out else ():
                bell.post_up_to(1)
        deaths = self.pool.deaths()
        if not deaths:
            return
        with interrupts_held():
            for death in deaths:
                broken = self._supervisor.see_to(death)
                if broken is not None:
                    self.break_off(broken)
                    raise broken()
        for bell in self._orders:
            bell.post_up_to(1)

    def break_off(self, why: Callable[[], WorkerDied]) -> None:
        """Ends the workers, as one has ended that may not be replaced; `next` goes on saying so."""
        self._broken = why
        self.close(grace_s=0)

    def _order_in(self, slot: int) -> Order | None:
        return next((order for order in self._queue if order.slot == slot), None)

    # ------------------------------------------------------------ ends

    @faults.at("abandoning")
    def abandon(self) -> None:
        """Forgets every order. Workers finish what they have claimed; nothing is waited for."""
        with interrupts_held():
            if self._feed is not None:
                self._feed.ahead.clear()
            self._queue.clear()
            self._backlog.clear()
            self._ring.void()
        self._ring.drain()
        for hook in self._hooks:
            hook.abandoned()

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the workers and gives up the names; live batches stay valid. Safe to call twice, and in a forked child.

        Args:
            grace_s: how long a worker may take over what it has claimed before it is killed.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        try:
            for hook in self._hooks:
                hook.closing(is_broken=self._broken is not None)
        finally:
            self._is_closed = True
            try:
                with self.turns.others_out():  # who waits in next() hears of it at the next look
                    if self._feed is not None:
                        self._feed.ahead.clear()
                    self._parts.close(grace_s)
            finally:
                for hook in self._hooks:
                    hook.closed()

    # ------------------------------------------------------------ looking at it

    def begin_pass(self, num_steps: int, *, step_stride: int = 1, epoch_base: int = 0) -> None:
        """Tells stats readers how long the pass is that begins (0: that is not known), and how its orders count."""
        self._ring.begin_pass(num_steps, step_stride=step_stride, epoch_base=epoch_base)
        for hook in self._hooks:
            hook.pass_begins()

    def leave_pass(self) -> None:
        """Hears that a pass is left before its end; who shares the ring says so to the others."""
        if not self._is_closed:
            for hook in self._hooks:
                hook.pass_left()

    def counters(self) -> dict[str, Any]:
        """What `shmload top` shows of this ring (docs/top.md), over its whole life, and what only the trainer knows."""
        self._ring.state(0)  # takes in what leases have given back, and refuses a forked child
        report = RingReader(self.control).report()
        pids = self.pool.pids
        for worker, pid in zip(report["workers"], pids, strict=False):  # none is left when it is closed
            worker["pid"] = worker["pid"] or pid
        add_memory(report)
        report |= {"num_repacked": self._writer.num_repacked, "num_taken_back": self._supervisor.num_taken_back}
        report["num_queued"] = len(self._queue)
        for hook in self._hooks:
            report |= hook.counters()
        return report

    def totals(self) -> dict[str, Any]:
        """What the ring has counted since it began, and `busy_s` of all workers."""
        seen = RingReader(self.control).snapshot()
        return {**seen, "wait_s": seen["wait_ns"] / 1e9, "busy_s": sum(worker["busy_ns"] for worker in seen["workers"]) / 1e9}

    def pace(self) -> tuple[float, float, int]:
        """So far: seconds that the trainer has waited, seconds that workers have worked, and workers that were replaced."""
        totals = self.totals()
        return totals["wait_s"], totals["busy_s"], int(totals["num_restarts"])

    @property
    def layout(self) -> Layout | None:
        """Where fields lie, once it is known."""
        return self._writer.layout

    @property
    def wants_pinned(self) -> bool:
        """Whether a batch that is not pinned is to be copied to pinned memory: not where the ring could not be, nor on a device."""
        return self._options.num_sent is None and (self._pending_copies is None or not self._pending_copies.pins.has_failed)
