"""Divide the cores of a machine among ranks, given its cores and the NUMA node of each rank's GPU.

Shares are equal to within one core, because ranks wait for each other. Every core is assigned, because decoding needs them all.
The hardware threads of a core stay together. Within these rules a rank gets cores of its GPU's NUMA node; ranks without a known
node take the nodes in order. A rank gets cores of another node only if its own node has none left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from shmload.launch.topology import Core


def shares(cores: Sequence[Core], wanted: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Divide cores among ranks. Return the processors of each rank; empty tuples (no binding) if there are fewer cores than ranks.

    Args:
        cores: all cores, sorted by NUMA node.
        wanted: for each rank, the NUMA node of its GPU; None if it is unknown.
    """
    num_ranks = len(wanted)
    if len(cores) < num_ranks:
        return [()] * num_ranks
    least, num_larger = divmod(len(cores), num_ranks)
    left = Counter(core.node for core in cores)
    # a rank without a preference gets the node that it would have if all cores were divided in order
    near = [
        node if node is not None and node in left else cores[(2 * rank + 1) * len(cores) // (2 * num_ranks)].node
        for rank, node in enumerate(wanted)
    ]
    taken = [Counter[int]() for _ in wanted]  # for each rank, its number of cores on each node

    def take(rank: int, node: int, count: int) -> None:
        count = min(count, left[node])
        taken[rank][node] += count
        left[node] -= count

    for rank in range(num_ranks):
        take(rank, near[rank], least)
    for rank in range(num_ranks):  # one more core, if the same node has one
        if num_larger and left[near[rank]] and taken[rank].total() == least:
            take(rank, near[rank], 1)
            num_larger -= 1
    for rank in range(num_ranks):
        size = least
        if num_larger and taken[rank].total() <= least:
            size, num_larger = least + 1, num_larger - 1
        for node in sorted(left, key=lambda node: abs(node - near[rank])):
            take(rank, node, max(size - taken[rank].total(), 0))
    # neighboring cores of a node go to one rank, because they may share a cache
    queues = {node: iter([core for core in cores if core.node == node]) for node in left}
    return [
        tuple(sorted(cpu for node, count in mine.items() for core in islice(queues[node], count) for cpu in core.cpus))
        for mine in taken
    ]
