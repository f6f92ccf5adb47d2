"""What an engine is made of: its ring, the worker pool that fills it, who watches them, and whoever takes part in its work."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shmload._core.mapping import Mapping
from shmload._core.trainer import FollowerRing, Order, TrainerRing, control_nbytes
from shmload.device.calls import Calls
from shmload.device.pins import PendingCopies
from shmload.device.sending import Sender
from shmload.engine.reader import RingReader
from shmload.engine.ring import OrderWriter, RingMemory
from shmload.engine.stats import introduce
from shmload.engine.supervision import Size, Supervisor, WorkerSet, num_slots
from shmload.shm import forks
from shmload.shm.group import Doorbell, Group, JointBell
from shmload.worker.pool import STOP_GRACE_S, Backend, WorkerPool, interrupts_held, prepare_workers, processes
from shmload.worker.process import STACK_NBYTES
from shmload.worker.spec import Job, PeerRing
from shmload.world import users_frame


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
            forks.settle()
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

    def __init__(
        self, job: Job, options: EngineOptions, hooks: Sequence[Hook], order_in: Callable[[int], Order | None]
    ) -> None:
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
        self.control = Mapping(self.control_segment.fd, nbytes)
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
