"""Decide how to start each rank (its number, environment, processors and output), and start a command as a rank."""

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
    """The settings with which one rank is started.

    Attributes:
        local_rank: its number on this machine.
        rank: its number among all ranks.
        environ: its complete environment.
        cpus: the processors that it is bound to; empty for all processors of the launcher.
        log: the file for its output; "" if the launcher prints it.
    """

    local_rank: int
    rank: int
    environ: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    log: str = ""


class Ends(NamedTuple):
    """Descriptors of the pipes or files that a rank's process writes to."""

    stdout: int
    stderr: int
    report: int  # see in_rank.py


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
        num_ranks: number of ranks on this machine.
        host: this machine.
        allowed: the processors to divide, or None for those that this thread may run on.
    """
    nodes = device_nodes(host)
    wanted = nodes[:num_ranks] if len(nodes) >= num_ranks else [None] * num_ranks
    return shares(cores(host, sorted(os.sched_getaffinity(0)) if allowed is None else allowed), wanted)


def log_of(logs: str | Path, rank: int) -> str:
    """Return the path of a rank's log file. boot.py builds the same name, because it imports nothing of shmload."""
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
    """Return the settings for every rank of this machine.

    Args:
        place: the run's meeting point, and this machine's place in the run.
        num_ranks: number of ranks on this machine.
        host: this machine.
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

    So a ^C in the terminal reaches only the launcher, which decides what happens to the ranks.

    Args:
        command: the command line.
        rank_spec: the settings of the rank.
        ends: descriptors for its output.
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
        rank_spec: the settings of the rank.
        ends: descriptors for its output.
    """
    process = booted(command, rank_spec, ends)
    return Child(process.pid, process.wait)
