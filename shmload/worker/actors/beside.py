"""What actors leave to the processes of this machine that claim from the same ring.

Batches are wanted in order, and only so many are ordered ahead: one that takes long in the end holds up all. So

* an actor that has nothing to do takes the oldest order, like any process; for one that has, and would begin later, as many of the
  oldest orders are left alone as there are processes, which begin at once when they are free;
* an actor gets nothing as long as the processes would be through with all that is ordered ahead before it had the batch done.

How long an actor takes is measured, apart for each number of errands that it has under way already. A measure fades, so that one
that was slow once is tried again; what was asked of an actor before it first answered is none, since it was still starting.

Rejected: the oldest order for everyone. The batches that lie in the queue of a slow actor are then the ones that are wanted next:
where it took four times as long, both kinds did half of what the processes do alone (benchmarks/local_workers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

HALF_LIFE_S = 20.0  # of a measure: each new attempt at what takes too long holds up all
WEIGHT = 0.25  # of the newest measure


class Paces(Protocol):
    """Tells what workers of a ring have done."""

    def pace_of(self, worker_id: int) -> tuple[int, int]:
        """Chunks done so far, and nanoseconds they took."""


class Beside:
    """The processes of one ring, and what is known of the actors beside them.

    Args:
        processes: their worker numbers.
        num_ordered: batches that the trainer orders ahead.
        clock: seconds.
    """

    def __init__(self, ring: Paces, processes: range, num_ordered: int, clock: Callable[[], float] = monotonic) -> None:
        self._ring, self._processes, self._num_ordered, self._clock = ring, processes, num_ordered, clock
        self._last = (0, 0)  # chunks and nanoseconds of all processes, at the last look
        self._process_s = 0.0  # what a batch takes a process; 0: not known
        self._took: dict[tuple[int, int], tuple[float, float]] = {}  # by actor and errands under way: seconds, and when
        self._first_answers: dict[int, float] = {}  # by actor, when

    def num_left(self, num_under_way: int) -> int:
        """How many of the oldest orders are left alone for an actor that has so many errands."""
        return len(self._processes) if num_under_way else 0

    def may_claim(self, actor: int, num_under_way: int) -> bool:
        """Whether an actor that has so many errands would be done in time with another."""
        self._look()
        took_s, when = self._took.get((actor, num_under_way), (0.0, 0.0))
        faded_s = took_s * 0.5 ** ((self._clock() - when) / HALF_LIFE_S)
        return not self._process_s or faded_s * len(self._processes) <= self._num_ordered * self._process_s

    def answered(self, actor: int, num_under_way: int, began_s: float, ended_s: float) -> None:
        """Takes a measure of an actor that had so many errands when it got this one."""
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
