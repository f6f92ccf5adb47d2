"""The memory behind a ring's slots: one segment for all in use at first, one of its own for a slot that needs more or comes later.

A slot keeps the room it was given: batches of growing size make the ring learn, slot by slot, and nothing waits for an epoch's end.
What a slot had before is given up at once; leases and workers that still map it keep it until they let go. A ring may be made for
more slots than are in use: the others are parked and have no memory.

From an order to a slot that workers claim: its bytes, the room for its batch, and the bells.

The usual order is posted by one native call (`TrainerRing.post`). Here is the same for all others: a sampler's own keys, an order
or a batch larger than its room, one that is written again because its samples differ or were bad.

What the loader asks of the engine, and what it gets.

One caller at a time: of several threads that ask one iterator for batches each gets its own, and waits for its turn.

A call in a thread that is inside already (a signal handler's, a sampler's, a callback's) would wait for itself, so it is refused.
Waiting does not hold up ^C. In a forked child nobody is inside but the thread that has forked.

What is done about a sample that cannot be read: `on_error`.

A worker reports which rows of its batch it cannot read. "raise" raises its error; "skip" orders the batch again without them,
"substitute" with another index in their place. So the batch is made anew of what is then ordered, by the same code on the same
path, and the outcome depends on the bad samples alone, not on workers or timing.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from weakref import WeakSet

import numpy as np

from shmload import faults
from shmload._core.mapping import CAN_POPULATE, Mapping, give_back_pages
from shmload._core.trainer import FREE, PARKED, Order, TrainerRing
from shmload.batch.layout import Layout
from shmload.device.pending_copies import Releases
from shmload.device.pinned_slots import PinnedSlots
from shmload.errors import RingTooSmall, SampleError
from shmload.metrics import irregular_files
from shmload.shm import travel
from shmload.shm.segment import Doorbell, Group, JointBell, Segment, memfds_work, shm_free_bytes
from shmload.worker.pool import STOP_GRACE_S
from shmload.worker.snapshot import Note

if TYPE_CHECKING:
    from shmload.engine.builder import LoaderConfig
    from shmload.engine.parts import Holders

LEAVE_S = 1.0  # for who is inside to come out


class Turns:
    """Whose turn it is: `with turns: ...`. Loaders do it in these lines, as calls would cost as much again as the lock:

    with turns.lock:
        if turns.is_taken:
            raise turns.refusal()
        turns.is_taken = True
        try:
            ...
        finally:
            turns.is_taken = False
    """

    __slots__ = ("__weakref__", "is_taken", "lock")

    def __init__(self) -> None:
        self.lock: Any = RLock()
        self.is_taken = False  # by the thread that has the lock
        _all.add(self)

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.is_taken:
            self.lock.release()
            raise self.refusal()
        self.is_taken = True

    def __exit__(self, *exc: object) -> None:
        self.is_taken = False
        self.lock.release()

    def __reduce__(self) -> Any:
        return Turns, ()  # a copy has its own

    @contextmanager
    def others_out(self) -> Iterator[None]:
        """Waits until no other thread is inside, where those hear that they must go; not for ever: they may be in a user's code."""
        is_mine = self.lock.acquire(timeout=LEAVE_S)
        try:
            yield
        finally:
            if is_mine:
                self.lock.release()

    @staticmethod
    def refusal() -> RuntimeError:
        """The error of a call within a call."""
        return RuntimeError(
            "this iterator is being asked for a batch already, further up in this thread: a sampler, a dataset, a callback or a "
            "signal handler that is called meanwhile cannot take the next one. Take it when the first call has returned"
        )


_all: WeakSet[Turns] = WeakSet()


def _in_child() -> None:
    for turns in list(_all):
        if not turns.lock._is_owned():  # whoever had it is not in this process
            turns.lock._at_fork_reinit()
            turns.is_taken = False


os.register_at_fork(after_in_child=_in_child)


