"""What a rank's process is started with, and what the launcher keeps of it.

What a rank's environment says: torch.distributed's variables, as torchrun sets them, and a place to meet.

The place is a port of the loopback that nobody else can have: the launcher keeps a socket bound to it for as long as it runs and
never listens, which lets rank 0 listen there and keeps the port from all whom the kernel gives a free one. Both sides must say
SO_REUSEADDR; servers do, torch's among them. Rejected: to choose a free port and let go of it, which others may take before rank 0
is up.

What the machine is made of, as far as ranks are placed on it: cores, their NUMA nodes, and the nodes that GPUs hang on.

Which processors each rank gets: a pure function of cores and of where each rank's GPU is.

Shares are equal within one core, because ranks wait for each other; every core is someone's, because decoding needs them all; the
hardware threads of a core stay together. Within these rules a rank gets cores of the node its GPU hangs on, else ranks take the
nodes in order. It gets cores of another node only when its own has no more.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, SupportsIndex

from shmload.shm.names import Host, listed
from shmload.world import OWN_CPUS

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
    """The cores that processors of `allowed` belong to, by node; what /sys does not say is one node of one-threaded cores."""
    allowed, left = set(allowed), set(allowed)
    node_of = {}
    for folder in (host.root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in listed(host.text(f"sys/devices/system/node/{folder.name}/cpulist") or ""):
            node_of[cpu] = int(folder.name[4:])
    found = []
    for cpu in sorted(allowed):
        if cpu in left:
            siblings = host.text(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            threads = (listed(siblings or "") | {cpu}) & left
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
    if (visible := host.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]
        if not all(name.isdecimal() and int(name) < len(addresses) for name in names):  # names of devices, or of parts of one
            return []
        addresses = [addresses[int(name)] for name in names]
    nodes = [int(host.text(f"sys/bus/pci/devices/{address.lower()}/numa_node") or -1) for address in addresses]
    return [node if node >= 0 else None for node in nodes]  # -1: the firmware does not say


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


@dataclass(frozen=True)
class RankSpec:
    """One rank's place before anyone sits there.

    Attributes:
        local_rank: among the ranks of this machine.
        rank: among all.
        environ: its whole environment.
        cpus: the processors it may run on; none: all that the launcher may.
        log: the file its output goes to; "": through pipes to the launcher, which prints it.
    """

    local_rank: int
    rank: int
    environ: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    log: str = ""


class Ends(NamedTuple):
    """The ends of pipes and files that a rank's process gets, by descriptor."""

    stdout: int
    stderr: int
    report: int


class Child(NamedTuple):
    """A started process: its id, and how to reap it once it has ended, which gives the exit code (negative: a signal's number)."""

    pid: int
    reap: Callable[[], int]


Start = Callable[[RankSpec, Ends], Child]  # starts the process of a rank, which is not waited for


LOOPBACK = "127.0.0.1"
STATIC_PORT = 29500  # torchrun's: where several machines meet if nobody says another


@dataclass(frozen=True)
class NodePlace:
    """Where the ranks of a run meet, which of its machines this is, and how often they were started before, of how many times."""

    master_addr: str
    master_port: int
    run_id: str
    num_nodes: int = 1
    node_rank: int = 0
    num_restarts: int = 0
    max_restarts: int = 0


def held_port() -> socket.socket:
    """A socket bound to a free port, which nobody else is given until it is closed; all addresses, as rank 0 may listen on any."""
    for family in (socket.AF_INET6, socket.AF_INET):
        with ExitStack() as stack:
            try:
                held = stack.enter_context(socket.socket(family))  # fails where the kernel has no IPv6
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
    """The whole environment of one rank.

    Args:
        num_local: ranks of this machine.
        cpus: processors that are this rank's alone; none: it shares them with the others.
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
        # by these torch and the frameworks know that somebody else has started the ranks
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": place.num_restarts,
        "TORCHELASTIC_MAX_RESTARTS": place.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 serves the rendezvous
    }
    found = {**inherited, **{name: str(value) for name, value in own.items()}}
    found.pop("TORCHELASTIC_ERROR_FILE", None)  # of a launcher around this one
    found.pop(OWN_CPUS, None)
    found.setdefault("PYTHONUNBUFFERED", "1")  # what a rank has printed is there when it is killed
    found.setdefault("PYTHONFAULTHANDLER", "1")
    if cpus:
        found[OWN_CPUS] = str(len(cpus))  # OpenMP counts them by itself
    elif num_local > 1:
        found.setdefault("OMP_NUM_THREADS", threads_of_each(num_local))
    return found


def next_start(number: int, ranks: Sequence[int], world_size: int, num_used: int, max_restarts: int) -> str:
    """What is said when the ranks of this machine are started for the `number`th time."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"start {number}: {who} of {world_size}; {num_used} of {max_restarts} restarts are used up"


