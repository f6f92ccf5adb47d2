"""Record which line of the program took each batch that still has its slot.

`shmload.debug` is the public interface. Only loaders that start their workers after `enable()` are recorded;
SHMLOAD_DEBUG_BATCHES=1 enables it from the start.
"""

from __future__ import annotations

import os
from time import monotonic
from typing import NamedTuple

from shmload._core.trainer import LEASED, Order, TrainerRing
from shmload.introspect.users_frame import users_place

POISON = 0xA5  # src/lease.h writes it

_is_enabled = os.environ.get("SHMLOAD_DEBUG_BATCHES", "") not in ("", "0")


def enable(on: bool = True) -> None:
    """Record holders, and overwrite new and released slots with 0xA5, in loaders that start their workers from now on.

    So reads of a released batch are noticed. Fields that a dataset's `read_into` or `read_batch_into` does not write are an error
    for each sample, and not only for a worker's first.

    Args:
        on: if False, stop recording.
    """
    global _is_enabled
    _is_enabled = on


def is_enabled() -> bool:
    """Return whether loaders that start their workers now will record holders."""
    return _is_enabled


class Holder(NamedTuple):
    """A batch that still has its slot.

    Attributes:
        slot: number of the slot in the ring.
        epoch, step: the epoch, and the number of the batch within it.
        nbytes: size of the slot.
        age_s: seconds since it was yielded.
        where: the line that took it, "file:line in function".
    """

    slot: int
    epoch: int
    step: int
    nbytes: int
    age_s: float
    where: str

    def __str__(self) -> str:
        return (
            f"slot {self.slot} ({self.nbytes} bytes): batch {self.step} of epoch {self.epoch}, taken {self.age_s:.1f} s ago at "
            f"{self.where}"
        )


class Holders:
    """The record of which line took each batch of one ring. Constructing it makes the ring overwrite released slots.

    Args:
        ring: the ring.
    """

    def __init__(self, ring: TrainerRing) -> None:
        self._ring = ring
        self._ring.poison = True
        self._taken: dict[int, tuple[int, int, float, str]] = {}  # slot -> epoch, step, time, place

    def delivered(self, order: Order) -> None:
        """Record that a batch is about to be yielded.

        Args:
            order: its order.
        """
        self._taken[order.slot] = (order.epoch, self._ring.batch_of(order.step), monotonic(), users_place())

    def held(self) -> list[Holder]:
        """Return the batches that still have their slots, the oldest first."""
        now, ring = monotonic(), self._ring
        found = [
            Holder(slot, epoch, step, ring.payload_nbytes(slot), now - taken, where)
            for slot, (epoch, step, taken, where) in self._taken.items()
            if ring.state(slot) == LEASED
        ]
        return sorted(found, key=lambda holder: -holder.age_s)

    def __str__(self) -> str:
        return "".join(f"\n{holder}" for holder in self.held())
