"""Start, stop and replace the workers of one engine, and adjust how many workers and slots are in use.

A ring has records for the largest worker pool. Its header contains the number of wanted workers, which are those with the lowest
numbers. The others see this number between two chunks and leave. Their finished chunks stay valid, so no batch changes. The set
remembers the workers that are leaving until their processes have ended, because any other exit is a death.
"""

from __future__ import annotations

import logging
from time import monotonic_ns

from shmload._core.trainer import TrainerRing
from shmload.engine.ring_memory import LEAST_SLOTS, RingMemory
from shmload.processes.interrupts import interrupts_held
from shmload.worker.pool import WorkerPool

log = logging.getLogger("shmload")


class WorkerSet:
    """The workers of one engine by number, and the slots that they fill.

    Args:
        ring: the trainer's end of the ring.
        pool: starts and ends the processes.
        memory: the payload of the slots.
        num_pending_copies: number of slots in addition to those for batches in flight.

    Attributes:
        leaving: workers that were asked to leave; the end of their processes is not a death.
        start_s: seconds that the newest worker took from its start until it looked for work; 0 before any worker has started.
    """

    def __init__(self, ring: TrainerRing, pool: WorkerPool, memory: RingMemory, num_pending_copies: int) -> None:
        self._ring, self._pool, self._memory = ring, pool, memory
        self._num_pending_copies = num_pending_copies
        self._num_spare = num_pending_copies + 2  # slots besides those of ordered batches, as num_slots counts them
        self._called_ns: dict[int, int] = {}  # worker -> time when it was started
        self.leaving: set[int] = set()
        self.start_s = 0.0

    def start(self, num_workers: int) -> None:
        """Start the first workers.

        Args:
            num_workers: number of workers to start.
        """
        self._ring.num_wanted = num_workers
        now = monotonic_ns()
        self._called_ns = dict.fromkeys(range(num_workers), now)
        self._pool.start(num_workers)

    def resize(self, num_wanted: int) -> bool:
        """Change the number of workers without waiting, in seed mode: start processes, or ask workers to leave.

        Args:
            num_wanted: the new number.
        Returns:
            whether all new workers could be started. If not, those that were started stay.
        """
        with interrupts_held():
            self.leaving |= {worker for worker in self._called_ns if worker >= num_wanted}
            self._ring.num_wanted = num_wanted
            return self._start_missing()

    def make_room(self, num_ordered: int, budget: int) -> int:
        """Bring slots into use for `num_ordered` batches in flight, or park free slots that are not needed.

        Args:
            num_ordered: wanted number of batches in flight.
            budget: maximum bytes of all payloads after adding slots.
        Returns:
            number of batches in flight for which there are slots.
        """
        with interrupts_held():
            return self._memory.use(num_slots(num_ordered) + self._num_pending_copies, budget) - self._num_spare

    def room(self, budget: int) -> int:
        """Return the number of batches that can be in flight if all payloads may take `budget` bytes."""
        return self._memory.room(budget) - self._num_spare

    @property
    def payload_nbytes(self) -> int:
        """Return the size of all payloads now, in bytes."""
        return self._memory.nbytes

    def forget(self, worker: int) -> None:
        """Reap the process of a worker that has left, and start it again if it is wanted again."""
        self._pool.reap(worker)
        self._ring.forget(worker)
        self.leaving.discard(worker)
        del self._called_ns[worker]
        self._start_missing()

    def _start_missing(self) -> bool:
        for worker in range(self._ring.num_wanted):
            if worker in self._called_ns:
                continue
            began = monotonic_ns()
            try:
                self._pool.start_worker(worker)
            except OSError as error:  # no processes or memory are left
                log.warning("worker %d could not be started (%s); the loader continues with fewer workers", worker, error)
                return False
            self._called_ns[worker] = began
        return True

    def is_complete(self) -> bool:
        """Return whether every wanted worker has started and looks for work."""
        newest = 0
        for worker in range(self._ring.num_wanted):
            started_ns = self._ring.worker(worker)["started_ns"]
            called_ns = self._called_ns.get(worker)
            if called_ns is None or started_ns < called_ns:
                return False
            if called_ns > newest:
                newest, self.start_s = called_ns, (started_ns - called_ns) / 1e9
        return True


def num_slots(num_ordered: int) -> int:
    """Return the number of slots for `num_ordered` batches in flight: one more for the batch in use, and one that is free."""
    return max(num_ordered + 2, LEAST_SLOTS)
