"""The agent's side of Ray: the connection, the dataset in the object store, the actors and who takes a dead one's place.

An actor counts as started when it has the dataset and has said which versions its node runs; nothing is asked of it before. So one
that waits for a CPU, or for a node that an autoscaler is still to bring, holds up no batch: the others take what it would have.

The worker pool whose workers are Ray actors: to the trainer, one process that is all of its workers.
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

HEAD_S = 10.0  # for the head to take a connection; Ray itself tries for two minutes
LOG_S = 5.0  # how often it is logged what is still waited for
LOOK_S = 0.1  # how often who waits for the connection looks whether it still should
MAX_DEATHS = 3  # of actors over one task alone: then it is the task
MAX_STARTS = 10  # of actors of one worker that end before they have started: then it is the cluster
OWN_S = 2.0  # how long the task of a dead actor waits for its successor before it goes to another worker's


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
        ship_timeout_s: how long it may take then until an actor has the dataset and can begin; None: as long as it takes.
        actor_options: of the actors, as Ray's `.options` takes them.
        near: bytes of the dataset that lie on each node, if it says so.
        sample_timeout_s: how long one sample may take before its actor is ended; None: for ever.
        goes_in_turn: a worker does a batch that is ordered anew before any other: its streams go on from one to the next.
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
    ship_timeout_s: float | None = None
    actor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    near: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sample_timeout_s: float | None = None
    goes_in_turn: bool = False
    is_again: bool = False


class Cluster:
    """A connection to Ray, and one actor for each worker.

    Args:
        pickled_job: the pickled job.
        settings: of the actors, by worker.
        wait_for_job: returns when the pickled job has been written.
        control: a descriptor of the ring's control segment, which actors that reach it lock.
    """

    def __init__(
        self,
        briefing: Briefing,
        pickled_job: NDArray[np.uint8],
        settings: list[ActorSetting],
        wait_for_job: Callable[[], None],
        control: int,
    ) -> None:
        self._briefing = briefing
        self.goes_in_turn = briefing.goes_in_turn
        self._pickled_job = pickled_job
        self._wait_for_job = wait_for_job
        self._control = control
        self._bytes: dict[Any, int] = {}  # by actor that has not ended, which one of the control segment it locks
        self._pickled_job_nbytes = pickled_job.nbytes
        self._settings = settings
        self._is_connected = threading.Event()  # all is done, or has failed
        self._asked_at: float | None = None  # when the cluster was first asked; before that Ray is imported
        self._joined_at: float | None = None
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)  # an actor has started, or none will
        self._actors: dict[int, Any] = {}
        self._started: dict[int, Introduction] = {}  # by worker, of its newest actor, once that has started
        self._waits_since: dict[int, float] = {}  # for the newest actor of a worker, which has not
        self._restarts = [RestartPolicy(MAX_STARTS - 1) for _ in settings]  # of actors that end before they have started
        self.when_started: list[Callable[[], None]] = []  # what to call then, from any thread
        # held while a worker's new actor does one task again, alone
        self._repeats = [threading.Lock() for _ in settings]
        self._newest: dict[int, tuple[Any, int]] = {}  # by worker, where its newest answer came from, and how many places before
        self._ended: dict[int, str] = {}  # torch mode: workers whose actor has died, and how
        self.node_id = ""  # of this machine
        self._job: Any = None  # the dataset in Ray's object store

    def connect(self) -> None:
        """Joins the cluster, asks for the actors, and puts the dataset while they start."""
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

    def _make_actors(self, settings: Iterable[ActorSetting]) -> None:
        import ray

        given, near = self._briefing.actor_options, self._briefing.near
        options = options_of(alive_nodes(ray.nodes(), draining()), len(self._settings), given, first=os.getpid(), near=near)
        for setting in settings:
            worker = setting.post.worker_id
            actor = ray.remote(Decoder).options(max_restarts=0, **options[worker])
            life_lock.let_live(self._control, byte := life_lock.draw())
            made = actor.remote(dataclasses.replace(setting, byte=byte))
            self._actors[worker], self._bytes[made] = made, byte

    def _introduce(self, settings: Iterable[ActorSetting]) -> None:
        """Gives new actors the dataset; they have started when they answer."""
        for setting in settings:
            worker = setting.post.worker_id
            with self._lock:
                self._waits_since[worker] = monotonic()
                actor = self._actors[worker]
            threading.Thread(target=self._welcome, args=(worker, actor, actor.introduce.remote([self._job])), daemon=True).start()

    def _welcome(self, worker: int, actor: Any, introduction: Any) -> None:
        """Waits until an actor has started, which may be long, and has the worker be claimed for."""
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
        """Has another take the place of an actor that ended before it had started, unless no other would do better."""
        how = _line(error)
        with self._news:
            is_given_up = self._restarts[worker].failed() is None
            is_hopeless = is_given_up or getattr(error, "actor_init_failed", False) or "creation task" in how
            if is_hopeless and self._actors[worker] is actor:
                wanted = ", ".join(f"{name} {version}" for name, version in versions().items())
                self._failure = ClusterUnreachable(
                    f"the Ray actor of DataLoader worker {worker} cannot start on its node: {how}. Each node needs what the "
                    f"trainer has ({wanted}), and what actor_options asks for"
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
        """Returns once the connection stands or has failed, or as soon as nobody wants it.

        The cluster has `connect_timeout_s` to answer. Importing Ray before that and sending the dataset behind it have no limit:
        they end with this process, and what they wait for is said now and then.
        """
        began = logged = monotonic()
        with shown_on_stderr() as show:
            while not self._is_connected.wait(LOOK_S):
                now = monotonic()
                asked_at = self._asked_at if self._joined_at is None else None
                if not is_wanted() or (asked_at is not None and now - asked_at > self._briefing.connect_timeout_s):
                    return
                show(self._waits_for())
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

    def watch(self, is_wanted: Callable[[], bool]) -> None:
        """Says how far actors are until all have started: a line at a terminal, else in the log, ever more seldom."""
        pause_s, logged = LOG_S, monotonic()
        with shown_on_stderr() as show, self._news:
            while is_wanted() and self._failure is None and len(self._started) < len(self._settings):
                self._news.wait(LOOK_S)
                show(None if self._started and self._briefing.is_seeded else self.progress())
                if len(self._started) < len(self._settings) and monotonic() - logged > pause_s:
                    log.warning("%s", self.progress())
                    logged, pause_s = monotonic(), 2 * pause_s

    def progress(self) -> str:
        """How many actors have started, and where."""
        with self._lock:
            nodes = {found.place[0] for found in self._started.values()}
            text = f"{len(self._started)} of {len(self._settings)} Ray actors have started"
        if nodes:
            text += f"; the dataset, {self._pickled_job_nbytes / 1e6:,.0f} MB, is on {len(nodes)} node{'s' * (len(nodes) > 1)}"
        return f"{text}. The others wait for the dataset, or for {self._resources()}"

    def _resources(self) -> str:
        """What an actor asks for, and what the cluster has."""
        import ray

        asked = {"num_cpus": 1, **self._briefing.actor_options}
        wants = ", ".join(
            f"{name}={value!r}" for name, value in asked.items() if name not in ("runtime_env", "scheduling_strategy")
        )
        try:
            free, all_of = (what().get("CPU", 0) for what in (ray.available_resources, ray.cluster_resources))
        except Exception:  # the head may be gone
            return wants
        return f"{wants} (of the cluster's {all_of:g} CPUs {free:g} are free)"

    # ------------------------------------------------------------ tasks

    def begin(self, worker: int, method: str, *argument: Any) -> Call:
        """Asks a worker's actor for something, behind all it has been asked for; nothing is waited for.

        Where the actor has died since it was last looked at and another is on its way, nobody is asked yet: `result` sees to that.

        Raises:
            ClusterUnreachable: there is no connection, or none yet.
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
                f"the Ray cluster at address={self._briefing.address!r} did not answer within "
                f"{self._briefing.connect_timeout_s:g} s. Is its head running, and does this machine belong to it (`ray status`)? "
                "If it is only slow, raise connect_timeout_s"
            )
        if self._failure is not None:
            raise self._failure
        if worker in self._ended:
            raise WorkerDied(self._ended[worker])
        if self._is_late(worker):
            raise ClusterUnreachable(
                f"no Ray actor could begin within ship_timeout_s={self._briefing.ship_timeout_s:g}: {self.progress()}. Add nodes, "
                'ask for less (actor_options={"num_cpus": 0} shares CPUs with whatever runs there), or raise ship_timeout_s'
            )

    def may_claim(self, worker: int) -> bool:
        """Whether the worker has an actor that has started, or an error to tell in place of one."""
        return worker in self._started or self._failure is not None or not self._is_connected.is_set() or self._is_late(worker)

    def _is_late(self, worker: int) -> bool:
        """Whether an actor should have started by now: in seed mode, any that the worker could be helped by."""
        limit_s = self._briefing.ship_timeout_s
        with self._lock:
            since = self._waits_since.get(worker)
            if limit_s is None or since is None or (self._briefing.is_seeded and self._started):
                return False
        return monotonic() - since > limit_s

    def is_near(self, worker: int) -> bool:
        """Whether the worker's actor can write into the ring."""
        return self._reaches_ring(self._actors.get(worker))

    def _reaches_ring(self, actor: Any) -> bool:
        byte = self._bytes.get(actor)
        return byte is not None and life_lock.is_held(self._control, byte)

    def is_repeating(self, worker: int) -> bool:
        """Whether the worker's actor has taken a dead one's place and should be left alone with what that one may have died of."""
        return self._repeats[worker].locked()

    def result(self, worker: int, call: Call) -> Any:
        """What came of a call; in seed mode, if its actor has died, from another in its place.

        It is waited for without a limit: to give up an object that is on its way would mean to begin its transfer again.

        Raises:
            WorkerDied: the actor is dead and may not be replaced, or `MAX_DEATHS` died over it alone, and none over a sample of it.
        """
        from ray import exceptions

        died = (
            exceptions.RayActorError,
            exceptions.ObjectLostError,
            exceptions.NodeDiedError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,  # Ray has killed it because its node ran short
        )
        reason: Exception | None = None  # why the actor that was asked last has ended
        if call.actor is not None:
            try:
                return self._answer(call.actor, call.ref)
            except died as error:
                reason = error
            if (timed_out := self._timed_out(worker, call)) is not None:
                return timed_out
        num_deaths = 0.0  # the first may have been over another task
        with self._repeats[worker]:  # alone: what it had been asked for besides would be blamed, too
            while True:
                if reason is not None:
                    self._see_to(worker, call.actor, reason)
                    if num_deaths >= MAX_DEATHS:
                        return self._blamed(worker, call, reason, died)
                actor = self._actor_for(worker)
                is_own = actor is self._actors[worker]  # another worker's has other tasks, which it may die of
                call = self._ask(actor, call.method, tuple(map(_suspect, call.argument)))
                try:
                    return self._answer(call.actor, call.ref)
                except died as error:
                    reason, num_deaths = error, num_deaths + (1 if is_own else 1 / MAX_DEATHS)
                if (timed_out := self._timed_out(worker, call)) is not None:
                    return timed_out

    def _answer(self, actor: Any, ref: Any) -> Any:
        """What an actor says to a call. If it has not said itself that the call is over, it has ended before this raises."""
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
        """Ends an actor. When this returns it cannot write into the ring any more, and what it had may be another's."""
        import ray

        if (byte := self._bytes.get(actor)) is None:
            return
        began = monotonic()
        life_lock.let_end(self._control, byte)
        while True:
            with suppress(Exception):  # one that only could not be reached would go on
                ray.kill(actor)
            if life_lock.wait_until_free(self._control, byte, LOG_S):
                break
            log.warning(
                "%s was ended %.0f s ago and still lives: what it had waits until it cannot write into the ring any more",
                actor,
                monotonic() - began,
            )
        self._bytes.pop(actor, None)

    def _actor_for(self, worker: int) -> Any:
        """The worker's newest actor once it has started; another worker's, where that takes long: its CPU went with a node, say.

        Raises:
            ClusterUnreachable: there is none, for longer than `ship_timeout_s`.
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
        """How many actors the worker has had, when the newest answer came from there."""
        with self._lock:
            newest, number = self._newest.get(worker, (None, 0))
            if newest != place:
                self._newest[worker] = place, number + 1
            return self._newest[worker][1]

    def _timed_out(self, worker: int, call: Call) -> Reply | None:
        """What came of a task whose sample took too long: its failure, and another actor. None where it may be any of several."""
        task = call.argument[0]
        if self._settings[worker].sample_timeout_s is None or not isinstance(task, Task):
            return None
        if (failure := take_failure(call.actor, task)) is None:
            return None
        self._replace(worker, call.actor, "a sample took too long" if failure.rows else "samples read at once took too long")
        if not failure.rows:  # they are read again, one by one
            return None
        return Reply(ERROR, error=failure.dumps(self._settings[worker].text_capacity))

    def _blamed(self, worker: int, call: Call, reason: Exception, died: tuple[type[Exception], ...]) -> Reply:
        """The failure of the first sample of a task that ends its actor when it is asked for by itself, too.

        Raises:
            WorkerDied: none of them does.
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
                self._replace(worker, actor, _line(error))  # if it is this worker's
                num_deaths += 1 if is_own else 1 / MAX_DEATHS
            if num_deaths >= 1:
                text = f"{sample_at(task.key(row), task.epoch, row, task.step)} ended its actor when it was read alone, too: {how}"
                return Reply(ERROR, error=Failure(WorkerDied, text, "", "", (row,)).dumps(text_capacity))
        raise WorkerDied(how)

    def _see_to(self, worker: int, actor: Any, error: Exception) -> None:
        how = _line(error)
        if not self._briefing.is_seeded:
            self._ended.setdefault(
                worker,
                f"the Ray actor of DataLoader worker {worker} has died, and with it the worker's random streams, which torch mode "
                f"cannot go on without: {how}. Resume from a state_dict, or give a seed: then another actor takes its place",
            )
            raise WorkerDied(self._ended[worker])
        self._replace(worker, actor, how)

    def _replace(self, worker: int, actor: Any, how: str) -> None:
        with self._lock:
            if self._actors[worker] is not actor:  # its place has been taken already, after another task
                return
            self._actors[worker] = None
            self._started.pop(worker, None)
            self._waits_since[worker] = monotonic()
        log.warning("the Ray actor of worker %d has died (%s); another takes its place", worker, how)
        try:
            self._make_actors([self._settings[worker]])
            self._introduce([self._settings[worker]])
        except Exception as error:  # the head has gone, or every node
            self._failure = unreachable(self._briefing.address, error)


