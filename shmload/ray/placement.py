"""The placement of actors on nodes, and the resources they ask Ray for.

An actor asks for one CPU, so that an autoscaler sees the demand and Ray overbooks no node, unless `actor_options` says otherwise.
As many actors as the nodes have CPUs for are placed explicitly: in proportion to the bytes of the dataset on each node, if the
dataset reports them; else in proportion to the CPUs, on nodes without a GPU first, because a GPU node's CPUs are needed by a
trainer. Each such place is a preference: Ray takes another node if it is full or gone. Ray places the rest when a node with free
CPUs arrives.

Actors that ask for no CPU would be put anywhere by Ray; they are all placed explicitly, and stay there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A live node of the cluster."""

    node_id: str
    num_cpus: int
    has_gpu: bool


def alive_nodes(described: Iterable[dict[str, Any]], going: Container[str] = ()) -> list[Node]:
    """Return the nodes that Ray reports as alive and that are not being drained, in a fixed order."""
    nodes = []
    for one in described:
        if one["Alive"] and one["NodeID"] not in going:
            resources = one["Resources"]
            nodes.append(Node(one["NodeID"], int(resources.get("CPU", 0)), resources.get("GPU", 0) > 0))
    return sorted(nodes)


def draining() -> Mapping[str, int]:
    """Return the nodes that Ray is draining, by id."""
    from ray._private.state import state

    found: Mapping[str, int] = getattr(state, "get_draining_nodes", dict)()  # Ray has no public interface for it
    return found


def place(nodes: list[Node], num_workers: int, first: int = 0, near: Mapping[str, int] | None = None) -> list[str]:
    """Return the node of each worker.

    Workers fill nodes with data up to their CPUs, in proportion to the bytes, then CPU-only nodes by turns, then nodes with a
    GPU, then start over.

    Args:
        nodes: the live nodes.
        num_workers: the number of workers.
        first: the node that the first turn starts with, so that several loaders do not all start with the same one.
        near: bytes of the dataset on each node.
    Raises:
        ValueError: there is no node.
    """
    if not nodes:
        raise ValueError("the cluster has no node that is alive")
    lap = seats(nodes, first, near or {}) or [node.node_id for node in nodes]
    return [lap[worker % len(lap)] for worker in range(num_workers)]


def seats(nodes: list[Node], first: int, near: Mapping[str, int]) -> list[str]:
    """Return each node once for each of its CPUs, in the order in which workers take them."""
    # by highest averages (D'Hondt): the next seat goes to the node with the most bytes for each actor
    with_data = [(near[n.node_id] / (seat + 1), n.node_id) for n in nodes if near.get(n.node_id) for seat in range(n.num_cpus)]
    rest = [node for node in nodes if not near.get(node.node_id)]
    turns = [_turns([node for node in rest if node.has_gpu is has_gpu], first) for has_gpu in (False, True)]
    return [node_id for _, node_id in sorted(with_data, reverse=True)] + [node_id for part in turns for node_id in part]


def _turns(nodes: list[Node], first: int) -> list[str]:
    nodes = nodes[first % len(nodes) :] + nodes[: first % len(nodes)] if nodes else []
    most = max((node.num_cpus for node in nodes), default=0)
    return [node.node_id for turn in range(most) for node in nodes if node.num_cpus > turn]


def options_of(
    nodes: list[Node], num_workers: int, given: Mapping[str, Any], *, first: int = 0, near: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Return the options of each worker's actor, as Ray's `.options` takes them.

    Args:
        nodes: the live nodes.
        num_workers: the number of workers.
        given: the user's options; a `scheduling_strategy` or `label_selector` among them replaces the placement here.
        first: the node that the first turn starts with.
        near: bytes of the dataset on each node.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {"num_cpus": 1, **given}
    if "scheduling_strategy" in options or "label_selector" in options:
        return [options] * num_workers
    num_cpus = options["num_cpus"]
    places = place(nodes, num_workers, first, near)
    if not num_cpus:
        # not soft: Ray would put an actor that asks for no CPU anywhere
        return [{**options, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} for node in places]
    fitting = int(len(seats(nodes, first, near or {})) // num_cpus)
    return [
        {
            **options,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
            if worker < fitting
            else "SPREAD",
        }
        for worker, node in enumerate(places)
    ]
