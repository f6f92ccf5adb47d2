"""Choose the nodes of actors, and the resources that they request from Ray.

Unless `actor_options` changes it, an actor requests one CPU, so that an autoscaler sees the demand and Ray does not overbook a
node.

As many actors as there are CPUs on the nodes are placed explicitly: in proportion to the bytes of the dataset on each node, if the
dataset reports them; otherwise on the nodes in turn, up to the CPUs of each, and on nodes without a GPU first, because a trainer
needs the CPUs of a GPU node. These places are preferences: Ray takes another node if one is full or gone. Further actors are placed
by Ray when a node has free CPUs.

Ray would put actors that request no CPU on any node, so all of these are placed explicitly, and Ray may not take another node. If
they request something else (GPUs, memory, resources of one's own), Ray places them, because not every node has it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

_OTHER_REQUESTS = ("num_gpus", "memory", "object_store_memory", "resources", "accelerator_type")  # options of Ray


class Node(NamedTuple):
    """A live node of the cluster."""

    node_id: str
    num_cpus: int
    has_gpu: bool


def alive_nodes(described: Iterable[dict[str, Any]], going: Container[str] = ()) -> list[Node]:
    """Return the nodes that are alive and not being drained, in a fixed order.

    Args:
        described: the result of `ray.nodes()`.
        going: ids of the nodes that are being drained.
    """
    nodes = []
    for one in described:
        if one["Alive"] and one["NodeID"] not in going:
            resources = one["Resources"]
            nodes.append(Node(one["NodeID"], int(resources.get("CPU", 0)), resources.get("GPU", 0) > 0))
    return sorted(nodes)


def draining() -> Mapping[str, int]:
    """Return the nodes that Ray is draining; the keys are their ids."""
    from ray._private.state import state

    found: Mapping[str, int] = getattr(state, "get_draining_nodes", dict)()  # Ray has no public interface for it
    return found


def place(nodes: list[Node], num_workers: int, first: int = 0, node_nbytes: Mapping[str, int] | None = None) -> list[str]:
    """Return the id of each worker's node.

    Workers take the CPUs of nodes with data first, in proportion to the bytes, then those of nodes without a GPU in turn, then
    those of nodes with a GPU, and then start over.

    Args:
        nodes: the live nodes.
        num_workers: the number of workers.
        first: number of the node that gets the first worker, so that several loaders do not all start with the same node.
        node_nbytes: bytes of the dataset on each node, by id.
    Raises:
        ValueError: `nodes` is empty.
    """
    if not nodes:
        raise ValueError("the Ray cluster has no live node")
    lap = seats(nodes, first, node_nbytes or {}) or [node.node_id for node in nodes]
    return [lap[worker % len(lap)] for worker in range(num_workers)]


def seats(nodes: list[Node], first: int, node_nbytes: Mapping[str, int]) -> list[str]:
    """Return the id of each node once for each of its CPUs, in the order in which workers take them."""
    # by highest averages (D'Hondt): the next seat goes to the node with the most bytes for each actor
    with_data = [
        (node_nbytes[n.node_id] / (seat + 1), n.node_id) for n in nodes if node_nbytes.get(n.node_id) for seat in range(n.num_cpus)
    ]
    rest = [node for node in nodes if not node_nbytes.get(node.node_id)]
    turns = [_turns([node for node in rest if node.has_gpu is has_gpu], first) for has_gpu in (False, True)]
    return [node_id for _, node_id in sorted(with_data, reverse=True)] + [node_id for part in turns for node_id in part]


def _turns(nodes: list[Node], first: int) -> list[str]:
    nodes = nodes[first % len(nodes) :] + nodes[: first % len(nodes)] if nodes else []
    most = max((node.num_cpus for node in nodes), default=0)
    return [node.node_id for turn in range(most) for node in nodes if node.num_cpus > turn]


def options_of(
    nodes: list[Node], num_workers: int, given: Mapping[str, Any], *, first: int = 0, node_nbytes: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Return the arguments of Ray's `.options` for each worker's actor.

    Args:
        nodes: the live nodes.
        num_workers: the number of workers.
        given: the user's options; a `scheduling_strategy` or `label_selector` among them replaces this placement.
        first: number of the node that gets the first worker.
        node_nbytes: bytes of the dataset on each node, by id.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {"num_cpus": 1, **given}
    if "scheduling_strategy" in options or "label_selector" in options:
        return [options] * num_workers
    num_cpus = options["num_cpus"]
    if not num_cpus and any(options.get(name) for name in _OTHER_REQUESTS):
        return [{**options, "scheduling_strategy": "SPREAD"}] * num_workers
    places = place(nodes, num_workers, first, node_nbytes)
    if not num_cpus:
        # not soft, because Ray would put an actor that requests no CPU on any node
        return [{**options, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} for node in places]
    fitting = int(len(seats(nodes, first, node_nbytes or {})) // num_cpus)
    return [
        {
            **options,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
            if worker < fitting
            else "SPREAD",
        }
        for worker, node in enumerate(places)
    ]
