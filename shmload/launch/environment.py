"""What a rank's environment says: torch.distributed's variables, as torchrun sets them, and a place to meet.

The place is a port of the loopback that nobody else can have: the launcher keeps a socket bound to it for as long as it runs and
never listens, which lets rank 0 listen there and keeps the port from all whom the kernel gives a free one. Both sides must say
SO_REUSEADDR; servers do, torch's among them. Rejected: to choose a free port and let go of it, which others may take before rank 0
is up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from shmload.autotune.budget import OWN_CPUS

LOOPBACK = "127.0.0.1"
STATIC_PORT = 29500  # torchrun's: where several machines meet if nobody says another


@dataclass(frozen=True)
class Place:
    """Where the ranks of a run meet, and which of its machines this is."""

    master_addr: str
    master_port: int
    run_id: str
    num_nodes: int = 1
    node_rank: int = 0


class HeldPort:
    """A free port, kept from others until it is closed."""

    def __init__(self) -> None:
        # all addresses, of both families where there are two: rank 0 may listen on any of them
        try:
            self._socket = _bound(socket.AF_INET6, "::")
        except OSError:
            self._socket = _bound(socket.AF_INET, "")
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Gives the port back."""
        self._socket.close()


def _bound(family: int, address: str) -> socket.socket:
    found = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address, 0))
    except OSError:
        found.close()
        raise
    return found


def environment(
    place: Place,
    local_rank: int,
    num_local: int,
    cpus: tuple[int, ...] = (),
    inherited: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The whole environment of one rank.

    Args:
        num_local: ranks of this machine.
        cpus: processors that are this rank's alone; none: it shares them with the others.
    """
    rank, world_size = place.node_rank * num_local + local_rank, place.num_nodes * num_local
    told = {
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
        # by these torch and the frameworks know that somebody else has started the ranks
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 serves the rendezvous
    }
    found = {**inherited, **{name: str(value) for name, value in told.items()}}
    found.pop("TORCHELASTIC_ERROR_FILE", None)  # of a launcher around this one
    found.pop(OWN_CPUS, None)
    found.setdefault("PYTHONUNBUFFERED", "1")  # what a rank has printed is there when it is killed
    found.setdefault("PYTHONFAULTHANDLER", "1")
    if cpus:
        found[OWN_CPUS] = str(len(cpus))  # OpenMP counts them by itself
    elif num_local > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // num_local, 1)))
    return found
