"""Actors and processes of this machine in one crew: whoever is free first takes the next batch.

The ring's first workers are the actors, those behind them this machine's processes. Each kind starts, watches and ends its own;
here is only said whose a worker is. Both have a bell of their own, since one bell would wake the one or the other; who leaves what
to whom stands in `dispatch.py`.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from time import monotonic

from shmload.worker.actors.crew import RayCrew
from shmload.worker.crew import Crew, Death, ProcessCrew


class JointCrew:
    """Two crews of one ring, told apart by the workers' numbers.

    Args:
        num_actors: the number of the first worker that is this machine's.
    """

    def __init__(self, actors: RayCrew, processes: ProcessCrew, num_actors: int) -> None:
        self._actors, self._processes, self._num_actors = actors, processes, num_actors

    def _crew_of(self, worker_id: int) -> Crew:
        return self._actors if worker_id < self._num_actors else self._processes

    @property
    def pids(self) -> list[int]:
        """Of the workers now: the agent's for each actor, then the processes'."""
        return self._actors.pids + self._processes.pids

    @property
    def processes(self) -> list[BaseProcess]:
        """This machine's workers."""
        return self._processes.processes

    def reads_samples(self, worker_id: int) -> bool:
        """Whether the worker is this machine's."""
        return self._crew_of(worker_id).reads_samples(worker_id)

    def start(self, num_workers: int) -> None:
        """Starts both; the processes first, so that a fork has nothing of the agent's."""
        self._processes.start(num_workers)
        self._actors.start(num_workers)

    def hire(self, worker_id: int) -> None:
        """Starts one."""
        self._crew_of(worker_id).hire(worker_id)

    def bury(self, worker_id: int) -> None:
        """Forgets one."""
        self._crew_of(worker_id).bury(worker_id)

    def deaths(self) -> list[Death]:
        """Workers of either kind that have ended. Cost: two polls."""
        return self._actors.deaths() + self._processes.deaths()

    def replace(self, worker_id: int) -> None:
        """Starts another in a dead one's place."""
        self._crew_of(worker_id).replace(worker_id)

    def stack(self, worker_id: int) -> str:
        """Where a worker is now, if it is this machine's."""
        return self._crew_of(worker_id).stack(worker_id)

    def kill(self, worker_id: int) -> Death:
        """Ends one at once; an actor's agent, with it."""
        return self._crew_of(worker_id).kill(worker_id)

    def stop(self, grace_s: float) -> None:
        """Ends all within one time of grace. Safe to call twice."""
        deadline = monotonic() + grace_s
        try:
            self._processes.stop(grace_s)
        finally:
            self._actors.stop(max(deadline - monotonic(), 0.0))
