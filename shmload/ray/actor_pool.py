"""A worker pool of Ray actors: the agent's connection to the cluster, and the trainer's `RayPool`.

The agent (`Cluster`) joins Ray, puts the dataset into the object store, creates one actor for each worker, and replaces actors
that die. The trainer (`RayPool`) has one child process, the agent, which represents all workers.

An actor has started once it has the dataset and has reported its node's versions, and gets tasks only then. So an actor that waits
for a CPU, or for a node that an autoscaler is still adding, delays no batch, because the other actors take its share.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload import faults
from shmload._core.filler import ERROR
from shmload.errors import ClusterUnreachable, StoreError, WorkerDied
from shmload.processes.child import Child, Children
from shmload.processes.exit_codes import settle_popen
from shmload.processes.restarts import RestartPolicy
from shmload.ray import life_lock
from shmload.ray.actors import NOTHING, ActorSetting, Decoder, Introduction, Reply, Task, take_failure, versions
from shmload.ray.placement import alive_nodes, draining, options_of
from shmload.ray_options import Ray
from shmload.shm import reaper, travel
from shmload.shm.segment import Segment
from shmload.storage.retry import Retry, RetryPolicy, TransientError
from shmload.worker.failure import Failure, sample_at
from shmload.worker.job import Job, Post
from shmload.worker.pool import Death, PreparedWorkers, ProcessPool, WorkerPool, named, processes
from shmload.world import package_ability

log = logging.getLogger("shmload")

HEAD_S = 10.0  # the timeout of a connection to the head; Ray itself retries for two minutes
LOG_S = 5.0  # interval of log messages about pending steps
LOOK_S = 0.1  # interval at which a wait checks whether it is still needed
MAX_DEATHS = 3  # deaths of actors while reading one task alone, after which the task is blamed
MAX_STARTS = 10  # actors of one worker that end before they have started, after which the cluster is blamed
OWN_S = 2.0  # time that a dead actor's task waits for the replacement before another worker's actor gets it


class Call(NamedTuple):
    """A task that was sent to an actor."""

    actor: Any
    ref: Any
    method: str
    argument: tuple[Any, ...]


@dataclass(frozen=True)
class AgentConfig:
    """The agent's settings: the workers' posts, the cluster's address, the program's sys.path.

    Attributes:
        is_seeded: whether a task's result depends only on the task, so that another actor may repeat it.
        num_ahead: tasks that each worker may have in progress.
        num_local: workers of this machine that claim from the same ring.
        num_ordered: batches that the trainer orders ahead, over all workers.
        connect_timeout_s: seconds that the cluster may take to answer; sending the dataset afterwards has no limit.
        ship_timeout_s: seconds that an actor may then take to receive the dataset and start; None for no limit.
        actor_options: arguments of Ray's `.options` for the actors.
        node_nbytes: bytes of the dataset on each node, if the dataset reports them.
        sample_timeout_s: seconds that one sample may take before its actor is ended; None for no limit.
        repeats_in_order: whether a worker repeats a lost batch before all others, because its random streams continue from batch to
            batch.
        is_replacement: whether this agent replaces another; then it retries a cluster that does not answer.
    """

    posts: tuple[Post, ...]
    address: str
    paths: tuple[str, ...]
    is_seeded: bool
    num_ahead: int
    num_local: int
    num_ordered: int
    connect_timeout_s: float
    ship_timeout_s: float | None = None
    actor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    node_nbytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sample_timeout_s: float | None = None
    repeats_in_order: bool = False
    is_replacement: bool = False


class Cluster:
    """A connection to Ray, with one actor for each worker.

    Args:
        config: the agent's settings.
        pickled_job: the pickled job.
        settings: settings of the actors, by worker.
        wait_for_job: returns once the pickled job has been written.
        control: a descriptor of the ring's control segment, which actors that reach it lock.
    """

    def __init__(
        self,
        config: AgentConfig,
        pickled_job: NDArray[np.uint8],
        settings: list[ActorSetting],
        wait_for_job: Callable[[], None],
        control: int,
    ) -> None:
        self._config = config
        self.repeats_in_order = config.repeats_in_order
        self._pickled_job = pickled_job
        self._wait_for_job = wait_for_job
        self._control = control
        self._bytes: dict[Any, int] = {}  # actor that has not ended -> the byte of the control segment that it locks
        self._pickled_job_nbytes = pickled_job.nbytes
        self._settings = settings
        self._is_connected = threading.Event()  # `connect` has finished or failed
        self._asked_at: float | None = None  # time of the first request to the cluster, after Ray was imported
        self._joined_at: float | None = None
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)  # an actor has started, or none will
        self._actors: dict[int, Any] = {}
        self._started: dict[int, Introduction] = {}  # worker -> the introduction of its newest actor, once that has started
        self._waits_since: dict[int, float] = {}  # worker -> time since which its newest actor has been starting
        self._restarts = [RestartPolicy(MAX_STARTS - 1) for _ in settings]  # counts actors that end before they have started
        self.when_started: list[Callable[[], None]] = []  # called when an actor has started, from any thread
        # held while a worker's new actor repeats one task alone
        self._repeats = [threading.Lock() for _ in settings]
        self._newest: dict[int, tuple[Any, int]] = {}  # by worker: place of its newest answer, and how many actors so far
        self._ended: dict[int, str] = {}  # torch mode: workers whose actor has died, with the message
        self.node_id = ""  # the node of this machine
        self._job: Any = None  # the dataset in Ray's object store

    def connect(self) -> None:
        """Join the cluster, create the actors, and put the dataset into the object store while they start."""
        try:
            import ray

            self._join()
            self._joined_at = monotonic()
            self.node_id = str(ray.get_runtime_context().get_node_id())
            self._make_actors(self._settings)
            self._wait_for_job()
            self._job = ray.put(self._pickled_job)
            self._introduce(self._settings)
        except Exception as error:
            self._failure = error if isinstance(error, ClusterUnreachable) else unreachable(self._config.address, error)
        finally:
            self._pickled_job = NOTHING
            self._is_connected.set()

    def _join(self) -> None:
        self._asked_at = monotonic()
        tries = Retry(RetryPolicy(timeout_s=self._config.connect_timeout_s), "join the Ray cluster")
        while True:
            try:
                return join(self._config.address, self._config.connect_timeout_s)
            except ClusterUnreachable as error:
                if not self._config.is_replacement:
                    raise
                try:
                    tries.failed(TransientError(str(error)))
                except StoreError:  # no attempts left
                    raise error from None
                log.warning("%s; trying again", error)

    def _make_actors(self, settings: Iterable[ActorSetting]) -> None:
        import ray

        given, node_nbytes = self._config.actor_options, self._config.node_nbytes
        options = options_of(
            alive_nodes(ray.nodes(), draining()), len(self._settings), given, first=os.getpid(), node_nbytes=node_nbytes
        )
        for setting in settings:
            worker = setting.post.worker_id
            actor = ray.remote(Decoder).options(max_restarts=0, **options[worker])
            life_lock.let_live(self._control, byte := life_lock.draw())
            made = actor.remote(dataclasses.replace(setting, byte=byte))
            self._actors[worker], self._bytes[made] = made, byte

    def _introduce(self, settings: Iterable[ActorSetting]) -> None:
        """Send the dataset to new actors; each has started once it answers."""
        for setting in settings:
            worker = setting.post.worker_id
            with self._lock:
                self._waits_since[worker] = monotonic()
                actor = self._actors[worker]
            threading.Thread(target=self._welcome, args=(worker, actor, actor.introduce.remote([self._job])), daemon=True).start()

    def _welcome(self, worker: int, actor: Any, introduction: Any) -> None:
        """Wait until an actor has started, which may take long, and let the dispatcher claim for its worker."""
        try:
            found: Introduction = self._answer(actor, introduction)
            failure = None if (text := differing(found)) is None else ClusterUnreachable(text)
        except Exception as error:
            self._end(actor)
            self._not_started(worker, actor, error)
            return
        with self._news:
            if self._actors[worker] is not actor:
                return
            self._started[worker] = found
            self._restarts[worker].succeeded()
            self._waits_since.pop(worker, None)
            self._failure = self._failure or failure
            self._news.notify_all()
        self._tell()

    def _not_started(self, worker: int, actor: Any, error: Exception) -> None:
        """Replace an actor that ended before it had started, unless no replacement could do better."""
        how = _line(error)
        with self._news:
            is_given_up = self._restarts[worker].failed() is None
            is_hopeless = is_given_up or getattr(error, "actor_init_failed", False) or "creation task" in how
            if is_hopeless and self._actors[worker] is actor:
                wanted = ", ".join(f"{name} {version}" for name, version in versions().items())
                self._failure = ClusterUnreachable(
                    f"the Ray actor of DataLoader worker {worker} cannot start on its node: {how}. Each node needs the "
                    f"trainer's versions ({wanted}) and the resources in actor_options"
                )
                self._news.notify_all()
        if is_hopeless:
            self._tell()
        else:
            self._replace(worker, actor, how)

    def _tell(self) -> None:
        for call in self.when_started:
            call()

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        """Wait until the connection is up or has failed, or until it is no longer wanted.

        The cluster has `connect_timeout_s` to answer. Importing Ray before that and sending the dataset after it have no limit:
        they end with this process, and a log message every LOG_S seconds names the pending one.
        """
        began = logged = monotonic()
        with shown_on_stderr() as show:
            while not self._is_connected.wait(LOOK_S):
                now = monotonic()
                asked_at = self._asked_at if self._joined_at is None else None
                if not is_wanted() or (asked_at is not None and now - asked_at > self._config.connect_timeout_s):
                    return
                show(self._waits_for())
                if now - logged > LOG_S:
                    logged = now
                    log.warning("%s, for %.0f s so far", self._waits_for(), now - began)

    def _waits_for(self) -> str:
        if self._asked_at is None:
            return "Ray is being imported"
        if self._joined_at is None:
            limit = f"connect_timeout_s={self._config.connect_timeout_s:g}"
            return f"the Ray cluster at address={self._config.address!r} has not answered yet ({limit})"
        return f"the dataset, {self._pickled_job_nbytes / 1e6:,.0f} MB, is being sent to Ray's object store"

    def watch(self, is_wanted: Callable[[], bool]) -> None:
        """Report progress until all actors have started: on one line of a terminal, else in the log at growing intervals."""
        pause_s, logged = LOG_S, monotonic()
        with shown_on_stderr() as show, self._news:
            while is_wanted() and self._failure is None and len(self._started) < len(self._settings):
                self._news.wait(LOOK_S)
                show(None if self._started and self._config.is_seeded else self.progress())
                if len(self._started) < len(self._settings) and monotonic() - logged > pause_s:
                    log.warning("%s", self.progress())
                    logged, pause_s = monotonic(), 2 * pause_s

    def progress(self) -> str:
        """Return a message with the number of actors that have started, and of their nodes."""
        with self._lock:
            nodes = {found.place[0] for found in self._started.values()}
            text = f"{len(self._started)} of {len(self._settings)} Ray actors have started"
        if nodes:
            text += f"; the dataset, {self._pickled_job_nbytes / 1e6:,.0f} MB, is on {len(nodes)} node{'s' * (len(nodes) > 1)}"
        return f"{text}. The others wait for the dataset, or for {self._resources()}"

    def _resources(self) -> str:
        """Return a text with an actor's requested resources and the cluster's CPUs."""
        import ray

        asked = {"num_cpus": 1, **self._config.actor_options}
        wants = ", ".join(
            f"{name}={value!r}" for name, value in asked.items() if name not in ("runtime_env", "scheduling_strategy")
        )
        try:
            free, all_of = (what().get("CPU", 0) for what in (ray.available_resources, ray.cluster_resources))
        except Exception:  # the head may have ended
            return wants
        return f"{wants} (of the cluster's {all_of:g} CPUs {free:g} are free)"

    # ------------------------------------------------------------ tasks

    def begin(self, worker: int, method: str, *argument: Any) -> Call:
        """Send a call to a worker's actor, after all its earlier calls, without waiting for the result.

        If the actor has died and its replacement has not started, nothing is sent yet; `result` sends it.

        Raises:
            ClusterUnreachable: there is no connection yet, or it has failed.
            WorkerDied: the actor is dead and may not be replaced.
        """
        self._check(worker)
        with self._lock:
            actor = self._actors[worker] if worker in self._started else None
        return Call(None, None, method, argument) if actor is None else self._ask(actor, method, argument)

    def _ask(self, actor: Any, method: str, argument: tuple[Any, ...]) -> Call:
        if not self._reaches_ring(actor):
            argument = tuple(given._replace(slot=None) if isinstance(given, Task) else given for given in argument)
        return Call(actor, getattr(actor, method).remote(*argument), method, argument)

    def _check(self, worker: int) -> None:
        if not self._is_connected.is_set():
            raise ClusterUnreachable(
                f"the Ray cluster at address={self._config.address!r} did not answer within "
                f"{self._config.connect_timeout_s:g} s. Is its head running, and does this machine belong to it (`ray status`)? "
                "If it is only slow, raise connect_timeout_s"
            )
        if self._failure is not None:
            raise self._failure
        if worker in self._ended:
            raise WorkerDied(self._ended[worker])
        if self._is_late(worker):
            raise ClusterUnreachable(
                f"no Ray actor could start within ship_timeout_s={self._config.ship_timeout_s:g}: {self.progress()}. Add nodes, "
                'request less (actor_options={"num_cpus": 0} shares CPUs with other processes), or raise ship_timeout_s'
            )

    def may_claim(self, worker: int) -> bool:
        """Return whether the worker has an actor that has started, or an error to report instead."""
        return worker in self._started or self._failure is not None or not self._is_connected.is_set() or self._is_late(worker)

    def _is_late(self, worker: int) -> bool:
        """Return whether the worker's actor is overdue. In seed mode, this is False once any actor has started."""
        limit_s = self._config.ship_timeout_s
        with self._lock:
            since = self._waits_since.get(worker)
            if limit_s is None or since is None or (self._config.is_seeded and self._started):
                return False
        return monotonic() - since > limit_s

    def can_write_ring(self, worker: int) -> bool:
        """Return whether the worker's actor can write into the ring."""
        return self._reaches_ring(self._actors.get(worker))

    def _reaches_ring(self, actor: Any) -> bool:
        byte = self._bytes.get(actor)
        return byte is not None and life_lock.is_held(self._control, byte)

    def is_repeating(self, worker: int) -> bool:
        """Return whether the worker's actor is a replacement that repeats, alone, a task that may have ended its predecessor."""
        return self._repeats[worker].locked()

    def result(self, worker: int, call: Call) -> Any:
        """Return the result of a call. In seed mode, if its actor has died, another actor repeats it.

        There is no timeout, because a timeout would restart the transfer of an object.

        Raises:
            WorkerDied: the actor is dead and may not be replaced, or `MAX_DEATHS` actors died while reading this task alone, but
                none while reading a single sample of it.
        """
        from ray import exceptions

        died = (
            exceptions.RayActorError,
            exceptions.ObjectLostError,
            exceptions.NodeDiedError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,  # Ray has killed it because its node ran out of memory
        )
        reason: Exception | None = None  # the error that ended the previous actor
        if call.actor is not None:
            try:
                return self._answer(call.actor, call.ref)
            except died as error:
                reason = error
            if (timed_out := self._timed_out(worker, call)) is not None:
                return timed_out
        num_deaths = 0.0  # the first death may have been caused by another task
        with self._repeats[worker]:  # alone, because other tasks in progress could be the cause of a death
            while True:
                if reason is not None:
                    self._see_to(worker, call.actor, reason)
                    if num_deaths >= MAX_DEATHS:
                        return self._blamed(worker, call, reason, died)
                actor = self._actor_for(worker)
                is_own = actor is self._actors[worker]  # another worker's actor has other tasks, which may cause its death
                call = self._ask(actor, call.method, tuple(map(_suspect, call.argument)))
                try:
                    return self._answer(call.actor, call.ref)
                except died as error:
                    reason, num_deaths = error, num_deaths + (1 if is_own else 1 / MAX_DEATHS)
                if (timed_out := self._timed_out(worker, call)) is not None:
                    return timed_out

    def _answer(self, actor: Any, ref: Any) -> Any:
        """Return an actor's answer to a call. If this raises an error that the actor did not report, the actor has ended."""
        import ray
        from ray.exceptions import RayTaskError

        try:
            return ray.get(ref)
        except RayTaskError:
            raise
        except BaseException:
            self._end(actor)
            raise

    def _end(self, actor: Any) -> None:
        """End an actor. Afterward it cannot write into the ring, and another actor may get its rows."""
        import ray

        if (byte := self._bytes.get(actor)) is None:
            return
        began = monotonic()
        life_lock.let_end(self._control, byte)
        while True:
            with suppress(Exception):  # an actor that is only unreachable would continue
                ray.kill(actor)
            if life_lock.wait_until_free(self._control, byte, LOG_S):
                break
            log.warning(
                "%s was ended %.0f s ago and still lives: its rows wait until it cannot write into the ring any more",
                actor,
                monotonic() - began,
            )
        self._bytes.pop(actor, None)

    def _actor_for(self, worker: int) -> Any:
        """Return the worker's newest actor once it has started, or another worker's if that takes longer than OWN_S.

        A replacement takes long, for example, if its CPU was lost with a node.

        Raises:
            ClusterUnreachable: no actor has started within `ship_timeout_s`.
        """
        asked_at = monotonic()
        with self._news:
            while True:
                if worker not in self._started and monotonic() - asked_at > OWN_S:
                    others = [other for other in self._started if not self.is_repeating(other)]
                    if others:
                        return self._actors[min(others, key=lambda other: (other - worker) % len(self._settings))]
                if worker in self._started or self._failure is not None or self._is_late(worker):
                    self._check(worker)
                    return self._actors[worker]
                self._news.wait(LOOK_S)

    def num_actors(self, worker: int, place: tuple[str, int]) -> int:
        """Record the place of the worker's newest answer. Return the number of its actors so far."""
        with self._lock:
            newest, number = self._newest.get(worker, (None, 0))
            if newest != place:
                self._newest[worker] = place, number + 1
            return self._newest[worker][1]

    def _timed_out(self, worker: int, call: Call) -> Reply | None:
        """If a sample of the task is known to have timed out, replace the actor and return the failure; otherwise return None."""
        task = call.argument[0]
        if self._settings[worker].sample_timeout_s is None or not isinstance(task, Task):
            return None
        if (failure := take_failure(call.actor, task)) is None:
            return None
        self._replace(worker, call.actor, "a sample took too long" if failure.rows else "samples read at once took too long")
        if not failure.rows:  # the samples are read again one by one
            return None
        return Reply(ERROR, error=failure.dumps(self._settings[worker].text_capacity))

    def _blamed(self, worker: int, call: Call, reason: Exception, died: tuple[type[Exception], ...]) -> Reply:
        """Return the failure of the task's first sample that also ends its actor when it is read alone.

        Raises:
            WorkerDied: no single sample ends its actor.
        """
        task, text_capacity = call.argument[0], self._settings[worker].text_capacity
        how = f"{MAX_DEATHS} Ray actors of DataLoader worker {worker} died over the same rows: {_line(reason)}"
        row, num_deaths = task.first if isinstance(task, Task) else -1, 0.0
        while 0 <= row < task.end:
            actor = self._actor_for(worker)
            is_own = actor is self._actors[worker]
            lone = self._ask(actor, call.method, (task._replace(first=row, end=row + 1, slot=None),))
            try:
                self._answer(lone.actor, lone.ref)
                row, num_deaths = row + 1, 0.0
            except died as error:
                if (timed_out := self._timed_out(worker, lone)) is not None:
                    return timed_out
                self._replace(worker, actor, _line(error))  # no effect on another worker's actor
                num_deaths += 1 if is_own else 1 / MAX_DEATHS
            if num_deaths >= 1:
                text = f"{sample_at(task.key(row), task.epoch, row, task.step)} ended its actor when it was read alone, too: {how}"
                return Reply(ERROR, error=Failure(WorkerDied, text, "", "", (row,)).dumps(text_capacity))
        raise WorkerDied(how)

    def _see_to(self, worker: int, actor: Any, error: Exception) -> None:
        how = _line(error)
        if not self._config.is_seeded:
            self._ended.setdefault(
                worker,
                f"the Ray actor of DataLoader worker {worker} has died, and with it the worker's random streams, which torch mode "
                f"cannot continue without: {how}. Resume from a state_dict, or give a seed: then another actor takes its place",
            )
            raise WorkerDied(self._ended[worker])
        self._replace(worker, actor, how)

    def _replace(self, worker: int, actor: Any, how: str) -> None:
        with self._lock:
            if self._actors[worker] is not actor:  # it has already been replaced, after another task
                return
            self._actors[worker] = None
            self._started.pop(worker, None)
            self._waits_since[worker] = monotonic()
        log.warning("the Ray actor of worker %d has died (%s); another takes its place", worker, how)
        try:
            self._make_actors([self._settings[worker]])
            self._introduce([self._settings[worker]])
        except Exception as error:  # the head is gone, or all nodes are
            self._failure = unreachable(self._config.address, error)


