"""The agent's side of Ray: the connection, the dataset in the object store, the actors and who takes a dead one's place.

Which node decodes for which worker.

Actors ask Ray for no CPU of their own: a request that the cluster cannot meet waits for ever, and two loaders would starve each
other. Instead they are spread by hand, in proportion to the nodes' CPUs, over nodes without a GPU first: the others' CPUs
are a trainer's.

The worker pool whose workers are Ray actors: to the trainer, one process that is all of its workers.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload import faults
from shmload._core.filler import ERROR
from shmload.errors import ClusterUnreachable, StoreError, WorkerDied
from shmload.ray.actors import NOTHING, ActorSetting, Decoder, Outcome, Task, take_failure
from shmload.shm import owners
from shmload.storage.transport import Retry, RetryPolicy, TransientError
from shmload.worker.pool import Death, PreparedWorkers, ProcessPool, WorkerPool, processes, with_pickled_job
from shmload.worker.reader import Job, Post


class Node(NamedTuple):
    """A node of the cluster that is alive."""

    node_id: str
    num_cpus: int
    has_gpu: bool


def alive_nodes(described: Iterable[dict[str, Any]]) -> list[Node]:
    """The nodes that Ray says are alive, in a fixed order."""
    nodes = []
    for one in described:
        if one["Alive"]:
            resources = one["Resources"]
            nodes.append(Node(one["NodeID"], int(resources.get("CPU", 0)), resources.get("GPU", 0) > 0))
    return sorted(nodes)


def place(nodes: list[Node], num_workers: int, first: int = 0) -> list[str]:
    """The node of each worker.

    Workers fill CPU-only nodes up to their CPUs, by turns, then nodes with a GPU, then go round again.

    Args:
        first: at which node turns begin, so that several loaders do not all begin at the same one.
    Raises:
        ValueError: there is no node.
    """
    if not nodes:
        raise ValueError("the cluster has no node that is alive")
    turns = [_turns([node for node in nodes if node.has_gpu is has_gpu], first) for has_gpu in (False, True)]
    lap = [node_id for part in turns for node_id in part] or [node.node_id for node in nodes]
    return [lap[worker % len(lap)] for worker in range(num_workers)]


def _turns(nodes: list[Node], first: int) -> list[str]:
    """Each node as often as it has CPUs, in turns."""
    nodes = nodes[first % len(nodes) :] + nodes[: first % len(nodes)] if nodes else []
    most = max((node.num_cpus for node in nodes), default=0)
    return [node.node_id for turn in range(most) for node in nodes if node.num_cpus > turn]


log = logging.getLogger("shmload")

HEAD_S = 10.0  # for the head to take a connection; Ray itself tries for two minutes
LOG_S = 5.0  # how often it is logged what is still waited for
LOOK_S = 0.1  # how often who waits for the connection looks whether it still should
MAX_DEATHS = 3  # of actors over one task alone: then it is the task


class Call(NamedTuple):
    """A task that an actor has been asked for."""

    actor: Any
    ref: Any
    method: str
    argument: tuple[Any, ...]


@dataclass(frozen=True)
class Briefing:
    """What the agent is started with: the workers' posts, where the cluster is, the program's sys.path.

    Attributes:
        is_seeded: what a task gives depends on nothing but the task, so another actor may do it again.
        num_ahead: tasks that each worker may have under way.
        num_beside: workers of this machine that claim from the same ring.
        num_ordered: batches that the trainer orders ahead, for all.
        connect_timeout_s: how long the cluster may take to answer; what is sent there then takes as long as it takes.
        sample_timeout_s: how long one sample may take before its actor is ended; None: for ever.
        is_again: another agent was there before: a cluster that does not answer is asked again.
    """

    posts: tuple[Post, ...]
    address: str
    paths: tuple[str, ...]
    is_seeded: bool
    num_ahead: int
    num_beside: int
    num_ordered: int
    connect_timeout_s: float
    sample_timeout_s: float | None = None
    is_again: bool = False


class Cluster:
    """A connection to Ray, and one actor for each worker.

    Args:
        pickled_job: the pickled job.
        settings: of the actors, by worker.
    """

    def __init__(self, briefing: Briefing, pickled_job: NDArray[np.uint8], settings: list[ActorSetting]) -> None:
        self._briefing = briefing
        self._pickled_job = pickled_job
        self._pickled_job_nbytes = pickled_job.nbytes
        self._settings = settings
        self._is_connected = threading.Event()  # all is done, or has failed
        self._asked_at: float | None = None  # when the cluster was first asked; before that Ray is imported
        self._joined_at: float | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        # held while a worker's new actor does one task again, alone
        self._repeats = [threading.Lock() for _ in settings]
        self._newest: dict[int, tuple[Any, int]] = {}  # by worker, where its newest answer came from, and how many places before
        self._ended: dict[int, str] = {}  # torch mode: workers whose actor has died, and how
        self.node_id = ""  # of this machine
        self._job: Any = None  # the dataset in Ray's object store

    def connect(self) -> None:
        """Joins the cluster, puts the dataset and asks for the actors."""
        try:
            import ray

            self._join()
            self._joined_at = monotonic()
            self.node_id = str(ray.get_runtime_context().get_node_id())
            self._job = ray.put(self._pickled_job)
            self._start_workers(self._settings)
        except Exception as error:
            self._failure = error if isinstance(error, ClusterUnreachable) else unreachable(self._briefing.address, error)
        finally:
            self._pickled_job = NOTHING
            self._is_connected.set()

    def _join(self) -> None:
        self._asked_at = monotonic()
        tries = Retry(RetryPolicy(timeout_s=self._briefing.connect_timeout_s), "join the Ray cluster")
        while True:
            try:
                return join(self._briefing.address, self._briefing.connect_timeout_s)
            except ClusterUnreachable as error:
                if not self._briefing.is_again:
                    raise
                try:
                    tries.failed(TransientError(str(error)))
                except StoreError:  # no try is left
                    raise error from None
                log.warning("%s; trying again", error)

    def _start_workers(self, settings: Iterable[ActorSetting]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = place(alive_nodes(ray.nodes()), len(self._settings), os.getpid())
        for setting in settings:
            # not soft: an actor that asks for no CPU is then put anywhere
            worker = setting.post.worker_id
            strategy = NodeAffinitySchedulingStrategy(nodes[worker], soft=False)
            made = ray.remote(Decoder).options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0)
            self._actors[worker] = made.remote(setting, self._job)

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        """Returns once the connection stands or has failed, or as soon as nobody wants it.

        The cluster has `connect_timeout_s` to answer. Importing Ray before that and sending the dataset behind it have no limit:
        they end with this process, and what they wait for is said now and then.
        """
        began = logged = monotonic()
        while not self._is_connected.wait(LOOK_S):
            now = monotonic()
            asked_at = self._asked_at if self._joined_at is None else None
            if not is_wanted() or (asked_at is not None and now - asked_at > self._briefing.connect_timeout_s):
                return
            if now - logged > LOG_S:
                logged = now
                log.warning("%s, for %.0f s so far", self._waits_for(), now - began)

    def _waits_for(self) -> str:
        if self._asked_at is None:
            return "Ray is being imported"
        if self._joined_at is None:
            limit = f"connect_timeout_s={self._briefing.connect_timeout_s:g}"
            return f"the Ray cluster at address={self._briefing.address!r} has not answered yet ({limit})"
        return f"the dataset, {self._pickled_job_nbytes / 1e6:,.0f} MB, is on its way into Ray's object store"

    # ------------------------------------------------------------ tasks

    def begin(self, worker: int, method: str, *argument: Any) -> Call:
        """Asks a worker's actor for something, behind all it has been asked for; nothing is waited for.

        Raises:
            ClusterUnreachable: there is no connection, or none yet.
            WorkerDied: the actor is dead and may not be replaced.
        """
        if not self._is_connected.is_set():
            raise ClusterUnreachable(
                f"the Ray cluster at address={self._briefing.address!r} did not answer within "
                f"{self._briefing.connect_timeout_s:g} s. Is its head running, and does this machine belong to it (`ray status`)? "
                "If it is only slow, raise connect_timeout_s"
            )
        if self._failure is not None:
            raise self._failure
        if worker in self._ended:
            raise WorkerDied(self._ended[worker])
        actor = self._actors[worker]
        return Call(actor, getattr(actor, method).remote(*argument), method, argument)

    def is_repeating(self, worker: int) -> bool:
        """Whether the worker's actor has taken a dead one's place and should be left alone with what that one may have died of."""
        return self._repeats[worker].locked()

    def result(self, worker: int, call: Call) -> Any:
        """What came of a call; in seed mode, if its actor has died, from another in its place.

        It is waited for without a limit: to give up an object that is on its way would mean to begin its transfer again.

        Raises:
            WorkerDied: the actor is dead and may not be replaced, or `MAX_DEATHS` died over it alone.
        """
        import ray
        from ray import exceptions

        died = (
            exceptions.RayActorError,
            exceptions.ObjectLostError,
            exceptions.NodeDiedError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,  # Ray has killed it because its node ran short
        )
        try:
            return ray.get(call.ref)
        except died as error:
            reason: Exception = error
        num_deaths = 0  # the first may have been over another task
        if (timed_out := self._timed_out(worker, call)) is not None:
            return timed_out
        with self._repeats[worker]:  # alone: what it had been asked for besides would be blamed, too
            while True:
                self._see_to(worker, call.actor, reason, num_deaths)
                call = self.begin(worker, call.method, *call.argument)
                try:
                    return ray.get(call.ref)
                except died as error:
                    reason, num_deaths = error, num_deaths + 1
                if (timed_out := self._timed_out(worker, call)) is not None:
                    return timed_out

    def num_actors(self, worker: int, place: tuple[str, int]) -> int:
        """How many actors the worker has had, when the newest answer came from there."""
        with self._lock:
            newest, number = self._newest.get(worker, (None, 0))
            if newest != place:
                self._newest[worker] = place, number + 1
            return self._newest[worker][1]

    def _timed_out(self, worker: int, call: Call) -> Outcome | None:
        """What came of a task whose sample took too long: its failure, and another actor."""
        task = call.argument[0]
        if self._settings[worker].sample_timeout_s is None or not isinstance(task, Task):
            return None
        if (failure := take_failure(call.actor, task)) is None:
            return None
        self._replace(worker, call.actor, "a sample took too long")
        return Outcome(ERROR, error=failure.dumps(self._settings[worker].text_capacity))

    def _see_to(self, worker: int, actor: Any, error: Exception, num_deaths: int) -> None:
        how = " ".join(str(error).split())
        if not self._briefing.is_seeded:
            self._ended.setdefault(
                worker,
                f"the Ray actor of DataLoader worker {worker} has died, and with it the worker's random streams, which torch mode "
                f"cannot go on without: {how}. Resume from a state_dict, or give a seed: then another actor takes its place",
            )
            raise WorkerDied(self._ended[worker])
        self._replace(worker, actor, how)
        if num_deaths >= MAX_DEATHS:
            raise WorkerDied(f"{num_deaths} Ray actors of DataLoader worker {worker} died over the same rows: {how}")

    def _replace(self, worker: int, actor: Any, how: str) -> None:
        import ray

        with self._lock:
            if self._actors[worker] is not actor:  # its place has been taken already, after another task
                return
            log.warning("the Ray actor of worker %d has died (%s); another takes its place", worker, how)
            try:
                ray.kill(actor)  # one that only could not be reached would go on
            except Exception:
                pass
            self._start_workers([self._settings[worker]])


def join(given: str, timeout_s: float = HEAD_S) -> None:
    """Makes this process a driver of a cluster.

    Args:
        timeout_s: how long the head may take to take a connection, at most HEAD_S.
    Raises:
        ClusterUnreachable: there is none at this address.
    """
    import ray

    address = (os.environ.get("RAY_ADDRESS") or given) if given == "auto" else given
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), min(timeout_s, HEAD_S)).close()
        ray.init(address=address, logging_level=logging.WARNING, namespace="shmload")
    except Exception as error:
        raise unreachable(given, error) from error


def unreachable(address: str, error: Exception) -> ClusterUnreachable:
    """What is said of a cluster that cannot be joined."""
    return ClusterUnreachable(
        f"there is no Ray cluster at address={address!r} ({type(error).__name__}: {error}). Start one with "
        "`ray start --head`, join it from this machine with `ray start --address=HEAD:6379`, or give the head's address"
    )


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
        except BrokenPipeError:  # it has ended already; `deaths` will report it
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