def _suspect(argument: Any) -> Any:
    """A task, if it is one, whose samples are read one by one."""
    return argument._replace(is_suspect=True) if isinstance(argument, Task) else argument


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


SAME_VERSIONS = (
    'Install the same versions on every node, or name an environment that has them: actor_options={"runtime_env": {"pip": [...]}}'
)


def other_versions(theirs: Mapping[str, str]) -> str:
    """What a node has in another version than this machine; empty: nothing that matters."""
    return ", ".join(
        f"{name} {theirs[name] or 'missing'} where the trainer has {version or 'none'}"
        for name, version in versions().items()
        if theirs[name] != version
    )


def differing(found: Introduction) -> str | None:
    """What is said of an actor's node that has another version than this machine; None: nothing that matters."""
    if not (said := other_versions(found.versions)):
        return None
    return (
        f"node {found.place[0]} of the Ray cluster ({found.host}) has {said}: what is pickled here may fail or mean something else "
        f"there. {SAME_VERSIONS}"
    )


@contextmanager
def shown_on_stderr() -> Iterator[Callable[[str | None], None]]:
    """Shows one line of text that changes at a terminal, and takes it away at the end; nothing where stderr is none."""
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


def own_cluster() -> str:
    """The cluster that this process is part of already, as a worker of Ray Train is; else "auto"."""
    ray: Any = sys.modules.get("ray")
    return str(ray.get_runtime_context().gcs_address) if ray is not None and ray.is_initialized() else "auto"


