"""The engine of one loader: orders in, batches out, over one ring and one crew.

    submit ──▶ backlog ──publish──▶ slot ──workers──▶ ready ──next──▶ tensors ──last alias dies──▶ free slot ──▶ backlog ...

Orders are delivered in the order they were submitted. They queue here, apart from slots, so that a sampler is asked at the pace
its user expects whatever the ring's size. The trainer does its share of the protocol only inside these calls: there is no thread.
One round is: take in freed slots, settle what workers ask for, publish, look at the next batch, see to deaths, and only then
sleep, on a bell that every worker rings when it completes a slot.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from shmload import faults
from shmload._core.mapping import Mapping
from shmload._core.trainer import (
    FAILED,
    FILLING,
    HELD,
    MAX_CHUNKS,
    ORDERED,
    READY,
    REPACK,
    TrainerRing,
    control_nbytes,
)
from shmload.bad_samples import BadSamples
from shmload.batch.deliver import LeasedBatch, copied, deliver_rows
from shmload.batch.layout import Layout
from shmload.batch.unpacked import unpack
from shmload.orders import NOTHING, Delivery, Order
from shmload.ring_memory import RingMemory
from shmload.shm import forks
from shmload.shm.group import Group
from shmload.supervision import Supervisor, Verdict
from shmload.worker.crew import STOP_GRACE_S, interrupts_held
from shmload.worker.failure import Failure
from shmload.worker.muster import muster
from shmload.worker.notes import END, load_note
from shmload.worker.spec import Job

log = logging.getLogger("shmload")

WAIT_S = 0.02  # the longest sleep between looks at deaths and lost bells
DEATH_LOOK_S = 0.01  # how often deaths are looked for while batches keep coming
TEXT_CAPACITY = 16384
LAYOUT_CAPACITY = 65536
ORDER_CAPACITY = 4096
REPACKED_SHARE = 4  # one batch in so many that had to be packed after all makes all be packed
CHUNK_WORK_NS = 300_000  # a chunk worth a claim of its own keeps a worker busy this long


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built; the loader derives it from its own arguments.

    `max_rows` is the largest batch expected (0: unknown), `num_ordered` how many batches may be under way at once.
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
        self._layout = options.layout
        self._packs = (
            job.collate_fn is not None
            or not job.auto_collation
            or (options.layout is None and job.ragged is not None and job.ragged.is_certain)
        )
        self._num_repacked = 0
        self._queue: deque[Order] = deque()  # submitted and not delivered
        self._backlog: deque[Order] = deque()  # its tail: not published
        self._lost: Order | None = None
        self._broken: Verdict | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._is_draining = False
        self._death_look = 0.0
        self._has_warned_held = False
        self._has_collected = False
        self.num_slots = max(options.num_ordered + 2, 4)
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
        self._ring = TrainerRing(
            Mapping(control.fd, nbytes),
            num_slots=self.num_slots,
            num_workers=options.num_workers,
            is_static=options.is_static,
            **sizes,
        )
        self._memory = RingMemory(group, self._ring, options.ring_bytes)
        self._ready = group.doorbell("ready")
        self._grants = group.doorbell("grants")
        num_order_bells = options.num_workers if options.is_static else 1
        self._orders = [group.doorbell(f"orders-{i}") for i in range(num_order_bells)]
        if self._layout is not None:
            self._memory.make(self._layout.nbytes(max(options.max_rows, 1)))
            self._ring.accept_layout(self._layout.dumps(), is_packed=False)
        elif self._packs:
            self._ring.accept_layout(b"", is_packed=True)
        self._has_layout = self._layout is not None or self._packs
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
            keeps_stacks=options.sample_timeout_s is not None,
        )
        limit = options.max_restarts
        if limit is None and self._job.seed is None:
            limit = 0
        self._supervisor = Supervisor(
            self._ring, self.crew, limit, self._order_in, sample_timeout_s=options.sample_timeout_s
        )
        with interrupts_held():
            self.crew.start()

    # ------------------------------------------------------------ orders

    def submit(self, order: Order) -> None:
        """Queues an order behind those submitted before; it is published as soon as a slot is free."""
        if self._is_closed:
            raise self._why_closed()
        try:
            self._queue.append(order)
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
            self._write(order, slot)
            self._backlog.popleft()

    def _write(self, order: Order, slot: int, *, is_packed: bool = False) -> None:
        """Publishes an order in a slot that is held, or in its own again."""
        nrows, indices = order.nrows, order.indices
        if isinstance(indices, np.ndarray) and not order.is_given:
            raw, is_pickled = indices, False
        else:
            try:
                raw, is_pickled = _as_int64(indices), False
            except (TypeError, ValueError, OverflowError):
                raw, is_pickled = pickle.dumps(indices), True  # type: ignore[assignment]  # bytes, a buffer too
        path = self._memory.order_path(slot, raw)
        is_packed = is_packed or self._packs
        if not is_packed and self._layout is not None:
            self._memory.ensure(slot, self._layout.nbytes(nrows))
        nchunks = 1 if is_packed or order.worker >= 0 else self._num_chunks(nrows)
        order.slot = slot
        self._ring.publish(
            slot,
            epoch=order.epoch,
            step=order.step,
            seq=order.step,
            indices=raw,
            nrows=nrows,
            nchunks=nchunks,
            is_packed=is_packed,
            is_pickled=is_pickled,
            reserved=order.worker,
            order_path=path,
        )
        self._ring_workers(order.worker, nchunks)

    @faults.at("ringing")
    def _ring_workers(self, worker: int, count: int) -> None:
        if worker >= 0:
            self._orders[worker].post_up_to(1)
        else:
            self._orders[0].post_up_to(min(count, self._options.num_workers))

    def _num_chunks(self, nrows: int) -> int:
        """Chunks for a batch: enough that every worker has a part, none shorter than a claim is worth."""
        most = min(4 * self._options.num_workers, MAX_CHUNKS, nrows // self._job.num_threads)
        if most <= 1:
            return 1
        busy_ns, num_samples = self._ring.work_done()
        if num_samples < 2 * nrows:
            return most
        return int(max(1, min(most, nrows * busy_ns / num_samples / CHUNK_WORK_NS)))

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
        try:
            return self._next(in_order)
        except BaseException:  # ^C, or what another signal handler raises, may come at any line
            self._mend()
            raise

    def _next(self, in_order: bool) -> Delivery:
        began = 0.0
        ring = self._ring
        self._round()
        if monotonic() - self._death_look > DEATH_LOOK_S:
            self._see_to_deaths()
        while True:
            order = self._queue[0] if in_order else self._first_done()
            if order.slot >= 0:
                found = ring.look(order.slot)
                if found == READY:
                    break
                if found != FILLING:
                    if self._settle(order, found):
                        continue
                    self._queue.remove(order)
                    return Delivery(order, NOTHING, None)
            if began == 0:
                began = monotonic()
                ring.begin_wait()
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
        if began:
            ring.end_wait()
        return self._deliver(order)

    def _is_done(self, order: Order) -> bool:
        return order.slot >= 0 and self._ring.look(order.slot) != FILLING

    def _first_done(self) -> Order:
        return next((order for order in self._queue if self._is_done(order)), self._queue[0])

    def _why_closed(self) -> BaseException:
        return RuntimeError("this loader is closed: make a new one") if self._broken is None else self._broken.error()

    def _deliver(self, order: Order) -> Delivery:
        ring, slot = self._ring, order.slot
        dumped = ring.note(slot) if self._has_notes else b""
        if dumped[:1] == END:
            ring.free(slot)
            self._queue.remove(order)
            return Delivery(order, NOTHING, load_note(dumped, None))
        lease = ring.lease(slot)
        nbytes = lease.used_nbytes  # set by the worker that packed the batch, whatever the order asked for
        try:
            note = load_note(dumped, lease.bytes_at)
            if note is not None and note.has_ended:
                batch = NOTHING
            elif nbytes:
                batch = unpack(LeasedBatch(lease))
            else:
                assert self._layout is not None
                batch = deliver_rows(self._layout, lease, order.nrows)
                nbytes = self._layout.nbytes(order.nrows)
            if ring.num_leased < self.num_slots:
                self._has_collected = False
            elif batch is not NOTHING and self._must_copy():
                batch = copied(batch)
        except Exception:  # an object in it does not unpickle, say: it would not the next time either
            self._lose(order)
            raise
        del lease
        ring.count_batch(order.nrows, nbytes)
        self._supervisor.batch_came()
        if self._queue[0] is order:
            self._queue.popleft()
        else:
            self._queue.remove(order)
        return Delivery(order, batch, note)

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

    def _must_copy(self) -> bool:
        """Whether the batch that has the last slot must leave it at once, because the user does hold all others."""
        ring = self._ring
        if not self._has_collected:  # a reference cycle holds its slots until the collector comes by
            self._has_collected = True
            forks.settle()
            gc.collect()
            if ring.num_leased < self.num_slots:
                return False
        if not self._has_warned_held:
            self._has_warned_held = True
            warnings.warn(
                f"{ring.num_leased - 1} batches are still in use, all but one of the ring's {self.num_slots} slots: from now on "
                "batches are copied to private memory while that is so. Drop batches you no longer need, or raise "
                "prefetch_factor or ring_bytes",
                stacklevel=7,  # whoever called next()
            )
        ring.count_copied_out()
        return True

    def _settle(self, order: Order, found: int) -> bool:
        """Sees to a batch that will not become ready by itself.

        Returns:
            True: it was ordered anew; False: every one of its samples was bad, so there will be none.
        Raises:
            what failed, for good.
        """
        ring, slot = self._ring, order.slot
        if found == REPACK:
            self._num_repacked += 1
            num_delivered = self._ring.counters()["batches"]
            if self._num_repacked > 1 and REPACKED_SHARE * self._num_repacked >= num_delivered:
                self._packs = True  # samples differ in shape more often than not: rows would be begun in vain
            self._write(order, slot, is_packed=True)
            return True
        assert found == FAILED
        _, text = ring.failure(slot)
        if text == b"":  # opened again, because the text was another chunk's
            self._ring_workers(order.worker, 1)
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
        except Exception:
            ring.free(slot)
            self._lose(order)
            raise
        if order.nrows == 0:
            ring.free(slot)
            return False
        self._write(order, slot)
        return True

    def _round(self) -> None:
        """Everything the trainer can act upon without waiting."""
        ring = self._ring
        if self._is_draining:
            self._is_draining = ring.drain() > 0
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
        if text:
            self._layout = Layout.loads(text)
            nrows = max([self._options.max_rows, *(order.nrows for order in self._queue), 1])
            self._memory.make(self._layout.nbytes(nrows))
        else:
            self._packs = True
        self._ring.accept_layout(text, is_packed=not text)
        self._has_layout = True
        self._ring_grants()

    def _ring_grants(self) -> None:
        for _ in range(self._options.num_workers):
            self._grants.post()

    # ------------------------------------------------------------ deaths

    def _see_to_deaths(self) -> None:
        self._death_look = monotonic()
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
        self._is_draining = self._ring.drain() > 0

    def counters(self) -> dict[str, Any]:
        """What the ring has counted, and its slots by state."""
        workers = [self._ring.worker(w) for w in range(self._options.num_workers)]
        states = Counter(self._ring.state(slot) for slot in range(self.num_slots))
        names = ("free", "held", "ordered", "leased", "draining")
        return {
            **self._ring.counters(),
            "slots": {name: states[i] for i, name in enumerate(names)},
            "num_queued": len(self._queue),
            "num_repacked": self._num_repacked,
            "num_taken_back": self._supervisor.num_taken_back,
            "num_foreign": sum(worker["num_foreign"] for worker in workers),
            "workers": workers,
        }

    @property
    def layout(self) -> Layout | None:
        """Where fields lie, once it is known."""
        return self._layout

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


def _as_int64(indices: Any) -> np.ndarray[Any, Any]:
    """The indices as int64; TypeError if one is not exactly an int (its worker must see the sampler's own key)."""
    if type(indices) is not list or not set(map(type, indices)) <= {int}:
        raise TypeError("what is no list of int travels pickled")
    return np.array(indices, np.int64)
