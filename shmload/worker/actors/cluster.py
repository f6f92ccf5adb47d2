"""The agent's side of Ray: the connection, the dataset in the object store, the actors and who takes a dead one's place."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import ERROR
from shmload.errors import ClusterUnreachable, WorkerDied
from shmload.worker.actors.decoder import Decoder
from shmload.worker.actors.errand import Errand, Outcome, Setting
from shmload.worker.actors.lateness import failure_in, forget_word, take_word
from shmload.worker.actors.placement import alive_nodes, place

log = logging.getLogger("shmload")

CONNECT_S = 20.0  # Ray itself tries for two minutes
LOOK_S = 0.1  # how often who waits for the connection looks whether it still should
MAX_DEATHS = 3  # of actors over one errand alone: then it is the errand


class Call(NamedTuple):
    """An errand that an actor has been asked for."""

    actor: Any
    ref: Any
    method: str
    argument: tuple[Any, ...]


class Cluster:
    """A connection to Ray, and one actor for each worker.

    Args:
        parcel: the pickled job.
        settings: of the actors, by worker.
        is_seeded: what an errand gives depends on nothing but the errand, so another actor may do it again.
    """

    def __init__(self, address: str, parcel: NDArray[np.uint8], settings: list[Setting], *, is_seeded: bool) -> None:
        self._address = address
        self._parcel = parcel
        self._settings = settings
        self._is_seeded = is_seeded
        self._is_connected = threading.Event()
        self._began = monotonic()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        # held while a worker's new actor does one errand again, alone
        self._repeats = [threading.Lock() for _ in settings]
        self._newest: dict[
            int, tuple[Any, int]
        ] = {}  # by worker, where its newest answer came from, and how many places before
        self._ended: dict[int, str] = {}  # torch mode: workers whose actor has died, and how
        self.node_id = ""  # of this machine
        self._job: Any = None  # the dataset in Ray's object store

    def connect(self) -> None:
        """Joins the cluster, puts the dataset and asks for the actors."""
        try:
            self._connect()
        except Exception as error:
            self._failure = error if isinstance(error, ClusterUnreachable) else unreachable(self._address, error)
        finally:
            self._parcel = np.empty(0, np.uint8)
            self._is_connected.set()

    def _connect(self) -> None:
        import ray

        join(self._address)
        self.node_id = str(ray.get_runtime_context().get_node_id())
        self._job = ray.put(self._parcel)
        nodes = place(alive_nodes(ray.nodes()), len(self._settings), os.getpid())
        with self._lock:
            for worker, node in enumerate(nodes):
                self._hire(worker, node)

    def _hire(self, worker: int, node_id: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        setting = self._settings[worker]
        # not soft: an actor that asks for no CPU is then put anywhere
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        made = ray.remote(Decoder).options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0)
        self._actors[worker] = made.remote(setting, self._job)

    def wait(self, is_wanted: Callable[[], bool]) -> None:
        """Returns once the connection stands or has failed, after `CONNECT_S` at the latest, or as soon as nobody wants it."""
        while not self._is_connected.wait(LOOK_S):
            if not is_wanted() or monotonic() - self._began > CONNECT_S:
                return

    # ------------------------------------------------------------ errands

    def begin(self, worker: int, method: str, *argument: Any) -> Call:
        """Asks a worker's actor for something, behind all it has been asked for; nothing is waited for.

        Raises:
            ClusterUnreachable: there is no connection, or none yet.
            WorkerDied: the actor is dead and may not be replaced.
        """
        if not self._is_connected.is_set():
            raise ClusterUnreachable(
                f"the Ray cluster at address={self._address!r} did not answer within {CONNECT_S:.0f} s. Is its head "
                "running, and does this machine belong to it (`ray status`)?"
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
        if (late := self._late(worker, call)) is not None:
            return late
        with self._repeats[worker]:  # alone: what it had been asked for besides would be blamed, too
            num_deaths = 0  # the first may have been over another errand
            while True:
                self._see_to(worker, call.actor, reason, num_deaths)
                call = self.begin(worker, call.method, *call.argument)
                try:
                    return ray.get(call.ref)
                except died as error:
                    reason, num_deaths = error, num_deaths + 1
                if (late := self._late(worker, call)) is not None:
                    return late

    def num_actors(self, worker: int, place: tuple[str, int]) -> int:
        """How many actors the worker has had, when the newest answer came from there."""
        with self._lock:
            newest, number = self._newest.get(worker, (None, 0))
            if newest != place:
                self._newest[worker] = place, number + 1
            return self._newest[worker][1]

    def _late(self, worker: int, call: Call) -> Outcome | None:
        """What came of an errand whose sample was too late: its failure, and another actor."""
        if self._settings[worker].sample_timeout_s is None:
            return None
        word, errand = take_word(call.actor), call.argument[0]
        failure = failure_in(word, errand) if isinstance(errand, Errand) else None
        if failure is None:
            return None
        forget_word(call.actor)
        self._replace(worker, call.actor, "a sample was too late")
        dumped = failure.dumps(self._settings[worker].text_capacity)
        return Outcome(ERROR, np.empty(0, np.uint8), None, None, None, dumped, 0)

    def _see_to(self, worker: int, actor: Any, error: Exception, num_deaths: int) -> None:
        how = " ".join(str(error).split())
        if not self._is_seeded:
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
            if self._actors[worker] is not actor:  # its place has been taken already, after another errand
                return
            log.warning("the Ray actor of worker %d has died (%s); another takes its place", worker, how)
            try:
                ray.kill(actor)  # one that only could not be reached would go on
            except Exception:
                pass
            nodes = place(alive_nodes(ray.nodes()), len(self._settings), os.getpid())
            self._hire(worker, nodes[worker])


def join(given: str) -> None:
    """Makes this process a driver of a cluster.

    Raises:
        ClusterUnreachable: there is none at this address.
    """
    import ray

    address = (os.environ.get("RAY_ADDRESS") or given) if given == "auto" else given
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S / 2).close()
        ray.init(address=address, logging_level=logging.WARNING, namespace="shmload")
    except Exception as error:
        raise unreachable(given, error) from error


def unreachable(address: str, error: Exception) -> ClusterUnreachable:
    """What is said of a cluster that cannot be joined."""
    return ClusterUnreachable(
        f"there is no Ray cluster at address={address!r} ({type(error).__name__}: {error}). Start one with "
        "`ray start --head`, join it from this machine with `ray start --address=HEAD:6379`, or give the head's address"
    )