def threads_of_each(num_local: int) -> str:
    """OMP_NUM_THREADS of ranks that share their processors."""
    return str(max(len(os.sched_getaffinity(0)) // num_local, 1))


def number_of_ranks(nprocs: int | None, host: Host) -> int:
    """As given, else one for each CUDA device, else one.

    Raises:
        ValueError: it is less than 1, or no integer.
    """
    if nprocs is None:
        return max(num_devices(host), 1)
    if not isinstance(nprocs, SupportsIndex) or nprocs.__index__() < 1:
        raise ValueError(f"nprocs is a number of processes from 1 up, or None for one per CUDA device; got {nprocs!r}")
    return nprocs.__index__()


def divided(num_ranks: int, host: Host, allowed: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """The processors of each rank of this machine, near its GPU; empty tuples if there are fewer cores than ranks.

    Args:
        allowed: what is divided; None: the processors that this thread may run on.
    """
    nodes = device_nodes(host)
    wanted = nodes[:num_ranks] if len(nodes) >= num_ranks else [None] * num_ranks
    return shares(cores(host, sorted(os.sched_getaffinity(0)) if allowed is None else allowed), wanted)


def log_of(logs: str | Path, rank: int) -> str:
    """The file that a rank's output goes to; boot.py knows the name, too."""
    return os.path.join(os.path.abspath(logs), f"rank_{rank}.log")


def rank_specs(
    place: NodePlace,
    num_ranks: int,
    host: Host,
    *,
    pin: bool = True,
    logs: str | Path | None = None,
    allowed: Sequence[int] | None = None,
) -> list[RankSpec]:
    """One for each rank of this machine.

    Args:
        pin: whether each gets processors of its own.
        logs: a folder, made if it is not there: each rank's output goes to a file in it.
        allowed: the processors to be divided; None: those that this thread may run on.
    """
    cpus = divided(num_ranks, host, allowed) if pin else [()] * num_ranks
    if logs is not None:
        os.makedirs(logs, exist_ok=True)
    found = []
    for local_rank in range(num_ranks):
        environ = environment(place, local_rank, num_ranks, cpus[local_rank], host.environ)
        rank = int(environ["RANK"])
        log = log_of(logs, rank) if logs is not None else ""
        found.append(RankSpec(local_rank, rank, environ, cpus[local_rank], log))
    return found


BOOT = ("-I", "-S", str(Path(__file__).with_name("boot.py")))  # what python runs first in a rank


def booted(command: Sequence[str], rank_spec: RankSpec, ends: Ends, keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts a command as a rank: tied to this thread, in a process group of its own.

    The terminal's ^C goes to the foreground's group alone: it reaches the launcher, which decides what becomes of the ranks.

    Args:
        keep: descriptors that the command inherits besides.
    """
    return subprocess.Popen(
        [sys.executable, *BOOT, str(os.getpid()), ",".join(map(str, rank_spec.cpus)), "", *command],
        stdout=ends.stdout,
        stderr=ends.stderr,
        pass_fds=keep,
        env=rank_spec.environ,
        process_group=0,
    )


def start_command(command: Sequence[str], rank_spec: RankSpec, ends: Ends) -> Child:
    """Starts a command line as a rank."""
    process = booted(command, rank_spec, ends)
    return Child(process.pid, process.wait)
