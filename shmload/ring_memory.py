"""The memory behind a ring's slots: one segment for all at first, a larger one of its own for a slot that needs it.

A slot keeps the room it was given: batches of growing size make the ring learn, slot by slot, and nothing waits for an epoch's end.
What a slot had before is given up at once; leases and workers that still map it keep it until they let go.
"""

from __future__ import annotations

from typing import Any

from shmload import faults
from shmload._core.mapping import Mapping
from shmload._core.trainer import TrainerRing
from shmload.errors import RingTooSmall
from shmload.shm.group import Group
from shmload.shm.preflight import check_fits
from shmload.shm.segment import Segment

ALIGNMENT = 4096
GROWTH = 1.25  # a slot that had to grow gets this much more than was asked for


class RingMemory:
    """Payload and oversized orders of one ring.

    Args:
        limit: bytes that payloads may take in all; None: what the machine has.
    """

    def __init__(self, group: Group, ring: TrainerRing, limit: int | None) -> None:
        self._group = group
        self._ring = ring
        self._limit = limit
        self._nbytes = 0
        self._has_payload = False
        self._own: dict[int, Segment] = {}  # of slots that have grown
        self._orders: dict[int, Segment] = {}  # of slots whose order is larger than its area
        self._num_made = 0

    def make(self, slot_nbytes: int) -> None:
        """Reserves the same room for every slot, in one segment.

        Raises:
            RingTooSmall: that is more than is allowed, or than there is.
        """
        slot_nbytes, num_slots = _aligned(slot_nbytes), self._ring.num_slots
        segment = self._payload(num_slots, slot_nbytes)
        memory = Mapping(segment.fd, num_slots * slot_nbytes, populate=True)
        for slot in range(num_slots):
            self._ring.set_payload(slot, memory, segment.path.encode(), slot * slot_nbytes, slot_nbytes)
        self._has_payload = True

    def ensure(self, slot: int, nbytes: int) -> None:
        """Sees to it that a slot has that much room."""
        if self._ring.payload_nbytes(slot) >= nbytes:
            return
        nbytes = _aligned(nbytes)
        segment = self._payload(1, nbytes)
        self._ring.set_payload(slot, Mapping(segment.fd, nbytes), segment.path.encode(), 0, nbytes)
        old = self._own.pop(slot, None)
        if old is not None:
            self._nbytes -= old.nbytes
            self._group.give_up(old)
        self._own[slot] = segment

    def answer_need(self, slot: int) -> None:
        """Gives the worker that packs a batch into this slot the room it asks for."""
        nbytes = int(self._ring.need_nbytes(slot) * GROWTH)
        if self._has_payload:
            self.ensure(slot, nbytes)
        else:
            self.make(nbytes)
        self._ring.grant(slot)

    @faults.at("making_memory")
    def _payload(self, num_slots: int, slot_nbytes: int) -> Segment:
        nbytes = num_slots * slot_nbytes
        if self._limit is not None and self._nbytes + nbytes > self._limit:
            free = self._limit - self._nbytes
            raise RingTooSmall(
                f"the ring needs {num_slots} slots of {slot_nbytes} bytes, {nbytes} in all; ring_bytes allows {free}, room for "
                f"{free // slot_nbytes} slots. Raise ring_bytes, or lower prefetch_factor, num_workers or batch_size"
            )
        check_fits(nbytes, num_slots=num_slots, slot_nbytes=slot_nbytes)
        segment = self._segment("payload", nbytes, (num_slots, slot_nbytes))
        self._nbytes += nbytes
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

    def _segment(self, part: str, nbytes: int, slots: tuple[int, int] | None) -> Segment:
        segment = self._group.segment(f"{part}-{self._num_made}", nbytes, slots=slots)
        self._num_made += 1
        return segment


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
