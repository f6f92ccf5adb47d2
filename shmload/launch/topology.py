"""What the machine is made of, as far as ranks are placed on it: cores, their NUMA nodes, and the nodes that GPUs hang on.

Which processors each rank gets: a pure function of cores and of where each rank's GPU is.

Shares are equal within one core, because ranks wait for each other; every core is someone's, because decoding needs them all; the
hardware threads of a core stay together. Within these rules a rank gets cores of the node its GPU hangs on, else ranks take the
nodes in order. It gets cores of another node only when its own has no more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from shmload.shm.host import Host, listed

_DRIVERS = ("dev/nvidiactl", "dev/kfd", "dev/dxg")  # NVIDIA's, AMD's, and WSL's


class Core(NamedTuple):
    """One core, as far as this process may use it.

    Attributes:
        node: the NUMA node it belongs to.
        cpus: its hardware threads.
    """

    node: int
    cpus: tuple[int, ...]


def cores(host: Host, allowed: Iterable[int]) -> list[Core]:
    """The cores that processors of `allowed` belong to, by node; what /sys does not tell is one node of one-threaded cores."""
    allowed, left = set(allowed), set(allowed)
    node_of = {}
    for folder in (host.root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in listed(host.text(f"sys/devices/system/node/{folder.name}/cpulist") or ""):
            node_of[cpu] = int(folder.name[4:])
    found = []
    for cpu in sorted(allowed):
        if cpu in left:
            told = host.text(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            threads = (listed(told or "") | {cpu}) & left
            left -= threads
            found.append(Core(node_of.get(cpu, 0), tuple(sorted(threads))))
    return sorted(found)


def num_devices(host: Host) -> int:
    """CUDA devices that a rank here would see. torch is only asked where there is a driver."""
    if not any((host.root / path).exists() for path in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def device_nodes(host: Host) -> list[int | None]:
    """Of each CUDA device, in CUDA's order, the NUMA node it hangs on; None where that is not known. Empty: nothing is known.

    NVIDIA's driver lists the devices by PCI address, which is CUDA's order among devices of one kind. CUDA itself is not asked:
    a process that has begun it cannot fork ranks any more.
    """
    listing = host.root / "proc/driver/nvidia/gpus"
    addresses = sorted(folder.name for folder in listing.iterdir()) if listing.is_dir() else []
    found = []
    for address in _visible(host, addresses):
        node = host.text(f"sys/bus/pci/devices/{address.lower()}/numa_node")
        found.append(int(node) if node is not None and int(node) >= 0 else None)  # -1: the firmware does not say
    return found


def _visible(host: Host, addresses: list[str]) -> list[str]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; none where it names what is not one of them, such as parts of one."""
    wanted = host.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return addresses
    uuids = {}
    for address in addresses:
        told = re.search(r"UUID:\s*(\S+)", host.text(f"proc/driver/nvidia/gpus/{address}/information") or "")
        uuids[address] = told[1] if told else ""
    found = []
    for name in (part.strip() for part in wanted.split(",")):
        if name.isdecimal() and int(name) < len(addresses):
            found.append(addresses[int(name)])
        else:
            named = [address for address in addresses if name and uuids[address].startswith(name)]
            if len(named) != 1:
                return []
            found += named
    return found


def shares(cores: Sequence[Core], wanted: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Processors of each rank. With fewer cores than ranks nobody is tied down: empty tuples.

    Args:
        cores: sorted by node.
        wanted: of each rank the node it should be near; None: any.
    """
    num_ranks = len(wanted)
    if len(cores) < num_ranks:
        return [()] * num_ranks
    least, num_larger = divmod(len(cores), num_ranks)
    left = Counter(core.node for core in cores)
    # a rank without a wish wants what lies at its place if all cores were divided in order
    near = [
        node if node is not None and node in left else cores[(2 * rank + 1) * len(cores) // (2 * num_ranks)].node
        for rank, node in enumerate(wanted)
    ]
    taken = [Counter[int]() for _ in wanted]  # of each rank, how many cores of which node

    def take(rank: int, node: int, count: int) -> None:
        count = min(count, left[node])
        taken[rank][node] += count
        left[node] -= count

    for rank in range(num_ranks):
        take(rank, near[rank], least)
    for rank in range(num_ranks):  # one core more, where that needs no other node
        if num_larger and left[near[rank]] and taken[rank].total() == least:
            take(rank, near[rank], 1)
            num_larger -= 1
    for rank in range(num_ranks):
        size = least
        if num_larger and taken[rank].total() <= least:
            size, num_larger = least + 1, num_larger - 1
        for node in sorted(left, key=lambda node: abs(node - near[rank])):
            take(rank, node, max(size - taken[rank].total(), 0))
    # neighbouring cores of a node go to one rank: they may share a cache
    queues = {node: iter([core for core in cores if core.node == node]) for node in left}
    return [
        tuple(sorted(cpu for node, count in mine.items() for core in islice(queues[node], count) for cpu in core.cpus))
        for mine in taken
    ]
