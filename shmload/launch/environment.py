"""Make the environment of a rank: torch.distributed's variables, as torchrun sets them, and a port at which ranks meet.

Ranks of one machine meet at a port that no other process can take. The launcher keeps a socket bound to the port while it runs, and
never listens on it, so rank 0 can listen there, and the kernel gives the port to no other process. This works if both sides set
SO_REUSEADDR, as servers do, including torch's. Rejected: choosing a free port and releasing it, because another process may take it
before rank 0 listens.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from shmload.processes.ranks import OWN_CPUS

LOOPBACK = "127.0.0.1"
STATIC_PORT = 29500  # torchrun's default, at which several machines meet


@dataclass(frozen=True)
class NodePlace:
    """The address where a run's ranks meet, this machine's place among the run's machines, and the restarts so far."""

    master_addr: str
    master_port: int
    run_id: str
    num_nodes: int = 1
    node_rank: int = 0
    num_restarts: int = 0
    max_restarts: int = 0


def held_port() -> socket.socket:
    """Return a socket bound to a free port on all addresses. No other process can take the port until the socket is closed."""
    for family in (socket.AF_INET6, socket.AF_INET):
        with ExitStack() as stack:
            try:
                held = stack.enter_context(socket.socket(family))  # fails if the kernel has no IPv6
                if family == socket.AF_INET6:
                    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(("", 0))
                stack.pop_all()
                return held
            except OSError as error:
                last = error
    raise OSError(f"no port of this machine can be bound: {last}") from last


def environment(
    place: NodePlace, local_rank: int, num_local: int, cpus: tuple[int, ...] = (), inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the complete environment of one rank.

    Args:
        place: the meeting point of the run, and this machine's place in it.
        local_rank: the rank among those of this machine.
        num_local: number of ranks on this machine.
        cpus: processors of this rank alone; empty if ranks share processors.
        inherited: the environment to start from.
    """
    rank, world_size = place.node_rank * num_local + local_rank, place.num_nodes * num_local
    own = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": num_local,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.num_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
        # these tell torch and frameworks that a launcher has started the ranks
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": place.num_restarts,
        "TORCHELASTIC_MAX_RESTARTS": place.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 serves the rendezvous
    }
    found = {**inherited, **{name: str(value) for name, value in own.items()}}
    found.pop("TORCHELASTIC_ERROR_FILE", None)  # set by an outer launcher
    found.pop(OWN_CPUS, None)
    found.setdefault("PYTHONUNBUFFERED", "1")  # so that output is not lost if the rank is killed
    found.setdefault("PYTHONFAULTHANDLER", "1")
    if cpus:
        found[OWN_CPUS] = str(len(cpus))  # OpenMP counts them itself
    elif num_local > 1:
        found.setdefault("OMP_NUM_THREADS", threads_of_each(num_local))
    return found


def next_start(number: int, ranks: Sequence[int], world_size: int, num_used: int, max_restarts: int) -> str:
    """Return a message about a start of this machine's ranks.

    Args:
        number: number of the start, counted from 1.
        ranks: ranks of this machine.
        world_size: number of ranks of the run.
        num_used: number of restarts used so far, including this one.
        max_restarts: number of restarts allowed.
    """
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"start {number}: {who} of {world_size}; {num_used} of {max_restarts} restarts are used up"


def threads_of_each(num_local: int) -> str:
    """Return the value of OMP_NUM_THREADS for `num_local` ranks that share this process's processors."""
    return str(max(len(os.sched_getaffinity(0)) // num_local, 1))
