"""The engine of one loader: orders in, batches out, over one ring and one worker pool.

    submit ──▶ backlog ──publish──▶ slot ──workers──▶ ready ──next──▶ tensors ──last alias dies──▶ free slot ──▶ backlog ...

Batches are delivered in the order in which their orders came. The queue of orders is independent of the number of slots, so a
sampler is read at the pace that its user expects for any size of the ring. The trainer runs its part of the protocol only inside
these calls; it has no thread. One round is: collect freed slots, answer the workers' requests, publish orders, check the next
batch, check for deaths, and only then sleep, on a doorbell that a worker rings when it completes the awaited slot. Usually a batch
takes two native calls instead, `TrainerRing.post` and `TrainerRing.take`, because the other steps would dominate for small batches.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from shmload import faults
from shmload._core.trainer import ANY_SLOT, FAILED, FILLING, HELD, ORDERED, READY, REPACK, Lease, Order
from shmload.batch.batch_memory import CopiedBatch, LeasedBatch
from shmload.batch.fixed_rows import copied_rows, deliver_rows
from shmload.batch.layout import Layout
from shmload.batch.unpacking import unpack
from shmload.device.pending_copies import Releases
from shmload.engine.bad_samples import BadSamples
from shmload.engine.copy_out import CopyOut
from shmload.engine.device_feed import DeviceFeed
from shmload.engine.holders import Holders
from shmload.engine.iterator_lock import IteratorLock
from shmload.engine.options import EngineOptions
from shmload.engine.outcome import NOTHING, Outcome
from shmload.engine.process_usage import add_memory_usage
from shmload.engine.rank_hook import RankHook
from shmload.engine.ring import Ring
from shmload.engine.ring_reader import RingReader
from shmload.engine.stats import describe
from shmload.engine.supervisor import Supervisor
from shmload.engine.worker_set import WorkerSet
from shmload.errors import WorkerDied
from shmload.processes.interrupts import interrupts_held
from shmload.shm import fork_copies
from shmload.worker.failure import Failure
from shmload.worker.job import Job, PeerRing
from shmload.worker.note import AFRESH, ENDED, NO_NEWS, Note, load_note
from shmload.worker.pool import STOP_GRACE_S, PreparedWorkers

WAIT_S = 0.02  # longest sleep until the next check for deaths, and for a batch whose doorbell was not rung
DEATH_LOOK_S = 0.02  # interval between checks for deaths while batches are ready


class Engine:
    """A ring, its worker pool, and the queue of orders between them.

    Args:
        job: the work of the workers.
        options: size and placement.
        bad_samples: skips or replaces samples that cannot be read.
        ranks: hook through which other ranks of the node take part; None without them.
        records_holders: record the line of the program that takes each batch.

    Attributes:
        on_delivery: called after each batch, unless None.
        iterator_lock: held by the thread that asks for a batch; the iterator uses the same object.
        shared_by: number of ranks that read the ring.
        holders: the record of the lines that took each batch; None if that is not recorded.
        releases: record of the streams to wait for when a lease ends; None if the ring is not pinned.
        control: mapping of the ring's control block.
        num_slots: number of slots, in use or parked.
        pool: the worker processes or actors.
        worker_set: starts, stops and replaces the pool's workers.
    """

    def __init__(
        self,
        job: Job,
        options: EngineOptions,
        bad_samples: BadSamples,
        ranks: RankHook | None = None,
        *,
        records_holders: bool = False,
    ) -> None:
        self._options, self._bad_samples = options, bad_samples
        self._ranks, self._has_ranks = ranks or RankHook(), ranks is not None
        self._queue: deque[Order] = deque()  # orders that are submitted and not delivered; the supervisor reads it, too
        self._backlog: deque[Order] = deque()  # the end of the queue, which is not published yet
        self._death_look = 0.0
        self.on_delivery: Callable[[], None] | None = None
        self._broken: Callable[[], WorkerDied] | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._runnable_at_end: list[int | None] = []  # of each worker when the engine was closed (worker_cpu.py)
        self.iterator_lock = IteratorLock()
        self.shared_by = options.num_ranks
        self._has_layout = job.plan.rows is not None or job.plan.is_whole
        self._has_notes = job.seed is None
        try:
            ring = self._ring_parts = Ring(job, options, is_poisoned=records_holders, order_bell=self._ranks.order_bell)
            try:
                self._start_workers(job, ring, self._ranks.peer_rings(ring))
                self._ranks.started(ring)
            except BaseException:
                self._stop_workers(STOP_GRACE_S)
                raise
        except BaseException as error:
            self._ranks.failed(error)
            raise
        self.control, self.num_slots = ring.control, ring.num_slots
        self._ring, self._memory, self._publisher, self._ready = ring.native, ring.memory, ring.publisher, ring.ready
        self._pending_copies = ring.pending_copies
        self._copy_out = CopyOut(ring.native, is_shared=options.num_ranks > 1)
        self.releases: Releases | None = None if ring.pending_copies is None else ring.pending_copies.releases
        self.holders = Holders(ring.native) if records_holders else None
        # with a device feed, all copies from the ring use the feed's own stream
        self._names_streams = options.device is not None and options.num_sent is None
        self._feed = None
        if options.num_sent is not None:
            assert options.device is not None
            self._feed = DeviceFeed(options.device, options.num_sent)

    def _start_workers(self, job: Job, ring: Ring, peer_rings: Sequence[PeerRing]) -> None:
        options = self._options
        config, num_ahead = options.config, options.num_ordered // options.num_workers
        self.pool = options.backend(
            PreparedWorkers(
                job,
                ring.group,
                ring.links(options, tuple(peer_rings)),
                config.multiprocessing_context,
                ring.stacks,
                ring.end,
                num_ahead,
                config.sample_timeout_s,
            )
        )
        self.worker_set = WorkerSet(ring.native, self.pool, ring.memory, options.num_pending_copies)
        self._supervisor = Supervisor(
            ring.native, self.pool, self.worker_set, config, options.restarts, self._queue, self._ranks.helpers
        )
        with interrupts_held():
            self.worker_set.start(options.first_workers or options.num_workers)

    def _stop_workers(self, grace_s: float) -> None:
        """Stop the workers that have been started, and remove the names of all segments and doorbells."""
        ring = self._ring_parts
        try:
            if hasattr(self, "pool"):
                ring.end()
                self.pool.stop(grace_s)
        finally:
            ring.close()

    # Orders

    def submit(self, order: Order) -> None:
        """Append an order to the queue; it is published as soon as a slot is free.

        Args:
            order: the samples to read. The engine sets its `slot` once it is published.
        """
        if self._is_closed:
            raise self._closed_error()
        try:
            self._queue.append(order)
            if self._backlog or not self._publisher.post(order):
                self._backlog.append(order)
                self._publish()
        except BaseException:  # KeyboardInterrupt, or another signal handler's exception, may come at any line
            self._restore_invariants()
            raise

    @property
    def num_queued(self) -> int:
        """Return the number of orders submitted and not delivered, including those sent ahead to a device."""
        return len(self._queue) if self._feed is None else len(self._queue) + len(self._feed.ahead)

    def is_queued(self, order: Order) -> bool:
        """Return whether an order is submitted and not delivered."""
        return order in self._queue

    @property
    def front(self) -> Order | None:
        """Return the order that `next` will deliver if called in order; None without orders."""
        if self._feed is not None and self._feed.ahead:
            return self._feed.ahead[0].outcome.order
        return self._queue[0] if self._queue else None

    def _publish(self) -> None:
        while self._backlog:
            slot = self._ring.hold()
            if slot < 0:
                fork_copies.release_copied()
                slot = self._ring.hold()
            if slot < 0:
                return
            order = self._backlog[0]
            self._publisher.write(order, slot)
            self._backlog.popleft()

    # Delivery

    def next(self, *, in_order: bool = True) -> Outcome:
        """Wait for the oldest order and return its outcome. There must be an order.

        Args:
            in_order: if False, take the oldest finished order.
        Returns:
            the batch, or the error that the dataset raised for one of its samples. The next call returns the next order.
        Raises:
            WorkerDied: a worker died and may not be replaced.
            RuntimeError: the loader is closed, or `timeout` has passed.
        """
        if self._is_closed:
            raise self._closed_error()
        if self._copy_out.pending_warning is not None:
            self._copy_out.raise_warning()
        if self._pending_copies is not None:
            self._pending_copies.look()
        outcome = self._next_with_ranks(in_order) if self._has_ranks else self._take(in_order)
        if self.holders is not None and outcome.error is None:
            self.holders.delivered(outcome.order)
        return outcome

    def _next_with_ranks(self, in_order: bool) -> Outcome:
        front = self.front
        assert front is not None
        self._ranks.before_next(front)
        try:
            return self._take(in_order)
        finally:
            self._ranks.after_next(is_gone=self.front is not front)

    def _take(self, in_order: bool) -> Outcome:
        """Return the next outcome; restore the invariants if an exception interrupts it."""
        try:
            if self._feed is not None:
                return self._feed.next(self, in_order)
            if in_order and not self._backlog:
                order = self._queue[0]
                lease = self._ring.take(order) or self._sleep_and_take(order)
                if lease is not None:
                    return self._deliver(order, lease, NO_NEWS if lease.has_note else None)
            order, outcome = self.wait_for_next(in_order)
            return self.deliver(order) if outcome is None else outcome
        except BaseException:  # KeyboardInterrupt, or another signal handler's exception, may come at any line
            self._restore_invariants()
            raise

    def _sleep_and_take(self, order: Order) -> Lease | None:
        """Wait for an order and lease its slot, in the usual case. Return None in all others, which `wait_for_next` handles.

        It takes half the steps of `wait_for_next`, because steps are slow after a wake-up, when the code is in no cache of the CPU.
        """
        if self._pending_copies is not None or self._options.timeout_s or self._memory.is_sparse:
            return None
        ring, ready = self._ring, self._ready
        if ring.must_look:
            self._handle_deaths()
        try:
            while ring.must_sleep(order):
                if not ready.wait(WAIT_S):
                    self._handle_deaths()
        finally:
            ring.end_wait()
        return ring.take(order, True)

    def wait_for_next(self, in_order: bool) -> tuple[Order, Outcome | None]:
        """Wait for the next order. Return it with None once it is ready, or with its outcome if it will have no batch.

        Args:
            in_order: if False, take the oldest finished order.
        Raises:
            WorkerDied, RuntimeError: see `next`.
        """
        began = 0.0
        ring = self._ring
        self.work()
        try:
            while True:
                order = self._queue[0] if in_order else self._first_done()
                if order.slot >= 0:
                    found = ring.look(order.slot)
                    if found == READY:
                        return order, None
                    if found != FILLING:
                        outcome = self._reorder_or_fail(order, found)
                        if outcome is None:
                            continue
                        return order, outcome
                if order.slot < 0 and self._pending_copies is not None and self._pending_copies.wait():
                    self._work_once()
                    continue
                began = began or monotonic()
                ring.begin_wait(order.slot if in_order and order.slot >= 0 else ANY_SLOT)
                self._ready.drain()
                self._work_once()
                if self._is_done(order if in_order else self._first_done()):
                    continue
                if self._memory.is_sparse and ring.counters()["batches"]:  # not before the first batch, whose workers need the CPUs
                    self._memory.reserve_more()
                    continue
                was_rung = self._ready.wait(WAIT_S)
                now = monotonic()
                if not was_rung or now - self._death_look > DEATH_LOOK_S:
                    self._handle_deaths()
                if self._options.timeout_s and now - began > self._options.timeout_s:
                    raise RuntimeError(f"DataLoader timed out after {self._options.timeout_s} seconds")
        finally:
            ring.end_wait()

    def _is_done(self, order: Order) -> bool:
        return order.slot >= 0 and self._ring.look(order.slot) != FILLING

    def _first_done(self) -> Order:
        """Return the oldest finished order, or the oldest order if none is finished.

        A worker finishes its orders one after another, so the order found may be preceded by one that was finished after this
        search had passed it. Delivered in the wrong order, the worker's batches could not be counted to resume after them.
        """
        found = next((order for order in self._queue if self._is_done(order)), self._queue[0])
        if found.worker < 0:
            return found
        return next(order for order in self._queue if order.worker == found.worker)

    def _closed_error(self) -> BaseException:
        return RuntimeError("this loader is closed: make a new one") if self._broken is None else self._broken()

    def deliver(self, order: Order) -> Outcome:
        """Return the outcome of a ready order.

        Args:
            order: an order whose slot is ready.
        """
        slot = order.slot
        dumped = self._ring.note(slot) if self._has_notes else b""
        if dumped[:1] == ENDED:
            self._ring.free(slot)
            self._queue.remove(order)
            return Outcome(order, NOTHING, load_note(dumped, None))
        lease = self._ring.lease(slot)
        return self._deliver(order, lease, load_note(dumped, lease.bytes_at))

    def _deliver(self, order: Order, lease: Lease, note: Note | None) -> Outcome:
        """Make the batch of a leased slot, and remove its order. An error of unpickling is part of the outcome."""
        nbytes = lease.used_nbytes  # nonzero if the worker packed the batch, even if rows were ordered
        slot, is_packed = lease.slot, nbytes > 0
        try:
            if note is not None and note.has_ended:
                batch = NOTHING
            elif nbytes:
                batch = unpack(LeasedBatch(lease), partial(self._bad_samples.report_uneven, order))
            else:
                assert self._publisher.layout is not None
                batch, nbytes = deliver_rows(self._publisher.layout, lease, order.nrows)
            if self._names_streams:
                assert self._pending_copies is not None
                self._pending_copies.releases.delivered(slot)
            del lease
            is_last_slot = self._ring.count_batch(order, nbytes)
            if is_last_slot and batch is not NOTHING and self._copy_out.must_copy(self._holders_hint):
                batch = self._copied_out(batch, slot, is_packed=is_packed)
        except Exception as error:  # an object that cannot be unpickled, for example; reading it again would fail, too
            self._queue.remove(order)
            return Outcome(order, None, note, error)
        self._supervisor.num_idle_deaths = 0
        self._queue.remove(order)
        if self.on_delivery is not None:
            self.on_delivery()
        return Outcome(order, batch, note)

    def _copied_out(self, batch: Any, slot: int, *, is_packed: bool) -> Any:
        """Return a batch that is in a slot in private memory, so that the slot is released when the batch itself is gone.

        A packed batch is built once more: only some of the objects that a batch may contain can be copied as a whole.
        """
        if not is_packed:
            return copied_rows(batch)
        lease = self._ring.lease_again(slot)
        return batch if lease is None else unpack(CopiedBatch(lease))  # without a lease, nothing in the batch aliases the slot

    def work(self) -> None:
        """Run all pending work without blocking."""
        self._work_once()
        if monotonic() - self._death_look > DEATH_LOOK_S:
            self._handle_deaths()

    def first_ready(self, in_order: bool) -> Order | None:
        """Return the next order if it is ready, else None.

        Args:
            in_order: if False, take the oldest finished order.
        """
        if not self._queue:
            return None
        order = self._queue[0] if in_order else self._first_done()
        return order if order.slot >= 0 and self._ring.look(order.slot) == READY else None

    def _restore_invariants(self) -> None:
        """Restore the invariants between orders and slots after an exception at any line: no order is lost or read twice."""
        with interrupts_held():
            for slot in range(self.num_slots):
                if self._ring.state(slot) == HELD:
                    self._ring.free(slot)
            for order in self._queue:
                if order.slot >= 0 and self._ring.state(order.slot) != ORDERED:
                    order.slot = -1
            self._backlog = deque(order for order in self._queue if order.slot < 0)

    def _holders_hint(self) -> str:
        """Return the end of the warning of `CopyOut`: the lines that hold slots, or how to record them."""
        return "; shmload.debug.enable() records where they were taken" if self.holders is None else str(self.holders)

    def _reorder_or_fail(self, order: Order, found: int) -> Outcome | None:
        """Order a batch again that was not written, and return None; or return its outcome if there will be no batch.

        Args:
            order: its order.
            found: FAILED if samples could not be read, REPACK if they do not have one shape.
        """
        ring, slot = self._ring, order.slot
        if found == REPACK:
            self._publisher.write_packed(order, self._ring.counters()["batches"])
            if self._publisher.is_packed:
                self._pack_divided()  # after publishing this order, because workers fill what was ordered first
            return None
        assert found == FAILED
        _, text = ring.failure(slot)
        if text == b"":  # the text belonged to another chunk, and the failed one was opened again
            self._publisher.ring_workers(order, 1)
            return None
        bad: Sequence[int]
        error: Callable[[], BaseException]
        if text is None:
            bad, error = self._supervisor.give_up_rows(slot)
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
        except Exception as failed:
            return self._drop_order(order, slot, Outcome(order, None, note, failed))
        if order.nrows == 0:
            return self._drop_order(order, slot, Outcome(order, NOTHING, note))
        self._publisher.write(order, slot)
        return None

    def _drop_order(self, order: Order, slot: int, outcome: Outcome) -> Outcome:
        """Free the slot of an order that will have no batch, and return the outcome. In torch mode, its worker waits for that."""
        self._ring.free(slot)
        if order.worker >= 0:
            self._publisher.ring_workers(order, 1)
        self._queue.remove(order)
        return outcome

    def _work_once(self) -> None:
        """Do all pending work without waiting, except for handling deaths."""
        ring = self._ring
        if ring.is_draining:
            ring.drain()
        if not self._has_layout:
            text = ring.proposal
            if text is not None:
                with interrupts_held():
                    self._accept_layout(text)
        while (slot := ring.needy()) >= 0:
            with interrupts_held():
                self._memory.answer_need(slot)
            self._announce_grants()
        if self._pending_copies is not None:
            self._pending_copies.pins.register()
        if self._backlog:
            self._publish()

    def _accept_layout(self, text: bytes) -> None:
        """Use the layout that a worker has proposed; b"" if the samples do not all have one shape, so that batches are packed."""
        nrows = max(self._options.max_rows, *(order.nrows for order in self._queue), 1)
        if not text:
            for order in self._divided():
                self._ring.withdraw(order.slot)
        self._publisher.accept_layout(Layout.loads(text) if text else None, nrows)
        self._has_layout = True
        self._announce_grants()
        if not text and self._queue and self._queue[0] not in self._divided():  # its worker packs it without being told
            self._pack_divided()

    def _divided(self) -> list[Order]:
        """Return the orders whose rows are divided into chunks."""
        return [order for order in self._queue if order.slot >= 0 and self._ring.rows(order.slot)[1] > 1]

    def _pack_divided(self) -> None:
        """Order again the batches that were divided into chunks and that no worker has begun, each as one packed chunk.

        Otherwise each would be packed only when it is the next batch, and the other workers would have nothing to do until then.
        """
        for order in self._divided():
            self._ring.withdraw(order.slot)
            if self._ring.look(order.slot) == REPACK:
                self._publisher.write(order, order.slot, is_packed=True)

    def _announce_grants(self) -> None:
        """Wake all workers that may wait for memory or for the layout."""
        for _ in range(self._options.num_workers):
            self._ring_parts.grants.post()

    # Deaths

    def _handle_deaths(self) -> None:
        """Take back the work of dead, late and departed workers, and wake the others; raise if a worker may not be replaced."""
        if self._is_closed:  # by another thread, while this one waits
            raise self._closed_error()
        self._death_look = monotonic()
        self._ring.look_again(DEATH_LOOK_S)
        bells = self._ring_parts.order_bells
        num_taken_back = self._ranks.check_ranks()
        if num_taken_back:
            self._supervisor.num_taken_back += num_taken_back
            bells[0].post_up_to(num_taken_back)
        if self._options.config.sample_timeout_s is not None:
            with interrupts_held():
                num_timed_out = sum(map(self._supervisor.end_if_timed_out, range(self._ring.num_workers)))
            for bell in bells if num_timed_out else ():
                bell.post_up_to(1)
        deaths = self.pool.deaths()
        if not deaths:
            return
        with interrupts_held():
            for death in deaths:
                broken = self._supervisor.handle(death)
                if broken is not None:
                    self.close_after_death(broken)
                    raise broken()
        for bell in bells:
            bell.post_up_to(1)

    def close_after_death(self, why: Callable[[], WorkerDied]) -> None:
        """Close the engine because a worker that may not be replaced has died. `next` raises the error from then on.

        Args:
            why: returns the error.
        """
        self._broken = why
        self.close(grace_s=0)

    # End

    @faults.at("abandoning")
    def abandon(self) -> None:
        """Drop every order without waiting. Workers finish the chunks that they have claimed."""
        with interrupts_held():
            if self._feed is not None:
                self._feed.ahead.clear()
            self._queue.clear()
            self._backlog.clear()
            self._ring.void()
        self._ring.drain()
        self._ranks.abandoned()

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the workers and remove all names; live batches stay valid. Idempotent, and does nothing in a forked child.

        Args:
            grace_s: seconds that a worker gets to finish its claim before it is killed.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        try:
            self._ranks.closing(is_broken=self._broken is not None)
        finally:
            self._is_closed = True
            self._runnable_at_end = [worker["runnable_ns"] for worker in RingReader(self.control).snapshot()["workers"]]
            try:
                # a thread that waits in next() sees `_is_closed` at its next check for deaths
                with self.iterator_lock.wait_until_alone():
                    if self._feed is not None:
                        self._feed.ahead.clear()
                    self._stop_workers(grace_s)
            finally:
                self._ranks.closed()

    # Observation

    def begin_pass(self, num_steps: int, *, step_stride: int = 1) -> None:
        """Publish the length of the pass that begins, for readers of stats.

        Args:
            num_steps: batches of the pass; 0 if unknown.
            step_stride: difference between the step numbers of successive batches.
        """
        self._ring.begin_pass(num_steps, step_stride=step_stride)
        self._ranks.pass_begins()

    def leave_pass(self) -> None:
        """Tell the other ranks that the pass was left before its end."""
        if not self._is_closed:
            self._ranks.pass_left()

    def counters(self) -> dict[str, Any]:
        """Return the report of `shmload top` on this ring (docs/top.md), with the counters of the trainer's process."""
        self._ring.state(0)  # called because it collects released leases, and raises in a forked child
        seen = RingReader(self.control).snapshot()
        for worker, at_end in zip(seen["workers"], self._runnable_at_end, strict=False):
            worker["runnable_ns"] = at_end
        report = describe(seen)
        pids = self.pool.pids
        for worker, pid in zip(report["workers"], pids, strict=False):  # a closed pool has no pids
            worker["pid"] = worker["pid"] or pid
        add_memory_usage(report, self._pid)
        report |= {"num_repacked": self._publisher.num_repacked, "num_taken_back": self._supervisor.num_taken_back}
        report["num_queued"] = len(self._queue)
        if self.holders is not None:
            report["holders"] = [holder._asdict() for holder in self.holders.held()]
        return report | self._ranks.counters()

    def totals(self) -> dict[str, Any]:
        """Return the ring's counters since it was made, with `wait_s` of the trainer and `busy_s` summed over all workers."""
        seen = RingReader(self.control).snapshot()
        return {**seen, "wait_s": seen["wait_ns"] / 1e9, "busy_s": sum(worker["busy_ns"] for worker in seen["workers"]) / 1e9}

    def pace(self) -> tuple[float, float, int]:
        """Return totals so far: seconds the trainer has waited, seconds all workers have worked, and number of workers replaced."""
        totals = self.totals()
        return totals["wait_s"], totals["busy_s"], int(totals["num_restarts"])

    @property
    def layout(self) -> Layout | None:
        """Return the offsets of the fields in a slot; None until they are known."""
        return self._publisher.layout

    @property
    def needs_pin_memory(self) -> bool:
        """Return whether batches should be passed to torch's `pin_memory`, which copies the tensors that are not pinned already.

        False if the device feed copies batches, or if pinning the ring has failed.
        """
        return self._options.num_sent is None and (self._pending_copies is None or not self._pending_copies.pins.has_failed)
