"""Which node decodes for which worker.

Actors ask Ray for no CPU of their own: a request that the cluster cannot meet waits for ever, and two loaders would starve each
other. Instead they are spread by hand, in proportion to the nodes' CPUs, over nodes without a GPU first: the others' CPUs
are a trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A node of the cluster that is alive."""

    node_id: str
    num_cpus: int
    has_gpu: bool


def alive_nodes(described: Iterable[dict[str, Any]]) -> list[Node]:
    """The nodes that Ray says are alive, in a fixed order."""
    nodes = []
    for one in described:
        if one["Alive"]:
            resources = one["Resources"]
            nodes.append(Node(one["NodeID"], int(resources.get("CPU", 0)), resources.get("GPU", 0) > 0))
    return sorted(nodes)


def place(nodes: list[Node], num_workers: int, first: int = 0) -> list[str]:
    """The node of each worker.

    Workers fill CPU-only nodes up to their CPUs, by turns, then nodes with a GPU, then go round again.

    Args:
        first: at which node turns begin, so that several loaders do not all begin at the same one.
    Raises:
        ValueError: there is no node.
    """
    if not nodes:
        raise ValueError("the cluster has no node that is alive")
    turns = [_turns([node for node in nodes if node.has_gpu is has_gpu], first) for has_gpu in (False, True)]
    lap = [node_id for part in turns for node_id in part] or [node.node_id for node in nodes]
    return [lap[worker % len(lap)] for worker in range(num_workers)]


def _turns(nodes: list[Node], first: int) -> list[str]:
    """Each node as often as it has CPUs, in turns."""
    nodes = nodes[first % len(nodes) :] + nodes[: first % len(nodes)] if nodes else []
    most = max((node.num_cpus for node in nodes), default=0)
    return [node.node_id for turn in range(most) for node in nodes if node.num_cpus > turn]
