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
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from torch.autograd import profiler

from shmload import faults
from shmload._core.mapping import Mapping
from shmload._core.onlooker import Onlooker
from shmload._core.trainer import (
    ANY_SLOT,
    FAILED,
    FILLING,
    HELD,
    ORDERED,
    READY,
    REPACK,
    Lease,
    TrainerRing,
    control_nbytes,
)
from shmload.autotune.roster import Roster
from shmload.autotune.size import Size, num_slots
from shmload.bad_samples import BadSamples
from shmload.batch.deliver import LeasedBatch, copied, deliver_rows
from shmload.batch.layout import Layout
from shmload.batch.unpacked import unpack
from shmload.hoarding import Hoarding
from shmload.observe.live.label import introduce
from shmload.observe.live.meaning import describe
from shmload.observe.live.processes import add_memory
from shmload.order_writer import OrderWriter
from shmload.orders import NOTHING, Delivery, Order
from shmload.ring_memory import RingMemory
from shmload.shm import forks
from shmload.shm.group import Group
from shmload.supervision import Supervisor, Verdict
from shmload.worker.crew import STOP_GRACE_S, interrupts_held
from shmload.worker.failure import Failure
from shmload.worker.muster import muster
from shmload.worker.notes import END, NO_NEWS, Note, load_note
from shmload.worker.spec import Job

log = logging.getLogger("shmload")

