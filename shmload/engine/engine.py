"""The engine of one loader: orders in, batches out, over one ring and one crew.

    submit ──▶ backlog ──publish──▶ slot ──workers──▶ ready ──next──▶ tensors ──last alias dies──▶ free slot ──▶ backlog ...

Orders are delivered in the order they were submitted. They queue here, apart from slots, so that a sampler is asked at the pace
its user expects whatever the ring's size. The trainer does its share of the protocol only inside these calls: there is no thread.
One round is: take in freed slots, settle what workers ask for, publish, look at the next batch, see to deaths, and only then
sleep, on a bell that a worker rings when it completes the slot that is slept for. When all goes well, a batch takes two native
calls instead, `TrainerRing.post` and `TrainerRing.take`: a trainer of small batches spends its time on the steps between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from torch.autograd import profiler

from shmload import faults
from shmload._core.trainer import (
    ANY_SLOT,
    FAILED,
    FILLING,
    HELD,
    ORDERED,
    READY,
    REPACK,
    Lease,
    Order,
)
from shmload.batch.deliver import LeasedBatch, copied, deliver_rows, unpack
from shmload.batch.layout import Layout
from shmload.engine.orders import NOTHING, BadSamples, Delivery
from shmload.engine.parts import EngineOptions, Machinery
from shmload.shm import forks
from shmload.worker.crew import interrupts_held
from shmload.worker.failure import Failure
from shmload.worker.snapshot import END, NO_NEWS, Note, load_note
from shmload.worker.spec import Job

log = logging.getLogger("shmload")

WAIT_S = 0.02  # the longest sleep between looks at deaths and lost bells
DEATH_LOOK_S = 0.02  # how often deaths are looked for while batches keep coming


class Engine(Machinery):
    """What passes through one ring and its crew.

    Args:
        job: what workers do with an order.
        bad_samples: what is done about samples that cannot be read.
    """

    def __init__(self, job: Job, options: EngineOptions, bad_samples: BadSamples) -> None:
        self._bad_samples = bad_samples
        self._queue: deque[Order] = deque()  # submitted and not delivered
        self._backlog: deque[Order] = deque()  # its tail: not published
        self._lost: Order | None = None
        self._death_look = 0.0
        self.on_delivery: Callable[[], None] | None = None  # called after each batch; nobody looks: None
        # what is sent ahead is copied by us alone
        self._names_streams = options.calls is not None and options.num_sent is None
        super().__init__(job, options)

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
        """Orders submitted and not delivered."""
        return len(self._queue)

    @property
    def front(self) -> Order | None:
        """The order that `next` will deliver."""
        return self._queue[0] if self._queue else None

    def counters(self) -> dict[str, Any]:
        """What the machinery counts, and how many orders are submitted and not delivered."""
        return {**super().counters(), "num_queued": len(self._queue)}

    def _publish(self) -> None:
        while self._backlog:
            slot = self._ring.hold()
            if slot < 0:
                forks.settle()
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
        if self._is_closed or self._hoarding.refused is not None or self._cooling is not None:
            self._begin_next()
        try:
            if in_order and not self._backlog and not profiler._is_profiler_enabled:
                order = self._queue[0]
                lease = self._ring.take(order) or self._slept(order)
                if lease is not None:
                    return self._deliver(order, lease, NO_NEWS if lease.has_note else None)
            return self._next(in_order)
        except BaseException:  # ^C, or what another signal handler raises, may come at any line
            self._mend()
            raise

    def _begin_next(self) -> None:
        """Sees to what may raise before anything is taken."""
        if self._is_closed:
            raise self._why_closed()
        if self._hoarding.refused is not None:
            self._hoarding.raise_refused()
        if self._cooling is not None:
            self._cooling.look()

    def _slept(self, order: Order) -> Lease | None:
        """The lease of an order for which nothing is to be done but to sleep; None: look at it all, one by one.

        What runs after a wake-up is in no cache, so it is as little as can be: half of what `_awaited` does.
        """
        if self._cooling is not None or self._options.timeout_s:
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

    def _next(self, in_order: bool) -> Delivery:
        if profiler._is_profiler_enabled:
            return self._next_in_ranges(in_order)
        order, is_ready = self._awaited(in_order)
        return self._deliver_noted(order) if is_ready else (order, NOTHING, None)

    def _next_in_ranges(self, in_order: bool) -> Delivery:
        """The same, as ranges in the profile that torch is taking."""
        with profiler.record_function("shmload: wait"):
            order, is_ready = self._awaited(in_order)
        if not is_ready:
            return order, NOTHING, None
        with profiler.record_function("shmload: deliver"):
            return self._deliver_noted(order)

    def _awaited(self, in_order: bool) -> tuple[Order, bool]:
        """The order that is next, and True as soon as it is ready; False, and it is gone, if all of its samples are skipped."""
        began = 0.0
        ring = self._ring
        self._round()
        if monotonic() - self._death_look > DEATH_LOOK_S:
            self._see_to_deaths()
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
                if order.slot < 0 and self._cooling is not None and self._cooling.wait():
                    self._round()
                    continue
                began = began or monotonic()
                ring.begin_wait(order.slot if in_order and order.slot >= 0 else ANY_SLOT)
                self._ready.drain()
                self._round()
                if self._is_done(order if in_order else self._first_done()):
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
        return RuntimeError("this loader is closed: make a new one") if self._broken is None else self._broken.error()

    def _deliver_noted(self, order: Order) -> Delivery:
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
                assert self._cooling is not None
                self._cooling.releases.delivered(lease.slot)
            del lease
            is_last_slot = self._ring.count_batch(order, nbytes)
            if not is_last_slot:
                self._hoarding.has_collected = False
            elif batch is not NOTHING and self._hoarding.must_copy(self._who_holds):
                batch = copied(batch)
        except Exception:  # an object in it does not unpickle, say: it would not the next time either
            self._lose(order)
            raise
        self._supervisor.num_vain = 0
        if self._queue[0] is order:
            self._queue.popleft()
        else:
            self._queue.remove(order)
        if self.on_delivery is not None:
            self.on_delivery()
        return order, batch, note

    def _lose(self, order: Order) -> None:
        self._queue.remove(order)
        self._lost = order

    def take_lost(self) -> Order | None:
        """The order that the exception of `next` has ended, if it has; told once."""
        lost, self._lost = self._lost, None
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
        return "; shmload.debug.enable() says where they were taken"

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
            death = self._supervisor.death_over(slot)
            bad, error = death.rows, death.error
        else:
            failure = Failure.loads(text)
            bad, error = failure.rows, failure.exception
        try:
            if not bad:
                raise error()
            order.indices = self._bad_samples.replaced(order, bad, error)
            ring.count_bad_samples(self._bad_samples.count)
        except Exception:
            ring.free(slot)
            self._lose(order)
            raise
        if order.nrows == 0:
            ring.free(slot)
            return False
        self._writer.write(order, slot)
        return True

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
        if self._cooling is not None:
            self._cooling.pins.register()
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
        if self._options.sample_timeout_s is not None:
            with interrupts_held():
                num_late = self._supervisor.see_to_late()
            for bell in self._orders if num_late else ():
                bell.post_up_to(1)
        deaths = self.crew.deaths()
        if not deaths:
            return
        with interrupts_held():
            for death in deaths:
                self._broken = self._supervisor.see_to(death)
                if self._broken is not None:
                    self.close(grace_s=0)
                    raise self._broken.error()
        for bell in self._orders:
            bell.post_up_to(1)

    def _order_in(self, slot: int) -> Order | None:
        return next((order for order in self._queue if order.slot == slot), None)

    # ------------------------------------------------------------ ends

    @faults.at("abandoning")
    def abandon(self) -> None:
        """Forgets every order. Workers finish what they have claimed; nothing is waited for."""
        with interrupts_held():
            self._queue.clear()
            self._backlog.clear()
            self._ring.void()
        self._ring.drain()
