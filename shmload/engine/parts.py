"""What an engine is made of: its ring, the worker pool that fills it, who watches them, and whoever takes part in its work.

The workers: a ring has records for the largest worker pool; the header says how many workers are wanted, and those are the first
ones. A worker whose number is not below that looks at the word between two chunks, and leaves. Nothing it did has to be done again,
so no batch differs. Which workers are leaving is remembered here until their processes have ended: only then is such an end no
death.

A dead worker's rows are done again by a new worker, or it ends the loader. In seed mode a worker is replaced as often as need be,
but a sample that ends its worker twice is given up, and so is a loader whose workers keep dying with nothing to do. In torch mode
the first death is the end, as in torch, unless `max_restarts` says otherwise: the dead worker's own random stream cannot be
recovered.

How batches arrive on a device: copied ahead, by a stream of their own.

    slot ready ──lease──▶ host batch ──copies on the side stream──▶ device batch ──the consumer's stream waits for them──▶ yielded
                              └── dropped at once: its lease ends with the side stream current, so the slot cools until then

Ahead of the batch that is yielded, as many as are ready, `num_sent` at most, are copied in the same call; the host waits neither
for workers nor for the device over them. What was sent ahead stays *ordered* to those above: they count it, and it can be
abandoned. So a position, a state and torch's pace are the same with a device as without.
"""

from __future__ import annotations

import logging
import os
import signal
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import is_exiting
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from shmload._core.mapping import Mapping
from shmload._core.trainer import Order, TrainerRing, control_nbytes
from shmload.device.cuda import CudaDevice
from shmload.device.pending_copies import LEASED, PendingCopies
from shmload.device.sending import sent
from shmload.engine.copy_out import CopyOut
from shmload.engine.ring import LEAST_SLOTS, NOTHING, Delivery, OrderWriter, RingMemory
from shmload.engine.stats import about_bytes
from shmload.errors import CopyFailed, SampleTimeout, ShmloadError, WorkerDied
from shmload.shm.segment import Doorbell, Group, JointBell
from shmload.worker.pool import STACK_NBYTES, STOP_GRACE_S, Backend, Death, PreparedWorkers, WorkerPool, interrupts_held, processes
from shmload.worker.reader import REMEDY, Job, PeerRing, Post, sample_at, timeout_text
from shmload.worker.snapshot import Note
from shmload.world import rank_and_world_size, users_place

if TYPE_CHECKING:
    from shmload.engine.builder import LoaderConfig
    from shmload.engine.engine import Engine

