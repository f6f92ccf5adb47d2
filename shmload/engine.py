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
import signal
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np

from shmload._core.mapping import Mapping
from shmload._core.trainer import (
    ANYONE,
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
from shmload.batch.deliver import copied, deliver_packed, deliver_rows
from shmload.batch.layout import Layout
from shmload.errors import RingTooSmall, WorkerDied
from shmload.shm import forks
from shmload.shm.group import Group
from shmload.shm.preflight import check_fits
from shmload.worker.crew import STOP_GRACE_S, Death, ProcessCrew, context_of, interrupts_held, pickled_once
from shmload.worker.failure import Failure
from shmload.worker.spec import Job, Post

log = logging.getLogger("shmload")

WAIT_S = 0.02  # the longest sleep between looks at deaths and lost bells
DEATH_LOOK_S = 0.05  # how often deaths are looked for while batches keep coming
TEXT_CAPACITY = 16384
LAYOUT_CAPACITY = 65536
ORDER_CAPACITY = 4096
SLOT_ALIGNMENT = 4096
GROWTH = 1.25  # a slot that had to grow gets this much more than it asked for
VAIN_DEATHS = 8  # this many deaths without a claim and without a batch between them: workers cannot live here
CHUNK_WORK_NS = 300_000  # a chunk worth a claim of its own keeps a worker busy this long


@dataclass
class Order:
    """One batch to be made: which, of which samples, and (in torch mode) by which worker. `slot` is -1 until published."""

    epoch: int
    step: int
    indices: Sequence[Any] | np.ndarray[Any, Any]
    worker: int = ANYONE
    slot: int = -1

    @property
    def nrows(self) -> int:
        """Rows of the batch."""
        return len(self.indices)


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


class Engine:
    """One ring, its memory, its bells and its crew.

    Args:
        job: what workers do with an order.
    """

    def __init__(self, job: Job, options: EngineOptions) -> None:
        self._job = job
        self._options = options
        self._layout = options.layout
        self._packs = job.collate_fn is not None or not job.auto_collation
        self._queue: deque[Order] = deque()  # submitted and not delivered
        self._backlog: deque[Order] = deque()  # its tail: not published
        self._kills: Counter[str] = Counter()  # by what a worker died over, in words
        self._poisoned: dict[int, str] = {}  # slot -> what happened to its workers
        self._num_restarts = 0
        self._num_vain = 0  # deaths of workers without a claim since the last batch
        self._num_taken_back = 0
        self._num_drawn = 0
        self._broken: tuple[str, str, str] | None = None  # what WorkerDied says, its cause, its note
        self._pid = os.getpid()
        self._is_closed = False
        self._is_draining = False
        self._has_payload = False
        self._death_look = 0.0
        self._has_warned_held = False
        self._has_collected = False
        self._order_segments: dict[int, Any] = {}
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
        self._ready = group.doorbell("ready")
        self._grants = group.doorbell("grants")
        num_order_bells = options.num_workers if options.is_static else 1
        self._orders = [group.doorbell(f"orders-{i}") for i in range(num_order_bells)]
        if self._layout is not None:
            self._make_payload(self._layout.nbytes(max(options.max_rows, 1)))
            self._ring.accept_layout(self._layout.dumps(), is_packed=False)
        elif self._packs:
            self._ring.accept_layout(b"", is_packed=True)
        self._has_layout = self._layout is not None or self._packs
        self._start_crew(control.path, nbytes)

    def _start_crew(self, control_path: str, control_bytes: int) -> None:
        options = self._options
        context = context_of(options.multiprocessing_context)
        travels = context.get_start_method() == "fork"
        parcel_path, parcel_nbytes = "", 0
        if not travels:
            parcel = pickled_once(self._job)
            if parcel is None:
                travels = True
            else:
                segment = self._group.segment("parcel", len(parcel))
                memory = Mapping(segment.fd, len(parcel))
                memoryview(memory)[:] = parcel
                parcel_path, parcel_nbytes = segment.path, len(parcel)
        posts = [
            Post(
                worker_id=w,
                num_workers=options.num_workers,
                trainer_pid=os.getpid(),
                control_path=control_path,
                control_nbytes=control_bytes,
                ready_bell=self._ready.name,
                orders_bell=self._orders[w % len(self._orders)].name,
                grants_bell=self._grants.name,
                base_seed=options.base_seed,
                affinity=tuple(sorted(os.sched_getaffinity(0))),
                parcel_path=parcel_path,
                parcel_nbytes=parcel_nbytes,
            )
            for w in range(options.num_workers)
        ]
        self.crew = ProcessCrew(posts, self._job, context, travels=travels)
        with interrupts_held():
            self.crew.start()

    # ------------------------------------------------------------ orders

    def submit(self, order: Order) -> None:
        """Queues an order behind those submitted before; it is published as soon as a slot is free."""
        self._check_usable()
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
        if isinstance(indices, np.ndarray):
            raw, is_pickled = indices, False
        else:
            try:
                raw, is_pickled = _as_int64(indices), False
            except (TypeError, ValueError, OverflowError):
                raw, is_pickled = pickle.dumps(list(indices)), True  # type: ignore[assignment]
        path = self._order_path(slot, raw)
        is_packed = is_packed or self._packs
        if not is_packed and self._layout is not None and self._ring.payload_nbytes(slot) < self._layout.nbytes(nrows):
            self._grow(slot, self._layout.nbytes(nrows))
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

    def _ring_workers(self, worker: int, count: int) -> None:
        if worker >= 0:
            self._orders[worker].post_up_to(1)
        else:
            self._orders[0].post_up_to(min(count, self._options.num_workers))

    def _order_path(self, slot: int, raw: Any) -> bytes:
        """The path of a segment for an order too large for its area; empty if it fits."""
        old = self._order_segments.pop(slot, None)
        if old is not None:
            old.close()
        view = memoryview(raw).cast("B")
        if view.nbytes <= self._ring.order_capacity:
            return b""
        self._num_drawn += 1
        segment = self._group.segment(f"order-{self._num_drawn}", view.nbytes)
        memoryview(Mapping(segment.fd, view.nbytes))[:] = view
        self._order_segments[slot] = segment
        return segment.path.encode()

    def _num_chunks(self, nrows: int) -> int:
        """Chunks for a batch: enough that every worker has a part, none shorter than a claim is worth."""
        most = min(4 * self._options.num_workers, MAX_CHUNKS, nrows)
        if most <= 1:
            return 1
        busy_ns, num_samples = self._ring.work_done()
        if num_samples < 2 * nrows:
            return most
        return int(max(1, min(most, nrows * busy_ns / num_samples / CHUNK_WORK_NS)))

    # ------------------------------------------------------------ delivery

    def next(self) -> tuple[Order, Any]:
        """Waits for the oldest order and delivers it.

        Returns:
            the order and its batch, whose arrays alias the slot until their last alias dies.
        Raises:
            whatever the dataset raised for one of its samples; that batch is then lost and the next call goes on behind it.
            WorkerDied: a worker ended and may not be replaced, or a sample killed its worker twice.
            RuntimeError: the loader is closed, or `timeout` has passed.
        """
        self._check_usable()
        try:
            return self._next()
        except BaseException:  # ^C, or what another signal handler raises, may come at any line
            self._mend()
            raise

    def _next(self) -> tuple[Order, Any]:
        order = self._queue[0]
        began_ns = 0
        ring = self._ring
        self._round()
        now = monotonic()
        if now - self._death_look > DEATH_LOOK_S:
            self._death_look = now
            self._see_to_deaths()
        while True:
            if order.slot >= 0:
                found = ring.look(order.slot)
                if found == READY:
                    break
                if found != FILLING and self._settle(order, found):
                    continue
            if began_ns == 0:
                began_ns = monotonic_ns()
                ring.waiting(began_ns)
            self._ready.drain()
            self._round()
            if order.slot >= 0 and ring.look(order.slot) != FILLING:
                continue
            self._ready.wait(WAIT_S)
            self._see_to_deaths()
            if self._options.timeout_s and monotonic_ns() - began_ns > self._options.timeout_s * 1e9:
                raise RuntimeError(f"DataLoader timed out after {self._options.timeout_s} seconds")
        if began_ns:
            ring.waiting(0)
            ring.count_wait(monotonic_ns() - began_ns)
        return order, self._deliver(order)

    def _check_usable(self) -> None:
        if self._broken is not None:  # a new exception each time: its traceback would keep this engine alive
            text, cause, note = self._broken
            error = WorkerDied(text)
            if note:
                error.add_note(note)
            raise error from RuntimeError(cause)
        if self._is_closed:
            raise RuntimeError("this loader is closed: make a new one")

    def _deliver(self, order: Order) -> Any:
        ring, slot = self._ring, order.slot
        must_copy = self._must_copy()
        nrows = order.nrows
        nbytes = ring.used_nbytes(slot)  # set by the worker that packed the batch, whatever the order asked for
        lease = ring.lease(slot)
        try:
            if nbytes:
                batch = deliver_packed(lease)
            else:
                assert self._layout is not None
                batch = deliver_rows(self._layout, lease, nrows)
                nbytes = self._layout.nbytes(nrows)
            if must_copy:
                batch = copied(batch)
        except Exception:  # an object in it does not unpickle, say: it would not the next time either
            self._queue.popleft()
            raise
        del lease
        ring.count_nbytes(nbytes)
        self._num_vain = 0
        self._queue.popleft()
        return batch

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
        """Whether this batch must leave its slot at once, because the user holds all others."""
        ring, limit = self._ring, self.num_slots - 1
        if ring.num_leased < limit:
            self._has_collected = False
            return False
        if not self._has_collected:  # a reference cycle holds its slots until the collector comes by
            self._has_collected = True
            forks.settle()
            gc.collect()
            if ring.num_leased < limit:
                return False
        if not self._has_warned_held:
            self._has_warned_held = True
            warnings.warn(
                f"{ring.num_leased} batches are still in use, all but one of the ring's {self.num_slots} slots: from now on "
                "batches are copied to private memory while that is so. Drop batches you no longer need, or raise "
                "prefetch_factor or ring_bytes",
                stacklevel=7,  # whoever called next()
            )
        ring.count_copied_out()
        return True

    def _settle(self, order: Order, found: int) -> bool:
        """Sees to a batch that will not become ready by itself. Raises if it failed for good; True if it was ordered anew."""
        ring, slot = self._ring, order.slot
        if found == REPACK:
            self._write(order, slot, is_packed=True)
            return True
        assert found == FAILED
        _, text = ring.failure(slot)
        if text == b"":  # opened again, because the text was another chunk's
            self._ring_workers(order.worker, 1)
            return True
        ring.free(slot)
        self._queue.popleft()
        if text is None:
            raise WorkerDied(self._poisoned.pop(slot, "a sample killed its worker twice"))
        raise Failure.loads(text).exception()

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
                self._answer_need(slot)
        if self._backlog:
            self._publish()

    # ------------------------------------------------------------ memory

    def _accept(self, text: bytes) -> None:
        """Settles the layout that a worker has proposed; no text: samples have no fixed rows."""
        if text:
            self._layout = Layout.loads(text)
            nrows = max([self._options.max_rows, *(order.nrows for order in self._queue), 1])
            self._make_payload(self._layout.nbytes(nrows))
        else:
            self._packs = True
        self._ring.accept_layout(text, is_packed=not text)
        self._has_layout = True
        for _ in range(self._options.num_workers):
            self._grants.post()

    def _make_payload(self, slot_nbytes: int) -> None:
        """Reserves the ring's memory: one segment, all slots."""
        slot_nbytes = -(-slot_nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        limit = self._options.ring_bytes
        num_slots = self.num_slots
        if limit is not None and num_slots * slot_nbytes > limit:
            raise RingTooSmall(
                f"the ring needs {num_slots} slots of {slot_nbytes} bytes, {num_slots * slot_nbytes} in all; ring_bytes allows "
                f"{limit}, room for {limit // slot_nbytes} slots. Raise ring_bytes, or lower prefetch_factor, num_workers or "
                "batch_size"
            )
        check_fits(num_slots * slot_nbytes, num_slots=num_slots, slot_nbytes=slot_nbytes)
        segment = self._group.segment("payload-0", num_slots * slot_nbytes, slots=(num_slots, slot_nbytes))
        memory = Mapping(segment.fd, num_slots * slot_nbytes, populate=True)
        path = segment.path.encode()
        for slot in range(num_slots):
            self._ring.set_payload(slot, memory, path, slot * slot_nbytes, slot_nbytes)
        self._has_payload = True

    def _answer_need(self, slot: int) -> None:
        """Gives a worker with a packed batch the room it asks for."""
        nbytes = int(self._ring.need_nbytes(slot) * GROWTH)
        if not self._has_payload:
            self._make_payload(nbytes)
        else:
            self._grow(slot, nbytes)
        self._ring.grant(slot)
        for _ in range(self._options.num_workers):
            self._grants.post()

    def _grow(self, slot: int, nbytes: int) -> None:
        """Gives one slot a larger segment of its own; the ring has learned."""
        nbytes = -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        check_fits(nbytes, num_slots=1, slot_nbytes=nbytes)
        self._num_drawn += 1
        segment = self._group.segment(f"payload-{self._num_drawn}", nbytes, slots=(1, nbytes))
        self._ring.set_payload(slot, Mapping(segment.fd, nbytes), segment.path.encode(), 0, nbytes)

    # ------------------------------------------------------------ deaths

    def _see_to_deaths(self) -> None:
        deaths = self.crew.deaths()
        if deaths:
            with interrupts_held():
                for death in deaths:
                    self._see_to(death)

    def _see_to(self, death: Death) -> None:
        """Replaces a dead worker and has its rows done again, or breaks the loader, as the mode says."""
        ring, options = self._ring, self._options
        held = ring.held_by(death.worker_id)
        work = None if held is None else self._blame(held[0], held[3])
        limit = options.max_restarts
        if self._job.seed is None and limit is None:
            limit = 0
        if limit is not None and self._num_restarts >= limit:
            self._break(f"DataLoader worker (pid(s) {death.pid}) exited unexpectedly", death, work)
        if held is None:
            self._num_vain += 1
            if self._num_vain >= VAIN_DEATHS:
                self._break(f"{death}, the {self._num_vain}th in a row that ended with nothing to do", death, None)
        poison = work is not None and self._kills[work] >= 2
        if poison and held is not None:
            self._poisoned[held[0]] = f"{work} ended its worker twice: {death}"
        if ring.recover(death.worker_id, poison=poison) >= 0:
            self._num_taken_back += 1
        log.warning("%s%s; it is replaced", death, "" if work is None else f" on {work}")
        ring.count_restart()
        self._num_restarts += 1
        self.crew.replace(death.worker_id)
        for bell in self._orders:
            bell.post_up_to(1)
        self._ready.post()

    def _blame(self, slot: int, row: int) -> str | None:
        """Notes that a worker died over a row of the slot (-1: over the batch); says in words what it worked on."""
        order = next((o for o in self._queue if o.slot == slot), None)
        if order is None:
            return None
        work = f"batch {order.step} of epoch {order.epoch}"
        if row >= 0:
            work = f"sample {order.indices[row]} of epoch {order.epoch} (row {row} of batch {order.step})"
        self._kills[work] += 1
        return work

    def _break(self, text: str, death: Death, work: str | None) -> None:
        """A death that may not be mended ends the loader, with a cause in torch's words. Raises what every later call raises."""
        code = death.exitcode or 0
        if code < 0:
            cause = f"DataLoader worker (pid {death.pid}) is killed by signal: {signal.strsignal(-code)}. "
        else:
            cause = (
                f"DataLoader worker (pid {death.pid}) exited unexpectedly with exit code {code}. Details are lost due to "
                "multiprocessing. Rerunning with num_workers=0 may give better error trace."
            )
        self._broken = text, cause, "" if work is None else f"shmload: it was at {work}"
        self.close(grace_s=0)
        self._check_usable()

    # ------------------------------------------------------------ ends

    def abandon(self) -> None:
        """Forgets every order. Workers finish what they have claimed; nothing is waited for."""
        with interrupts_held():
            self._queue.clear()
            self._backlog.clear()
            self._ring.void()
        self._is_draining = self._ring.drain() > 0

    def finish(self) -> None:
        """Has every order made and forgets the batches: torch's workers, too, work off what they were sent."""
        while self._queue:
            try:
                self.next()
            except Exception:
                self._check_usable()

    def counters(self) -> dict[str, Any]:
        """What the ring has counted, and its slots by state."""
        states = Counter(self._ring.state(slot) for slot in range(self.num_slots))
        names = ("free", "held", "ordered", "leased", "draining")
        return {
            **self._ring.counters(),
            "slots": {name: states[i] for i, name in enumerate(names)},
            "num_queued": len(self._queue),
            "num_taken_back": self._num_taken_back,
            "workers": [self._ring.worker(w) for w in range(self._options.num_workers)],
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
        if hasattr(self, "crew"):
            self._ring.set_closing()
            for bell in (*self._orders, self._grants):
                for _ in range(self._options.num_workers):
                    bell.post()
            self.crew.stop(grace_s)
        self._group.close()


def _as_int64(indices: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The indices as int64; TypeError if one is not exactly an int (its worker must see the sampler's own key)."""
    if not set(map(type, indices)) <= {int}:
        raise TypeError("keys that are not int travel pickled")
    return np.array(indices, np.int64)
