"""The memory behind a ring's slots: one segment for all in use at first, one of its own for a slot that needs more or comes later.

A slot keeps the room it was given: batches of growing size make the ring learn, slot by slot, and nothing waits for an epoch's end.
What a slot had before is given up at once; leases and workers that still map it keep it until they let go. A ring may be made for
more slots than are in use: the others are parked and have no memory.

From an order to a slot that workers claim: its bytes, the room for its batch, and the bells.

The usual order is posted by one native call (`TrainerRing.post`). Here is the same for all others: a sampler's own keys, an order
or a batch larger than its room, one that is written again because its samples differ or were bad.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmload import faults
from shmload._core.mapping import Mapping, give_back_pages
from shmload._core.trainer import FREE, PARKED, Order, TrainerRing
from shmload.batch.layout import Layout
from shmload.device.pins import Pins
from shmload.errors import RingTooSmall
from shmload.shm.group import Doorbell, Group, JointBell
from shmload.shm.segment import Segment, check_fits, shm_free_bytes

ALIGNMENT = mmap.PAGESIZE  # 4 KiB at least; what ranks share is renewed by pages
GROWTH = 1.25  # a slot that had to grow gets this much more than was asked for
LEAST_SLOTS = 4  # one filled, one with the user, and two so that neither waits for the other
SHM_SHARE = (
    4  # a slot that comes later takes at most one part in so many of what /dev/shm has left: others need some, too
)


class RingMemory:
    """Payload and oversized orders of one ring.

    Args:
        limit: bytes that payloads may take in all; None: what the machine has.
        may_park: slots may be taken out of use where the memory is too little for all of them.
        pins: is told where each slot lies; None: nothing is pinned.
        is_private: what the trainer's program writes into a batch, other ranks that read the ring do not see.
    """

    def __init__(
        self,
        group: Group,
        ring: TrainerRing,
        limit: int | None,
        *,
        may_park: bool = False,
        pins: Pins | None = None,
        is_private: bool = False,
    ) -> None:
        self._group = group
        self._ring = ring
        self._limit = limit
        self._may_park = may_park
        self._pins = pins
        self._is_private = is_private
        self.nbytes = 0  # of payloads, now
        self._slot_nbytes = 0  # the most that a slot has been given
        self._is_asked = False  # batches have no fixed size: the next may be larger
        self._num_first = 0  # slots that were given memory together, and keep it
        self._has_payload = False
        self._own: dict[int, Segment] = {}  # of slots that have grown, or came later
        self._orders: dict[int, Segment] = {}  # of slots whose order is larger than its area
        self._num_made = 0

    def make(self, slot_nbytes: int) -> None:
        """Reserves the same room for every slot in use, in one segment.

        Raises:
            RingTooSmall: that is more than is allowed, or than there is.
        """
        slot_nbytes = _aligned(slot_nbytes)
        while True:
            slots = [slot for slot in range(self._ring.num_slots) if self._ring.state(slot) != PARKED]
            try:
                segment = self._payload(len(slots), slot_nbytes)
                break
            except RingTooSmall:
                if not self._park_one():
                    raise
        is_private = self._is_private  # such pages are populated by copying them
        memory = Mapping(segment.fd, len(slots) * slot_nbytes, populate=not is_private, private=is_private)
        for place, slot in enumerate(slots):
            self._ring.set_payload(slot, memory, segment.path.encode(), place * slot_nbytes, slot_nbytes)
            if self._pins is not None:
                self._pins.add(slot, memory, place * slot_nbytes, slot_nbytes)
        self._has_payload, self._num_first = True, len(slots)

    def ensure(self, slot: int, nbytes: int) -> None:
        """Sees to it that a slot has that much room."""
        if self._ring.payload_nbytes(slot) >= nbytes:
            return
        nbytes = _aligned(nbytes)
        while True:
            try:
                segment = self._payload(1, nbytes)
                break
            except RingTooSmall:
                if not self._park_one():
                    raise
        self._put(slot, segment)

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
            self._group.give_up(old)

    def answer_need(self, slot: int) -> None:
        """Gives the worker that packs a batch into this slot the room it asks for."""
        nbytes = int(self._ring.need_nbytes(slot) * GROWTH)
        self._is_asked = True
        if self._has_payload:
            self.ensure(slot, nbytes)
        else:
            self.make(nbytes)
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

    @faults.at("making_memory")
    def _payload(self, num_slots: int, slot_nbytes: int, kind: Any = "auto") -> Segment:
        nbytes = num_slots * slot_nbytes
        if self._limit is not None and self.nbytes + nbytes > self._limit:
            free = self._limit - self.nbytes
            raise RingTooSmall(
                f"the ring needs {num_slots} slots of {slot_nbytes} bytes, {nbytes} in all; ring_bytes allows {free}, room for "
                f"{free // slot_nbytes} slots. Raise ring_bytes, or lower prefetch_factor, num_workers or batch_size"
            )
        check_fits(nbytes, num_slots=num_slots, slot_nbytes=slot_nbytes)
        segment = self._segment("payload", nbytes, (num_slots, slot_nbytes), kind)
        self.nbytes += nbytes
        self._slot_nbytes = max(self._slot_nbytes, slot_nbytes)
        return segment

    def order_path(self, slot: int, order: Any) -> bytes:
        """Puts an order that is too large for its area into a segment and says which; empty if it fits the area."""
        if (
            not self._orders and len(order) * 8 <= self._ring.order_capacity
        ):  # 8 bytes an index; of a pickle it is more than enough
            return b""
        old = self._orders.pop(slot, None)
        if old is not None:
            self._group.give_up(old)
        view = memoryview(order).cast("B")
        if view.nbytes <= self._ring.order_capacity:
            return b""
        segment = self._orders[slot] = self._segment("order", view.nbytes, None)
        memoryview(Mapping(segment.fd, view.nbytes))[:] = view
        return segment.path.encode()

    def _segment(self, part: str, nbytes: int, slots: tuple[int, int] | None, kind: Any = "auto") -> Segment:
        segment = self._group.segment(f"{part}-{self._num_made}", nbytes, kind=kind, slots=slots)
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

    def __init__(
        self, ring: TrainerRing, memory: RingMemory, orders: Sequence[Doorbell | JointBell], *, is_packed: bool
    ) -> None:
        self._ring = ring
        self._memory = memory
        self._orders = orders
        self.is_packed = is_packed
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
        indices = order.indices
        is_pickled = False
        if isinstance(indices, np.ndarray) and not order.is_given:
            raw: Any = indices
        else:
            try:
                raw = _as_int64(indices)
            except (TypeError, ValueError, OverflowError):
                raw, is_pickled = pickle.dumps(indices), True
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


def _as_int64(indices: Any) -> np.ndarray[Any, Any]:
    """The indices as int64; TypeError if one is not exactly an int (its worker must see the sampler's own key)."""
    if type(indices) is not list or not set(map(type, indices)) <= {int}:
        raise TypeError("what is no list of int travels pickled")
    return np.array(indices, np.int64)
