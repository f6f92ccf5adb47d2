"""The engine of a rank that reads another rank's ring: orders in, batches out, as `Engine` has it, with nobody to order from.

Orders only say which batch is expected; whether it is ready stands in the leader's owner words.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from shmload._core.mapping import Mapping
from shmload._core.trainer import FAILED, FILLING, FollowerRing, Lease, Order, Share
from shmload.batch.deliver import LeasedBatch, copied, deliver_rows, unpack
from shmload.batch.layout import Layout
from shmload.engine.parts import CopyOut, EngineOptions
from shmload.engine.ring import Delivery, Turns
from shmload.engine.stats import RingReader
from shmload.errors import RankLeft, WorkerDied
from shmload.sharing.rank_group import RankGroup
from shmload.sharing.rank_sync import RankSync
from shmload.shm.segment import Doorbell, open_segment
from shmload.worker.failure import Failure

WAIT_S = 0.02  # the longest sleep between looks at who has ended


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
        self._layout: Layout | None = None
        self._memory: dict[bytes, Mapping] = {}
        self._places: dict[int, tuple[int, bytes]] = {}  # slot -> version and segment of its payload, as mapped
        self.on_delivery: Callable[[], None] | None = None
        try:
            way = rank_group.ring()
            self.control = _mapped(way["control"])
            share = Share(_mapped(way["share"]), me=rank_group.me)
            self._ring = FollowerRing(self.control, share)
            self._ready = Doorbell.attach(way["ready"])
        except BaseException:
            rank_group.close()
            raise
        self._reader = RingReader(self.control)
        self._copy_out = CopyOut(self._ring, is_shared=True)
        self.num_slots, self.shared_by = self._ring.num_slots, len(rank_group.members)
        self._rank_sync = RankSync(rank_group, share, self._sleep, self._ring_others, options.timeout_s)

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
        self._rank_sync.abandon()

    def begin_pass(self, num_steps: int, *, step_stride: int = 1, epoch_base: int = 0) -> None:
        """Counts passes; stats readers look at the leader."""
        self._rank_sync.begin_pass()

    def leave_pass(self) -> None:
        """Tells the others that this rank has left the pass before its end."""
        if not self._is_closed:
            self._rank_sync.leave_pass()

    # ------------------------------------------------------------ delivery

    def next(self, *, in_order: bool = True) -> Delivery:
        """Waits for the batch expected next and delivers it.

        Returns:
            the order and its batch, whose arrays alias the slot until their last alias dies.
        Raises:
            what the dataset raised for one of its samples, in every rank alike; that batch is then lost.
            WorkerDied: a sample has ended two workers.
            RankLeft: another rank does not take this batch, or has ended.
            RuntimeError: the loader is closed, or `timeout` has passed.
        """
        self._check_open()
        self._copy_out.raise_refused()
        order = self._queue[0]
        self._nudge()
        self._rank_sync.before(order)
        try:
            slot, lease = self._taken(order)
        except Exception:
            raise
        except BaseException:  # ^C: nobody knows whether the batch was passed, and it does not come twice
            self.close()
            raise
        try:
            if lease is None:
                raise self._failure(order, slot)
            batch = self._delivered(order, lease)
        finally:
            del lease
            self._queue.popleft()
            self._rank_sync.took()
            self._nudge()
        if self.on_delivery is not None:
            self.on_delivery()
        return order, batch, None

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
            self._rank_sync.check()
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
                memory = self._memory[path] = _mapped(path.decode(), private=True)
            except FileNotFoundError:
                raise RankLeft(
                    f'{self._rank_group.members[0]}, whose ring this rank reads (share="node"), has closed its loader before this '
                    f"rank "
                    "could open what the batch lies in. Let all ranks close their loaders at the same step"
                ) from None
        self._ring.set_payload(slot, memory, offset, nbytes)
        self._places[slot] = version, path
        for unused in self._memory.keys() - {used for _, used in self._places.values()}:
            del self._memory[unused]

    def _delivered(self, order: Order, lease: Lease) -> Any:
        if lease.used_nbytes:
            batch = unpack(LeasedBatch(lease))
        else:
            if self._layout is None:
                self._layout = Layout.loads(self._ring.layout_text)
            batch, _ = deliver_rows(self._layout, lease, order.nrows)
        if self._ring.num_leased < self._ring.num_lendable:
            self._copy_out.has_collected = False
        elif self._copy_out.must_copy(str):
            batch = copied(batch)
        return batch

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
        self._ring.wait(order, WAIT_S)

    def _nudge(self) -> None:
        """Rings for the leader if it waits for a slot: this rank may have let one go."""
        if self._ring.is_leader_waiting:
            self._ready.post()

    def _ring_others(self) -> None:
        self._ready.post_up_to(1)
        self._ring.wake()

    # ------------------------------------------------------------ looking at it

    @property
    def layout(self) -> Layout | None:
        """Where fields lie, once it is known."""
        return self._layout

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
            self._rank_sync.close()
            self._rank_group.close()


def _mapped(path: str, *, private: bool = False) -> Mapping:
    fd = open_segment(path)
    try:
        return Mapping(fd, os.fstat(fd).st_size, private=private)
    finally:
        os.close(fd)
