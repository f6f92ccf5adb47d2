"""The payload memory of a ring's slots.

The payload is the memory for a batch. At first one segment holds the payload of all slots in use. A slot that needs more, or that
comes into use later, gets a segment of its own and keeps it, so a ring adapts to growing batches slot by slot. The old segment is
unlinked at once; leases and workers that still map it keep its memory until they unmap it. A ring may have more slots than are in
use: the others are *parked* and have no memory.

A payload of up to 8 MiB is a named segment in /dev/shm, if there is room, and is reserved at once. Reserving a larger one takes
0.25 s per GiB, and filling it with zeros and mapping it 0.4 s more, which would delay the first batch. So a larger one is not
reserved at once, and is a memfd, because any process can take unreserved room in /dev/shm. Workers ask the kernel for pages for
the rows that they are about to write (MADV_POPULATE_WRITE, which returns an error where a write would raise SIGBUS), and the
trainer reserves the rest from the second batch on, while it would sleep anyway. If other programs have taken the memory in the
meantime, RingTooSmall is raised. Kernels before 5.14 and rings that are pinned, shared by ranks, or poisoned for debugging
reserve the whole payload at once.

Rejected for parked slots: one sparse segment for all slots, because populating its mappings would fill it; truncating the segment
of a parked slot, because a late read would raise SIGBUS, where it now reads zeros.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from shmload import faults
from shmload._core.mapping import CAN_POPULATE, Mapping, give_back_pages
from shmload._core.trainer import FREE, PARKED, TrainerRing
from shmload.device.pinned_slots import PinnedSlots
from shmload.engine.holders import POISON
from shmload.errors import RingTooSmall
from shmload.shm.free_memory import shm_free_bytes
from shmload.shm.segment import Kind, Segment, memfds_work
from shmload.shm.segment_group import SegmentGroup

ALIGNMENT = mmap.PAGESIZE  # at least 4 KiB; ranks that share a ring refresh it page by page
GROWTH = 1.25  # a slot that must grow gets this many times the requested size
RESERVED_NBYTES = 8 << 20  # bytes reserved at a time, which takes 2 ms; larger segments are reserved incrementally, between batches
SPARSE_KIND = "memfd"  # kind of larger segments, because any process can take unreserved room in /dev/shm
LEAST_SLOTS = 4  # one that a worker fills, one that the trainer uses, and two so that neither waits for the other
SHM_SHARE = 4  # a slot added later takes at most 1/4 of the free room in /dev/shm, because other programs need some


class RingMemory:
    """The segments with the payload and the oversized orders of one ring.

    Args:
        group: the owner of the segments.
        ring: the trainer's end of the ring.
        limit: maximum bytes of all payloads; None for all memory of the machine.
        may_park: whether slots may be taken out of use if there is too little memory for all of them.
        pins: pins the memory of each slot; None if nothing is pinned.
        is_private: map the payload copy-on-write, so that other ranks do not see what this program writes into a batch.
        is_poisoned: fill new memory with `POISON`, and so reserve it at once.

    Attributes:
        nbytes: bytes of all payloads now.
    """

    def __init__(
        self,
        group: SegmentGroup,
        ring: TrainerRing,
        limit: int | None,
        *,
        may_park: bool,
        pins: PinnedSlots | None = None,
        is_private: bool = False,
        is_poisoned: bool = False,
    ) -> None:
        self._group, self._ring, self._limit = group, ring, limit
        # a shared ring is found by its name, which a sparse segment does not have
        self._is_poisoned = is_poisoned
        self._is_reserved = is_poisoned or is_private or pins is not None or not CAN_POPULATE
        self._sparse: list[Segment] = []  # segments that are not reserved to their ends yet
        self._may_park, self._pins, self._is_private = may_park, pins, is_private
        self.nbytes = 0
        self._slot_nbytes = 0  # size of the largest slot so far
        self._has_grown = False  # batches vary in size, so the next may be larger
        self._num_first = 0  # number of slots in the first segment, which they keep
        self._has_payload = False
        self._own: dict[int, Segment] = {}  # by slot: slots that have grown or were added later
        self._orders: dict[int, Segment] = {}  # by slot: orders larger than the area in the control block
        self._num_made = 0

    def make(self, slot_nbytes: int) -> None:
        """Give every slot in use that has no payload one of this size, in one segment.

        Args:
            slot_nbytes: bytes per slot.
        Raises:
            RingTooSmall: this exceeds `limit` or the machine's memory.
        """
        slot_nbytes = _whole_pages(slot_nbytes)
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
        """Give a slot at least `nbytes` bytes of payload. Its present contents are lost if it gets a new segment.

        Raises:
            RingTooSmall: this exceeds the ring's limit or the machine's memory.
        """
        if self._ring.payload_nbytes(slot) >= nbytes:
            return
        self._put(slot, self._payload_or_park(_whole_pages(nbytes), lambda: 1))

    def _put(self, slot: int, segment: Segment) -> None:
        memory = Mapping(segment.fd, segment.nbytes, private=self._is_private)
        if self._pins is not None:
            self._pins.remove(slot)
            self._pins.add(slot, memory, 0, segment.nbytes)
        self._ring.set_payload(slot, memory, segment.path.encode(), 0, segment.nbytes)
        self._release_slot(slot)
        self._own[slot] = segment

    def _release_slot(self, slot: int) -> None:
        old = self._own.pop(slot, None)
        if old is not None:
            self.nbytes -= old.nbytes
            if old in self._sparse:
                self._sparse.remove(old)
            self._group.close_segment(old)

    @property
    def is_sparse(self) -> bool:
        """Return whether any segment is not reserved to its end yet."""
        return bool(self._sparse)

    def reserve_more(self) -> None:
        """Reserve the next `RESERVED_NBYTES` of a sparse segment.

        Raises:
            RingTooSmall: other programs have taken the memory that was free when the ring was made.
        """
        segment = self._sparse[0]
        segment.reserve(RESERVED_NBYTES)
        if segment.num_reserved == segment.nbytes:
            del self._sparse[0]

    def answer_need(self, slot: int) -> None:
        """Give the worker that packs a batch into this slot `GROWTH` times the bytes that it asks for."""
        nbytes = int(self._ring.need_nbytes(slot) * GROWTH)
        self._has_grown = True
        if self._has_payload:
            self.ensure(slot, nbytes)
        elif self._ring.has_layout:
            self.make(nbytes)
        else:  # a worker writes its snapshot before any batch, and must find it in the slot when the layout is known
            self._put(slot, self._payload_or_park(_whole_pages(nbytes), lambda: 1))
        self._ring.grant(slot)

    # Slots in use

    def use(self, num_slots: int, budget: int) -> int:
        """Bring slots into use or park free ones until `num_slots` are in use or memory runs out.

        Args:
            num_slots: wanted number of slots in use.
            budget: maximum bytes of all payloads after adding slots.
        Returns:
            number of slots in use now.
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
        """Return the number of slots that can be in use if all payloads may take `budget` bytes."""
        if not self._slot_nbytes:
            return self._ring.num_slots
        return max(self._ring.num_usable + (self._share_of(budget) - self.nbytes) // self._slot_nbytes, self._num_first)

    def _share_of(self, budget: int) -> int:
        """Return the part of the budget for added slots: half of it if slots in use may still grow."""
        return budget // 2 if self._has_grown else budget

    def _reserve(self, slot: int, budget: int) -> bool:
        """Give a parked slot a payload of the largest slot's size. Return whether there was enough memory."""
        if self.nbytes + self._slot_nbytes > self._share_of(budget):
            return False
        kind: Kind = "auto" if shm_free_bytes() >= SHM_SHARE * self._slot_nbytes else "memfd"
        try:
            self._put(slot, self._payload(1, self._slot_nbytes, kind))
        except RingTooSmall:
            return False
        return True

    def _park_one(self) -> bool:
        """Park a free slot and release its memory. Return False if no slot is free or too few would be left."""
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
            give_back_pages(self._own[slot].fd, self._own[slot].nbytes)  # workers may keep it mapped for a long time
            self._release_slot(slot)
        return True

    # Segments

    def _payload_or_park(self, slot_nbytes: int, num_slots: Callable[[], int]) -> Segment:
        """Return a segment for `num_slots()` slots; if memory is too small, park slots until it suffices."""
        while True:
            try:
                return self._payload(num_slots(), slot_nbytes)
            except RingTooSmall:
                if not self._park_one():
                    raise

    @faults.at("making_memory")
    def _payload(self, num_slots: int, slot_nbytes: int, kind: Kind = "auto") -> Segment:
        """Create the segment of `num_slots` slots; raise RingTooSmall if it exceeds `ring_bytes`."""
        nbytes = num_slots * slot_nbytes
        if self._limit is not None and self.nbytes + nbytes > self._limit:
            free = self._limit - self.nbytes
            raise RingTooSmall(
                f"the ring needs {num_slots} slots of {slot_nbytes} bytes, {nbytes} in total; ring_bytes={self._limit} has "
                f"{free} left, enough for {free // slot_nbytes} slots. Raise ring_bytes, or lower prefetch_factor, num_workers "
                "or batch_size"
            )
        options: dict[str, Any] = {"kind": kind, "slots": (num_slots, slot_nbytes)}
        if nbytes > RESERVED_NBYTES and not self._is_reserved and memfds_work():
            options |= {"kind": SPARSE_KIND, "num_reserved": 0}
        segment = self._segment("payload", nbytes, **options)
        if self._is_poisoned:
            np.ndarray(nbytes, np.uint8, Mapping(segment.fd, nbytes))[...] = POISON  # type: ignore[arg-type]  # a buffer
        if segment.num_reserved < nbytes:
            self._sparse.append(segment)
        self.nbytes += nbytes
        self._slot_nbytes = max(self._slot_nbytes, slot_nbytes)
        return segment

    def order_path(self, slot: int, order: Any) -> bytes:
        """Write an order that is larger than its area in the control block to a segment, and return its path; b"" if it fits.

        Args:
            slot: slot of the order.
            order: an int64 array of indices, or a pickle.
        """
        if not self._orders and len(order) * 8 <= self._ring.order_capacity:  # 8 bytes per index; a pickle has 1 byte per item
            return b""
        old = self._orders.pop(slot, None)
        if old is not None:
            self._group.close_segment(old)
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


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