def _suspect(argument: Any) -> Any:
    """Mark a task as suspect, so that its samples are read one by one; return any other argument unchanged."""
    return argument._replace(is_suspect=True) if isinstance(argument, Task) else argument


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


SAME_VERSIONS = (
    'Install the same versions on every node, or name an environment that has them: actor_options={"runtime_env": {"pip": [...]}}'
)


def other_versions(theirs: Mapping[str, str]) -> str:
    """Return a text with the versions of a node that differ from this machine's; empty if all agree."""
    return ", ".join(
        f"{name} {theirs[name] or 'missing'} where the trainer has {version or 'none'}"
        for name, version in versions().items()
        if theirs[name] != version
    )


def differing(found: Introduction) -> str | None:
    """Return the error message for an actor whose node has other versions than this machine; None if they agree."""
    if not (said := other_versions(found.versions)):
        return None
    return (
        f"node {found.place[0]} of the Ray cluster ({found.host}) has {said}: pickles from here may fail or have another meaning "
        f"there. {SAME_VERSIONS}"
    )


@contextmanager
def shown_on_stderr() -> Iterator[Callable[[str | None], None]]:
    """Show one changing line of text on a terminal and remove it at the end. Without a terminal on stderr, show nothing."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text or "", visible=bool(text))


def join(given: str, timeout_s: float = HEAD_S) -> None:
    """Make this process a driver of a cluster.

    Args:
        given: the address of the head, or "auto".
        timeout_s: seconds that the head may take to accept a connection, at most HEAD_S.
    Raises:
        ClusterUnreachable: no cluster answers at this address.
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