log = logging.getLogger("shmload")


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
    are copied ahead, None: they are not sent there at all.
    """

    config: LoaderConfig
    num_workers: int
    num_ordered: int
    max_rows: int
    timeout_s: float
    base_seed: int
    resume: Sequence[bytes] = ()
    first_workers: int = 0
    first_ordered: int = 0
    calls: CudaDevice | None = None
    num_pending_copies: int = 0
    num_sent: int | None = None
    num_ranks: int = 1  # of this node that read the ring
    num_helpers: int = 0  # workers of other ranks that may fill chunks of the ring
    affinity: tuple[int, ...] = ()  # processors of the worker pool; none: the trainer's
    backend: Backend = processes  # where workers run
    num_far: int = 0  # of the workers, the first ones: on other machines
    about: Sequence[tuple[str, str]] = ()  # stages of a pipeline and where they run, for who looks at the ring


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
        options, group, config = self.options, self.group, self.options.config
        is_static = job.seed is None  # torch mode: each order is one worker's
        order_capacity = max(8 * options.max_rows, ORDER_CAPACITY)
        sizes = {"order_capacity": order_capacity, "text_capacity": TEXT_CAPACITY, "layout_capacity": LAYOUT_CAPACITY}
        num_records = options.num_workers + options.num_helpers
        nbytes = control_nbytes(self.num_slots, num_records, **sizes)
        about = about_bytes(options.about)
        self.control_segment = group.segment("control", nbytes + len(about))
        os.pwrite(self.control_segment.fd, about, nbytes)
        self.control = Mapping(self.control_segment.fd, nbytes)
        self.ring = TrainerRing(
            self.control,
            num_slots=self.num_slots,
            num_workers=num_records,
            is_static=is_static,
            threads_per_worker=WHOLE_BATCHES if options.num_far else job.num_threads,
            num_usable=num_slots(options.first_ordered) + options.num_pending_copies if options.first_ordered else 0,
            **sizes,
        )
        try:
            rank, world_size = rank_and_world_size(config.rank, config.world_size)
        except ValueError:  # nobody has said which rank this is: the loader asks again, and loudly, where it matters
            rank, world_size = 0, 1
        dataset = type(job.dataset).__name__.encode()
        self.ring.introduce(dataset_name=dataset, read_path=job.plan.path.encode(), rank=rank, world_size=world_size)
        self.copy_out = CopyOut(self.ring, is_shared=options.num_ranks > 1)
        self.pending_copies = None if options.calls is None else PendingCopies(self.ring, options.calls)
        self.memory = RingMemory(
            group,
            self.ring,
            config.ring_bytes,
            may_park=options.first_ordered > 0,
            pins=None if self.pending_copies is None else self.pending_copies.pins,
            is_private=options.num_ranks > 1,
            is_reserved=any(isinstance(hook, Holders) for hook in hooks),  # who poisons slots
        )
        self.ready = group.doorbell("ready")
        self.grants = group.doorbell("grants")
        num_order_bells = options.num_workers if is_static else 1 + (0 < options.num_far < options.num_workers)
        self.orders = [group.doorbell(f"orders-{i}") for i in range(num_order_bells)]
        for hook in hooks:
            self.orders[0] = hook.order_bell(self, self.orders[0])
        bells = self.orders if is_static or num_order_bells == 1 else [JointBell(self.orders)]
        self.writer = OrderWriter(self.ring, self.memory, bells, is_packed=job.plan.is_whole)
        if job.plan.rows is not None or job.plan.is_whole:
            self.writer.settle(job.plan.rows, options.max_rows)
        self.stacks = {}  # by worker, where they can be asked for theirs; actors are watched where they are
        if config.sample_timeout_s is not None:
            for worker in range(options.num_far, options.num_workers):
                self.stacks[worker] = group.segment(f"stack-{worker}", STACK_NBYTES)

    def _start_pool(self, job: Job, neighbours: tuple[PeerRing, ...], order_in: Callable[[int], Order | None]) -> None:
        options, orders, control = self.options, self.orders, self.control_segment
        config = options.config
        num_workers = options.num_workers
        # one bell for each worker, or one for all; or two, one for those elsewhere and one for this machine's
        bells = [orders[w if len(orders) == num_workers else 0 if w < options.num_far else -1] for w in range(num_workers)]
        posts = [
            Post(
                worker_id=worker_id,
                num_workers=num_workers,
                trainer_pid=os.getpid(),
                control_path=control.path,
                control_nbytes=control.nbytes,
                ready_bell=self.ready.name,
                orders_bell=bell.name,
                grants_bell=self.grants.name,
                base_seed=options.base_seed,
                affinity=options.affinity or tuple(sorted(os.sched_getaffinity(0))),
                stack_path=self.stacks[worker_id].path if worker_id in self.stacks else "",
                neighbours=neighbours,
                resume=options.resume[worker_id] if options.resume else b"",
            )
            for worker_id, bell in enumerate(bells)
        ]
        num_ahead = options.num_ordered // num_workers
        self.pool = options.backend(
            PreparedWorkers(job, self.group, posts, config.multiprocessing_context, self.stacks, num_ahead, config.sample_timeout_s)
        )
        self.worker_set = WorkerSet(self.ring, self.pool, self.memory, options.num_pending_copies)
        self.supervisor = Supervisor(self.ring, self.pool, self.worker_set, config, order_in)
        with interrupts_held():
            self.worker_set.start(options.first_workers or num_workers)

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
                if self.pool is not None:
                    self.ring.let_go()
                self.group.close()


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
        self._engine = weakref.ref(engine)  # the engine has this
        self._calls, self._num_sent = options.calls, options.num_sent
        self.ahead: deque[Arrival] = deque()
        self._side: Any = None  # made with the first batch: workers that are forked should find the device untouched

    def next(self, in_order: bool) -> Delivery:
        """The next batch; its tensors lie on the device, and this thread's current stream waits for them by itself.

        Raises:
            CopyFailed: the batch could not be copied; it is lost, and the next call goes on behind it.
        """
        engine = self._engine()
        assert engine is not None
        if self.ahead:
            engine.work()
        else:
            order, is_ready = engine.awaited(in_order)
            if not is_ready:
                return order, NOTHING, engine.lost_note
            with interrupts_held():
                self.ahead.append(self._sent(engine, order))
        while len(self.ahead) <= self._num_sent:
            ready = engine.first_ready(in_order)
            if ready is None:
                break
            with interrupts_held():
                self.ahead.append(self._sent(engine, ready))
        arrival = self.ahead.popleft()
        if arrival.error is not None:
            engine.lost, engine.lost_note = arrival.order, arrival.note
            raise arrival.error
        if arrival.event is not None:
            stream = self._calls.current_stream()
            self._calls.wait_on_stream(stream, arrival.event)
            for tensor in arrival.made:  # of the side stream's memory, which would use it again without asking this one
                self._calls.keep_for(tensor, stream)
        return arrival.order, arrival.batch, arrival.note

    def _sent(self, engine: Engine, order: Order) -> Arrival:
        """Takes a ready order, and has its batch copied; what that raises is for the batch's turn."""
        try:
            _, batch, note = engine.deliver(order)
        except Exception as error:
            engine.take_lost()
            return Arrival(order, None, engine.lost_note, [], error=error)
        if batch is NOTHING:
            return Arrival(order, batch, note, [])
        calls = self._calls
        try:
            if self._side is None:
                self._side = calls.side_stream()
            with calls.using(self._side):
                # the host's own batch is gone after this, while the side stream is still current
                batch, made = sent(batch, calls, is_slot=True)
                return Arrival(order, batch, note, made, event=calls.record(self._side))
        except Exception as error:  # of the device, or of the user's own named tuple as it is made again
            # the batch dies with another stream current, and a part of it may be on its way
            if engine.releases is not None:
                engine.releases.name_stream(order.slot, self._side)
            error = error.with_traceback(None)  # whose frames hold the batch
            failure = CopyFailed(
                f"batch {order.step} of epoch {order.epoch} could not be copied to {calls.name}: {error}. Where it has too little "
                "memory, lower batch_size"
            )
            failure.__cause__ = error
            return Arrival(order, None, note, [], error=failure)


