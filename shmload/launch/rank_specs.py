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
from shmload.processes.child import Child
from shmload.shm.host import Host


@dataclass(frozen=True)
class RankSpec:
    """How to start one rank.

    Attributes:
        local_rank: its number on this machine.
        rank: its number among all ranks.
        environ: its complete environment.
        cpus: the processors it is bound to; empty: all processors of the launcher.
        log: the file for its output; "": pipes to the launcher, which prints it.
    """

    local_rank: int
    rank: int
    environ: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    log: str = ""


class Ends(NamedTuple):
    """Descriptors of the pipes and files that a rank's process writes to."""

    stdout: int
    stderr: int
    report: int


Start = Callable[[RankSpec, Ends], Child]  # starts the process of a rank and does not wait for it


def number_of_ranks(nprocs: int | None, host: Host) -> int:
    """Return the given number of ranks, or the number of CUDA devices, at least 1.

    Raises:
        ValueError: the given number is less than 1, or not an integer.
    """
    if nprocs is None:
        return max(num_devices(host), 1)
    if not isinstance(nprocs, SupportsIndex) or nprocs.__index__() < 1:
        raise ValueError(f"nprocs is a number of processes from 1 up, or None for one per CUDA device; got {nprocs!r}")
    return nprocs.__index__()


def divided(num_ranks: int, host: Host, allowed: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Return the processors of each rank of this machine, near its GPU; empty tuples if there are fewer cores than ranks.

    Args:
        allowed: the processors to divide, or None for those that this thread may run on.
    """
    nodes = device_nodes(host)
    wanted = nodes[:num_ranks] if len(nodes) >= num_ranks else [None] * num_ranks
    return shares(cores(host, sorted(os.sched_getaffinity(0)) if allowed is None else allowed), wanted)


def log_of(logs: str | Path, rank: int) -> str:
    """Return the log file of a rank. boot.py builds the same name."""
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
    """Describe every rank of this machine.

    Args:
        pin: give each rank processors of its own.
        logs: a folder for one output file per rank; created if it does not exist.
        allowed: the processors to divide, or None for those that this thread may run on.
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


BOOT = ("-I", "-S", str(Path(__file__).with_name("boot.py")))  # the arguments with which python starts a rank


def booted(command: Sequence[str], rank_spec: RankSpec, ends: Ends, keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a command as a rank that dies with this thread, in a process group of its own.

    A ^C in the terminal reaches only the foreground group, which is the launcher's; it decides what happens to the ranks.

    Args:
        keep: further descriptors that the command inherits.
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
    """Start a command line as a rank.

    Args:
        command: the command line.
        rank_spec: the rank.
        ends: where it writes.
    """
    process = booted(command, rank_spec, ends)
    return Child(process.pid, process.wait)
