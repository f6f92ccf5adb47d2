"""What an engine is made of: its ring, the worker pool that fills it, who watches them, and whoever takes part in its work.

Who holds the ring's slots, and which copies from them come too late: found while a program runs, where it has asked for that.

Each call in this thread that makes something on the device of what lies in a slot gets an event of its own, recorded behind it on
the stream that it runs on. When the slot has cooled, and so is about to be used again, that event must be done as well. If it is
not, nothing held the slot for that copy, and what the copy reads is a matter of luck.

So there is no false alarm: a stream that another one was made to wait for has done its copies when that one's event is done. A
copy that was in time by luck is not found. What C code does with an address is not seen; slots that are poisoned show that.

How batches arrive on a device: copied ahead, by a stream of their own.

    slot ready ──lease──▶ host batch ──copies on the side stream──▶ device batch ──the consumer's stream waits for them──▶ yielded
                              └── dropped at once: its lease ends with the side stream current, so the slot cools until then

Ahead of the batch that is yielded, as many as are ready, `num_sent` at most, are copied in the same call; the host waits neither
for workers nor for the device over them. What was sent ahead stays *ordered* to those above: they count it, and it can be
abandoned. So a position, a state and torch's pace are the same with a device as without.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from shmload._core.mapping import Mapping as MemoryMapping
from shmload._core.trainer import FollowerRing, Order, TrainerRing, control_nbytes
from shmload.device.calls import Calls, PendingCopies
from shmload.device.sending import BufferSet, Sender
from shmload.engine.ring import NOTHING, Delivery, OrderWriter, RingMemory
from shmload.engine.stats import RingReader, introduce
from shmload.engine.supervision import Size, Supervisor, WorkerSet, num_slots
from shmload.errors import CopyFailed
from shmload.shm import owners
from shmload.shm.segment import Doorbell, Group, JointBell
from shmload.worker.pool import STACK_NBYTES, STOP_GRACE_S, Backend, WorkerPool, interrupts_held, prepare_workers, processes
from shmload.worker.reader import Job, PeerRing
from shmload.worker.snapshot import Note
from shmload.world import users_frame, users_place

if TYPE_CHECKING:
    from shmload.engine.engine import Engine


class CopyOut:
    """Whether batches must leave their slots, over one ring.

    Args:
        is_shared: other ranks read it, too.
    """

    def __init__(self, ring: TrainerRing | FollowerRing, *, is_shared: bool = False) -> None:
        self._ring = ring
        self._whose = "slots that a rank may have of a shared ring" if is_shared else "slots of the ring"
        self._has_warned = False
        self.has_collected = False
        self.refused: UserWarning | None = None

    def must_copy(self, who_holds: Callable[[], str]) -> bool:
        """Whether the batch that has the last slot must leave it at once, because the user does hold all others.

        Args:
            who_holds: what else the warning says.
        """
        ring = self._ring
        if not self.has_collected:  # a reference cycle holds its slots until the collector comes by
            self.has_collected = True
            owners.settle()
            gc.collect()
            if ring.num_leased < ring.num_lendable:
                return False
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{ring.num_leased - 1} batches are still in use, all but one of the {ring.num_lendable} {self._whose}: from now "
                "on batches are copied to private memory while that is so. Drop batches you no longer need, or raise "
                f"prefetch_factor or ring_bytes{who_holds()}"
            )
        ring.count_copied_out()
        return True

    def _warn(self, text: str) -> None:
        try:
            warnings.warn(text, stacklevel=users_frame()[1])
        except UserWarning as error:
            # a program that makes errors of warnings: raised here it would lose this batch, and its traceback hold the last slot
            self.refused = error.with_traceback(None)

    def raise_refused(self) -> None:
        """Raises the warning that has been made an error, if one has; once."""
        error, self.refused = self.refused, None
        if error is not None:
            raise error


TEXT_CAPACITY = 16384
LAYOUT_CAPACITY = 65536
ORDER_CAPACITY = 4096
WHOLE_BATCHES = 1 << 30  # rows that are claimed together where a claim is a call to another machine


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built; the loader derives it from its own arguments.

    `max_rows` is the largest batch expected (0: unknown), `num_ordered` how many batches may be under way at once. It begins with
    `first_workers` of its workers and slots for `first_ordered` batches; 0: all, and that never changes. With `calls` the ring is
    pinned for that device, and `num_pending_copies` slots more are there for batches whose copies are under way; `num_sent` batches
    are copied ahead by `sender`, None: they are not sent there at all.
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
    resume: Sequence[bytes] = ()
    sample_timeout_s: float | None = None
    first_workers: int = 0
    first_ordered: int = 0
    rank: int | None = None
    world_size: int | None = None
    calls: Calls | None = None
    num_pending_copies: int = 0
    num_sent: int | None = None
    sender: Sender | None = None
    num_ranks: int = 1  # of this node that read the ring
    num_helpers: int = 0  # workers of other ranks that may fill chunks of the ring
    affinity: tuple[int, ...] = ()  # processors of the worker pool; none: the trainer's
    backend: Backend = processes  # where workers run
    num_far: int = 0  # of the workers, the first ones: on other machines


class Hook:
    """Takes part in an engine's work: its ring is read or filled by others, too, or its batches are watched.

    An engine calls each of these at its time; here they do nothing.
    """

    def neighbours(self, parts: Parts) -> tuple[PeerRing, ...]:
        """Rings of the node's other ranks in which the pool helps; asked once there is a ring, and before there is a pool."""
        return ()

    def order_bell(self, parts: Parts, bell: Doorbell) -> Doorbell:
        """The bell that the worker pool is called by, or another over it."""
        return bell

    def built(self, parts: Parts) -> None:
        """All parts are there."""

    def failed(self, error: BaseException) -> None:
        """They could not be made."""

    def before_next(self, order: Order) -> None:
        """The front order is asked for; what is raised here leaves it where it is."""

    def after_next(self, *, is_gone: bool) -> None:
        """It was delivered or lost, or it still is the front one."""

    def delivered(self, order: Order) -> None:
        """Its batch is about to be handed out."""

    def look(self) -> None:
        """Deaths are looked for."""

    def abandoned(self) -> None:
        """Every order is forgotten."""

    def pass_begins(self) -> None:
        """One more pass over the loader."""

    def pass_left(self) -> None:
        """A pass is left before its end."""

    def counters(self) -> dict[str, Any]:
        """What it adds to `stats()`."""
        return {}

    def who_holds(self) -> str:
        """What it adds to a warning about those who hold slots."""
        return ""

    def closing(self, *, is_broken: bool) -> None:
        """The engine is about to end."""

    def closed(self) -> None:
        """It has ended."""


