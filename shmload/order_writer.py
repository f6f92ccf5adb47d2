"""From an order to a slot that workers claim: its bytes, the room for its batch, and the bells.

The usual order is posted by one native call (`TrainerRing.post`). Here is the same for all others: a sampler's own keys, an order
or a batch larger than its room, one that is written again because its samples differ or were bad.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmload import faults
from shmload._core.trainer import Order, TrainerRing
from shmload.batch.layout import Layout
from shmload.ring_memory import RingMemory
from shmload.shm.doorbell import Doorbell, JointBell

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
