"""The slots of one ring as pinned memory: each is a piece of its own, registered once and unregistered before it is unmapped.

Slot by slot, and not the segment at once, because a copy may not reach across two pieces, one that grows leaves the others as they
are, and a ring that is closed under living batches is left piece by piece. Each piece keeps its mapping. A device that will not
register (a limit on locked memory, say) is asked no more: batches are as good, and copies from them wait for themselves.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from shmload._core.mapping import Mapping
from shmload.device.calls import Calls


@dataclass
class _Piece:
    mapping: Mapping
    address: int
    nbytes: int
    is_registered: bool = False


class Pins:
    """Which slot lies where, and whether it is pinned."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pieces: dict[int, _Piece] = {}
        self._waiting: list[int] = []  # slots that have memory and are to be registered
        self._pid = os.getpid()
        self.has_failed = False
        self.warning = ""  # to be given where an exception loses nothing

    def add(self, slot: int, mapping: Mapping, offset: int, nbytes: int) -> None:
        """Says where a slot lies from now on. It is registered later: workers that are forked should find the device untouched."""
        self._pieces[slot] = _Piece(mapping, mapping.address + offset, nbytes)
        self._waiting.append(slot)

    def register(self) -> None:
        """Registers what has come since the last time."""
        while self._waiting:
            piece = self._pieces.get(self._waiting.pop())
            if piece is None or piece.is_registered or self.has_failed:  # a slot may have grown twice meanwhile
                continue
            try:
                self._calls.register(piece.address, piece.nbytes)
            except RuntimeError as error:
                self.has_failed = True
                self.warning = (
                    f"{piece.nbytes} bytes of the ring could not be pinned for {self._calls.name} ({error}): batches come in "
                    "memory that is not pinned, and copies from it are slower. Raise the limit on locked memory (ulimit -l), or "
                    "lower prefetch_factor, num_workers or batch_size"
                )
            else:
                piece.is_registered = True

    def remove(self, slot: int) -> None:
        """Lets a slot's piece go, from which nothing copies any more."""
        piece = self._pieces.pop(slot, None)
        if piece is not None and piece.is_registered:
            self._calls.unregister(piece.address)

    def slot_at(self, address: int) -> int:
        """The slot in which an address lies; -1: none."""
        for slot, piece in self._pieces.items():
            if 0 <= address - piece.address < piece.nbytes:
                return slot
        return -1

    def __del__(self) -> None:
        # what ended where nobody could be told of it; nobody has it any more
        if sys is None or sys.is_finalizing() or self._pid != os.getpid() or not self._pieces:
            return
        self._calls.synchronize()
        for slot in list(self._pieces):
            self.remove(slot)
