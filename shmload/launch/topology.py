"""Read the hardware that ranks are placed on: cores, their NUMA nodes, and the node of each GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shmload.shm.host import Host, parse_list

_DRIVERS = ("dev/nvidiactl", "dev/kfd", "dev/dxg")  # of NVIDIA, AMD and WSL


class Core(NamedTuple):
    """One core.

    Attributes:
        node: number of its NUMA node.
        cpus: numbers of those of its hardware threads that may be used, as in sched_setaffinity.
    """

    node: int
    cpus: tuple[int, ...]


def cores(host: Host, allowed: Iterable[int]) -> list[Core]:
    """Return the cores of some processors, sorted by node. Without /sys, each processor counts as a core of node 0.

    Args:
        host: the machine.
        allowed: the processors that may be used.
    """
    allowed, left = set(allowed), set(allowed)
    node_of = {}
    for folder in (host.root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in parse_list(host.text(f"sys/devices/system/node/{folder.name}/cpulist") or ""):
            node_of[cpu] = int(folder.name[4:])
    found = []
    for cpu in sorted(allowed):
        if cpu in left:
            siblings = host.text(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            threads = (parse_list(siblings or "") | {cpu}) & left
            left -= threads
            found.append(Core(node_of.get(cpu, 0), tuple(sorted(threads))))
    return sorted(found)


def num_devices(host: Host) -> int:
    """Return the number of CUDA devices that a rank would see. torch is imported only if there is a driver."""
    if not any((host.root / path).exists() for path in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def device_nodes(host: Host) -> list[int | None]:
    """Return the NUMA node of each CUDA device in CUDA's order, None for an unknown node. Empty if the devices are unknown.

    NVIDIA's driver lists devices by PCI address, which is CUDA's order among devices of one kind. CUDA itself is not used, because
    a process that has initialized it cannot fork ranks any more.
    """
    listing = host.root / "proc/driver/nvidia/gpus"
    addresses = sorted(folder.name for folder in listing.iterdir()) if listing.is_dir() else []
    if (visible := host.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]
        if not all(name.isdecimal() and int(name) < len(addresses) for name in names):  # for example UUIDs of devices or MIG slices
            return []
        addresses = [addresses[int(name)] for name in names]
    nodes = [int(host.text(f"sys/bus/pci/devices/{address.lower()}/numa_node") or -1) for address in addresses]
    return [node if node >= 0 else None for node in nodes]  # -1 means that the firmware does not report it
