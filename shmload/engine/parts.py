"""What becomes of a batch that has got the ring's last slot, because the user holds all the others."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shmload._core.mapping import Mapping
from shmload._core.onlooker import Onlooker
from shmload._core.trainer import FollowerRing, Order, TrainerRing, control_nbytes
from shmload.batch.layout import Layout
from shmload.device.calls import Calls
from shmload.device.pins import Cooling, Releases
from shmload.device.sending import Sender
from shmload.engine.orders import Turns
from shmload.engine.ring import OrderWriter, RingMemory
from shmload.engine.stats import add_memory, describe, introduce
from shmload.engine.supervision import Supervisor, Verdict
from shmload.engine.worker_set import Roster, Size, num_slots
from shmload.shm import forks
from shmload.shm.doorbell import JointBell
from shmload.shm.group import Group
from shmload.worker.crew import STOP_GRACE_S, interrupts_held
from shmload.worker.muster import Backend, muster, processes
from shmload.worker.process import STACK_NBYTES
from shmload.worker.spec import Invitation, Job
from shmload.world import users_frame


class Hoarding:
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
    pinned for that device, and `num_cooling` slots more are there for batches whose copies are under way; `num_sent` batches are
    copied ahead by `sender`, None: they are not sent there at all.
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
    num_cooling: int = 0
    num_sent: int | None = None
    sender: Sender | None = None
    num_ranks: int = 1  # of this node that read the ring
    num_guests: int = 0  # workers of other ranks that may fill chunks of the ring
    affinity: tuple[int, ...] = ()  # processors of the crew; none: the trainer's
    backend: Backend = processes  # where workers run
    num_far: int = 0  # of the workers, the first ones: on other machines


class Machinery:
    """What an engine consists of.

    Args:
        job: what workers do with an order.
    """

    def __init__(self, job: Job, options: EngineOptions) -> None:
        self._job = job
        self._options = options
        self._broken: Verdict | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self.turns = Turns()  # of those who ask for batches; it is their iterator's
        self._cooling: Cooling | None = None
        self.num_slots = num_slots(options.num_ordered) + options.num_cooling
        self.shared_by = options.num_ranks
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
        num_records = options.num_workers + options.num_guests
        nbytes = control_nbytes(self.num_slots, num_records, **sizes)
        control = group.segment("control", nbytes)
        self.control = Mapping(control.fd, nbytes)
        self._control_path = control.path
        self._ring = TrainerRing(
            self.control,
            num_slots=self.num_slots,
            num_workers=num_records,
            is_static=options.is_static,
            threads_per_worker=WHOLE_BATCHES if options.num_far else self._job.num_threads,
            num_usable=num_slots(options.first_ordered) + options.num_cooling if options.first_ordered else 0,
            **sizes,
        )
        introduce(self._ring, self._job, options.rank, options.world_size)
        self._onlooker = Onlooker(self.control)
        self._hoarding = Hoarding(self._ring, is_shared=options.num_ranks > 1)
        self._cooling = None if options.calls is None else Cooling(self._ring, options.calls)
        pins = None if self._cooling is None else self._cooling.pins
        self._memory = RingMemory(
            group,
            self._ring,
            options.ring_bytes,
            may_park=options.first_ordered > 0,
            pins=pins,
            is_private=options.num_ranks > 1,
        )
        self._ready = group.doorbell("ready")
        self._grants = group.doorbell("grants")
        num_order_bells = options.num_workers if options.is_static else 1 + (0 < options.num_far < options.num_workers)
        self._orders = [group.doorbell(f"orders-{i}") for i in range(num_order_bells)]
        job = self._job
        bells = self._orders if options.is_static or len(self._orders) == 1 else [JointBell(self._orders)]
        self._writer = OrderWriter(self._ring, self._memory, bells, is_packed=job.plan.is_whole)
        self._has_layout = job.plan.rows is not None or job.plan.is_whole
        if self._has_layout:
            self._writer.settle(job.plan.rows, options.max_rows)
        self._has_notes = self._job.seed is None
        self._stacks = {}  # by worker, where they can be asked for theirs; actors are watched where they are
        if options.sample_timeout_s is not None:
            for worker in range(options.num_far, options.num_workers):
                self._stacks[worker] = group.segment(f"stack-{worker}", STACK_NBYTES)
        called = muster(
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
            stacks=self._stacks,
            neighbours=self._neighbours(),
            num_far=options.num_far,
            num_ahead=options.num_ordered // options.num_workers,
            sample_timeout_s=options.sample_timeout_s,
            affinity=options.affinity,
        )
        self.crew = options.backend(called)
        limit = options.max_restarts
        if limit is None and self._job.seed is None:
            limit = 0
        self.roster = Roster(self._ring, self.crew)
        self.size = Size(self._memory, self.roster, options.num_cooling)
        self._supervisor = Supervisor(
            self._ring,
            self.crew,
            self.roster,
            limit,
            self._order_in,
            sample_timeout_s=options.sample_timeout_s,
            tolerates_bad_samples=self._job.tolerates_bad_samples,
        )
        with interrupts_held():
            self.roster.start(options.first_workers or options.num_workers)

    def _neighbours(self) -> tuple[Invitation, ...]:
        """Rings of the node's other ranks in which the crew helps, once there is a ring here and before there is a crew."""
        return ()

    def _order_in(self, slot: int) -> Order | None:
        """The order that stands in a slot, if one does."""
        raise NotImplementedError

    # ------------------------------------------------------------ looking at it

    def begin_pass(self, num_steps: int, *, step_stride: int = 1, epoch_base: int = 0) -> None:
        """Tells onlookers how long the pass is that begins (0: that is not known), and how its orders count."""
        self._ring.begin_pass(num_steps, step_stride=step_stride, epoch_base=epoch_base)

    def leave_pass(self) -> None:
        """Hears that a pass is left before its end; who shares the ring tells the others."""

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
        with self.turns.others_out():  # who waits in next() hears of it at the next look
            self._end(grace_s)

    def _end(self, grace_s: float) -> None:
        try:
            if hasattr(self, "crew"):
                self._ring.set_closing()
                for bell in (*self._orders, self._grants):
                    for _ in range(self._options.num_workers):
                        bell.post()
                self.crew.stop(grace_s)
        finally:
            try:
                if self._cooling is not None:
                    self._cooling.close()
            finally:
                self._group.close()

    @property
    def wants_pinned(self) -> bool:
        """Whether a batch that is not pinned is to be copied to pinned memory: not where the ring could not be, nor on a device."""
        return self._options.num_sent is None and (self._cooling is None or not self._cooling.pins.has_failed)

    @property
    def releases(self) -> Releases | None:
        """What ends of leases leave behind; None where nothing is pinned."""
        return None if self._cooling is None else self._cooling.releases
