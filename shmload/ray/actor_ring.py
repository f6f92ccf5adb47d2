"""A ring of one slot in an actor's private memory, with the trainer's half of the protocol.

A `WorkerLoop` needs a ring, doorbells and a trainer. `ActorRing` is all of them: when the loop rings a bell to propose a layout or
to request more memory, `post` grants the request before it returns.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.trainer import ORDERED, Lease, TrainerRing, control_nbytes
from shmload.batch.layout import Layout
from shmload.ray.messages import NOTHING, Slot

GROWTH = 1.25  # as in engine/ring_memory.py
ORDER_CAPACITY = 4096  # bytes of the ring's area for an order; larger orders get their own memory
_ORDER = "order"


class ActorRing:
    """The ring, its memory, and all of its bells in one object.

    Args:
        worker_id: the worker's number in the trainer's ring, which its messages to users contain.
        text_capacity, layout_capacity: capacities of the trainer's ring, in bytes.

    Attributes:
        ring: the worker's end.
        trainer: the trainer's end.
        layout: the settled layout; None before it is settled, or if the samples do not have one shape.
        nrows: number of rows of the order.
        is_borrowed: whether the payload is the batch's own slot in the trainer's ring.
    """

    def __init__(self, worker_id: int, *, text_capacity: int, layout_capacity: int) -> None:
        sizes: dict[str, Any] = {
            "order_capacity": ORDER_CAPACITY,
            "text_capacity": text_capacity,
            "layout_capacity": layout_capacity,
        }
        self._control = private_memory(control_nbytes(1, worker_id + 1, **sizes))
        self.trainer = TrainerRing(self._control, num_slots=1, num_workers=worker_id + 1, **sizes)
        self.ring = WorkerRing(self._control, worker_id)
        self._memory: dict[str, Mapping] = {}
        self._payload = ""
        self._num_made = self._offset = 0
        self.is_borrowed = False
        self.layout: Layout | None = None
        self.nrows = 1
        self._lease: Lease | None = None  # the lease of the latest batch

    # ------------------------------------------------------------ the worker loop's interface

    def open(self, path: str) -> Mapping:
        """Return the memory with this name."""
        return self._memory[path]

    def post(self) -> None:
        """Grant the worker loop's request."""
        ring = self.trainer
        text = ring.proposal
        if text is not None:
            self.accept_layout(text)
        if ring.needy() >= 0:
            self._make_room(int(ring.need_nbytes(0) * GROWTH))
            ring.grant(0)

    def wait(self, timeout_s: float) -> bool:
        """Return True at once, because `post` has already granted the request."""
        return True

    # ------------------------------------------------------------ the trainer's half

    def accept_layout(self, text: bytes) -> None:
        """Accept a layout, given as bytes. Empty bytes mean that the samples do not have one shape, so batches are packed."""
        self.layout = Layout.loads(text) if text else None
        if self.layout is not None:
            self._make_room(self.layout.nbytes(self.nrows))
        self.trainer.accept_layout(text, is_packed=not text)

    def order(
        self,
        raw: bytes,
        borrowed: Borrowed | None,
        *,
        epoch: int,
        step: int,
        nrows: int,
        is_pickled: bool,
        is_packed: bool,
        is_suspect: bool = False,
    ) -> None:
        """Publish an order in the slot, whose previous batch is no longer needed, and claim it.

        Args:
            raw: the indices, as int64 bytes or as a pickle.
            borrowed: memory for the batch, used if it is large enough; None for this process's own memory.
            epoch, step: position of the order, for messages and random numbers.
            nrows: number of rows.
            is_pickled: whether `raw` is a pickle.
            is_packed: whether the batch must be packed.
            is_suspect: whether an actor died while reading this order; its samples are then read one by one.
        """
        ring = self.trainer
        self._lease = None
        if ring.state(0) == ORDERED:
            ring.free(0)
        if borrowed is not None:
            memory, (_, path, offset, nbytes, _) = borrowed
            self._memory = {path: memory}
            self._payload, self._offset, self.is_borrowed = path, offset, True
            ring.set_payload(0, memory, path.encode(), offset, nbytes)
        elif self.is_borrowed:  # the slot belongs to another batch now
            self._renew(1 << 16)
        self.nrows = nrows
        if self.layout is not None and not is_packed:
            self._make_room(self.layout.nbytes(nrows))
        self._memory.pop(_ORDER, None)
        if len(raw) > ORDER_CAPACITY:
            self._memory[_ORDER] = private_memory(len(raw))
            memoryview(self._memory[_ORDER])[:] = raw
        ring.publish(
            ring.hold(),
            epoch=epoch,
            step=step,
            indices=raw,
            nrows=nrows,
            is_packed=is_packed,
            is_pickled=is_pickled,
            order_path=_ORDER.encode() if _ORDER in self._memory else b"",
        )
        if is_suspect:  # a worker loop recognizes a suspect order by an earlier claim that was lost
            WorkerRing(self._control, self.ring.worker_id).claim()
            ring.recover(self.ring.worker_id)
        self.ring.claim()

    def lease(self) -> int:
        """Keep the finished batch until the next order. Return its size in bytes if it is packed, 0 if it consists of rows."""
        self._lease = self.trainer.lease(0)
        return self._lease.used_nbytes

    def payload(self, nbytes: int, at: int = 0) -> NDArray[np.uint8]:
        """Return a view of `nbytes` bytes of the slot from offset `at` on, valid until the next order."""
        if not nbytes:
            return NOTHING
        return np.ndarray(nbytes, np.uint8, self._memory[self._payload], self._offset + at)  # type: ignore[arg-type]  # a buffer

    def _make_room(self, nbytes: int) -> None:
        if self.trainer.payload_nbytes(0) < nbytes:
            self._renew(nbytes)

    def _renew(self, nbytes: int) -> None:
        memory = private_memory(nbytes)
        self._memory.pop(self._payload, None)
        self._num_made += 1
        self._payload, self._offset, self.is_borrowed = f"payload-{self._num_made}", 0, False
        self._memory[self._payload] = memory
        self.trainer.set_payload(0, memory, self._payload.encode(), 0, nbytes)


def private_memory(nbytes: int) -> Mapping:
    """Return memory that no other process can see, filled with zeros, as a Mapping."""
    fd = os.memfd_create("shmload-actor_ring")
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes)
    finally:
        os.close(fd)


Borrowed = tuple[Mapping, Slot]  # a segment of the trainer's ring, and a slot in it
