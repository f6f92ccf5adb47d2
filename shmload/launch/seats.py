"""The seats of one machine's ranks: how many, on which processors, told what."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shmload.launch.affinity import shares
from shmload.launch.environment import Place, environment
from shmload.launch.seat import Seat
from shmload.launch.topology import cores, device_nodes, num_devices
from shmload.observe.doctor.host import Host


def number_of_ranks(nprocs: int | None, host: Host) -> int:
    """As given, else one for each CUDA device, else one.

    Raises:
        ValueError: it is less than 1.
    """
    if nprocs is None:
        return max(num_devices(host), 1)
    if nprocs < 1:
        raise ValueError(f"nprocs is a number of processes from 1 up, or None for one per CUDA device; got {nprocs}")
    return nprocs


def seats(
    place: Place,
    num_ranks: int,
    host: Host,
    *,
    pin: bool = True,
    logs: str | Path | None = None,
    allowed: Sequence[int] | None = None,
) -> list[Seat]:
    """One for each rank of this machine.

    Args:
        pin: whether each gets processors of its own.
        logs: a folder, made if it is not there: each rank's output goes to a file in it.
        allowed: the processors to be divided; None: those that this thread may run on.
    """
    cpus: list[tuple[int, ...]] = [()] * num_ranks
    if pin:
        nodes = device_nodes(host)
        wanted = nodes if len(nodes) >= num_ranks else [None] * num_ranks
        allowed = sorted(os.sched_getaffinity(0)) if allowed is None else allowed
        cpus = shares(cores(host, allowed), wanted[:num_ranks])
    if logs is not None:
        os.makedirs(logs, exist_ok=True)
    found = []
    for local_rank in range(num_ranks):
        told = environment(place, local_rank, num_ranks, cpus[local_rank], host.environ)
        rank = int(told["RANK"])
        log = os.path.join(os.path.abspath(logs), f"rank_{rank}.log") if logs is not None else ""
        found.append(Seat(local_rank, rank, told, cpus[local_rank], log))
    return found
