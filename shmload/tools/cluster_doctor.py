"""The checks of `shmload doctor --cluster`: an actor on each node of a Ray cluster reports what it finds there.

The actor is pickled by value, so it starts on a node without shmload, or with another version, and can report that; what it
returns has only built-in types. It asks for no CPU, so a busy cluster can be examined, too.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from shmload.errors import ClusterUnreachable
from shmload.ray import version_check
from shmload.ray.cluster_connection import join_cluster
from shmload.ray.placement import Node, alive_nodes, draining
from shmload.ray.version_check import SAME_VERSIONS, other_versions, versions
from shmload.tools.byte_size import size_text
from shmload.tools.counted import counted
from shmload.tools.doctor import Finding, Level

START_S = 60.0  # for all actors: an image or an environment may still be in transfer
BATCH_NBYTES = 8 << 20
NUM_BATCHES = 4  # in transfer at once, as with a loader; the object store of each side must hold them
SLOW = 100e6  # bytes per second: a network of one gigabit


class Scout:
    """An actor that examines its node."""

    def look(self) -> dict[str, Any]:
        """Return the host's name, versions, why shmload cannot be loaded ("" if it can), and /dev/shm: total and free bytes."""
        failure = ""
        try:
            importlib.import_module("shmload.ray.worker_actor")
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        try:
            status = os.statvfs("/dev/shm")
            shm = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        except OSError:
            shm = 0, 0
        return {"host": socket.gethostname(), "versions": versions(), "load_failure": failure, "shm": shm}

    def batch(self, nbytes: int) -> Any:
        """Return an array, which is transferred like a batch."""
        return importlib.import_module("numpy").zeros(nbytes, "u1")


@dataclass
class NodeState:
    """A node and the facts known about it.

    Attributes:
        node: Ray's description.
        free_cpus, store, free_store: from Ray: CPUs; total and free bytes of the object store.
        is_here: whether it is this machine, whose object store is read in place.
        seen: what the actor has reported; empty if there is no actor.
        failure: why there is no actor, or why it returned nothing.
        bytes_per_s: the rate at which batches came from it; 0 if not measured.
    """

    node: Node
    free_cpus: float
    store: float
    free_store: float
    is_here: bool = False
    seen: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    bytes_per_s: float = 0.0

    @property
    def name(self) -> str:
        """Return the beginning of the node's id, as in Ray's own tools, and its host."""
        host = self.seen.get("host", "")
        return f"node {self.node.node_id[:8]}" + (f" ({host})" if host else "")


def examine_cluster(address: str = "auto") -> list[Finding]:
    """Return the findings about a cluster, node by node. It joins the cluster as a driver, and leaves it at the end.

    Args:
        address: the address of the head. "auto" means the address in RAY_ADDRESS, or a cluster on this machine.
    """
    try:
        import ray

        join_cluster(address)
    except ImportError:
        return [Finding("cluster", "problem", "Ray is not installed here", 'pip install "shmload[ray]"')]
    except ClusterUnreachable as error:
        return [Finding("cluster", "problem", str(error))]  # which has the remedy
    try:
        going = draining()
        states = _looked_at(ray, alive_nodes(ray.nodes(), going))
    finally:
        ray.shutdown()
    return [cluster_finding(states, len(going)), *(finding for state in states for finding in node_findings(state))]


def _looked_at(ray: Any, nodes: list[Node]) -> list[NodeState]:
    """Send an actor to each node, and time the batches from one node after the other."""
    from ray._private.state import available_resources_per_node  # Ray has no public interface for it
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    all_of = {one["NodeID"]: one["Resources"] for one in ray.nodes()}
    free_of = available_resources_per_node()
    states = []
    for node in nodes:
        resources, free = all_of[node.node_id], free_of.get(node.node_id, {})
        stores = resources.get("object_store_memory", 0), free.get("object_store_memory", 0)
        states.append(NodeState(node, free.get("CPU", 0), *stores, is_here=node.node_id == here))
    with by_value(ray.cloudpickle):
        scout = ray.remote(Scout)
        scouts = [
            scout.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote()
            for node in nodes
        ]
    looks = [one.look.remote() for one in scouts]
    ray.wait(looks, num_returns=len(looks), timeout=START_S)
    for state, one, look in zip(states, scouts, looks, strict=True):
        try:
            state.seen = ray.get(look, timeout=0)
            if not state.is_here:
                state.bytes_per_s = _pace(ray, one)
        except ray.exceptions.GetTimeoutError:
            state.failure = f"nothing came within {START_S:g} s"
        except Exception as error:
            state.failure = " ".join(str(error).split())
    return states