def unreachable(address: str, error: Exception) -> ClusterUnreachable:
    """What is said of a cluster that cannot be joined."""
    cause: BaseException | None = error
    while cause is not None:
        if "AuthenticationError" in str(cause):  # Ray has it in the text of another
            return ClusterUnreachable(
                f"the Ray cluster at address={address!r} wants Ray's token: set RAY_AUTH_MODE=token in this program's "
                "environment, and on another machine than the head's bring the token (the head's ~/.ray/auth_token) there"
            )
        cause = cause.__cause__ or cause.__context__
    return ClusterUnreachable(
        f"there is no Ray cluster at address={address!r} ({type(error).__name__}: {error}). Start one with "
        "`ray start --head`, join it from this machine with `ray start --address=HEAD:6379`, or give the head's address"
    )


ARRIVED = b"!"  # behind the briefing, when the pickled job has been written
MAX_AHEAD = 4  # tasks of a worker: one is decoded, one travels, one is copied, and one comes early


class RayPool:
    """The worker pool whose workers are Ray actors: one child process, the agent, stands for all of them.

    If the agent ends, all of its workers have ended; a new one starts once the rows of all workers have been taken back. An actor
    is no child process: Ray starts it, on any machine, so the agent learns of its death from Ray and from its file lock
    (life_lock.py), and not from a pidfd.

    Args:
        briefing: what the agent is started with.
        parcel: the pickled job, which `start` writes to the segment while the agent starts.
        control: the ring's control segment, which actors that write into the ring lock.
    """

    def __init__(self, briefing: Briefing, parcel: travel.Parcel, segment: Segment, control: Segment) -> None:
        self._briefing = briefing
        self._parcel, self._segment, self._control = parcel, segment, control
        self._logged = 0.0  # when it was last said that actors outlive their agent; 0: none does
        self._agent: Child | None = None
        self._children: Children[Child] = Children()  # the agent, until it is reaped
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
        """Starts the agent, which is not waited for, and writes meanwhile what it is to send."""
        faults.hit("starting")
        self._launch(self._briefing, self._write)

    def _write(self) -> None:
        self._segment.reserve(self._segment.nbytes)
        self._parcel.write(self._segment.fd)
        del self._parcel  # and with it the memory of what pickling has made

    def _launch(self, briefing: Briefing, ship: Callable[[], None] = lambda: None) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(briefing.paths), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "shmload.ray.agent"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        reaper.watch(process.pid)
        self._agent = Child(process.pid, partial(settle_popen, process))
        self._children.add(self._agent)
        self._ending = weakref.finalize(self, _end, self._agent, os.getpid())
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it has ended already; `deaths` will report it
            with suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps(briefing))
                process.stdin.flush()
            ship()
            process.stdin.write(ARRIVED)

    def start_worker(self, worker_id: int) -> None:
        """Not possible: the loader refuses a worker pool of changing size."""
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
            self._logged, self._dead = 0.0, set(range(len(self._briefing.posts)))
        return [Death(worker, agent.pid, agent.wait()) for worker in sorted(self._dead)]

    def _say_that_it_waits(self) -> None:
        """Log every LOG_S seconds that actors outlive their agent: their rows cannot be given away while they may write to them."""
        now = monotonic()
        self._logged = self._logged or now
        if now - self._logged > LOG_S:
            self._logged = now
            log.warning("the agent has ended, and some of its Ray actors still live: the loader waits until Ray has ended them")

    def replace(self, worker_id: int) -> None:
        """Start a new agent once every dead worker's rows have been taken back. An earlier one would claim for those workers."""
        self._dead.discard(worker_id)
        if self._dead or self._agent is None:
            return
        self._reap(self._agent)
        posts = tuple(dataclasses.replace(post, resume=b"") for post in self._briefing.posts)
        self._launch(dataclasses.replace(self._briefing, posts=posts, is_again=True))

    def stack(self, worker_id: int) -> str:
        """Not known."""
        return "(unknown: it is decoded on another machine)"

    def kill(self, worker_id: int) -> Death:
        """End the agent at once, and wait until the actors that write into the ring have ended."""
        assert self._agent is not None
        ended, pause = Death(worker_id, self._agent.pid, self._agent.kill()), threading.Event()
        while not self.deaths():
            pause.wait(life_lock.LOOK_S)
        return ended

    def stop(self, grace_s: float) -> None:
        """Wait for the agent to leave, then kill it. Ray ends its actors either way. Idempotent.

        Actors are not waited for, because nobody gets what they had. They keep the ring's memory until they end.

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
    """The job for actors, with what the trainer's own program defines: they do not have it.

    Raises:
        TypeError: that is not possible; names the cause.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray has no types for it
        dispatch_table = cloudpickle.CloudPickler.dispatch_table.new_child(travel.reducers())

    def dump(value: Any, take: Callable[[pickle.PickleBuffer], bool]) -> memoryview:
        pickled = io.BytesIO()
        Pickler(pickled, protocol=5, buffer_callback=take).dump(value)
        return pickled.getbuffer()

    # the program's name in a process that it has spawned, a rank say; elsewhere it is __main__ under another name
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
    """Starts workers on a Ray cluster, and some on this machine beside them.

    Args:
        ray: options of the cluster. The last `num_local_workers` of the workers are this machine's.
    """

    ray: Ray

    def __call__(self, called: PreparedWorkers) -> RayPool | JointPool:
        """Return the worker pool, not started."""
        num_far = len(called.posts) - self.ray.num_local_workers
        parcel = pickled_by_value(called.job)
        segment = called.group.segment("pickled_job", parcel.nbytes, num_reserved=0)
        posts = named(called.posts[:num_far], segment)
        locate = package_ability(called.job.dataset, "bytes_by_node")
        goes_in_turn = called.job.seed is None and called.job.tolerates_bad_samples
        briefing = Briefing(
            tuple(posts),
            own_cluster() if self.ray.address == "auto" else self.ray.address,
            tuple(path or os.getcwd() for path in sys.path),
            is_seeded=called.job.seed is not None,
            num_ahead=1 if goes_in_turn else max(1, min(called.num_ahead, MAX_AHEAD)),
            num_beside=self.ray.num_local_workers,
            num_ordered=called.num_ahead * len(called.posts),
            connect_timeout_s=self.ray.connect_timeout_s,
            ship_timeout_s=self.ray.ship_timeout_s,
            actor_options=dict(self.ray.actor_options),
            near=locate() if locate is not None else {},
            sample_timeout_s=called.sample_timeout_s,
            goes_in_turn=goes_in_turn,
        )
        assert called.group.control is not None
        actors = RayPool(briefing, parcel, segment, called.group.control)
        if not self.ray.num_local_workers:
            return actors
        return JointPool(actors, processes(dataclasses.replace(called, posts=called.posts[num_far:])), num_far)
