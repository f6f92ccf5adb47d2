"""Which engine a loader that shares gets: of its group's leader, a follower's, one that balances; any loader's if it is alone.

A follower's engine reads the leader's ring: orders in, batches out, as `Engine` has it, with nobody to order from. Orders only say
which batch is expected; whether it is ready stands in the leader's owner words.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from shmload._core.mapping import Mapping
from shmload._core.trainer import ANY_SLOT, FAILED, FILLING, FollowerRing, Lease, Order, Share, share_nbytes
from shmload.batch.deliver import LeasedBatch, copied, deliver_rows, unpack
from shmload.batch.layout import Layout
from shmload.engine.bad_samples import BadSamples
from shmload.engine.batch_source import BatchSource
from shmload.engine.copy_out import CopyOut
from shmload.engine.engine import WAIT_S, Engine
from shmload.engine.options import EngineOptions
from shmload.engine.outcome import Outcome
from shmload.engine.ring import Ring
from shmload.engine.ring_reader import RingReader
from shmload.engine.turns import Turns
from shmload.errors import RankLeft, WorkerDied
from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder
from shmload.sharing.balancing import Balancer
from shmload.sharing.rank_group import RankGroup, RankSync, gather
from shmload.shm.segment import Doorbell, map_segment
from shmload.worker.failure import Failure
from shmload.worker.job import Job
from shmload.world import rank_and_world_size

if TYPE_CHECKING:
    from shmload.engine.builder import EngineBuilder
    from shmload.engine.config import LoaderConfig

SLOTS_PER_FOLLOWER = 3  # as many batches as a loader of one rank and one worker lets its user keep

_next_number = itertools.count()  # of loaders that share, as they begin to read: the same in all ranks
_numbers: WeakKeyDictionary[EngineBuilder, int] = WeakKeyDictionary()


def shared_engine(
    config: LoaderConfig,
    builder: EngineBuilder,
    job: Job,
    options: EngineOptions,
    bad_samples: BadSamples,
    *,
    records_holders: bool = False,
) -> BatchSource:
    """The engine of one rank, once all ranks of the node are there.

    Raises:
        ValueError, RankLeft: as `gather`.
    """
    data = rank_and_world_size(config.rank, config.world_size)
    number = _numbers.get(builder)
    if number is None:
        number = _numbers[builder] = next(_next_number)
    name = f"{number}.{builder.num_made}"
    rank_group = gather(name, data, _promise(config), options.timeout_s)
    num_ranks = len(rank_group.members)
    if num_ranks == 1:
        rank_group.close()
        return Engine(job, options, bad_samples, records_holders=records_holders)
    if rank_group.is_balanced:
        options = dataclasses.replace(options, num_helpers=(num_ranks - 1) * options.num_workers)
        return Engine(job, options, bad_samples, Balancer(rank_group), records_holders=records_holders)
    if rank_group.me > 0:
        return FollowingEngine(options, rank_group)
    cpus = {cpu for member in rank_group.members for cpu in member.cpus}
    options = dataclasses.replace(
        options, num_ranks=num_ranks, num_pending_copies=SLOTS_PER_FOLLOWER * (num_ranks - 1), affinity=tuple(sorted(cpus))
    )
    return Engine(job, options, bad_samples, Leader(rank_group, options.timeout_s), records_holders=records_holders)


def _promise(config: LoaderConfig) -> dict[str, Any]:
    """What says which batches there are, and how far ahead."""
    plan = config.plan
    collate_fn = config.custom_collate_fn
    orders = (given for given in (config.sampler, config.batch_sampler) if isinstance(given, KeyedOrder | KeyedBatches))
    return {
        "dataset": type(config.dataset).__name__,
        "samples": config.num_samples,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "shuffle": bool(config.shuffle),
        "drop_last": bool(config.drop_last),
        "uneven": config.uneven,
        "sampler": next((order.identity for order in orders), ""),
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor,
        "collate_fn": getattr(collate_fn, "__qualname__", type(collate_fn).__qualname__),
        "seed_samples": config.seed_samples,
        "schema": "" if plan.layout is None else repr((plan.layout.fields, plan.layout.tree)),
        "ragged": repr(plan.ragged),
        "read by": plan.path,
    }


LINGER_S = 5.0  # how long a leader that closes waits for ranks that have not read yet what it has


class Leader(RankSync):
    """The part that an engine's rank takes whose ring other ranks read: a slot is used again when all have let it go."""

    def started(self, ring: Ring) -> None:
        self._ring, self._ready = ring.native, ring.ready
        num_ranks = len(self._rank_group.members)
        nbytes = share_nbytes(num_ranks, ring.num_slots)
        segment = ring.group.segment("share", nbytes)
        share = Share(Mapping(segment.fd, nbytes), me=0, num_ranks=num_ranks, num_slots=ring.num_slots)
        ring.native.share(share)
        self.attach(share, self._wait, ring.native.wake)
        self._rank_group.announce({"control": ring.control_segment.path, "share": segment.path, "ready": ring.ready.name})
        self._rank_group.meeting.leave()

    def failed(self, error: BaseException) -> None:
        self._rank_group.announce({"failed": f"{type(error).__name__}: {error}"})
        self._rank_group.close()

    def _wait(self, order: Order | None) -> None:
        self._ring.begin_wait(ANY_SLOT)  # so that ranks ring when they have passed a batch
        try:
            self._ready.wait(WAIT_S)
        finally:
            self._ring.end_wait()

    def counters(self) -> dict[str, Any]:
        return {"shared_by": len(self._rank_group.members)}

    def closing(self, *, is_broken: bool) -> None:
        """Ranks that are behind may still open what they have not opened yet, for a while."""
        self.leave()
        deadline = monotonic() + LINGER_S
        while not is_broken and not self.are_done() and monotonic() < deadline:
            self._wait(None)

    def closed(self) -> None:
        self._rank_group.close()