def own_cluster() -> str:
    """Return the address of the cluster that this process already belongs to, like a worker of Ray Train; otherwise "auto"."""
    ray: Any = sys.modules.get("ray")
    return str(ray.get_runtime_context().gcs_address) if ray is not None and ray.is_initialized() else "auto"


def unreachable(address: str, error: Exception) -> ClusterUnreachable:
    """Return the error for a cluster that cannot be joined."""
    cause: BaseException | None = error
    while cause is not None:
        if "AuthenticationError" in str(cause):  # Ray puts it into the message of another error
            return ClusterUnreachable(
                f"the Ray cluster at address={address!r} wants Ray's token: set RAY_AUTH_MODE=token in this program's "
                "environment, and on another machine than the head's bring the token (the head's ~/.ray/auth_token) there"
            )
        cause = cause.__cause__ or cause.__context__
    return ClusterUnreachable(
        f"there is no Ray cluster at address={address!r} ({type(error).__name__}: {error}). Start one with "
        "`ray start --head`, join it from this machine with `ray start --address=HEAD:6379`, or give the head's address"
    )


ARRIVED = b"!"  # sent after the agent config, once the pickled job has been written
MAX_AHEAD = 4  # most tasks of a worker: one is decoded, one transferred, one copied, and one is in reserve