class Parts:
    """The ring of one engine, the worker pool that fills it, and what watches both.

    Args:
        job: what workers do with an order.
        order_in: the order that stands in a slot, if one does.
    """

    def __init__(self, job: Job, options: EngineOptions, hooks: Sequence[Hook], order_in: Callable[[int], Order | None]) -> None:
        self.options = options
        self.num_slots = num_slots(options.num_ordered) + options.num_pending_copies
        self.pending_copies: PendingCopies | None = None
        self.pool: WorkerPool | None = None
        self.group = Group()
        try:
            self._build_ring(job, hooks)
            neighbours = tuple(ring for hook in hooks for ring in hook.neighbours(self))
            self._start_pool(job, neighbours, order_in)
            for hook in hooks:
                hook.built(self)
        except BaseException as error:
            try:
                for hook in hooks:
                    hook.failed(error)
            finally:
                self.close()
            raise

    def _build_ring(self, job: Job, hooks: Sequence[Hook]) -> None:
        options, group = self.options, self.group
        sizes = {
            "order_capacity": max(8 * options.max_rows, ORDER_CAPACITY),
            "text_capacity": TEXT_CAPACITY,
            "layout_capacity": LAYOUT_CAPACITY,
        }
        num_records = options.num_workers + options.num_helpers
        nbytes = control_nbytes(self.num_slots, num_records, **sizes)
        self.control_segment = group.segment("control", nbytes)
        self.control = MemoryMapping(self.control_segment.fd, nbytes)
        self.ring = TrainerRing(
            self.control,
            num_slots=self.num_slots,
            num_workers=num_records,
            is_static=options.is_static,
            threads_per_worker=WHOLE_BATCHES if options.num_far else job.num_threads,
            num_usable=num_slots(options.first_ordered) + options.num_pending_copies if options.first_ordered else 0,
            **sizes,
        )
        introduce(self.ring, job, options.rank, options.world_size)
        self.reader = RingReader(self.control)
        self.copy_out = CopyOut(self.ring, is_shared=options.num_ranks > 1)
        self.pending_copies = None if options.calls is None else PendingCopies(self.ring, options.calls)
        self.memory = RingMemory(
            group,
            self.ring,
            options.ring_bytes,
            may_park=options.first_ordered > 0,
            pins=None if self.pending_copies is None else self.pending_copies.pins,
            is_private=options.num_ranks > 1,
        )
        self.ready = group.doorbell("ready")
        self.grants = group.doorbell("grants")
        num_order_bells = options.num_workers if options.is_static else 1 + (0 < options.num_far < options.num_workers)
        self.orders = [group.doorbell(f"orders-{i}") for i in range(num_order_bells)]
        for hook in hooks:
            self.orders[0] = hook.order_bell(self, self.orders[0])
        bells = self.orders if options.is_static or num_order_bells == 1 else [JointBell(self.orders)]
        self.writer = OrderWriter(self.ring, self.memory, bells, is_packed=job.plan.is_whole)
        if job.plan.rows is not None or job.plan.is_whole:
            self.writer.settle(job.plan.rows, options.max_rows)
        self.stacks = {}  # by worker, where they can be asked for theirs; actors are watched where they are
        if options.sample_timeout_s is not None:
            for worker in range(options.num_far, options.num_workers):
                self.stacks[worker] = group.segment(f"stack-{worker}", STACK_NBYTES)

    def _start_pool(self, job: Job, neighbours: tuple[PeerRing, ...], order_in: Callable[[int], Order | None]) -> None:
        options = self.options
        called = prepare_workers(
            job,
            self.group,
            self.control_segment,
            num_workers=options.num_workers,
            multiprocessing_context=options.multiprocessing_context,
            base_seed=options.base_seed,
            ready=self.ready,
            orders=self.orders,
            grants=self.grants,
            resume=options.resume,
            stacks=self.stacks,
            neighbours=neighbours,
            num_far=options.num_far,
            num_ahead=options.num_ordered // options.num_workers,
            sample_timeout_s=options.sample_timeout_s,
            affinity=options.affinity,
        )
        self.pool = pool = options.backend(called)
        limit = options.max_restarts
        if limit is None and job.seed is None:
            limit = 0
        self.worker_set = WorkerSet(self.ring, pool)
        self.size = Size(self.memory, self.worker_set, options.num_pending_copies)
        self.supervisor = Supervisor(
            self.ring,
            pool,
            self.worker_set,
            limit,
            order_in,
            sample_timeout_s=options.sample_timeout_s,
            tolerates_bad_samples=job.tolerates_bad_samples,
        )
        with interrupts_held():
            self.worker_set.start(options.first_workers or options.num_workers)

    def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the workers and gives up the names."""
        try:
            if self.pool is not None:
                self.ring.set_closing()
                for bell in (*self.orders, self.grants):
                    for _ in range(self.options.num_workers):
                        bell.post()
                self.pool.stop(grace_s)
        finally:
            try:
                if self.pending_copies is not None:
                    self.pending_copies.close()
            finally:
                self.group.close()


LEASED = 3  # of TrainerRing.state
_is_enabled = os.environ.get("SHMLOAD_DEBUG_BATCHES", "") not in ("", "0")


def enable(on: bool = True) -> None:
    """Notes holders and poisons slots, for loaders that start their workers from now on.

    Args:
        on: False: no longer.
    """
    global _is_enabled
    _is_enabled = on


def is_enabled() -> bool:
    """Whether the next engine will be a watched one."""
    return _is_enabled


class Watched(NamedTuple):
    """An engine as far as its copies go: its slots, and which batch lies in one, in words."""

    calls: Calls
    pending_copies: PendingCopies
    batch_in: Callable[[int], str]


class _NotedCopy(NamedTuple):
    event: Any
    where: str
    batch: str


class CopyWatch(TorchFunctionMode):
    """Watches this thread's copies from the slots of some engines.

    Args:
        engines: gives those there are, at each call.
    """

    def __init__(self, engines: Callable[[], Iterable[Watched]]) -> None:
        super().__init__()
        self._engines = engines

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            for source in (*args, *(kwargs or {}).values()):
                if isinstance(source, torch.Tensor) and source is not made and source.layout is torch.strided:
                    self._see(source, made)
        return made

    def _see(self, source: torch.Tensor, made: torch.Tensor) -> None:
        for engine in self._engines():
            stream = engine.calls.stream_for(made)
            slot = -1 if stream is None else engine.pending_copies.pins.slot_at(source.data_ptr())
            if slot < 0:
                continue
            if engine.pending_copies.late is None:
                engine.pending_copies.late = Late(engine.calls)
            where, batch = users_place(), engine.batch_in(slot)
            if engine.calls.is_capturing():
                engine.pending_copies.warn(
                    f"the copy at {where} of {batch} is captured in a graph, which will read that address at each replay, "
                    "whatever lies there then. Copy into a tensor of your own before, and capture what reads that"
                )
            else:
                engine.pending_copies.late.noted.setdefault(slot, []).append(_NotedCopy(engine.calls.record(stream), where, batch))


class Late:
    """Which copies from a slot are not done although it has cooled."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.noted: dict[int, list[_NotedCopy]] = {}

    def __call__(self, slot: int) -> list[str]:
        """What is to be said of a slot that is free now; its copies are forgotten."""
        return [
            f"the copy at {copy.where} of {copy.batch} is not done, and nothing waits for it: its slot is used again, and it may "
            "read another batch's bytes. Call loader.record_stream(batch, stream) before the batch is dropped, or drop it while "
            "that stream is current"
            for copy in self.noted.pop(slot, ())
            if not self._calls.is_done(copy.event)
        ]