@contextmanager
def by_value(cloudpickle: Any) -> Iterator[None]:
    """Pickle the modules of shmload that a Scout needs by value, within a `with` block."""
    modules = sys.modules[__name__], version_check
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _pace(ray: Any, scout: Any) -> float:
    """Return the rate, in bytes per second, at which finished batches come from an actor's node, several at once."""
    ray.get(scout.batch.remote(BATCH_NBYTES), timeout=START_S)  # the nodes' first connection
    ready = [scout.batch.remote(BATCH_NBYTES) for _ in range(NUM_BATCHES)]
    ray.wait(ready, num_returns=len(ready), timeout=START_S, fetch_local=False)
    began = monotonic()
    ray.get(ready, timeout=START_S)
    return NUM_BATCHES * BATCH_NBYTES / (monotonic() - began)


def cluster_finding(states: list[NodeState], num_going: int = 0) -> Finding:
    """Return the finding about the nodes and CPUs of the whole cluster.

    Args:
        states: what is known about each node.
        num_going: nodes that Ray is draining.
    """
    free, num_cpus = sum(state.free_cpus for state in states), sum(state.node.num_cpus for state in states)
    text = f"{counted(len(states), 'node')}, {free:g} of {num_cpus} CPUs are free"
    if num_going:
        text += f"; {num_going} more will leave soon"
    if free >= 1:
        return Finding("cluster", "good", text)
    remedy = 'Add nodes, or let actors share CPUs: actor_options={"num_cpus": 0}'
    return Finding("cluster", "advice", f"{text}: actors wait for one, unless an autoscaler adds a node", remedy)


def node_findings(state: NodeState) -> Iterator[Finding]:
    """Yield all findings about one node, in the order in which a loader would meet the problems."""

    def found(check: str, level: Level, text: str, remedy: str = "") -> Finding:
        return Finding(f"{state.name}, {check}", level, text, remedy)

    if not state.seen:
        remedy = "Check the node's Ray logs, `ray status`, and whether it has what Ray's actors need: memory, the same Python"
        yield found("actor", "problem", f"none has started: {state.failure}", remedy)
        return
    yield found("actor", "good", f"starts; {state.free_cpus:g} of {state.node.num_cpus} CPUs are free")
    theirs = state.seen["versions"]
    if other := other_versions(theirs):
        yield found("versions", "problem", f"{other}: a loader refuses it", SAME_VERSIONS)
    elif why := state.seen["load_failure"]:
        yield found("versions", "problem", f"shmload cannot be loaded there: {why}", 'pip install "shmload[ray]" on the node')
    else:
        yield found("versions", "good", ", ".join(f"{name} {version}" for name, version in theirs.items() if version))
    size, free = state.seen["shm"]
    shm = f"{size_text(free)} of {size_text(size)} are free"
    if size < state.store:
        text = f"{shm}, and Ray's object store has {size_text(int(state.store))}, so it is on a disk, which slows down batches"
        remedy = "A larger /dev/shm (docker run --shm-size, in Kubernetes an emptyDir with medium: Memory), or a smaller "
        yield found("/dev/shm", "advice", text, f"{remedy}ray start --object-store-memory")
    else:
        yield found("/dev/shm", "good", shm)
    store = f"{size_text(int(state.free_store))} of {size_text(int(state.store))} are free"
    if state.free_store < max(state.store / 10, NUM_BATCHES * BATCH_NBYTES):
        text = f"{store}: it holds the dataset once, and finished batches; what does not fit is written to disk"
        yield found("object store", "advice", text, "ray start --object-store-memory=BYTES, or end what fills it (ray memory)")
    else:
        yield found("object store", "good", store)
    if state.failure:
        remedy = "Let nodes reach each other on all of Ray's ports (--object-manager-port, --min-worker-port), and install numpy"
        yield found("transfer", "problem", f"no batch came: {state.failure}", remedy)
    elif state.is_here:
        yield found("transfer", "good", "not needed on this machine")
    elif state.bytes_per_s < SLOW:
        text = f"{state.bytes_per_s / 1e6:,.0f} MB/s, less than a network of one gigabit: larger batches wait for it"
        yield found("transfer", "advice", text, "A faster network, or smaller samples: decode less, send uint8")
    else:
        yield found("transfer", "good", f"{state.bytes_per_s / 1e6:,.0f} MB/s")
