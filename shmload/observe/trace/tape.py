"""The events of one ring, kept: what the recorders hold is copied before it is overwritten, and what was missed is counted.

A recorder keeps the last few hundred events of its owner (src/events.h). Whoever wants more reads often enough. Within the
program that is after each delivery, since between two of them workers can do no more than what is ordered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmload._core.events import EVENT_NBYTES, KINDS, Recorders
from shmload._core.mapping import Mapping

__all__ = ["EVENT", "KIND_OF", "Tape"]

# One event, as shml_event in src/events.h. `place` is a chunk, or of an order's publication the number of its chunks.
EVENT = np.dtype(
    [
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("order", "<u8"),
        ("epoch", "<i8"),
        ("step", "<i8"),
        ("kind", "<u4"),
        ("slot", "<u4"),
        ("place", "<u4"),
        ("rows", "<u4"),
        ("amount", "<u8"),
    ]
)
assert EVENT.itemsize == EVENT_NBYTES
KIND_OF = {name: number for number, name in KINDS.items()}
FULL_SHARE = 4  # a recorder is read when one in so many of its places is taken


class Tape:
    """What one ring's recorders have told since a moment.

    Args:
        control: mapping of its control block.
        with_history: begin with what they hold already, else with what comes from now on.
    Attributes:
        num_lost: events that were overwritten before they were read.
    """

    def __init__(self, control: Mapping, *, with_history: bool) -> None:
        self._recorders = recorders = Recorders(control)
        self.owner_pid = recorders.owner_pid
        self.num_workers = recorders.num_workers
        self._next = [0] * (recorders.num_workers + 1) if with_history else recorders.heads()
        self._raw: list[list[bytes]] = [[] for _ in self._next]
        self._due = max(1, recorders.capacity // FULL_SHARE)
        self.num_lost = 0
        if with_history:
            self.drain()
            self.num_lost = 0  # what was before all memory is not missed

    @property
    def is_closing(self) -> bool:
        """Whether the loader is ending."""
        return self._recorders.is_closing

    @property
    def capacity(self) -> int:
        """Events that a recorder keeps."""
        return self._recorders.capacity

    def pids(self) -> list[int]:
        """Each worker's process, as it knows its number; 0: it has not started."""
        return self._recorders.pids()

    def drain_if_due(self) -> None:
        """Reads if a recorder is filling up. Cost: some 50 ns and 10 for each worker if none is."""
        if self._recorders.most_unread(self._next) >= self._due:
            self.drain()

    def drain(self) -> int:
        """Reads what is new. Returns the most that any one recorder had."""
        most = 0
        for owner, since in enumerate(self._next):
            first, raw = self._recorders.read(owner, since)
            self._next[owner] = first + len(raw) // EVENT_NBYTES
            self.num_lost += first - since
            most = max(most, self._next[owner] - since)
            if raw:
                self._raw[owner].append(raw)
        return most

    def events(self, owner: int) -> NDArray[np.void]:
        """What was read of one owner, in the order it was written; the last owner is the trainer. Fields as EVENT."""
        return np.frombuffer(b"".join(self._raw[owner]), EVENT)
