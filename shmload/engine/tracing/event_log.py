"""Copy the events of a ring's recorders before they are overwritten.

A recorder keeps the last few hundred events of its owner (src/events.h). Missed events are counted, and a reader that needs all of
them must read often enough.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmload._core.events import EVENT_NBYTES, Recorders
from shmload._core.mapping import Mapping

# One event: shml_event in src/events.h. `place` is a chunk, or the number of chunks of a published order.
_WORDS = ("begin_ns", "end_ns", "order", "epoch", "step", "kind", "slot", "place", "rows", "amount")
EVENT = np.dtype(list(zip(_WORDS, ["<u8", "<u8", "<u8", "<i8", "<i8", "<u4", "<u4", "<u4", "<u4", "<u8"], strict=True)))
assert EVENT.itemsize == EVENT_NBYTES

FULL_SHARE = 4  # a recorder is read when 1/4 of its places are full


class EventLog:
    """The events of one ring's recorders, from the construction of the log or from the oldest event in the recorders.

    Args:
        control: mapping of the ring's control block.
        with_history: whether to begin with the events that the recorders already hold.
    Attributes:
        owner_pid: process id of the trainer.
        num_workers, capacity: number of workers, and of events that a recorder holds.
        num_lost: number of events that were overwritten before they were read.
    """

    def __init__(self, control: Mapping, *, with_history: bool) -> None:
        self._recorders = recorders = Recorders(control)
        self.owner_pid = recorders.owner_pid
        self.num_workers, self.capacity = recorders.num_workers, recorders.capacity
        self._next = [0] * (recorders.num_workers + 1) if with_history else recorders.heads()
        self._raw: list[list[bytes]] = [[] for _ in self._next]
        self._due = max(1, recorders.capacity // FULL_SHARE)
        self.num_lost = 0
        if with_history:
            self.drain()
            self.num_lost = 0  # events older than the buffer are not counted as lost

    def pids(self) -> list[int]:
        """Return the pid of each worker, by its number; 0 for one that has not started."""
        return self._recorders.pids()

    def drain_if_due(self) -> None:
        """Read the recorders if one is filling up. Cost if not: about 50 ns, and 10 ns for each worker."""
        if self._recorders.most_unread(self._next) >= self._due:
            self.drain()

    def drain(self) -> int:
        """Read the new events. Return the largest number of events of one recorder."""
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
        """Return the recorded events of one owner in order, as a read-only array of dtype `EVENT`.

        Args:
            owner: number of a worker, or `num_workers` for the trainer.
        """
        return np.frombuffer(b"".join(self._raw[owner]), EVENT)