class RayPool:
    """A worker pool of Ray actors: one child process, the agent, represents all of them.

    If the agent ends, all of its workers have ended; a new agent starts once the rows of all workers have been recovered. Ray
    starts actors on any machine, so the agent learns of an actor's death from Ray and from its file lock (life_lock.py), not from a
    pidfd.

    Args:
        config: the agent's settings.
        parcel: the pickled job, which `start` writes to `segment` while the agent starts.
        segment: the shared memory that receives the pickled job.
        control: the ring's control segment, which actors that write into the ring lock.
    """

    def __init__(self, config: AgentConfig, parcel: travel.Parcel, segment: Segment, control: Segment) -> None:
        self._config = config
        self._parcel, self._segment, self._control = parcel, segment, control
        self._logged = 0.0  # time of the last log message that actors outlive their agent; 0 before the first
        self._agent: Child | None = None
        self._children: Children[Child] = Children()  # the agent, until it is reaped
        self._ending: Any = None  # the finalizer that ends the agent
        self._dead: set[int] = set()  # workers of an agent that has ended, whose rows have not been recovered yet
        self._pid = os.getpid()

    def reads_samples(self, worker_id: int) -> bool:
        """Return False, because actors read the samples, not this machine's processes."""
        return False

    @property
    def pids(self) -> list[int]:
        """Return the agent's PID for each worker."""
        return [] if self._agent is None else [self._agent.pid] * len(self._config.posts)

    @property
    def processes(self) -> list[Any]:
        """Return an empty list, because the agent is not a multiprocessing process."""
        return []

    def start(self, num_workers: int) -> None:
        """Start the agent without waiting for it, and write the pickled job in the meantime."""
        faults.hit("starting")
        self._launch(self._config, self._write)

    def _write(self) -> None:
        self._segment.reserve(self._segment.nbytes)
        self._parcel.write(self._segment.fd)
        del self._parcel  # frees the memory that pickling used

    def _launch(self, config: AgentConfig, ship: Callable[[], None] = lambda: None) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(config.paths), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "shmload.ray.agent"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        reaper.watch(process.pid)
        self._agent = Child(process.pid, partial(settle_popen, process))
        self._children.add(self._agent)
        self._ending = weakref.finalize(self, _end, self._agent, os.getpid())
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it has ended already; `deaths` will report it
            with suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps(config))
                process.stdin.flush()
            ship()
            process.stdin.write(ARRIVED)

    def start_worker(self, worker_id: int) -> None:
        """Raise NotImplementedError, because a Ray worker pool does not change its size."""
        raise NotImplementedError("a worker pool of Ray actors keeps its size")

    reap = start_worker

    def deaths(self) -> list[Death]:
        """Return all workers once their agent and its actors have ended, until they are replaced. Cost: one poll."""
        agent = self._agent
        if agent is None or not self._children.ended():
            return []
        if not self._dead:
            if life_lock.is_held(self._control.fd):
                self._say_that_it_waits()
                return []
            self._logged, self._dead = 0.0, set(range(len(self._config.posts)))
        return [Death(worker, agent.pid, agent.wait()) for worker in sorted(self._dead)]

    def _say_that_it_waits(self) -> None:
        """Log every LOG_S seconds that actors outlive their agent.

        Their rows cannot be reused while they may still write to them.
        """
        now = monotonic()
        self._logged = self._logged or now
        if now - self._logged > LOG_S:
            self._logged = now
            log.warning("the agent has ended, and some of its Ray actors still live: the loader waits until Ray has ended them")

    def replace(self, worker_id: int) -> None:
        """Start a new agent once every dead worker's rows have been recovered, because it claims for all workers."""
        self._dead.discard(worker_id)
        if self._dead or self._agent is None:
            return
        self._reap(self._agent)
        posts = tuple(dataclasses.replace(post, resume=b"") for post in self._config.posts)
        self._launch(dataclasses.replace(self._config, posts=posts, is_replacement=True))

    def stack(self, worker_id: int) -> str:
        """Return a placeholder, because the stack of a process on another machine is unknown."""
        return "(unknown: it is decoded on another machine)"

    def kill(self, worker_id: int) -> Death:
        """End the agent at once, and wait until the actors that write into the ring have ended."""
        assert self._agent is not None
        ended, pause = Death(worker_id, self._agent.pid, self._agent.kill()), threading.Event()
        while not self.deaths():
            pause.wait(life_lock.LOOK_S)
        return ended

    def stop(self, grace_s: float) -> None:
        """Wait for the agent to leave, then kill it. Ray ends its actors in both cases. Idempotent.

        This does not wait for actors, because their rows are not reused. They keep the ring's memory until they end.

        Args:
            grace_s: seconds to wait.
        """
        if self._agent is None or os.getpid() != self._pid:
            return
        patience_s = 0.0
        try:
            faults.hit("closing")
            patience_s = grace_s
        finally:
            self._children.end(patience_s, self._reap_ended)
            self._agent = None

    def _reap_ended(self, timeout_s: float | None) -> None:
        for agent in self._children.wait(timeout_s)[0]:
            self._reap(agent)

    def _reap(self, agent: Child) -> None:
        self._children.reap(agent)
        self._ending()
        reaper.forget(agent.pid)


