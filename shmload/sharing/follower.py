"""Read the batches of a rank from the ring of its group's leader.

A follower is a `BatchSource` like an `Engine`, but has no ring or workers of its own. Its orders are not published: each only
identifies the batch that is expected next. The owner words in the leader's ring show whether that batch is ready.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from shmload._core.mapping import Mapping
from shmload._core.trainer import FAILED, FILLING, FollowerRing, Lease, Order, Share
from shmload.batch.batch_memory import CopiedBatch, LeasedBatch
from shmload.batch.fixed_rows import copied_rows, deliver_rows
from shmload.batch.layout import Layout
from shmload.batch.unpacking import unpack
from shmload.engine.copy_out import CopyOut
from shmload.engine.iterator_lock import IteratorLock
from shmload.engine.options import EngineOptions
from shmload.engine.outcome import Outcome
from shmload.engine.ring_reader import RingReader
from shmload.errors import RankLeft, WorkerDied
from shmload.sharing.rank_group import RankGroup, RankSync
from shmload.shm.doorbell import Doorbell
from shmload.shm.segment import map_segment
from shmload.worker.failure import Failure

FOLLOWER_WAIT_S = 0.02  # longest sleep until the next check for ranks that have ended


class FollowingEngine:
    """The `BatchSource` of a rank that reads the ring of its group's leader.

    Args:
        options: the loader's options for its engine.
        rank_group: the ranks that read the ring.
    Raises:
        RankLeft: the leader has ended, or could not create its ring.
    """

    needs_pin_memory = True  # the ring is not pinned, so batches are copied to pinned memory, as torch does
    releases = holders = None

    def __init__(self, options: EngineOptions, rank_group: RankGroup) -> None:
        self._options, self._rank_group = options, rank_group
        self._pid = os.getpid()
        self._is_closed = False
        self.iterator_lock = IteratorLock()  # like those of any engine
        self._queue: deque[Order] = deque()
        self.layout: Layout | None = None  # offsets of the fields, once they are known
        self._memory: dict[bytes, Mapping] = {}
        self._places: dict[int, tuple[int, bytes]] = {}  # slot -> version and segment of its mapped payload
        self.on_delivery: Callable[[], None] | None = None
        try:
            announced = rank_group.ring()
            self.control = map_segment(announced["control"])
            share = Share(map_segment(announced["share"]), me=rank_group.me)
            self._ring = FollowerRing(self.control, share)
            self._ready = Doorbell.attach(announced["ready"])
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
        """Expect a batch after those expected so far."""
        self._queue.append(order)

    @property
    def num_queued(self) -> int:
        """Return the number of batches expected and not delivered."""
        return len(self._queue)

    @property
    def front(self) -> Order | None:
        """Return the order that `next` will deliver; None without orders."""
        return self._queue[0] if self._queue else None

    def abandon(self) -> None:
        """Drop every order. The next batch that is expected begins a new round (`RankSync`)."""
        self._queue.clear()
        self._rank_sync.abandoned()

    def begin_pass(self, num_steps: int, *, step_stride: int = 1) -> None:
        """Count the pass. The arguments are ignored, because readers of stats see the leader's."""
        self._rank_sync.pass_begins()

    def leave_pass(self) -> None:
        """Tell the other ranks that this one has left the pass before its end."""
        if not self._is_closed:
            self._rank_sync.pass_left()

    # ------------------------------------------------------------ delivery

    def next(self, *, in_order: bool = True) -> Outcome:
        """Wait for the oldest order and return its outcome.

        Args:
            in_order: ignored, because all ranks get batches in order.
        Returns:
            the batch, or the exception of one of its samples, the same in every rank; WorkerDied if a sample ended two workers.
        Raises:
            RankLeft: another rank will not take this batch, or has ended.
            RuntimeError: the loader is closed, or `timeout` has passed.
        """
        self._check_open()
        self._copy_out.raise_warning()
        order = self._queue[0]
        self._wake_leader()
        self._rank_sync.before_next(order)
        try:
            slot, lease = self._taken(order)
        except Exception:
            raise
        except BaseException:  # ^C, for example; the batch may have been released already, and cannot be read again
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
                batch = unpack(CopiedBatch(lease)) if lease.used_nbytes else copied_rows(batch)
        except Exception as error:  # an object that cannot be unpickled, for example
            return Outcome(order, None, None, error)
        finally:
            del lease
            self._queue.popleft()
            self._rank_sync.after_next(is_gone=True)
            self._wake_leader()
        if self.on_delivery is not None:
            self.on_delivery()
        return Outcome(order, batch, None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this loader is closed: make a new one")

    def _taken(self, order: Order) -> tuple[int, Lease | None]:
        """Wait for a batch. Return its slot and lease; the lease is None if the batch failed."""
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
            self._rank_sync.check_ranks()
            self._wake_leader()
            if self._options.timeout_s and monotonic() - began > self._options.timeout_s:
                raise RuntimeError(f"DataLoader timed out after {self._options.timeout_s} seconds")

    def _map(self, slot: int) -> None:
        """Map the segment that contains the slot's batch."""
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
                    "rank could open the memory of the batch. Let all ranks close their loaders at the same step"
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
            f"two workers have died while reading one sample of step {order.step} of epoch {order.epoch}; the error of "
            f"{self._rank_group.members[0]}, whose worker pool this rank shares, names the sample"
        )

    # ------------------------------------------------------------ bells

    def _sleep(self, order: Order | None) -> None:
        self._ring.wait(order, FOLLOWER_WAIT_S)

    def _wake_leader(self) -> None:
        """Wake the leader if it waits for a slot, because this rank may have released one."""
        if self._ring.is_leader_waiting:
            self._ready.post()

    def _ring_others(self) -> None:
        self._ready.post_up_to(1)
        self._ring.wake()

    # ------------------------------------------------------------ observation

    def counters(self) -> dict[str, Any]:
        """Return the leader's counters for `shmload top`, except that `num_copied_out` is this rank's own."""
        return {**self._reader.report(), "num_copied_out": self._ring.num_copied_out, "shared_by": len(self._rank_group.members)}

    def totals(self) -> dict[str, float]:
        """Return zeros, because the leader counts the ring's work."""
        return {"nbytes": 0, "num_restarts": 0, "busy_s": 0.0}

    # ------------------------------------------------------------ end

    def close(self, *, grace_s: float = 0) -> None:
        """Leave the ring; live batches stay valid. Idempotent, and without effect in a forked child.

        Args:
            grace_s: ignored, because this rank has no workers.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        with self.iterator_lock.wait_until_alone():
            self._rank_sync.leave()
            self._memory.clear()
            self._ring.let_go()
            self._rank_group.close()
