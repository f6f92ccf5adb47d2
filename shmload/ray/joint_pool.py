"""A worker pool of Ray actors and processes of this machine that fill one ring."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from time import monotonic

from shmload.ray.ray_pool import RayPool
from shmload.worker.pool import Death, ProcessPool, WorkerPool


class JointPool:
    """Two worker pools on one ring: the workers with the lowest numbers are actors, the others processes of this machine.

    Args:
        actors: the pool of the actors.
        processes: the pool of the processes.
        num_actors: number of actors, and so the number of the first process.
    """

    def __init__(self, actors: RayPool, processes: ProcessPool, num_actors: int) -> None:
        self._actors, self._processes, self._num_actors = actors, processes, num_actors

    def _pool_of(self, worker_id: int) -> WorkerPool:
        return self._actors if worker_id < self._num_actors else self._processes

    @property
    def pids(self) -> list[int]:
        """Return the workers' process ids: the agent's for each actor, then the processes' own."""
        return self._actors.pids + self._processes.pids

    @property
    def processes(self) -> list[BaseProcess]:
        """Return the multiprocessing processes of this machine's workers."""
        return self._processes.processes

    def reads_samples(self, worker_id: int) -> bool:
        """Return whether the worker is a process of this machine."""
        return self._pool_of(worker_id).reads_samples(worker_id)

    def start(self, num_workers: int) -> None:
        """Start both pools, the processes first, so that a fork inherits nothing of the agent."""
        self._processes.start(num_workers)
        self._actors.start(num_workers)

    def start_worker(self, worker_id: int) -> None:
        """Start a worker that has not been started yet. Raise NotImplementedError if it is an actor."""
        self._pool_of(worker_id).start_worker(worker_id)

    def reap(self, worker_id: int) -> None:
        """Forget a worker that has ended and will not be replaced. Raise NotImplementedError if it is an actor."""
        self._pool_of(worker_id).reap(worker_id)

    def deaths(self) -> list[Death]:
        """Return the workers of either kind that have ended. Cost: two polls."""
        return self._actors.deaths() + self._processes.deaths()

    def replace(self, worker_id: int) -> None:
        """Start a replacement for a dead worker."""
        self._pool_of(worker_id).replace(worker_id)

    def stack(self, worker_id: int) -> str:
        """Return the stack of a worker of this machine; a placeholder for an actor."""
        return self._pool_of(worker_id).stack(worker_id)

    def kill(self, worker_id: int) -> Death | None:
        """End one worker at once. For an actor, also end its agent and all other actors."""
        return self._pool_of(worker_id).kill(worker_id)

    def stop(self, grace_s: float) -> None:
        """End all workers within one grace period. Idempotent."""
        deadline = monotonic() + grace_s
        try:
            self._processes.stop(grace_s)
        finally:
            self._actors.stop(max(deadline - monotonic(), 0.0))
