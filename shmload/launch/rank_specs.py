"""Describe each rank before it starts (place, environment, processors, output), and start a command as a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, SupportsIndex

from shmload.launch.affinity import shares
from shmload.launch.environment import NodePlace, environment
from shmload.launch.topology import cores, device_nodes, num_devices
from shmload.shm.names import Host


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
