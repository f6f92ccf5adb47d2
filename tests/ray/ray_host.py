"""A Ray cluster of several nodes on this machine, for tests: a process that is nobody's child, driven over a socket.

    python ray_host.py SOCKET FOLDER

Apart from the tests' own process, because a worker pool of actors must not need a Ray that runs there, and because the processes that Ray
keeps for later use are no leftovers of a test. It ends when its connection does.
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

QUICK = {  # a killed node is noticed in about two seconds
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,  # a node that is only slow, on a busy machine, is not dead
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 5,  # a node gives up a head that has gone
    "memory_monitor_refresh_ms": 0,  # it kills actors for what other programs of this machine take
}
STORE_NBYTES = 80 << 20
NUM_CPUS = 4  # of each node: two loaders' actors have room there


def there(node_id: str) -> dict[str, Any]:
    """Options of what runs on a node and nowhere else."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def meet() -> None:
    """Waits until every node knows every other: Ray lets any of them place an actor, and one that is not known is passed over."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    nothing = ray.remote(lambda: None)
    look = ray.remote(lambda other: ray.get(nothing.options(**there(other)).remote()))
    pause = threading.Event()
    for one, other in product(nodes, nodes):
        while True:
            try:
                ray.get(look.options(**there(one)).remote(other))
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
    meet()
    connection.send(cluster.address)

    def alive() -> list[tuple[str, int]]:
        ours = [
            a for a in actors().values() if a["ActorClassName"] == "WorkerActor"
        ]  # Ray Train and Ray Data leave some of their own
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
        """The actors, when there are some on so many nodes: one that is not needed yet may still be starting."""
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
        """Has the oldest node take nothing new, and ends it as its owner would."""
        node = nodes.pop(0)
        node_id = node.node_id
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        is_accepted, why = GcsClient(address=cluster.address).drain_node(node_id, reason, "a test", int(time() * 1000) + 60_000)
        assert is_accepted, why
        cluster.remove_node(node, allow_graceful=True)
        return node_id

    def kill_head() -> None:
        """Ends the process that holds the cluster together."""
        cluster.head_node.kill_gcs_server()

    def kill_raylets() -> None:
        """Ends what rules the actors of every node, and leaves these."""
        for node in (cluster.head_node, *nodes):
            node.kill_raylet()

    def send_signal(pid: int, number: int) -> None:
        """To an actor that has not ended, by the number that it has here."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def add_node() -> None:
        nodes.append(cluster.add_node(num_cpus=NUM_CPUS, object_store_memory=STORE_NBYTES))
        meet()

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