FOLLOWER_WAIT_S = 0.02  # the longest sleep between looks at who has ended


class FollowingEngine:
    """What passes from the leader's ring through this rank.

    Args:
        rank_group: the ranks that read it.
    """

    wants_pinned = True  # the ring is not: batches are copied to pinned memory, as torch does
    releases = holders = None

    def __init__(self, options: EngineOptions, rank_group: RankGroup) -> None:
        self._options, self._rank_group = options, rank_group
        self._pid = os.getpid()
        self._is_closed = False
        self.turns = Turns()  # as of any engine
        self._queue: deque[Order] = deque()
        self.layout: Layout | None = None  # where fields lie, once it is known
        self._memory: dict[bytes, Mapping] = {}
        self._places: dict[int, tuple[int, bytes]] = {}  # slot -> version and segment of its payload, as mapped
        self.on_delivery: Callable[[], None] | None = None
        try:
            way = rank_group.ring()
            self.control = map_segment(way["control"])
            share = Share(map_segment(way["share"]), me=rank_group.me)
            self._ring = FollowerRing(self.control, share)
            self._ready = Doorbell.attach(way["ready"])
        except BaseException:
            rank_group.close()
            raise
        self._reader = RingReader(self.control)
        self._copy_out = CopyOut(self._ring, is_shared=True)
        self.num_slots, self.shared_by = self._ring.num_slots, len(rank_group.members)
        self._rank_sync = RankSync(rank_group, options.timeout_s)
        self._rank_sync.attach(share, self._sleep, self._ring_others)

    # ------------------------------------------------------------ orders

    def submit(self, order: Order) -> None:
        """Expects a batch behind those expected before."""
        self._queue.append(order)

    @property
    def num_queued(self) -> int:
        """Batches expected and not delivered."""
        return len(self._queue)

    @property
    def front(self) -> Order | None:
        """What `next` will deliver."""
        return self._queue[0] if self._queue else None

    def abandon(self) -> None:
        """Expects none of these any more."""
        self._queue.clear()
        self._rank_sync.abandoned()

    def begin_pass(self, num_steps: int, *, step_stride: int = 1, epoch_base: int = 0) -> None:
        """Counts passes; stats readers look at the leader."""
        self._rank_sync.pass_begins()

    def leave_pass(self) -> None:
        """Says that this rank has left the pass before its end."""
        if not self._is_closed:
            self._rank_sync.pass_left()

    # ------------------------------------------------------------ delivery

    def next(self, *, in_order: bool = True) -> Outcome:
        """Waits for the batch expected next and delivers it.

        Returns:
            the batch, or what the dataset raised for one of its samples, in every rank alike; WorkerDied if a sample ended two
            workers.
        Raises:
            RankLeft: another rank does not take this batch, or has ended.
            RuntimeError: the loader is closed, or `timeout` has passed.
        """
        self._check_open()
        self._copy_out.raise_refused()
        order = self._queue[0]
        self._nudge()
        self._rank_sync.before_next(order)
        try:
            slot, lease = self._taken(order)
        except Exception:
            raise
        except BaseException:  # ^C: nobody knows whether the batch was passed, and it does not come twice
            self.close()
            raise
        try:
            if lease is None:
                return Outcome(order, None, None, self._failure(order, slot))
            if lease.used_nbytes:
                batch = unpack(LeasedBatch(lease))
            else:
                if self.layout is None:
                    self.layout = Layout.loads(self._ring.layout_text)
                batch, _ = deliver_rows(self.layout, lease, order.nrows)
            if self._ring.num_leased >= self._ring.num_lendable and self._copy_out.must_copy(str):
                batch = copied(batch)
        except Exception as error:  # of an object that does not unpickle, say
            return Outcome(order, None, None, error)
        finally:
            del lease
            self._queue.popleft()
            self._rank_sync.after_next(is_gone=True)
            self._nudge()
        if self.on_delivery is not None:
            self.on_delivery()
        return Outcome(order, batch, None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this loader is closed: make a new one")

    def _taken(self, order: Order) -> tuple[int, Lease | None]:
        """The slot of a batch with its lease, once it is ready; None: it has failed, and is passed."""
        ring = self._ring
        began = 0.0
        while True:
            slot = ring.find(order)
            if slot >= 0 and (found := ring.look(slot)) != FILLING:
                if found == FAILED:
                    return slot, None
                if ring.is_free(slot):
                    self._map(slot)
                    return slot, ring.lease(slot)
            began = began or monotonic()
            self._sleep(order)
            self._check_open()  # another thread may have closed it
            self._rank_sync.look()
            self._nudge()
            if self._options.timeout_s and monotonic() - began > self._options.timeout_s:
                raise RuntimeError(f"DataLoader timed out after {self._options.timeout_s} seconds")

    def _map(self, slot: int) -> None:
        """Maps what the slot's batch lies in."""
        version, path, offset, nbytes = self._ring.payload(slot)
        if self._places.get(slot, (0, b""))[0] == version:
            return
        memory = self._memory.get(path)
        if memory is None:
            try:
                memory = self._memory[path] = map_segment(path.decode(), private=True)
            except FileNotFoundError:
                raise RankLeft(
                    f'{self._rank_group.members[0]}, whose ring this rank reads (share="node"), has closed its loader before this '
                    "rank could open what the batch lies in. Let all ranks close their loaders at the same step"
                ) from None
        self._ring.set_payload(slot, memory, offset, nbytes)
        self._places[slot] = version, path
        for unused in self._memory.keys() - {used for _, used in self._places.values()}:
            del self._memory[unused]

    def _failure(self, order: Order, slot: int) -> BaseException:
        text = self._ring.failure(slot)
        self._ring.skip(slot)
        if text is not None:
            return Failure.loads(text).exception()
        return WorkerDied(
            f"two workers have ended over one sample of step {order.step} of epoch {order.epoch}; {self._rank_group.members[0]}, "
            f"whose worker pool this rank shares, names it"
        )

    # ------------------------------------------------------------ bells

    def _sleep(self, order: Order | None) -> None:
        self._ring.wait(order, FOLLOWER_WAIT_S)

    def _nudge(self) -> None:
        """Rings for the leader if it waits for a slot: this rank may have let one go."""
        if self._ring.is_leader_waiting:
            self._ready.post()

    def _ring_others(self) -> None:
        self._ready.post_up_to(1)
        self._ring.wake()

    # ------------------------------------------------------------ looking at it

    def counters(self) -> dict[str, Any]:
        """What `shmload top` shows of the leader's ring; `num_copied_out` is this rank's own."""
        return {**self._reader.report(), "num_copied_out": self._ring.num_copied_out, "shared_by": len(self._rank_group.members)}

    def totals(self) -> dict[str, float]:
        """What this rank has had of the ring's work: nothing is counted here, the leader's rank counts it."""
        return {"nbytes": 0, "num_restarts": 0, "busy_s": 0.0}

    # ------------------------------------------------------------ ends

    def close(self, *, grace_s: float = 0) -> None:
        """Takes nothing any more; live batches stay valid. Safe to call twice, and in a forked child."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        with self.turns.others_out():
            self._rank_sync.leave()
            self._memory.clear()
            self._ring.let_go()
            self._rank_group.close()
