"""The agent's side of Ray: the connection, the dataset in the object store, the actors and who takes a dead one's place."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ClusterUnreachable, WorkerDied
from shmload.worker.actors.decoder import Decoder
from shmload.worker.actors.errand import Setting
from shmload.worker.actors.placement import alive_nodes, place

log = logging.getLogger("shmload")

CONNECT_S = 20.0  # Ray itself tries for two minutes
LOOK_S = 0.1  # how often a thread that waits for an actor looks whether it still should
MAX_DEATHS = 3  # of actors over one errand: then it is the errand


class Unwanted(Exception):
    """Nobody wants the errand's outcome any more."""


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
        self._ended: dict[int, str] = {}  # torch mode: workers whose actor has died, and how
        self.node_id = ""  # of this machine
        self._job: Any = None  # the dataset in Ray's object store

    def connect(self) -> None:
        """Joins the cluster, puts the dataset and asks for the actors; those that call `do` wait for it."""
        try:
            self._connect()
        except Exception as error:
            self._failure = ClusterUnreachable(
                f"there is no Ray cluster at address={self._address!r} ({type(error).__name__}: {error}). Start one with "
                "`ray start --head`, join it from this machine with `ray start --address=HEAD:6379`, or give the head's address"
            )
        finally:
            self._parcel = np.empty(0, np.uint8)
            self._is_connected.set()

    def _connect(self) -> None:
        import ray

        address = self._address
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or address
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S / 2).close()
        ray.init(address=address, logging_level=logging.WARNING, namespace="shmload")
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
        # soft: a node that has gone since then is no reason not to decode
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
        made = ray.remote(Decoder).options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0)
        self._actors[worker] = made.remote(setting, self._job)

    # ------------------------------------------------------------ errands

    def do(self, worker: int, method: str, argument: tuple[Any, ...], is_wanted: Callable[[], bool]) -> Any:
        """Has a worker's actor do something, or in seed mode another in its place.

        Args:
            is_wanted: asked every now and then.
        Raises:
            Unwanted: it said no.
            ClusterUnreachable: there is no connection, `CONNECT_S` after the start at the latest.
            WorkerDied: the actor is dead and may not be replaced, or `MAX_DEATHS` died over it.
        """
        self._wait_for_connection(is_wanted)
        import ray
        from ray import exceptions

        died = (
            exceptions.RayActorError,
            exceptions.ObjectLostError,
            exceptions.NodeDiedError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,  # Ray has killed it because its node ran short
        )
        num_deaths = 0
        while True:
            if worker in self._ended:
                raise WorkerDied(self._ended[worker])
            actor = self._actors[worker]
            try:
                ref = getattr(actor, method).remote(*argument)
                while not ray.wait([ref], timeout=LOOK_S)[0]:
                    if not is_wanted():
                        raise Unwanted
                return ray.get(ref)
            except died as error:
                num_deaths += 1
                self._see_to(worker, actor, error, num_deaths)

    def _wait_for_connection(self, is_wanted: Callable[[], bool]) -> None:
        while not self._is_connected.wait(LOOK_S):
            if not is_wanted():
                raise Unwanted
            if monotonic() - self._began > CONNECT_S:
                raise ClusterUnreachable(
                    f"the Ray cluster at address={self._address!r} did not answer within {CONNECT_S:.0f} s. Is its head "
                    "running, and does this machine belong to it (`ray status`)?"
                )
        if self._failure is not None:
            raise self._failure

    def _see_to(self, worker: int, actor: Any, error: Exception, num_deaths: int) -> None:
        import ray

        how = " ".join(str(error).split())
        if not self._is_seeded:
            self._ended[worker] = (
                f"the Ray actor of DataLoader worker {worker} has died, and with it the worker's random streams, which torch mode "
                f"cannot go on without: {how}. Resume from a state_dict, or give a seed: then another actor takes its place"
            )
            return
        if num_deaths >= MAX_DEATHS:
            raise WorkerDied(f"{num_deaths} Ray actors of DataLoader worker {worker} died over the same rows: {how}")
        log.warning("the Ray actor of worker %d has died (%s); another takes its place", worker, how)
        with self._lock:
            try:
                ray.kill(actor)  # one that only could not be reached would go on
            except Exception:
                pass
            nodes = place(alive_nodes(ray.nodes()), len(self._settings), os.getpid())
            self._hire(worker, nodes[worker])
