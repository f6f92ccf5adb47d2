"""A ring of one slot in private memory: what a worker's body needs around it where no trainer shares its memory.

The trainer's half is played at once, inside the worker's own call: when the body rings because it wants a layout settled or more
room, the desk grants that before the bell's `post` returns.
"""

from __future__ import annotations

import os
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.trainer import FAILED, ORDERED, Lease, TrainerRing, control_nbytes
from shmload.batch.layout import Layout

GROWTH = 1.25  # as ring_memory's
ORDER_CAPACITY = 4096  # a larger order lies in memory of its own
_ORDER = "order"


class _Sizes(TypedDict):
    order_capacity: int
    text_capacity: int
    layout_capacity: int


class Desk:
    """The ring, its memory, and all of its bells in one.

    Attributes:
        ring: the worker's end.
        trainer: the trainer's end.
    Args:
        worker_id: as the body and what it tells users name the worker.
        text_capacity, layout_capacity: of the real ring.
    """

    def __init__(self, worker_id: int, *, text_capacity: int, layout_capacity: int) -> None:
        sizes = _Sizes(order_capacity=ORDER_CAPACITY, text_capacity=text_capacity, layout_capacity=layout_capacity)
        control = private(control_nbytes(1, worker_id + 1, **sizes))
        self.trainer = TrainerRing(control, num_slots=1, num_workers=worker_id + 1, **sizes)
        self.ring = WorkerRing(control, worker_id)
        self._memory: dict[str, Mapping] = {}
        self._payload = ""
        self._num_made = 0
        self._layout: Layout | None = None
        self._nrows = 1
        self._lease: Lease | None = None  # of the batch made last

    # ------------------------------------------------------------ what a body asks for

    def open(self, path: str) -> Mapping:
        """The memory of this name."""
        return self._memory[path]

    def post(self) -> None:
        """Grants what the body waits for."""
        ring = self.trainer
        text = ring.proposal
        if text is not None:
            self.settle(text)
        if ring.needy() >= 0:
            self._make_room(int(ring.need_nbytes(0) * GROWTH))
            ring.grant(0)

    def wait(self, timeout_s: float) -> bool:
        """Returns: whatever it was, it has been granted."""
        return True

    # ------------------------------------------------------------ the trainer's half

    def settle(self, text: bytes) -> None:
        """Takes a layout; none in it: samples have no fixed rows."""
        self._layout = Layout.loads(text) if text else None
        if self._layout is not None:
            self._make_room(self._layout.nbytes(self._nrows))
        self.trainer.accept_layout(text, is_packed=not text)

    @property
    def layout_text(self) -> bytes | None:
        """The settled layout; None before that."""
        return self.ring.layout_text if self.trainer.has_layout else None

    def order(self, raw: bytes, *, epoch: int, step: int, nrows: int, is_pickled: bool, is_packed: bool) -> None:
        """Publishes an order in the slot, where the one before is of no use any more, and claims it."""
        ring = self.trainer
        self._lease = None
        if ring.state(0) == ORDERED:
            ring.free(0)
        self._nrows = nrows
        if self._layout is not None and not is_packed:
            self._make_room(self._layout.nbytes(nrows))
        self._memory.pop(_ORDER, None)
        if len(raw) > ORDER_CAPACITY:
            self._memory[_ORDER] = private(len(raw))
            memoryview(self._memory[_ORDER])[:] = raw
        ring.publish(
            ring.hold(),
            epoch=epoch,
            step=step,
            seq=step,
            indices=raw,
            nrows=nrows,
            is_packed=is_packed,
            is_pickled=is_pickled,
            order_path=_ORDER.encode() if _ORDER in self._memory else b"",
        )
        self.ring.claim()

    @property
    def error(self) -> bytes:
        """What the body has left of an order that failed; empty: it did not."""
        if self.trainer.look(0) != FAILED:
            return b""
        return self.trainer.failure(0)[1] or b""

    @property
    def note(self) -> bytes:
        """What the body has sent along."""
        return self.trainer.note(0)

    def lease(self) -> int:
        """Keeps the batch that the body has made until the next order. Returns its bytes if it is packed; 0: it is rows."""
        self._lease = self.trainer.lease(0)
        return self._lease.used_nbytes

    @property
    def num_foreign(self) -> int:
        """Objects that the body has pickled, ever."""
        return int(self.trainer.worker(self.ring.worker_id)["num_foreign"])

    def payload(self, nbytes: int, at: int = 0) -> NDArray[np.uint8]:
        """Bytes of the slot, valid until the next order."""
        if not nbytes:
            return np.empty(0, np.uint8)
        return np.ndarray(nbytes, np.uint8, self._memory[self._payload], at)  # type: ignore[arg-type]  # a buffer

    def row_nbytes(self) -> tuple[int, ...]:
        """Bytes of one row of each field."""
        assert self._layout is not None
        return tuple(f.row_nbytes for f in self._layout.fields)

    def rows_nbytes(self) -> int:
        """Bytes of the order's rows."""
        assert self._layout is not None
        return self._layout.nbytes(self._nrows)

    def _make_room(self, nbytes: int) -> None:
        if self.trainer.payload_nbytes(0) >= nbytes:
            return
        memory = private(nbytes)
        self._memory.pop(self._payload, None)
        self._num_made += 1
        self._payload = f"payload-{self._num_made}"
        self._memory[self._payload] = memory
        self.trainer.set_payload(0, memory, self._payload.encode(), 0, nbytes)


def private(nbytes: int) -> Mapping:
    """Memory that no other process sees."""
    fd = os.memfd_create("shmload-desk")
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes)
    finally:
        os.close(fd)
