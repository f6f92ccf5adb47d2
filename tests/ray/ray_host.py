"""Runs a Ray cluster of several nodes on this machine for tests, which drive it over a socket.

    python ray_host.py SOCKET FOLDER

It is a process of its own, not a child of the tests, because Ray actors as workers must not need a Ray in the trainer, and
because processes that Ray keeps for later use must not count as leftovers of a test. It ends when the connection is closed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from multiprocessing.connection import Client
from time import monotonic, time
from typing import Any

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray._private.state import actors
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

QUICK = {  # notices a killed node in about two seconds
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,  # long enough that a slow node on a busy machine is not taken for dead
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 5,  # a node gives up after its head has died
    "memory_monitor_refresh_ms": 0,  # off: it would kill actors because of other programs' memory
}
STORE_NBYTES = 80 << 20
NUM_CPUS = 4  # of each node: enough for two loaders' actors


def only_on(node_id: str) -> dict[str, Any]:
    """Returns options that place a task on one node and nowhere else."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def wait_until_nodes_are_connected() -> None:
    """Waits until every node knows every other, because any node may place an actor, and Ray skips nodes that it does not know."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    nothing = ray.remote(lambda: None)
    look = ray.remote(lambda other: ray.get(nothing.options(**only_on(other)).remote()))
    pause = threading.Event()
    for one, other in product(nodes, nodes):
        while True:
            try:
                ray.get(look.options(**only_on(one)).remote(other))
                break
            except (TaskUnschedulableError, RayTaskError):
                pause.wait(0.05)


def main(socket: str, folder: str) -> None:
    connection = Client(socket, "AF_UNIX")
    node = {"include_dashboard": False, "object_store_memory": STORE_NBYTES}
    head = {**node, "num_cpus": NUM_CPUS, "_system_config": QUICK, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=NUM_CPUS, object_store_memory=STORE_NBYTES)]
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    wait_until_nodes_are_connected()
    connection.send(cluster.address)

    def alive() -> list[tuple[str, int]]:
        ours = [
            a for a in actors().values() if a["ActorClassName"] == "WorkerActor"
        ]  # Ray Train and Ray Data leave their own actors
        return [(a["Address"]["NodeID"], a["Pid"]) for a in ours if a["State"] != "DEAD"]

    def until(found: Callable[[], Any], is_done: Callable[[Any], bool], timeout_s: float) -> Any:
        deadline, pause = monotonic() + timeout_s, threading.Event()
        while not is_done(left := found()) and monotonic() < deadline:
            pause.wait(0.05)
        return left

    def wait_for_none(timeout_s: float) -> list[tuple[str, int]]:
        left: list[tuple[str, int]] = until(alive, lambda left: not left, timeout_s)
        return left

    def wait_for_nodes(count: int, timeout_s: float) -> list[tuple[str, int]]:
        """Returns the actors once they run on `count` nodes; a node that is not needed yet may still be starting."""
        found: list[tuple[str, int]] = until(alive, lambda found: len({node for node, pid in found if pid}) == count, timeout_s)
        return found

    def wait_for_stored(most: int, timeout_s: float) -> int:
        return int(until(stored_nbytes, lambda left: left < most, timeout_s))

    def wait_until_stored(least: int, timeout_s: float) -> int:
        return int(until(stored_nbytes, lambda stored: stored >= least, timeout_s))

    def stored_nbytes() -> int:
        state = get_state_from_address(cluster.address)
        return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)

    def kill_node() -> str:
        node = nodes.pop(0)
        node_id = node.node_id
        cluster.remove_node(node, allow_graceful=False)
        return node_id

    def drain_node() -> str:
        """Drains the oldest node, so that it takes no new work, and shuts it down gracefully."""
        node = nodes.pop(0)
        node_id = node.node_id
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        is_accepted, why = GcsClient(address=cluster.address).drain_node(node_id, reason, "a test", int(time() * 1000) + 60_000)
        assert is_accepted, why
        cluster.remove_node(node, allow_graceful=True)
        return node_id

    def kill_head() -> None:
        """Kills the GCS server, the process that holds the cluster together."""
        cluster.head_node.kill_gcs_server()

    def kill_raylets() -> None:
        """Kills the raylet of every node but leaves the actors running."""
        for node in (cluster.head_node, *nodes):
            node.kill_raylet()

    def send_signal(pid: int, number: int) -> None:
        """Sends a signal to an actor that has not ended, by its process id on this machine."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def add_node() -> None:
        nodes.append(cluster.add_node(num_cpus=NUM_CPUS, object_store_memory=STORE_NBYTES))
        wait_until_nodes_are_connected()

    commands: dict[str, Any] = {
        "actors": alive,
        "wait_for_none": wait_for_none,
        "wait_for_nodes": wait_for_nodes,
        "stored_nbytes": stored_nbytes,
        "wait_for_stored": wait_for_stored,
        "wait_until_stored": wait_until_stored,
        "kill_node": kill_node,
        "add_node": add_node,
        "drain_node": drain_node,
        "kill_raylets": kill_raylets,
        "send_signal": send_signal,
        "kill_head": kill_head,
    }
    try:
        while True:
            name, arguments = connection.recv()
            connection.send(commands[name](*arguments))
    except EOFError:
        ray.shutdown()
        cluster.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