class WorkerSet:
    """The size of one engine: its workers by number, its slots, the memory behind them.

    Args:
        num_pending_copies: slots beyond those for batches under way.

    Attributes:
        leaving: workers that were asked to leave: that their processes end is no death.
        start_s: what the newest worker took from the call that started it to its first look for work; 0 before one has come.
    """

    def __init__(self, ring: TrainerRing, pool: WorkerPool, memory: RingMemory, num_pending_copies: int) -> None:
        self._ring, self._pool, self._memory = ring, pool, memory
        self._num_spare = num_pending_copies + 2
        self._called_ns: dict[int, int] = {}  # when each that is there was started
        self.leaving: set[int] = set()
        self.start_s = 0.0

    def start(self, num_workers: int) -> None:
        """Starts the first worker pool."""
        self._ring.num_wanted = num_workers
        now = monotonic_ns()
        self._called_ns = dict.fromkeys(range(num_workers), now)
        self._pool.start(num_workers)

    def resize(self, num_wanted: int) -> bool:
        """Makes the worker pool that large, in seed mode: starts processes now, and has others leave; nobody is waited for.

        Returns:
            False: not all could be started; what there is stays.
        """
        with interrupts_held():
            self.leaving |= {worker for worker in self._called_ns if worker >= num_wanted}
            self._ring.num_wanted = num_wanted
            return self._staff()

    def make_room(self, num_ordered: int, budget: int) -> int:
        """Brings slots into use for so many batches under way, or parks what is free beyond.

        Args:
            budget: bytes that payloads may take in all for the sake of more slots.
        Returns:
            how many batches there is room for.
        """
        with interrupts_held():
            return self._memory.use(num_slots(num_ordered) + self._num_spare - 2, budget) - self._num_spare

    def room(self, budget: int) -> int:
        """Batches under way that there are slots for, or can be within a budget."""
        return self._memory.room(budget) - self._num_spare

    @property
    def payload_nbytes(self) -> int:
        """Bytes reserved for batches now."""
        return self._memory.nbytes

    def has_gone(self, worker: int) -> None:
        """Takes note that a worker that was asked to leave has ended; it is started again if it is wanted again."""
        self._pool.reap(worker)
        self._ring.forget(worker)
        self.leaving.discard(worker)
        del self._called_ns[worker]
        self._staff()

    def _staff(self) -> bool:
        for worker in range(self._ring.num_wanted):
            if worker in self._called_ns:
                continue
            began = monotonic_ns()
            try:
                self._pool.start_worker(worker)
            except OSError as error:  # no more processes or memory for one; those that work go on
                log.warning("worker %d could not be started (%s): the loader goes on with fewer", worker, error)
                return False
            self._called_ns[worker] = began
        return True

    def is_complete(self) -> bool:
        """Whether every wanted worker is up and looks for work."""
        newest = 0
        for worker in range(self._ring.num_wanted):
            started_ns = self._ring.worker(worker)["started_ns"]
            called_ns = self._called_ns.get(worker)
            if called_ns is None or started_ns < called_ns:
                return False
            if called_ns > newest:
                newest, self.start_s = called_ns, (started_ns - called_ns) / 1e9
        return True


