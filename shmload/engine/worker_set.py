"""Which workers of a ring there are: a crew that may change its size while it works.

A ring has records for the largest crew; the header says how many workers are wanted, and those are the first ones. A worker whose
number is not below that looks at the word between two chunks, and leaves. Nothing it did has to be done again, so a batch cannot
tell. What the trainer has told to leave is remembered here until its process has ended: only then is such an end no death. One that
was told and is wanted again before it looked just stays.
"""

from __future__ import annotations

import logging
from time import monotonic_ns

from shmload._core.trainer import TrainerRing
from shmload.engine.ring import LEAST_SLOTS, RingMemory
from shmload.worker.crew import Crew, interrupts_held

log = logging.getLogger("shmload")


class Roster:
    """The workers of one ring, by number.

    Attributes:
        start_s: what the newest worker took from the call that started it to its first look for work; 0 before one has come.
    """

    def __init__(self, ring: TrainerRing, crew: Crew) -> None:
        self._ring = ring
        self._crew = crew
        self._hired_ns: dict[int, int] = {}  # when each that is there was started
        self._told: set[int] = set()
        self.start_s = 0.0

    def start(self, num_workers: int) -> None:
        """Starts the first crew."""
        self._ring.num_wanted = num_workers
        now = monotonic_ns()
        self._hired_ns = dict.fromkeys(range(num_workers), now)
        self._crew.start(num_workers)

    @property
    def num_wanted(self) -> int:
        """How many workers there are to be."""
        return self._ring.num_wanted

    def resize(self, num_wanted: int) -> bool:
        """Makes the crew that large: starts processes now, and tells others to leave.

        Returns:
            False: not all could be started; what there is stays.
        """
        self._told |= {worker for worker in self._hired_ns if worker >= num_wanted}
        self._ring.num_wanted = num_wanted
        return self._staff()

    def was_told(self, worker: int) -> bool:
        """Whether this worker was told to leave: then that its process has ended is no death."""
        return worker in self._told

    def has_gone(self, worker: int) -> None:
        """Takes note that a worker that was told to leave has ended; it is started again if it is wanted again."""
        self._crew.bury(worker)
        self._ring.forget(worker)
        self._told.discard(worker)
        del self._hired_ns[worker]
        self._staff()

    def _staff(self) -> bool:
        for worker in range(self._ring.num_wanted):
            if worker in self._hired_ns:
                continue
            began = monotonic_ns()
            try:
                self._crew.hire(worker)
            except OSError as error:  # no more processes or memory for one; those that work go on
                log.warning("worker %d could not be started (%s): the loader goes on with fewer", worker, error)
                return False
            self._hired_ns[worker] = began
        return True

    def is_complete(self) -> bool:
        """Whether every wanted worker is up and looks for work."""
        newest = 0
        for worker in range(self._ring.num_wanted):
            started_ns = self._ring.worker(worker)["started_ns"]
            hired_ns = self._hired_ns.get(worker)
            if hired_ns is None or started_ns < hired_ns:
                return False
            if hired_ns > newest:
                newest, self.start_s = hired_ns, (started_ns - hired_ns) / 1e9
        return True


class Size:
    """The size of one engine: its workers, its slots, the memory behind them.

    Args:
        num_cooling: slots beyond those for batches under way.
    """

    def __init__(self, memory: RingMemory, roster: Roster, num_cooling: int = 0) -> None:
        self._memory, self._roster = memory, roster
        self._num_spare = num_cooling + 2

    def resize(self, num_workers: int) -> bool:
        """Makes the crew that large, in seed mode; nobody is waited for. False: a process could not be started."""
        with interrupts_held():
            return self._roster.resize(num_workers)

    def make_room(self, num_ordered: int, budget: int) -> int:
        """Brings slots into use for so many batches under way, or parks what is free beyond.

        Args:
            budget: bytes that payloads may take in all for the sake of more slots.
        Returns:
            how many batches there is room for.
        """
        with interrupts_held():
            num_wanted = num_slots(num_ordered) + self._num_spare - 2
            return self._memory.use(num_wanted, budget) - self._num_spare

    def room(self, budget: int) -> int:
        """Batches under way that there are slots for, or can be within a budget."""
        return self._memory.room(budget) - self._num_spare

    @property
    def payload_nbytes(self) -> int:
        """Bytes reserved for batches now."""
        return self._memory.nbytes


def num_slots(num_ordered: int) -> int:
    """Slots for so many batches under way: one more is the user's, and one is free to be ordered when that comes back."""
    return max(num_ordered + 2, LEAST_SLOTS)