# An order, its batch (NOTHING if none came of it), and in torch mode what its worker said of itself.
Delivery: TypeAlias = tuple[Order, Any, Note | None]

# The iterator of an iterable dataset was at its end, or every sample of the batch was bad and is skipped.
NOTHING = object()


class BatchSource(Protocol):
    """What a mode orders batches from: an engine, or a ring of another rank's.

    Attributes:
        turns: of those who ask for batches; it is their iterator's.
        num_slots, control: of the ring, and its control block.
        shared_by: ranks that read the ring.
        on_delivery: called after each batch; None: nobody looks.
    """

    turns: Turns
    num_slots: int
    control: Mapping
    shared_by: int
    on_delivery: Callable[[], None] | None

    @property
    def num_queued(self) -> int:
        """Orders submitted and not delivered."""

    @property
    def front(self) -> Order | None:
        """The order that `next` will deliver."""

    @property
    def layout(self) -> Layout | None:
        """Where fields lie, once it is known."""

    @property
    def wants_pinned(self) -> bool:
        """Whether a batch that is not pinned is to be copied to pinned memory."""

    @property
    def releases(self) -> Releases | None:
        """What ends of leases leave behind; None where nothing is pinned."""

    @property
    def holders(self) -> Holders | None:
        """Who has taken its batches, where that is noted."""

    def submit(self, order: Order) -> None:
        """Queues an order behind those submitted before."""

    def next(self, *, in_order: bool = True) -> Delivery:
        """Waits for the oldest order and delivers it."""

    def abandon(self) -> None:
        """Forgets every order."""

    def begin_pass(self, num_steps: int, *, step_stride: int = 1, epoch_base: int = 0) -> None:
        """Hears how long the pass is that begins."""

    def leave_pass(self) -> None:
        """Hears that a pass is left before its end."""

    def counters(self) -> dict[str, Any]:
        """What `shmload top` shows of the ring."""

    def totals(self) -> dict[str, Any]:
        """What the ring has counted since it began, and `busy_s` of all workers."""

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the workers; live batches stay valid."""


class DeliveryLog(Protocol):
    """What hears of each pass and each batch, in the order in which they reach the user.

    Attributes:
        is_on: whether deliveries are recorded; where not, nothing need be said.
        last: the order of the batch just yielded, as whoever yields it says.
        num_passes: begun in this run, in torch mode: its passes have no other number.
    """

    is_on: bool
    last: Order | None
    num_passes: int

    def resumed(self, epoch: int, step: int, *, by: str = "state", beyond: Collection[int] = ()) -> None:
        """The next pass begins there; the steps `beyond` had come before their turn."""

    def begins(self, config: LoaderConfig, epoch: int, step: int, *, schedule: Any = None, rank: int = 0) -> None:
        """A pass begins at that step; `schedule`, and whose part of it, where it can be computed."""

    def delivered(
        self, order: Order, batch: Any, *, valid: int | None = None, epoch: int | None = None, step: int | None = None
    ) -> None:
        """A batch is about to be yielded, or NOTHING came of its order."""

    def ended(self, epoch: int, step: int) -> None:
        """The pass has come to its end."""


LISTED_MAX = 1000  # bad samples that stats() lists singly
SUBSTITUTES_MAX = 100  # indices tried in place of one bad sample

OnError = Literal["raise", "skip", "substitute"]


NextIndex: TypeAlias = Callable[[Order, int, int], Any]


class BadSamples:
    """Counts and replaces them, over the life of one loader.

    Args:
        max_bad: more bad samples than this raise SampleError; None: any number may be bad.
        next_index: (order, row, tries) -> the index that takes a row's place at that try, from 1; who reads must have given one.
    """

    def __init__(self, on_error: OnError, max_bad: int | None, next_index: NextIndex | None = None) -> None:
        self._on_error, self._max_bad, self.next_index = on_error, max_bad, next_index
        self.count = 0
        self.num_irregular = 0  # files without workers: of workers the ring knows
        self.listed: list[dict[str, Any]] = []

    @contextmanager
    def counting_irregular(self) -> Iterator[None]:
        """Count the files that this process reads in the block although they break a rule of their format."""
        before = irregular_files.value
        try:
            yield
        finally:
            self.num_irregular += irregular_files.value - before

    @property
    def are_tolerated(self) -> bool:
        """Whether a bad sample may be anything but an error."""
        return self._on_error != "raise"

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        """The order's indices without its bad rows, or with others in their place.

        Raises:
            the worker's error, if on_error is "raise".
            SampleError: there are more bad samples than `max_bad`, or too many substitutes were bad, too.
        """
        if not self.are_tolerated:
            raise error()
        if order.ordered is None:
            order.ordered = order.indices
        origins = order.origins or [(row, 0) for row in range(order.nrows)]
        indices = list(order.indices)
        cause = error()
        for row in bad:
            self._count(order, indices[row], cause)
            first_row, tries = origins[row]
            if self._on_error == "substitute":
                if tries == SUBSTITUTES_MAX:
                    raise SampleError(
                        f"{SUBSTITUTES_MAX} samples tried in place of one bad sample of epoch {order.epoch} are bad, too: "
                        "look at the dataset"
                    ) from cause
                origins[row] = (first_row, tries + 1)
                assert self.next_index is not None
                indices[row] = self.next_index(order, first_row, tries + 1)
        if self._on_error == "skip":
            good = sorted(set(range(order.nrows)).difference(bad))
            indices, origins = [indices[row] for row in good], [origins[row] for row in good]
        order.origins = origins
        return np.array(indices, np.int64) if isinstance(order.indices, np.ndarray) else indices

    def _count(self, order: Order, index: Any, error: BaseException) -> None:
        self.count += 1
        if len(self.listed) < LISTED_MAX:
            lines = str(error).strip().splitlines() or [""]
            kind = type(error).__name__
            self.listed.append(
                {
                    "epoch": order.epoch,
                    "step": order.step,
                    "index": int(index) if isinstance(index, np.integer) else index,
                    # the last line of a worker's traceback, or the first of what was raised here, without the type's module
                    "error": f"{kind}: {lines[-1 if lines[0].startswith('Caught ') else 0].partition(f'{kind}: ')[2] or lines[0]}",
                }
            )
        if self._max_bad is not None and self.count > self._max_bad:
            raise SampleError(
                f"{self.count} bad samples are more than max_bad={self._max_bad} allows; the last was sample {index} of epoch "
                f"{order.epoch}. stats()['bad_samples'] lists them; mend the data, or raise max_bad"
            ) from error


ALIGNMENT = mmap.PAGESIZE  # 4 KiB at least; what ranks share is renewed by pages
GROWTH = 1.25  # a slot that had to grow gets this much more than was asked for
RESERVED_NBYTES = 8 << 20  # at a time, for which a batch that comes meanwhile waits: 2 ms; what is larger gets them by and by
SPARSE_KIND = "memfd"  # where that lies: room in /dev/shm that is not reserved is anybody's
LEAST_SLOTS = 4  # one filled, one with the user, and two so that neither waits for the other
SHM_SHARE = 4  # a slot that comes later takes at most one part in so many of what /dev/shm has left: others need some, too


class RingMemory:
    """Payload and oversized orders of one ring.

    Args:
        limit: bytes that payloads may take in all; None: what the machine has.
        may_park: slots may be taken out of use where the memory is too little for all of them.
        pins: hears where each slot lies; None: nothing is pinned.
        is_private: what the trainer's program writes into a batch, other ranks that read the ring do not see.
        is_reserved: slots have all their memory before the first is filled: the trainer itself writes to all of it.
    """

    def __init__(
        self,
        group: Group,
        ring: TrainerRing,
        limit: int | None,
        *,
        may_park: bool,
        pins: PinnedSlots | None = None,
        is_private: bool = False,
        is_reserved: bool = False,
    ) -> None:
        self._group, self._ring, self._limit = group, ring, limit
        # ranks that share a ring find it by its name
        self._is_reserved = is_reserved or is_private or pins is not None or not CAN_POPULATE
        self._sparse: list[Segment] = []  # of which not all is reserved yet
        self._may_park, self._pins, self._is_private = may_park, pins, is_private
        self.nbytes = 0  # of payloads, now
        self._slot_nbytes = 0  # the most that a slot has been given
        self._is_asked = False  # batches have no fixed size: the next may be larger
        self._num_first = 0  # slots that were given memory together, and keep it
        self._has_payload = False
        self._own: dict[int, Segment] = {}  # of slots that have grown, or came later
        self._orders: dict[int, Segment] = {}  # of slots whose order is larger than its area
        self._num_made = 0

    def make(self, slot_nbytes: int) -> None:
        """Makes the same room for every slot in use that has none yet, in one segment.

        Raises:
            RingTooSmall: that is more than is allowed, or than there is.
        """
        slot_nbytes = _aligned(slot_nbytes)
        if len(self._own) == self._ring.num_usable:
            self._has_payload = True
            return
        segment = self._payload_or_park(slot_nbytes, lambda: max(self._ring.num_usable - len(self._own), 1))
        slots = [slot for slot in range(self._ring.num_slots) if self._ring.state(slot) != PARKED and slot not in self._own]
        memory = Mapping(segment.fd, len(slots) * slot_nbytes, private=self._is_private)
        for place, slot in enumerate(slots):
            self._ring.set_payload(slot, memory, segment.path.encode(), place * slot_nbytes, slot_nbytes)
            if self._pins is not None:
                self._pins.add(slot, memory, place * slot_nbytes, slot_nbytes)
        self._has_payload, self._num_first = True, len(slots)

    def ensure(self, slot: int, nbytes: int) -> None:
        """Sees to it that a slot has that much room."""
        if self._ring.payload_nbytes(slot) >= nbytes:
            return
        self._put(slot, self._payload_or_park(_aligned(nbytes), lambda: 1))

    def _put(self, slot: int, segment: Segment) -> None:
        memory = Mapping(segment.fd, segment.nbytes, private=self._is_private)
        if self._pins is not None:
            self._pins.remove(slot)
            self._pins.add(slot, memory, 0, segment.nbytes)
        self._ring.set_payload(slot, memory, segment.path.encode(), 0, segment.nbytes)
        self._give_up(slot)
        self._own[slot] = segment

    def _give_up(self, slot: int) -> None:
        old = self._own.pop(slot, None)
        if old is not None:
            self.nbytes -= old.nbytes
            if old in self._sparse:
                self._sparse.remove(old)
            self._group.give_up(old)

    @property
    def is_sparse(self) -> bool:
        """Whether there are bytes without memory."""
        return bool(self._sparse)

    def reserve_more(self) -> None:
        """Reserves the next piece of what has no memory yet.

        Raises:
            RingTooSmall: others have taken the memory that was free when the ring was made.
        """
        segment = self._sparse[0]
        segment.reserve(RESERVED_NBYTES)
        if segment.num_reserved == segment.nbytes:
            del self._sparse[0]

    def answer_need(self, slot: int) -> None:
        """Gives the worker that packs a batch into this slot the room it asks for."""
        nbytes = int(self._ring.need_nbytes(slot) * GROWTH)
        self._is_asked = True
        if self._has_payload:
            self.ensure(slot, nbytes)
        elif self._ring.has_layout:
            self.make(nbytes)
        else:  # a worker says where it stands and has no batch: that must stay there when the layout comes
            self._put(slot, self._payload_or_park(_aligned(nbytes), lambda: 1))
        self._ring.grant(slot)

    # ------------------------------------------------------------ slots in use

    def use(self, num_slots: int, budget: int) -> int:
        """Brings slots into use, or parks free ones, until so many are in use or memory ends.

        Args:
            budget: bytes that payloads may take in all for the sake of more slots.
        Returns:
            how many are in use now.
        """
        ring = self._ring
        parked = (slot for slot in range(ring.num_slots) if ring.state(slot) == PARKED)
        while ring.num_usable < num_slots and (slot := next(parked, -1)) >= 0:
            if self._has_payload and not self._reserve(slot, budget):
                break
            ring.unpark(slot)
        while ring.num_usable > num_slots and self._park_one():
            pass
        return ring.num_usable

    def room(self, budget: int) -> int:
        """Slots that there are, or can be within a budget."""
        if not self._slot_nbytes:
            return self._ring.num_slots
        return max(self._ring.num_usable + (self._share_of(budget) - self.nbytes) // self._slot_nbytes, self._num_first)

    def _share_of(self, budget: int) -> int:
        """What slots that come later may use up: not what those that are there may yet grow by."""
        return budget // 2 if self._is_asked else budget

    def _reserve(self, slot: int, budget: int) -> bool:
        """Gives a parked slot as much room as any other has; False: that is more than there is."""
        if self.nbytes + self._slot_nbytes > self._share_of(budget):
            return False
        kind = "auto" if shm_free_bytes() >= SHM_SHARE * self._slot_nbytes else "memfd"
        try:
            self._put(slot, self._payload(1, self._slot_nbytes, kind))
        except RingTooSmall:
            return False
        return True

    def _park_one(self) -> bool:
        """Takes a free slot out of use and gives its memory back; False: there is none, or too few would be left."""
        ring = self._ring
        if not self._may_park or ring.num_usable <= LEAST_SLOTS:
            return False
        candidates = sorted(self._own) if self._has_payload else range(ring.num_slots)
        slot = next((slot for slot in reversed(candidates) if ring.state(slot) == FREE), -1)
        if slot < 0:
            return False
        if self._pins is not None:
            self._pins.remove(slot)
        ring.park(slot)
        if slot in self._own:
            give_back_pages(self._own[slot].fd, self._own[slot].nbytes)  # workers may have it mapped for long
            self._give_up(slot)
        return True

    # ------------------------------------------------------------ segments

    def _payload_or_park(self, slot_nbytes: int, num_slots: Callable[[], int]) -> Segment:
        """A segment for so many slots; where the memory is too little, slots are parked until it is enough."""
        while True:
            try:
                return self._payload(num_slots(), slot_nbytes)
            except RingTooSmall:
                if not self._park_one():
                    raise

    @faults.at("making_memory")
    def _payload(self, num_slots: int, slot_nbytes: int, kind: Any = "auto") -> Segment:
        nbytes = num_slots * slot_nbytes
        if self._limit is not None and self.nbytes + nbytes > self._limit:
            free = self._limit - self.nbytes
            raise RingTooSmall(
                f"the ring needs {num_slots} slots of {slot_nbytes} bytes, {nbytes} in all; ring_bytes={self._limit} has {free} "
                f"left, room for {free // slot_nbytes} slots. Raise ring_bytes, or lower prefetch_factor, num_workers or batch_size"
            )
        options: dict[str, Any] = {"kind": kind, "slots": (num_slots, slot_nbytes)}
        if nbytes > RESERVED_NBYTES and not self._is_reserved and memfds_work():
            options |= {"kind": SPARSE_KIND, "num_reserved": 0}
        segment = self._segment("payload", nbytes, **options)
        if segment.num_reserved < nbytes:
            self._sparse.append(segment)
        self.nbytes += nbytes
        self._slot_nbytes = max(self._slot_nbytes, slot_nbytes)
        return segment

    def order_path(self, slot: int, order: Any) -> bytes:
        """Puts an order that is too large for its area into a segment and says which; empty if it fits the area."""
        if not self._orders and len(order) * 8 <= self._ring.order_capacity:  # 8 bytes an index; of a pickle it is more than enough
            return b""
        old = self._orders.pop(slot, None)
        if old is not None:
            self._group.give_up(old)
        view = memoryview(order).cast("B")
        if view.nbytes <= self._ring.order_capacity:
            return b""
        segment = self._orders[slot] = self._segment("order", view.nbytes)
        memoryview(Mapping(segment.fd, view.nbytes))[:] = view
        return segment.path.encode()

    def _segment(self, part: str, nbytes: int, **options: Any) -> Segment:
        segment = self._group.segment(f"{part}-{self._num_made}", nbytes, **options)
        self._num_made += 1
        return segment


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


REPACKED_SHARE = 4  # one batch in so many that had to be packed after all makes all be packed


class OrderWriter:
    """Writes orders into slots, as rows or packed.

    Args:
        orders: the bells of workers: one for each, or one for all.
        is_packed: samples have no fixed rows, as is known beforehand.
    """

    def __init__(self, ring: TrainerRing, memory: RingMemory, orders: Sequence[Doorbell | JointBell], *, is_packed: bool) -> None:
        self._ring, self._memory, self._orders, self.is_packed = ring, memory, orders, is_packed
        self.layout: Layout | None = None  # where fields lie, once it is known
        self.num_repacked = 0

    def settle(self, layout: Layout | None, max_rows: int) -> None:
        """Takes a layout, with room for batches of so many rows in every slot; None: all batches are packed."""
        self.layout = layout
        if layout is None:
            self.is_packed = True
        else:
            nbytes = layout.nbytes(max(max_rows, 1))
            self._memory.make(nbytes)
            self._ring.expect(max(max_rows, 1), nbytes)
        self._ring.accept_layout(b"" if layout is None else layout.dumps(), is_packed=layout is None)

    @faults.at("publishing")
    def post(self, order: Order) -> bool:
        """Publishes a usual order in a free slot; False if it is none, or none is free."""
        nchunks = self._ring.post(order, is_packed=self.is_packed)
        if nchunks:
            self.ring_workers(order, nchunks)
        return nchunks > 0

    @faults.at("publishing")
    def write(self, order: Order, slot: int, *, is_packed: bool = False) -> None:
        """Publishes an order in a slot that is held, or in its own again."""
        indices, is_pickled = order.indices, False
        raw: Any = None
        if isinstance(indices, np.ndarray) and not order.is_given:
            raw = indices
        elif type(indices) is list and set(map(type, indices)) <= {int}:
            with suppress(OverflowError):
                raw = np.array(indices, np.int64)
        if raw is None:
            raw, is_pickled = travel.dumps(indices), True
        path = self._memory.order_path(slot, raw)
        is_packed = is_packed or self.is_packed
        if not is_packed and self.layout is not None:
            self._memory.ensure(slot, self.layout.nbytes(order.nrows))
        nchunks = 1 if is_packed or order.worker >= 0 else self._ring.num_chunks(order.nrows)
        order.slot = slot
        self._ring.publish(
            slot,
            epoch=order.epoch,
            step=order.step,
            seq=order.step,
            indices=raw,
            nrows=order.nrows,
            nchunks=nchunks,
            is_packed=is_packed,
            is_pickled=is_pickled,
            reserved=order.worker,
            order_path=path,
        )
        self.ring_workers(order, nchunks)

    def write_packed(self, order: Order, num_delivered: int) -> None:
        """Publishes an order again, packed, because its samples turned out to differ; if that is common, so are all from now on."""
        self.num_repacked += 1
        if self.num_repacked > 1 and REPACKED_SHARE * self.num_repacked >= num_delivered:
            self.is_packed = True  # rows would be begun in vain
        self.write(order, order.slot, is_packed=True)

    @faults.at("ringing")
    def ring_workers(self, order: Order, nchunks: int) -> None:
        """Tells those who may claim the order that it is there."""
        self._orders[order.worker].post_up_to(min(nchunks, self._ring.num_wanted))
