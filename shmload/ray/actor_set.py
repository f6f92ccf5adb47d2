"""The Ray actors of one loader, as its agent manages them: one actor for each worker.

The agent joins Ray, creates the actors, puts the dataset into the object store, sends tasks to the actors, and replaces actors that
die.

An actor *has started* once it has loaded the dataset and reported its node's versions, and gets tasks only then. So an actor that
waits for a CPU, or for a node that an autoscaler is still adding, delays no batch, because the other actors take its share.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import ERROR
from shmload.errors import ClusterUnreachable, StoreError, WorkerDied
from shmload.processes.restarts import RestartPolicy
from shmload.ray import life_lock
from shmload.ray.agent_config import AgentConfig
from shmload.ray.cluster_connection import join_cluster, unreachable_error
from shmload.ray.messages import NOTHING, ActorSetting, ActorStarted, Reply, Task
from shmload.ray.placement import alive_nodes, draining, options_of
from shmload.ray.sample_timer import take_failure
from shmload.ray.status_line import stderr_status_line
from shmload.ray.version_check import version_error, versions
from shmload.ray.worker_actor import WorkerActor
from shmload.storage.retry import Retry, RetryPolicy, TransientError
from shmload.worker.failure import Failure, sample_at

log = logging.getLogger("shmload")
LOG_S = 5.0  # interval of log messages about pending steps
LOOK_S = 0.1  # interval at which a wait checks whether it is still needed
MAX_DEATHS = 3  # deaths of actors while reading one task alone, after which the task counts as the cause
MAX_STARTS = 10  # actors of one worker that end before they have started, after which the loader fails
OWN_S = 2.0  # time that a dead actor's task waits for the replacement before another worker's actor gets it


class Call(NamedTuple):
    """A call of an actor's method.

    Attributes:
        actor: the actor; None if the call has not been sent, because the worker has no actor that has started.
        ref: Ray's reference to the result; None if it has not been sent.
        method: name of the method.
        argument: its arguments.
    """

    actor: Any
    ref: Any
    method: str
    argument: tuple[Any, ...]


class ActorSet:
    """The actors of one loader and the connection to their cluster.

    Args:
        config: the agent's settings.
        pickled_job: the pickled job.
        settings: settings of the actors, by worker.
        wait_for_job: function that returns once the pickled job has been written.
        control: a descriptor of the ring's control segment; actors lock a byte of it if they can reach it (life_lock.py).

    Attributes:
        when_started: functions to call, from any thread, when an actor has started or starting has failed.
        repeats_in_order: see `AgentConfig`.
        node_id: Ray's id of this machine's node; empty before the connection is up.
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
        self._lock_offsets: dict[Any, int] = {}  # actor that has not ended -> the byte of the control segment that it locks
        self._pickled_job_nbytes = pickled_job.nbytes
        self._settings = settings
        self._is_connected = threading.Event()  # `connect` has finished or failed
        self._asked_at: float | None = None  # time of the first request to the cluster; None while Ray is being imported
        self._joined_at: float | None = None
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # an actor has started, or none will
        self._actors: dict[int, Any] = {}
        self._started: dict[int, ActorStarted] = {}  # worker -> the message of its newest actor, once that has started
        self._waits_since: dict[int, float] = {}  # worker -> time since which its newest actor has been starting
        self._restarts = [RestartPolicy(MAX_STARTS - 1) for _ in settings]  # counts actors that end before they have started
        self.when_started: list[Callable[[], None]] = []
        # held while a worker's new actor repeats one task alone
        self._repeats = [threading.Lock() for _ in settings]
        self._newest: dict[int, tuple[Any, int]] = {}  # worker -> place of its newest answer, and number of its actors so far
        self._ended: dict[int, str] = {}  # torch mode: workers whose actor has died, with the message
        self.node_id = ""
        self._job: Any = None  # the dataset in Ray's object store

    def connect(self) -> None:
        """Join the cluster, create the actors, and put the dataset into the object store while they start.

        An error is not raised here, but by the later calls of `begin` and `result`.
        """
        try:
            import ray

            self._join()
            self._joined_at = monotonic()
            self.node_id = str(ray.get_runtime_context().get_node_id())
            self._make_actors(self._settings)
            self._wait_for_job()
            self._job = ray.put(self._pickled_job)
            self._start_actors(self._settings)
        except Exception as error:
            self._failure = error if isinstance(error, ClusterUnreachable) else unreachable_error(self._config.address, error)
        finally:
            self._pickled_job = NOTHING
            self._is_connected.set()

    def _join(self) -> None:
        self._asked_at = monotonic()
        tries = Retry(RetryPolicy(timeout_s=self._config.connect_timeout_s), "join the Ray cluster")
        while True:
            try:
                return join_cluster(self._config.address, self._config.connect_timeout_s)
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
            worker = setting.link.worker_id
            actor = ray.remote(WorkerActor).options(max_restarts=0, **options[worker])
            life_lock.let_live(self._control, byte := life_lock.draw())
            made = actor.remote(dataclasses.replace(setting, byte=byte))
            self._actors[worker], self._lock_offsets[made] = made, byte

    def _start_actors(self, settings: Iterable[ActorSetting]) -> None:
        """Send the dataset to new actors; each has started once it answers."""
        for setting in settings:
            worker = setting.link.worker_id
            with self._lock:
                self._waits_since[worker] = monotonic()
                actor = self._actors[worker]
            arguments = worker, actor, actor.start.remote([self._job])
            threading.Thread(target=self._wait_until_started, args=arguments, daemon=True).start()

    def _wait_until_started(self, worker: int, actor: Any, ref: Any) -> None:
        """Wait until an actor has started, which may take long, and then let the dispatcher claim orders for its worker."""
        try:
            found: ActorStarted = self._answer(actor, ref)
            text = version_error(found.place[0], found.host, found.versions)
            failure = None if text is None else ClusterUnreachable(text)
        except Exception as error:
            self._end(actor)
            self._not_started(worker, actor, error)
            return
        with self._changed:
            if self._actors[worker] is not actor:
                return
            self._started[worker] = found
            self._restarts[worker].succeeded()
            self._waits_since.pop(worker, None)
            self._failure = self._failure or failure
            self._changed.notify_all()
        self._notify_started()

    def _not_started(self, worker: int, actor: Any, error: Exception) -> None:
        """Replace an actor that ended before it had started, unless a replacement would fail in the same way."""
        how = _one_line(error)
        with self._changed:
            is_given_up = self._restarts[worker].failed() is None
            is_hopeless = is_given_up or getattr(error, "actor_init_failed", False) or "creation task" in how
            if is_hopeless and self._actors[worker] is actor:
                wanted = ", ".join(f"{name} {version}" for name, version in versions().items())
                self._failure = ClusterUnreachable(
                    f"the Ray actor of DataLoader worker {worker} cannot start on its node: {how}. Each node needs the "
                    f"trainer's versions ({wanted}) and the resources in actor_options"
                )
                self._changed.notify_all()
        if is_hopeless:
            self._notify_started()
        else:
            self._replace(worker, actor, how)

    def _notify_started(self) -> None:
        for call in self.when_started:
            call()

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        """Wait until the dataset is in the object store and the actors are starting, or until this has failed or is not wanted.

        The cluster has `connect_timeout_s` to answer. Importing Ray before that and sending the dataset after it have no limit:
        they end with this process, and a log message every LOG_S seconds names the pending step.

        Args:
            is_wanted: returns False to end the wait.
        """
        began = logged = monotonic()
        with stderr_status_line() as show:
            while not self._is_connected.wait(LOOK_S):
                now = monotonic()
                asked_at = self._asked_at if self._joined_at is None else None
                if not is_wanted() or (asked_at is not None and now - asked_at > self._config.connect_timeout_s):
                    return
                show(self._pending_step())
                if now - logged > LOG_S:
                    logged = now
                    log.warning("%s, for %.0f s so far", self._pending_step(), now - began)

    def _pending_step(self) -> str:
        if self._asked_at is None:
            return "Ray is being imported"
        if self._joined_at is None:
            limit = f"connect_timeout_s={self._config.connect_timeout_s:g}"
            return f"the Ray cluster at address={self._config.address!r} has not answered yet ({limit})"
        return f"the dataset, {self._pickled_job_nbytes / 1e6:,.0f} MB, is being sent to Ray's object store"

    def watch(self, is_wanted: Callable[[], bool]) -> None:
        """Report progress until all actors have started, on one line of a terminal and in the log at growing intervals.

        Args:
            is_wanted: returns False to end the wait.
        """
        pause_s, logged = LOG_S, monotonic()
        with stderr_status_line() as show, self._changed:
            while is_wanted() and self._failure is None and len(self._started) < len(self._settings):
                self._changed.wait(LOOK_S)
                show(None if self._started and self._config.is_seeded else self.progress())
                if len(self._started) < len(self._settings) and monotonic() - logged > pause_s:
                    log.warning("%s", self.progress())
                    logged, pause_s = monotonic(), 2 * pause_s

    def progress(self) -> str:
        """Return a message with the number of actors that have started, and the number of their nodes."""
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

        Args:
            worker: number of the worker.
            method: name of the method of `WorkerActor`.
            argument: its arguments.
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
        """Return whether to claim orders for the worker: it has an actor that has started, or there is an error to report."""
        return worker in self._started or self._failure is not None or not self._is_connected.is_set() or self._is_late(worker)

    def _is_late(self, worker: int) -> bool:
        """Return whether the worker's actor has not started in `ship_timeout_s`. In seed mode, False once any actor has started."""
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
        byte = self._lock_offsets.get(actor)
        return byte is not None and life_lock.is_held(self._control, byte)

    def is_repeating(self, worker: int) -> bool:
        """Return whether the worker's actor is a replacement that repeats, alone, a task that may have ended its predecessor."""
        return self._repeats[worker].locked()

    def result(self, worker: int, call: Call) -> Any:
        """Wait for a call and return its result. In seed mode, if its actor has died, another actor repeats it.

        There is no timeout, because a timeout would restart the transfer of an object.

        Args:
            worker: number of the worker.
            call: the result of `begin`.
        Raises:
            WorkerDied: the actor is dead and may not be replaced, or `MAX_DEATHS` actors died while reading this task alone, but
                none while reading a single sample of it.
            ClusterUnreachable: no actor could start.
        """
        from ray import exceptions

        died = (
            exceptions.RayActorError,
            exceptions.ObjectLostError,
            exceptions.NodeDiedError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,  # Ray has killed the actor because its node ran out of memory
        )
        reason: Exception | None = None  # the error that ended the previous actor
        if call.actor is not None:
            try:
                return self._answer(call.actor, call.ref)
            except died as error:
                reason = error
            if (timed_out := self._timed_out(worker, call)) is not None:
                return timed_out
        num_deaths = 0.0  # the death above does not count, because another task may have caused it
        with self._repeats[worker]:  # only one task at a time, because other tasks in progress could cause a death
            while True:
                if reason is not None:
                    self._handle_death(worker, call.actor, reason)
                    if num_deaths >= MAX_DEATHS:
                        return self._blamed(worker, call, reason, died)
                actor = self._actor_for(worker)
                is_own = actor is self._actors[worker]  # another worker's actor has other tasks, which may cause its death
                call = self._ask(actor, call.method, tuple(map(_as_suspect, call.argument)))
                try:
                    return self._answer(call.actor, call.ref)
                except died as error:
                    reason, num_deaths = error, num_deaths + (1 if is_own else 1 / MAX_DEATHS)
                if (timed_out := self._timed_out(worker, call)) is not None:
                    return timed_out

    def _answer(self, actor: Any, ref: Any) -> Any:
        """Return an actor's answer to a call. For any error except one that its method raised, end the actor first."""
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
        """End an actor, and wait until it cannot write into the ring, so that another actor may get its rows. Idempotent."""
        import ray

        if (byte := self._lock_offsets.get(actor)) is None:
            return
        began = monotonic()
        life_lock.let_end(self._control, byte)
        while True:
            with suppress(Exception):  # an actor that is only unreachable would continue
                ray.kill(actor)
            if life_lock.wait_until_free(self._control, byte, LOG_S):
                break
            log.warning(
                "%s was told to end %.0f s ago and still runs: its rows are not reused until it has ended",
                actor,
                monotonic() - began,
            )
        self._lock_offsets.pop(actor, None)

    def _actor_for(self, worker: int) -> Any:
        """Return the worker's newest actor once it has started, or another worker's if that takes longer than OWN_S.

        It may take long, for example, because a node and its CPUs were lost.

        Raises:
            ClusterUnreachable: no actor has started within `ship_timeout_s`.
        """
        asked_at = monotonic()
        with self._changed:
            while True:
                if worker not in self._started and monotonic() - asked_at > OWN_S:
                    others = [other for other in self._started if not self.is_repeating(other)]
                    if others:
                        return self._actors[min(others, key=lambda other: (other - worker) % len(self._settings))]
                if worker in self._started or self._failure is not None or self._is_late(worker):
                    self._check(worker)
                    return self._actors[worker]
                self._changed.wait(LOOK_S)

    def num_actors(self, worker: int, place: tuple[str, int]) -> int:
        """Record the place of the worker's newest answer. Return the number of actors that have answered for the worker so far.

        Args:
            worker: number of the worker.
            place: Ray's id of the actor's node, and its pid there.
        """
        with self._lock:
            newest, number = self._newest.get(worker, (None, 0))
            if newest != place:
                self._newest[worker] = place, number + 1
            return self._newest[worker][1]

    def _timed_out(self, worker: int, call: Call) -> Reply | None:
        """If the actor has ended because of a timeout, replace it. Return the failure of the sample, None if it is not known."""
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
        """Read a task's samples one by one, and return the failure of the first one that ends its actor.

        Raises:
            WorkerDied: no single sample ends its actor.
        """
        task, text_capacity = call.argument[0], self._settings[worker].text_capacity
        how = f"{MAX_DEATHS} Ray actors of DataLoader worker {worker} died over the same rows: {_one_line(reason)}"
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
                self._replace(worker, actor, _one_line(error))  # no effect on another worker's actor
                num_deaths += 1 if is_own else 1 / MAX_DEATHS
            if num_deaths >= 1:
                text = f"{sample_at(task.key(row), task.epoch, row, task.step)} ended its actor when it was read alone, too: {how}"
                return Reply(ERROR, error=Failure(WorkerDied, text, "", "", (row,)).dumps(text_capacity))
        raise WorkerDied(how)

    def _handle_death(self, worker: int, actor: Any, error: Exception) -> None:
        how = _one_line(error)
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
        log.warning("the Ray actor of worker %d has died (%s): starting a replacement", worker, how)
        try:
            self._make_actors([self._settings[worker]])
            self._start_actors([self._settings[worker]])
        except Exception as error:  # the head is gone, or all nodes are
            self._failure = unreachable_error(self._config.address, error)


def _as_suspect(argument: Any) -> Any:
    """Mark a task as suspect, so that its samples are read one by one; return any other argument unchanged."""
    return argument._replace(is_suspect=True) if isinstance(argument, Task) else argument


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
