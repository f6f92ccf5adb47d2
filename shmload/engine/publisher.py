"""Publish orders in slots: write the indices, make room for the batch, and ring the workers' doorbells.

`TrainerRing.post` publishes the usual order in one native call. `Publisher.write` handles all others: indices that are a sampler's
own keys, an order or a batch larger than its room, an order that is published again because its samples differ in shape or were
bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from shmload import faults
from shmload._core.trainer import Order, TrainerRing
from shmload.batch.layout import Layout
from shmload.engine.ring_memory import RingMemory
from shmload.shm import pickling
from shmload.shm.doorbell import Doorbell, JointBell

REPACKED_SHARE = 4  # if 1 batch in 4 had to be packed after all, pack all batches from the start


class Publisher:
    """The writer of a ring's orders, for batches of rows of one shape and for packed batches.

    Args:
        ring: the trainer's end of the ring.
        memory: the payload of its slots.
        bells: the workers' doorbells: one for each worker, or one for all.
        is_packed: batches are packed from the start, because the samples are known not to have one shape.

    Attributes:
        layout: offsets of the fields in a slot; None until it is known.
        num_repacked: number of batches that were ordered as rows and had to be packed.
        is_packed: whether all new orders are packed.
    """

    def __init__(self, ring: TrainerRing, memory: RingMemory, bells: Sequence[Doorbell | JointBell], *, is_packed: bool) -> None:
        self._ring, self._memory, self._bells, self.is_packed = ring, memory, bells, is_packed
        self.layout: Layout | None = None
        self.num_repacked = 0

    def accept_layout(self, layout: Layout | None, max_rows: int) -> None:
        """Use this layout, and give every slot room for `max_rows` rows. If it is None, pack all batches."""
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
        """Publish the usual kind of order in a free slot. Return False if the order is of another kind or no slot is free."""
        nchunks = self._ring.post(order, is_packed=self.is_packed)
        if nchunks:
            self.ring_workers(order, nchunks)
        return nchunks > 0

    @faults.at("publishing")
    def write(self, order: Order, slot: int, *, is_packed: bool = False) -> None:
        """Publish an order of any kind in a slot that is held, or again in the slot that it already has."""
        indices, is_pickled = order.indices, False
        raw: Any = None
        if isinstance(indices, np.ndarray) and not order.is_samplers_object:
            raw = indices
        elif type(indices) is list and set(map(type, indices)) <= {int}:
            with suppress(OverflowError):
                raw = np.array(indices, np.int64)
        if raw is None:
            raw, is_pickled = pickling.dumps(indices), True
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
        """Publish an order again as a packed batch, because its samples differ in shape. If that is common, pack all later batches.

        Args:
            order: an order in a slot.
            num_delivered: number of batches delivered so far.
        """
        self.num_repacked += 1
        if self.num_repacked > 1 and REPACKED_SHARE * self.num_repacked >= num_delivered:
            self.is_packed = True  # reading further batches as rows first would be wasted work
        self.write(order, order.slot, is_packed=True)

    @faults.at("ringing")
    def ring_workers(self, order: Order, nchunks: int) -> None:
        """Wake the workers that may claim the order."""
        self._bells[order.worker].post_up_to(min(nchunks, self._ring.num_wanted))