def _end(agent: Child, pid: int) -> None:
    """Kill an agent that still runs at the end of its process, because its loader was not closed."""
    if os.getpid() == pid:
        agent.kill()
        agent.reap()


def pickled_by_value(job: Job) -> travel.Parcel:
    """Return the pickled job for actors, with the definitions of the trainer's own program, which actors cannot import.

    Raises:
        TypeError: the job cannot be pickled; the message names the cause.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray has no types for it
        dispatch_table = cloudpickle.CloudPickler.dispatch_table.new_child(travel.reducers())

    def dump(value: Any, take: Callable[[pickle.PickleBuffer], bool]) -> memoryview:
        pickled = io.BytesIO()
        Pickler(pickled, protocol=5, buffer_callback=take).dump(value)
        return pickled.getbuffer()

    # the name of the program in a process that it has spawned, for example a rank; elsewhere __main__ has another name
    if (program := sys.modules.get("__mp_main__")) is not None and program.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(program)
    try:
        return travel.Parcel(job, dump)
    except Exception as error:
        raise TypeError(
            'backend="ray" sends the dataset, collate_fn and worker_init_fn to other machines, and they cannot be pickled: '
            f"{type(error).__name__}: {error}. Open files, locks and connections at first use in the worker"
        ) from error


class JointPool:
    """Two worker pools on one ring; a worker's number determines its pool.

    Args:
        actors: the pool of the workers with the lowest numbers.
        processes: the pool of this machine's workers.
        num_actors: the number of the first worker of this machine.
    """

    def __init__(self, actors: RayPool, processes: ProcessPool, num_actors: int) -> None:
        self._actors, self._processes, self._num_actors = actors, processes, num_actors

    def _pool_of(self, worker_id: int) -> WorkerPool:
        return self._actors if worker_id < self._num_actors else self._processes

    @property
    def pids(self) -> list[int]:
        """Return the workers' PIDs: the agent's for each actor, then the processes' own."""
        return self._actors.pids + self._processes.pids

    @property
    def processes(self) -> list[BaseProcess]:
        """Return this machine's workers."""
        return self._processes.processes

    def reads_samples(self, worker_id: int) -> bool:
        """Return whether the worker belongs to this machine."""
        return self._pool_of(worker_id).reads_samples(worker_id)

    def start(self, num_workers: int) -> None:
        """Start both pools, the processes first, so that a fork inherits nothing of the agent."""
        self._processes.start(num_workers)
        self._actors.start(num_workers)

    def start_worker(self, worker_id: int) -> None:
        """Start one worker."""
        self._pool_of(worker_id).start_worker(worker_id)

    def reap(self, worker_id: int) -> None:
        """Reap one worker."""
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

    def kill(self, worker_id: int) -> Death:
        """End one worker at once. For an actor, also end its agent and all other actors."""
        return self._pool_of(worker_id).kill(worker_id)

    def stop(self, grace_s: float) -> None:
        """End all workers within one grace period. Idempotent."""
        deadline = monotonic() + grace_s
        try:
            self._processes.stop(grace_s)
        finally:
            self._actors.stop(max(deadline - monotonic(), 0.0))