def num_slots(num_ordered: int) -> int:
    """Slots for so many batches under way: one more is the user's, and one is free to be ordered when that comes back."""
    return max(num_ordered + 2, LEAST_SLOTS)


# rows of an order that are not to be read again, none if it is not known which, and what to raise over them
Fatal: TypeAlias = tuple[tuple[int, ...], Callable[[], ShmloadError]]
VAIN_DEATHS = 10  # in a row, of workers with no claim and no batch delivered between: the next would die, too


class Supervisor:
    """Sees to the deaths of one worker pool.

    Args:
        workers: which workers there are to be.
        order_in: the order that stands in a slot, if one does.

    Attributes:
        helpers: workers of other ranks, whose numbers are beyond the worker pool's; it is asked for what a pool is asked for where
            one of them takes too long over a sample (sharing/balancing.py).
        num_vain: deaths of workers with nothing to do, since a batch came: whoever delivers one sets it back.
    """

    def __init__(
        self, ring: TrainerRing, pool: WorkerPool, workers: WorkerSet, config: LoaderConfig, order_in: Callable[[int], Order | None]
    ) -> None:
        self._ring, self._pool, self._workers, self._order_in = ring, pool, workers, order_in
        self._max_restarts = 0 if config.max_restarts is None and config.seed is None else config.max_restarts  # None: any number
        self._sample_timeout_s, self._num_threads = config.sample_timeout_s, config.threads_per_worker
        self._tolerates_bad_samples = config.on_error != "raise"
        self.helpers: Any = None
        self._kills: Counter[tuple[str, int]] = Counter()  # by what a worker died over, in words, and which order of it
        self._poisoned: dict[int, Fatal] = {}  # by slot
        # worker that has timed out -> the order of which it had begun no row when last looked at
        self._unbegun: dict[int, int] = {}
        self._num_restarts = 0
        self._last_pid = 0  # of the process that died last
        self.num_vain = 0
        self.num_taken_back = 0

    def see_to(self, death: Death) -> Callable[[], WorkerDied] | None:
        """Opens a dead worker's rows again and replaces it, if it is wanted; or says why that may not be."""
        held = self._ring.held_by(death.worker_id)
        if held is None and death.worker_id in self._workers.leaving:
            self._ring.recover(death.worker_id)
            self._workers.has_gone(death.worker_id)
            return None
        is_idle = held is None or not self._pool.reads_samples(death.worker_id)
        slot, _, number, row = held or (-1, 0, 0, -1)
        work, row, num_kills = (None, row, 0) if is_idle else self._blame(slot, row, number)
        if self._max_restarts is not None and self._num_restarts >= self._max_restarts:
            return _verdict(f"DataLoader worker (pid(s) {death.pid}) exited unexpectedly", death, work)
        if is_idle and death.pid != self._last_pid:  # an agent of many workers dies once
            self.num_vain += 1
            if self.num_vain >= VAIN_DEATHS:
                return _verdict(f"{death}, the {self.num_vain}th in a row that ended with nothing to do", death, None)
        self._last_pid = death.pid
        is_deadly = num_kills >= 2
        if is_deadly:
            self._poisoned[slot] = (row,) if row >= 0 else (), partial(WorkerDied, f"{work} ended its worker twice: {death}")
        while self._ring.recover(death.worker_id, poison=is_deadly) >= 0:  # a Ray worker pool's worker holds several
            self.num_taken_back += 1
        fate = "when it was about to leave" if death.worker_id in self._workers.leaving else "it is replaced"
        if not is_exiting():  # in which Python ends its children, though a thread of the program may still read
            log.warning("%s%s; %s", death, "" if work is None else f" on {work}", fate)
        self._replace(death.worker_id)
        self._num_restarts += 1
        return None

    def end_if_timed_out(self, worker: int) -> bool:
        """Ends and replaces a worker whose sample takes too long; its batches fail over it."""
        if not self._pool.reads_samples(worker):  # an actor is watched where it is
            return False
        held = self._ring.held_by(worker)
        since_ns = self._ring.worker(worker)["since_ns"]
        # 0: it is at no sample, but waits for the trainer or collates
        has_timed_out = held is not None and since_ns and (monotonic_ns() - since_ns) / 1e9 > (self._sample_timeout_s or 0)
        if held is None or not has_timed_out:
            self._unbegun.pop(worker, None)
            return False
        slot, _, number, row = held
        if row < 0 and self._unbegun.get(worker) != number:
            self._unbegun[worker] = number  # the time may be an earlier claim's: it is looked at again
            return False
        order = self._order_in(slot)
        if row < 0:
            batch = "a batch" if order is None else self._work_of(order, row)
            what = f"{batch} was claimed, and no sample of it begun, or several at once, for"
        else:
            sample = f"sample {self._ring.worker(worker)['index']}" if order is None else self._work_of(order, row)
            what = f"{sample} took longer than"
        owner = self._owner_of(worker)
        stack = owner.stack(worker)
        death = owner.kill(worker)
        text = timeout_text(what, self._sample_timeout_s, worker, death.pid, stack)
        if row >= 0:  # else it stood still before its first sample, or amid several, which are read one by one now
            text += REMEDY
            self._poisoned[slot] = (row,), partial(SampleTimeout, text)
        is_raised = row >= 0 and not self._tolerates_bad_samples  # with all that is said here
        log.log(logging.DEBUG if is_raised else logging.WARNING, "%s", text)
        self._ring.recover(worker, poison=row >= 0)
        self._replace(worker)
        return True

    def _replace(self, worker: int) -> None:
        """Starts another in the place of one that has ended, unless it was about to leave anyway."""
        if worker in self._workers.leaving:
            self._workers.has_gone(worker)
        else:
            self._owner_of(worker).replace(worker)
        self._ring.count_restart(worker)

    def _owner_of(self, worker: int) -> Any:
        """Who has this worker in hand."""
        return self._pool if self.helpers is None or worker < self._ring.num_wanted else self.helpers

    def death_over(self, slot: int) -> Fatal:
        """What happened to the workers of a slot that was given up."""
        return self._poisoned.pop(slot, ((), partial(WorkerDied, "a sample ended its worker twice")))

    def _blame(self, slot: int, row: int, number: int) -> tuple[str | None, int, int]:
        """Notes that a worker died over a row of the slot (-1: over the batch); says in words what it worked on, which row that
        was, and how often one has died over it.

        Where several threads read rows at once it may have been any, so the batch is to blame first; then they are read one by
        one. A batch that is ordered again, without a row that was bad, begins anew, as its rows are read together again.
        """
        order = self._order_in(slot)
        if order is None:
            return None, row, 0
        of_batch = self._work_of(order, -1), number
        if self._num_threads > 1 and not self._kills[of_batch]:
            row = -1
        over = of_batch if row < 0 else (self._work_of(order, row), 0)
        self._kills[over] += 1
        return over[0], row, self._kills[over]

    def _work_of(self, order: Order, row: int) -> str:
        batch = self._ring.batch_of(order.step)
        if row < 0:
            return f"batch {batch} of epoch {order.epoch}"
        return sample_at(order.indices[row], order.epoch, row, batch)


def _verdict(text: str, death: Death, work: str | None) -> Callable[[], WorkerDied]:
    code = death.exitcode or 0
    if code < 0:
        cause = f"DataLoader worker (pid {death.pid}) is killed by signal: {signal.strsignal(-code)}. "
        if -code == signal.SIGBUS:
            cause += "It is possible that dataloader's workers are out of shared memory. "
            cause += "Please try to raise your shared memory limit."
    else:
        cause = (
            f"DataLoader worker (pid {death.pid}) exited unexpectedly with exit code {code}. Details are lost due to "
            "multiprocessing. Rerunning with num_workers=0 may give better error trace."
        )

    def error() -> WorkerDied:
        made = WorkerDied(text)
        made.__cause__ = RuntimeError(cause)
        if work is not None:
            made.add_note(f"shmload: it was at {work}")
        return made

    return error  # a new one each time: an error that was raised holds the frames it went through