class Holder(NamedTuple):
    """A batch that still has its slot.

    Attributes:
        slot: its number in the ring.
        epoch, step: which batch it is; the step counts from the epoch's start.
        nbytes: the slot's.
        age_s: seconds since it was yielded.
        where: the line that took it, "file:line in function".
    """

    slot: int
    epoch: int
    step: int
    nbytes: int
    age_s: float
    where: str

    def __str__(self) -> str:
        return (
            f"slot {self.slot} ({self.nbytes} bytes): batch {self.step} of epoch {self.epoch}, taken {self.age_s:.1f} s ago at "
            f"{self.where}"
        )


class Holders(Hook):
    """Notes where each batch is taken, over a ring whose slots are poisoned."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[int, int, float, str]] = {}  # slot -> epoch, step, when, where

    def built(self, parts: Parts) -> None:
        self._ring = parts.ring
        self._ring.poison = True

    def delivered(self, order: Order) -> None:
        self._taken[order.slot] = (order.epoch, order.step, monotonic(), users_place())

    def held(self) -> list[Holder]:
        """The batches that still have their slots, the oldest first."""
        now, ring = monotonic(), self._ring
        found = [
            Holder(slot, epoch, step, ring.payload_nbytes(slot), now - taken, where)
            for slot, (epoch, step, taken, where) in self._taken.items()
            if ring.state(slot) == LEASED
        ]
        return sorted(found, key=lambda holder: -holder.age_s)

    def batch_in(self, slot: int) -> str:
        """Which batch lies in a leased slot."""
        epoch, step, _, where = self._taken[slot]
        return f"batch {step} of epoch {epoch}, taken at {where},"

    def counters(self) -> dict[str, Any]:
        return {"holders": [holder._asdict() for holder in self.held()]}

    def who_holds(self) -> str:
        return "".join(f"\n{holder}" for holder in self.held())


@dataclass
class Arrival:
    """A batch sent ahead, or what became of it."""

    order: Order
    batch: Any
    note: Note | None
    made: list[torch.Tensor]
    event: Any = None
    error: Exception | None = None


class DeviceFeed:
    """Sends the batches of an engine over a pinned ring to a device.

    Attributes:
        ahead: batches that were sent and are not delivered.
    """

    def __init__(self, engine: Engine, options: EngineOptions) -> None:
        assert options.calls is not None
        assert options.num_sent is not None
        assert options.sender is not None
        self._engine = weakref.ref(engine)  # the engine has this
        self._calls: Calls = options.calls
        self._num_sent, self._sender = options.num_sent, options.sender
        self.ahead: deque[Arrival] = deque()
        self._side: Any = None  # made with the first batch: workers that are forked should find the device untouched

    def next(self, in_order: bool) -> Delivery:
        """The next batch; its tensors lie on the device, and this thread's current stream waits for them by itself.

        Raises:
            CopyFailed: the batch could not be copied; it is lost, and the next call goes on behind it.
            ValueError: it is none that the device's options are for; likewise.
            RuntimeError: all static buffers are held; nothing is lost.
        """
        engine = self._engine()
        assert engine is not None
        buffers = self._sender.buffers
        if buffers is not None:
            buffers.look()
        if self.ahead:
            engine.work()
        else:
            if buffers is not None:
                buffers.check_room()
            order, is_ready = engine.awaited(in_order)
            if not is_ready:
                return order, NOTHING, None
            with interrupts_held():
                self.ahead.append(self._sent(engine, order))
        while len(self.ahead) <= self._num_sent and (buffers is None or buffers.has_room):
            ready = engine.first_ready(in_order)
            if ready is None:
                break
            with interrupts_held():
                self.ahead.append(self._sent(engine, ready))
        return self._arrived(engine, self.ahead.popleft())

    def _arrived(self, engine: Engine, arrival: Arrival) -> Delivery:
        if arrival.error is not None:
            engine.has_lost(arrival.order)
            raise arrival.error
        if arrival.event is not None:
            stream = self._calls.current_stream()
            self._calls.wait_on_stream(stream, arrival.event)
            if self._sender.buffers is not None and arrival.made:  # it is used here, wherever its last alias dies
                self._sender.buffers.name_stream(arrival.made[0], stream)
            for tensor in arrival.made:  # of the side stream's memory, which would use it again without asking this one
                self._calls.keep_for(tensor, stream)
        return arrival.order, arrival.batch, arrival.note

    def _sent(self, engine: Engine, order: Order) -> Arrival:
        """Takes a ready order, and has its batch copied; what that raises is for the batch's turn."""
        try:
            _, batch, note = engine.deliver(order)
        except Exception as error:
            engine.take_lost()
            return Arrival(order, None, None, [], error=error)
        if batch is NOTHING:
            return Arrival(order, batch, note, [])
        calls = self._calls
        try:
            with calls.using(self._side or self._new_side()):
                # the host's own batch is gone after this, while the side stream is still current
                batch, made = self._sender.send(batch, into=self._buffers_for(order), is_slot=True)
                return Arrival(order, batch, note, made, event=calls.record(self._side))
        except (RuntimeError, ValueError) as error:
            # the batch dies with another stream current, and a part of it may be on its way
            if engine.releases is not None:
                engine.releases.name_stream(order.slot, self._side)
            error = error.with_traceback(None)  # whose frames hold the batch
            if isinstance(error, ValueError):
                return Arrival(order, None, note, [], error=error)
            failure = CopyFailed(
                f"batch {order.step} of epoch {order.epoch} could not be copied to {calls.name}: {error}. Where it has too little "
                "memory, lower batch_size"
            )
            failure.__cause__ = error
            return Arrival(order, None, note, [], error=failure)

    def _buffers_for(self, order: Order) -> BufferSet | None:
        buffers = self._sender.buffers
        return None if buffers is None else buffers.take(f"batch {order.step} of epoch {order.epoch}", self._side)

    def _new_side(self) -> Any:
        self._side = self._calls.side_stream()
        return self._side
