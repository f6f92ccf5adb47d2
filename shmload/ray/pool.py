"""The worker pool whose workers are Ray actors: to the trainer, one process that is all of its workers."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import weakref
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

from shmload import faults
from shmload.ray.cluster import Briefing
from shmload.shm import owners
from shmload.worker.pool import Death, PreparedWorkers, ProcessPool, WorkerPool, processes, with_pickled_job
from shmload.worker.reader import Job

MAX_AHEAD = 4  # tasks of a worker: one is decoded, one travels, one is copied, and one comes early


class RayPool:
    """The agent's process. If it ends, all of its workers have ended; a new one starts when the rows of all have been taken back.

    Args:
        briefing: what the agent is started with.
    """

    def __init__(self, briefing: Briefing) -> None:
        self._briefing = briefing
        self._agent: subprocess.Popen[bytes] | None = None
        self._ending: Any = None  # the finalizer of the agent
        self._dead: set[int] = set()  # workers of an agent that has ended, whose rows are still to be taken back
        self._pid = os.getpid()

    def reads_samples(self, worker_id: int) -> bool:
        """None of them does: their actors do."""
        return False

    @property
    def pids(self) -> list[int]:
        """Of the workers now: the agent's, for each of them."""
        return [] if self._agent is None else [self._agent.pid] * len(self._briefing.posts)

    @property
    def processes(self) -> list[Any]:
        """None of multiprocessing's."""
        return []

    def start(self, num_workers: int) -> None:
        """Starts the agent, which is not waited for."""
        faults.hit("starting")
        self._launch(self._briefing)

    def _launch(self, briefing: Briefing) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(briefing.paths), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "shmload.ray.agent"]
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        owners.watch(agent.pid)
        self._agent = agent
        self._ending = weakref.finalize(self, _end, agent, os.getpid())
        assert agent.stdin is not None
        try:
            agent.stdin.write(pickle.dumps(briefing))
            agent.stdin.close()
        except BrokenPipeError:  # it has ended already; `deaths` will tell
            pass

    def start_worker(self, worker_id: int) -> None:
        """Not possible: the loader refuses a worker pool of changing size."""
        raise NotImplementedError("a worker pool of Ray actors keeps its size")

    reap = start_worker

    def deaths(self) -> list[Death]:
        """All workers whose agent has ended, until they are replaced. Cost: one poll."""
        agent = self._agent
        if agent is None or agent.poll() is None:
            return []
        if not self._dead:
            self._dead = set(range(len(self._briefing.posts)))
        return [Death(worker, agent.pid, agent.returncode) for worker in sorted(self._dead)]

    def replace(self, worker_id: int) -> None:
        """Starts a new agent once every dead worker's rows have been taken back: before that it would claim for them."""
        self._dead.discard(worker_id)
        if self._dead or self._agent is None:
            return
        self._ending()
        owners.forget(self._agent.pid)
        posts = tuple(dataclasses.replace(post, resume=b"") for post in self._briefing.posts)
        self._launch(dataclasses.replace(self._briefing, posts=posts, is_again=True))

    def stack(self, worker_id: int) -> str:
        """Not known."""
        return "(unknown: it is decoded on another machine)"

    def kill(self, worker_id: int) -> Death:
        """Ends the agent at once."""
        assert self._agent is not None
        self._agent.kill()
        return Death(worker_id, self._agent.pid, self._agent.wait())

    def stop(self, grace_s: float) -> None:
        """Gives the agent that long to leave, then kills it; Ray ends its actors either way. Safe to call twice."""
        agent = self._agent
        if agent is None or os.getpid() != self._pid:
            return
        try:
            faults.hit("closing")
            agent.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._ending()
            owners.forget(agent.pid)
            self._agent = None


def _end(agent: subprocess.Popen[bytes], pid: int) -> None:
    """Kills an agent that is still there: of a loader that was not closed, at the end of its process."""
    if os.getpid() == pid and agent.poll() is None:
        agent.kill()
        agent.wait()