WAIT_S = 0.02  # the longest sleep between looks at deaths and lost bells
DEATH_LOOK_S = 0.01  # how often deaths are looked for while batches keep coming
TEXT_CAPACITY = 16384
LAYOUT_CAPACITY = 65536
ORDER_CAPACITY = 4096
WHOLE_BATCHES = 1 << 30  # rows that are claimed together where a claim is a call to another machine


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built; the loader derives it from its own arguments.

    `max_rows` is the largest batch expected (0: unknown), `num_ordered` how many batches may be under way at once. It begins with
    `first_workers` of its workers and slots for `first_ordered` batches; 0: all, and that never changes.
    """

    num_workers: int
    num_ordered: int
    max_rows: int
    is_static: bool
    ring_bytes: int | None
    timeout_s: float
    max_restarts: int | None
    multiprocessing_context: Any
    base_seed: int
    layout: Layout | None
    resume: Sequence[bytes] = ()
    sample_timeout_s: float | None = None
    first_workers: int = 0
    first_ordered: int = 0
    rank: int | None = None
    world_size: int | None = None
    address: str | None = None  # of the Ray cluster whose actors are the workers; None: processes of this machine are


class Engine:
    """One ring, its memory, its bells and its crew.

    Args:
        job: what workers do with an order.
        bad_samples: what is done about samples that cannot be read.
    """

    def __init__(self, job: Job, options: EngineOptions, bad_samples: BadSamples) -> None:
        self._job = job
        self._bad_samples = bad_samples
        self._options = options
        self._queue: deque[Order] = deque()  # submitted and not delivered
        self._backlog: deque[Order] = deque()  # its tail: not published
        self._lost: Order | None = None
        self._broken: Verdict | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._death_look = 0.0
        self.on_delivery: Callable[[], None] | None = None  # called after each batch; nobody looks: None
        self.num_slots = num_slots(options.num_ordered)
        self._group = Group()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        options, group = self._options, self._group
        sizes = {
            "order_capacity": max(8 * options.max_rows, ORDER_CAPACITY),
            "text_capacity": TEXT_CAPACITY,
            "layout_capacity": LAYOUT_CAPACITY,
        }
        nbytes = control_nbytes(self.num_slots, options.num_workers, **sizes)
        control = group.segment("control", nbytes)
        self.control = Mapping(control.fd, nbytes)
        self._ring = TrainerRing(
            self.control,
            num_slots=self.num_slots,
            num_workers=options.num_workers,
            is_static=options.is_static,
            threads_per_worker=self._job.num_threads if options.address is None else WHOLE_BATCHES,
            num_usable=num_slots(options.first_ordered) if options.first_ordered else 0,
            **sizes,
        )
        introduce(self._ring, self._job, options.rank, options.world_size)
        self._onlooker = Onlooker(self.control)
        self._hoarding = Hoarding(self._ring)
        self._memory = RingMemory(group, self._ring, options.ring_bytes, may_park=options.first_ordered > 0)
        self._ready = group.doorbell("ready")
        self._grants = group.doorbell("grants")
        num_order_bells = options.num_workers if options.is_static else 1
        self._orders = [group.doorbell(f"orders-{i}") for i in range(num_order_bells)]
        job = self._job
        is_packed = (
            job.collate_fn is not None
            or not job.auto_collation
            or (options.layout is None and job.ragged is not None and job.ragged.is_certain)
        )
        self._writer = OrderWriter(self._ring, self._memory, self._orders, is_packed=is_packed)
        self._has_layout = options.layout is not None or is_packed
        if self._has_layout:
            self._writer.settle(options.layout, options.max_rows)
        self._has_notes = self._job.seed is None
        self.crew = muster(
            self._job,
            group,
            control,
            num_workers=options.num_workers,
            multiprocessing_context=options.multiprocessing_context,
            base_seed=options.base_seed,
            ready=self._ready,
            orders=self._orders,
            grants=self._grants,
            resume=options.resume,
            keeps_stacks=options.sample_timeout_s is not None and options.address is None,
            address=options.address,
            num_ahead=options.num_ordered // options.num_workers,
            sample_timeout_s=options.sample_timeout_s,
        )
        limit = options.max_restarts
        if limit is None and self._job.seed is None:
            limit = 0
        self.roster = Roster(self._ring, self.crew)
        self.size = Size(self._memory, self.roster)
        self._supervisor = Supervisor(
            self._ring,
            self.crew,
            self.roster,
            limit,
            self._order_in,
            sample_timeout_s=options.sample_timeout_s
            if options.address is None
            else None,  # actors are watched where they are
        )
        with interrupts_held():
            self.roster.start(options.first_workers or options.num_workers)

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
        if self._is_closed:
            raise self._why_closed()
        if self._hoarding.refused is not None:
            self._hoarding.raise_refused()
        try:
            if in_order and not self._backlog and not profiler._is_profiler_enabled:
                order = self._queue[0]
                lease = self._ring.take(order)
                if lease is not None:
                    return self._deliver(order, lease, NO_NEWS if lease.has_note else None)
            return self._next(in_order)
        except BaseException:  # ^C, or what another signal handler raises, may come at any line
            self._mend()
            raise

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
            del lease
            is_last_slot = self._ring.count_batch(order, nbytes)
            if not is_last_slot:
                self._hoarding.is_over()
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

    # ------------------------------------------------------------ looking at it

    def begin_pass(self, num_steps: int, *, step_stride: int = 1, epoch_base: int = 0) -> None:
        """Tells onlookers how long the pass is that begins (0: that is not known), and how its orders count."""
        self._ring.begin_pass(num_steps, step_stride=step_stride, epoch_base=epoch_base)

    def counters(self) -> dict[str, Any]:
        """What `shmload top` shows of this ring (docs/top.md), over its whole life, and what only the trainer knows."""
        self._ring.state(0)  # takes in what leases have given back, and refuses a forked child
        report = describe(self._onlooker.snapshot())
        pids = self.crew.pids
        for worker, pid in zip(report["workers"], pids, strict=False):  # none is left when it is closed
            worker["pid"] = worker["pid"] or pid
        add_memory(report)
        return {
            **report,
            "num_queued": len(self._queue),
            "num_repacked": self._writer.num_repacked,
            "num_taken_back": self._supervisor.num_taken_back,
        }

    def totals(self) -> dict[str, float]:
        """What the ring has counted since it began, and `busy_s` of all workers."""
        workers = (self._ring.worker(w) for w in range(self._options.num_workers))
        return {**self._ring.counters(), "busy_s": sum(worker["busy_s"] for worker in workers)}

    def pace(self) -> tuple[float, float, int]:
        """So far: seconds that the trainer has waited, seconds that workers have worked, and workers that were replaced."""
        totals = self.totals()
        return totals["wait_s"], totals["busy_s"], int(totals["num_restarts"])

    @property
    def layout(self) -> Layout | None:
        """Where fields lie, once it is known."""
        return self._writer.layout

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the workers and gives up the names; live batches stay valid. Safe to call twice, and in a forked child.

        Args:
            grace_s: how long a worker may take over what it has claimed before it is killed.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        try:
            if hasattr(self, "crew"):
                self._ring.set_closing()
                for bell in (*self._orders, self._grants):
                    for _ in range(self._options.num_workers):
                        bell.post()
                self.crew.stop(grace_s)
        finally:
            self._group.close()