@dataclasses.dataclass(frozen=True)
class OnCluster:
    """Starts workers on a Ray cluster, and optionally some on this machine.

    Args:
        ray: options of the cluster. The last `num_local_workers` of the workers run on this machine.
    """

    ray: Ray

    def __call__(self, called: PreparedWorkers) -> RayPool | JointPool:
        """Return the worker pool, not started."""
        num_far = len(called.posts) - self.ray.num_local_workers
        parcel = pickled_by_value(called.job)
        segment = called.group.segment("pickled_job", parcel.nbytes, num_reserved=0)
        posts = named(called.posts[:num_far], segment)
        locate = package_ability(called.job.dataset, "bytes_by_node")
        repeats_in_order = called.job.seed is None and called.job.tolerates_bad_samples
        config = AgentConfig(
            tuple(posts),
            own_cluster() if self.ray.address == "auto" else self.ray.address,
            tuple(path or os.getcwd() for path in sys.path),
            is_seeded=called.job.seed is not None,
            num_ahead=1 if repeats_in_order else max(1, min(called.num_ahead, MAX_AHEAD)),
            num_local=self.ray.num_local_workers,
            num_ordered=called.num_ahead * len(called.posts),
            connect_timeout_s=self.ray.connect_timeout_s,
            ship_timeout_s=self.ray.ship_timeout_s,
            actor_options=dict(self.ray.actor_options),
            node_nbytes=locate() if locate is not None else {},
            sample_timeout_s=called.sample_timeout_s,
            repeats_in_order=repeats_in_order,
        )
        assert called.group.control is not None
        actors = RayPool(config, parcel, segment, called.group.control)
        if not self.ray.num_local_workers:
            return actors
        return JointPool(actors, processes(dataclasses.replace(called, posts=called.posts[num_far:])), num_far)