def pickled_by_value(job: Job) -> bytearray:
    """The job as bytes for actors, with what the trainer's own program defines: they do not have it.

    Raises:
        TypeError: that is not possible; names the cause.
    """
    from ray import cloudpickle

    try:
        return owners.dumps(job, lambda value, take: cloudpickle.dumps(value, protocol=5, buffer_callback=take))
    except Exception as error:
        raise TypeError(
            'backend="ray" sends the dataset, collate_fn and worker_init_fn to other machines, and they cannot be pickled: '
            f"{type(error).__name__}: {error}. Open files, locks and connections at first use in the worker"
        ) from error


class JointPool:
    """Two worker pools of one ring, told apart by the workers' numbers.

    Args:
        num_actors: the number of the first worker that is this machine's.
    """

    def __init__(self, actors: RayPool, processes: ProcessPool, num_actors: int) -> None:
        self._actors, self._processes, self._num_actors = actors, processes, num_actors

    def _pool_of(self, worker_id: int) -> WorkerPool:
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
        return self._pool_of(worker_id).reads_samples(worker_id)

    def start(self, num_workers: int) -> None:
        """Starts both; the processes first, so that a fork has nothing of the agent's."""
        self._processes.start(num_workers)
        self._actors.start(num_workers)

    def start_worker(self, worker_id: int) -> None:
        """Starts one."""
        self._pool_of(worker_id).start_worker(worker_id)

    def reap(self, worker_id: int) -> None:
        """Forgets one."""
        self._pool_of(worker_id).reap(worker_id)

    def deaths(self) -> list[Death]:
        """Workers of either kind that have ended. Cost: two polls."""
        return self._actors.deaths() + self._processes.deaths()

    def replace(self, worker_id: int) -> None:
        """Starts another in a dead one's place."""
        self._pool_of(worker_id).replace(worker_id)

    def stack(self, worker_id: int) -> str:
        """Where a worker is now, if it is this machine's."""
        return self._pool_of(worker_id).stack(worker_id)

    def kill(self, worker_id: int) -> Death:
        """Ends one at once; an actor's agent, with it."""
        return self._pool_of(worker_id).kill(worker_id)

    def stop(self, grace_s: float) -> None:
        """Ends all within one time of grace. Safe to call twice."""
        deadline = monotonic() + grace_s
        try:
            self._processes.stop(grace_s)
        finally:
            self._actors.stop(max(deadline - monotonic(), 0.0))


@dataclasses.dataclass(frozen=True)
class OnCluster:
    """Workers on a Ray cluster, and some of this machine beside them.

    Args:
        address: of the cluster's head, or "auto".
        num_local_workers: of the workers, how many, the last ones, are this machine's.
        connect_timeout_s: how long the cluster may take to answer.
    """

    address: str
    num_local_workers: int
    connect_timeout_s: float

    def __call__(self, called: PreparedWorkers) -> RayPool | JointPool:
        """The worker pool, not started."""
        num_far = len(called.posts) - self.num_local_workers
        posts = with_pickled_job(called.group, "pickled_job", pickled_by_value(called.job), called.posts[:num_far])
        briefing = Briefing(
            tuple(posts),
            self.address,
            tuple(path or os.getcwd() for path in sys.path),
            is_seeded=called.job.seed is not None,
            num_ahead=max(1, min(called.num_ahead, MAX_AHEAD)),
            num_beside=self.num_local_workers,
            num_ordered=called.num_ahead * len(called.posts),
            connect_timeout_s=self.connect_timeout_s,
            sample_timeout_s=called.sample_timeout_s,
        )
        actors = RayPool(briefing)
        if not self.num_local_workers:
            return actors
        return JointPool(actors, processes(dataclasses.replace(called, posts=called.posts[num_far:])), num_far)
