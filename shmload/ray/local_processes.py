"""Decide which orders of a ring are left to processes of this machine, when actors claim from the same ring.

Batches are delivered in order, and only a limited number is ordered ahead, so one slow batch delays all others. Therefore:

* an actor without a task takes the oldest order, like any process; for an actor with tasks, which would start later, the oldest
  orders are skipped, one for each process, because a free process starts at once;
* an actor gets no task while the processes would finish all orders in progress before the actor finished that batch.

The time that an actor takes is measured, separately for each number of tasks that it already has in progress. Measured times decay
toward 0, so an actor that was slow once is tried again. Tasks sent before an actor's first answer do not count, because the actor
was still starting.

Rejected: always claiming the oldest order. The batches queued at a slow actor are then the ones that are needed next: with actors
four times slower, both kinds together reached half of the throughput of the processes alone (benchmarks/local_workers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from shmload._core.filler import WorkerRing

HALF_LIFE_S = 20.0  # half-life of a measurement; not shorter, because each new attempt with a slow actor delays all batches
WEIGHT = 0.25  # weight of the newest measurement


class LocalProcesses:
    """The measured times of actors and processes that claim from one ring, and the decisions based on them.

    An actor is identified by the place of its worker in the dispatcher's list.

    Args:
        ring: a view of the ring, which counts the chunks that its workers have finished.
        processes: the worker numbers of the processes.
        num_ordered: batches that the trainer orders ahead.
        clock: returns seconds.
    """

    def __init__(self, ring: WorkerRing, processes: range, num_ordered: int, clock: Callable[[], float] = monotonic) -> None:
        self._ring, self._processes, self._num_ordered, self._clock = ring, processes, num_ordered, clock
        self._last = (0, 0)  # chunks and nanoseconds of all processes at the last measurement
        self._process_s = 0.0  # seconds of a process for a batch; 0 if not known
        self._took: dict[tuple[int, int], tuple[float, float]] = {}  # (actor, tasks in progress) -> (seconds, time of measurement)
        self._first_answers: dict[int, float] = {}  # actor -> time of its first answer

    def num_skipped(self, num_under_way: int) -> int:
        """Return the number of oldest orders that an actor must skip if it already has `num_under_way` tasks in progress."""
        return len(self._processes) if num_under_way else 0

    def may_claim(self, actor: int, num_under_way: int) -> bool:
        """Return whether an actor that has `num_under_way` tasks in progress would finish another one in time."""
        self._look()
        took_s, when = self._took.get((actor, num_under_way), (0.0, 0.0))
        faded_s = took_s * 0.5 ** ((self._clock() - when) / HALF_LIFE_S)
        return not self._process_s or faded_s * len(self._processes) <= self._num_ordered * self._process_s

    def answered(self, actor: int, num_under_way: int, began_s: float, ended_s: float) -> None:
        """Record the time that a task took an actor.

        Args:
            actor: the actor.
            num_under_way: number of tasks that it had in progress when it got this one.
            began_s, ended_s: times of `clock` at the claim and at the reply.
        """
        if began_s < self._first_answers.setdefault(actor, ended_s):
            return
        took_s = ended_s - began_s
        before, _ = self._took.get((actor, num_under_way), (took_s, 0.0))
        self._took[actor, num_under_way] = before + WEIGHT * (took_s - before), ended_s

    def _look(self) -> None:
        paces = [self._ring.pace_of(worker) for worker in self._processes]
        chunks, took_ns = sum(pace[0] for pace in paces), sum(pace[1] for pace in paces)
        new_chunks = chunks - self._last[0]
        if new_chunks >= len(self._processes):
            self._process_s = (took_ns - self._last[1]) / new_chunks / 1e9
            self._last = chunks, took_ns
