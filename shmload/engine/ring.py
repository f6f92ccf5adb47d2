"""The shared memory of one engine: control block, payload, and the doorbells on which trainer and workers wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

from shmload._core.mapping import Mapping
from shmload._core.trainer import TrainerRing, control_nbytes
from shmload.device.pending_copies import PendingCopies
from shmload.engine.options import EngineOptions
from shmload.engine.publisher import Publisher
from shmload.engine.ring_memory import RingMemory
from shmload.engine.stage_record import dump_stages
from shmload.engine.tuning.tuning_limits import num_cpus
from shmload.engine.worker_set import num_slots
from shmload.processes.ranks import rank_and_world_size
from shmload.shm.doorbell import Doorbell, JointBell
from shmload.shm.segment import Segment
from shmload.shm.segment_group import SegmentGroup
from shmload.worker.job import Job, PeerRing, WorkerLink
from shmload.worker.pool import STACK_NBYTES

TEXT_CAPACITY = 16384  # bytes of each slot's area for the text of a failure or a note
LAYOUT_CAPACITY = 65536  # bytes for the layout of a batch
ORDER_CAPACITY = 4096  # least bytes for the indices of a slot's order; a larger order gets a segment of its own
WHOLE_BATCHES = 1 << 30  # threads per worker if a claim is a call to another machine: batches are not divided into chunks

_num_cpus = cache(num_cpus)  # read once: it takes 0.2 ms of each first batch, and chunks need only an estimate


class Ring:
    """The shared memory and doorbells of one engine, ready for orders. `close` removes all names; live batches stay valid.

    Args:
        job: the work of the workers.
        options: size of the ring.
        is_poisoned: see `RingMemory`.
        order_bell: (native ring, doorbell of the workers) -> the doorbell to use in its place.

    Attributes:
        native: the trainer's end of the ring's protocol.
        control: mapping of the control block.
        control_segment: the segment that contains the control block.
        group: owner of all segments and doorbells.
        num_slots: slots in total, in use or parked.
        num_workers: largest number of workers.
        memory: payload memory of the slots.
        pending_copies: copies to a device that are in flight; None if the ring is not pinned.
        ready: the bell that workers ring to wake the trainer.
        grants: the bell that the trainer rings when it has granted memory or a layout.
        order_bells: the bells that the trainer rings for a new order: one for each worker, or one for all.
        publisher: publishes orders in slots.
        stacks: the segment to which each worker can write its Python stack, by worker.
    """

    def __init__(
        self, job: Job, options: EngineOptions, *, is_poisoned: bool, order_bell: Callable[[TrainerRing, Doorbell], Doorbell] | None
    ) -> None:
        self.num_workers = options.num_workers
        self.group = SegmentGroup(is_named=not options.has_threads)  # no other process maps the memory of threads
        self.pending_copies: PendingCopies | None = None
        try:
            self._make_control(job, options)
            if options.device is not None:
                self.pending_copies = PendingCopies(self.native, options.device)
            self.memory = RingMemory(
                self.group,
                self.native,
                options.config.ring_bytes,
                may_park=options.first_ordered > 0,
                pins=None if self.pending_copies is None else self.pending_copies.pins,
                is_private=options.num_ranks > 1,
                is_poisoned=is_poisoned,
            )
            self._make_bells(job, options, order_bell)
            if job.plan.rows is not None or job.plan.is_whole:
                self.publisher.accept_layout(job.plan.rows, options.max_rows)
            self.stacks: dict[int, Segment] = {}
            # actors are watched on their own machines, and a thread's stack is known to its process
            if options.config.sample_timeout_s is not None and not options.has_threads:
                for worker in range(options.num_ray_workers, options.num_workers):
                    self.stacks[worker] = self.group.segment(f"stack-{worker}", STACK_NBYTES)
        except BaseException:
            self._release_names()
            raise

    def _make_control(self, job: Job, options: EngineOptions) -> None:
        """Create the control block, with the rank, the dataset and the stages for tools that read the ring."""
        self.num_slots = num_slots(options.num_ordered) + options.num_pending_copies
        order_capacity = max(8 * options.max_rows, ORDER_CAPACITY)
        sizes = {"order_capacity": order_capacity, "text_capacity": TEXT_CAPACITY, "layout_capacity": LAYOUT_CAPACITY}
        num_records = options.num_workers + options.num_helpers
        nbytes = control_nbytes(self.num_slots, num_records, **sizes)
        stages = dump_stages(options.stage_places)
        self.control_segment = self.group.segment("control", nbytes + len(stages))
        os.pwrite(self.control_segment.fd, stages, nbytes)
        self.control = Mapping(self.control_segment.fd, nbytes)
        self.native = TrainerRing(
            self.control,
            num_slots=self.num_slots,
            num_workers=num_records,
            is_static=job.seed is None,  # in torch mode, each order belongs to one worker
            threads_per_worker=WHOLE_BATCHES if options.num_ray_workers else job.num_threads,
            num_cpus=0 if job.seed is None else len(options.affinity) or _num_cpus(),  # torch mode does not cut batches
            num_usable=num_slots(options.first_ordered) + options.num_pending_copies if options.first_ordered else 0,
            **sizes,
        )
        try:
            rank, world_size = rank_and_world_size(options.config.rank, options.config.world_size)
        except ValueError:  # the rank is unknown; the loader raises if it needs it
            rank, world_size = 0, 1
        dataset = type(job.dataset).__name__.encode()
        self.native.introduce(dataset_name=dataset, read_path=job.plan.path.encode(), rank=rank, world_size=world_size)

    def _make_bells(self, job: Job, options: EngineOptions, order_bell: Callable[[TrainerRing, Doorbell], Doorbell] | None) -> None:
        self.ready = self.group.doorbell("ready")
        self.grants = self.group.doorbell("grants")
        is_static = job.seed is None
        # one bell for Ray actors and one for the processes of this machine
        has_both = 0 < options.num_ray_workers < options.num_workers
        num_bells = options.num_workers if is_static else 1 + has_both
        self.order_bells = [self.group.doorbell(f"orders-{i}") for i in range(num_bells)]
        if order_bell is not None:
            self.order_bells[0] = order_bell(self.native, self.order_bells[0])
        bells = self.order_bells if is_static or num_bells == 1 else [JointBell(self.order_bells)]
        self.publisher = Publisher(self.native, self.memory, bells, is_packed=job.plan.is_whole)

    def links(self, options: EngineOptions, peer_rings: tuple[PeerRing, ...]) -> list[WorkerLink]:
        """Return the `WorkerLink` of each worker, by its number.

        Args:
            options: options of the engine.
            peer_rings: rings of other ranks in which the workers help.
        """
        bells, num_workers = list(self.order_bells), options.num_workers
        if len(bells) < num_workers:
            bells = [bells[0 if worker < options.num_ray_workers else -1] for worker in range(num_workers)]
        return [
            WorkerLink(
                worker_id=worker,
                num_workers=num_workers,
                trainer_pid=os.getpid(),
                control_path=self.control_segment.path,
                control_nbytes=self.control_segment.nbytes,
                ready_bell=self.ready.name,
                orders_bell=bells[worker].name,
                grants_bell=self.grants.name,
                base_seed=options.base_seed,
                affinity=options.affinity or tuple(sorted(os.sched_getaffinity(0))),
                stack_path=self.stacks[worker].path if worker in self.stacks else "",
                peer_rings=peer_rings,
                resume=options.resume[worker] if options.resume else b"",
            )
            for worker in range(num_workers)
        ]

    def end(self) -> None:
        """Close the ring to the workers, and wake all, so that they leave."""
        self.native.set_closing()
        for bell in (*self.order_bells, self.grants):
            for _ in range(self.num_workers):
                bell.post()

    def close(self) -> None:
        """Unmap the payload, except for leases, and remove the names of all segments and doorbells."""
        try:
            self._release_names()
        finally:
            self.native.let_go()

    def _release_names(self) -> None:
        try:
            if self.pending_copies is not None:
                self.pending_copies.close()
        finally:
            self.group.close()
