"""The slots of one ring as pinned memory: each slot is registered once, by itself, and unregistered before it is unmapped.

Slots are registered one by one and not as one segment, because a copy may not cross two registered pieces, because a slot that
grows must not disturb the others, and because a ring that closes while batches are alive is released slot by slot. If the device
refuses to register memory (for example because of a limit on locked memory), it is not asked again: batches are still correct,
and copies from them are synchronous.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from shmload._core.mapping import Mapping
from shmload.device.cuda import CudaDevice


@dataclass
class _Piece:
    mapping: Mapping
    address: int
    nbytes: int
    is_registered: bool = False


class PinnedSlots:
    """The memory of each slot, and whether it is pinned."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pieces: dict[int, _Piece] = {}
        self._waiting: list[int] = []  # slots that have memory and are not registered yet
        self._pid = os.getpid()
        self.has_failed = False  # then nothing more is pinned
        self.warning = ""  # issued by `PendingCopies.look`, where an exception loses nothing

    def add(self, slot: int, mapping: Mapping, offset: int, nbytes: int) -> None:
        """Set the memory of a slot. It is registered later, because forked workers must find the device uninitialized."""
        self._pieces[slot] = _Piece(mapping, mapping.address + offset, nbytes)
        self._waiting.append(slot)

    def register(self) -> None:
        """Register the slots that were added since the last call."""
        while self._waiting:
            piece = self._pieces.get(self._waiting.pop())
            if piece is None or piece.is_registered or self.has_failed:  # a slot may have grown twice
                continue
            try:
                self._device.register(piece.address, piece.nbytes)
            except RuntimeError as error:
                self.has_failed = True
                self.warning = (
                    f"{piece.nbytes} bytes of the ring could not be pinned for {self._device.name} ({error}), so copies of "
                    "batches to the device are slower. Raise the limit on locked memory (ulimit -l), or lower prefetch_factor, "
                    "num_workers or batch_size"
                )
            else:
                piece.is_registered = True

    def remove(self, slot: int) -> None:
        """Unregister and forget the memory of a slot. No copy from it may be running."""
        piece = self._pieces.pop(slot, None)
        if piece is not None and piece.is_registered:
            self._device.unregister(piece.address)

    def slot_at(self, address: int) -> int:
        """Return the slot that contains an address, or -1."""
        for slot, piece in self._pieces.items():
            if 0 <= address - piece.address < piece.nbytes:
                return slot
        return -1

    def __del__(self) -> None:
        # leases of a closed ring may end where Python cannot be called; nothing refers to these slots any more
        if sys is None or sys.is_finalizing() or self._pid != os.getpid() or not self._pieces:
            return
        self._device.synchronize()
        for slot in list(self._pieces):
            self.remove(slot)
