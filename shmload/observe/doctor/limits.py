"""Checks of what a process is limited to: descriptors, locked memory, processes."""

from __future__ import annotations

from collections.abc import Iterator

from shmload.observe.doctor.finding import Finding, mib
from shmload.observe.doctor.host import Host
from shmload.shm import cgroups

FEW_FILES = 256  # torch and Python take some ten, a loader two, each worker two, each shard that is read another
FEW_PROCESSES = 64  # beside those that run: threads count, and torch starts one for each core


def check_open_files(host: Host) -> Iterator[Finding]:
    """RLIMIT_NOFILE."""
    limit = host.limit("Max open files")
    if limit is None or limit.soft is None:
        yield Finding("open files", "good", "not limited")
    elif limit.soft < FEW_FILES:
        yield Finding(
            "open files",
            "advice",
            f"{limit.soft} descriptors: a loader of few workers gets by, many workers or open shards end in "
            '"Too many open files"',
            "ulimit -n 4096, or docker run --ulimit nofile=4096:4096",
        )
    else:
        yield Finding("open files", "good", f"{limit.soft:,} descriptors")


def check_locked_memory(host: Host) -> Iterator[Finding]:
    """RLIMIT_MEMLOCK: shmload locks nothing, so it is only told."""
    limit = host.limit("Max locked memory")
    told = "not limited" if limit is None or limit.soft is None else f"{mib(limit.soft)} may be locked"
    yield Finding("locked memory", "good", f"{told}; a loader locks none")


def check_processes(host: Host) -> Iterator[Finding]:
    """How many processes and threads may still be started: RLIMIT_NPROC, and the cgroups' own limits."""
    rests = []
    for _, folder in cgroups.folders("pids", host.root):
        most, used = cgroups.number(folder / "pids.max"), cgroups.number(folder / "pids.current")
        if most is not None and used is not None:
            rests.append(most - used)
    rest = min(rests, default=None)
    if rest is not None and rest < FEW_PROCESSES:
        yield Finding(
            "processes",
            "advice",
            f"the cgroup lets {max(rest, 0)} more processes and threads start: workers beyond that fail to start",
            "Raise it (docker run --pids-limit), or lower num_workers and OMP_NUM_THREADS",
        )
        return
    limit = host.limit("Max processes")
    if limit is not None and limit.soft is not None and limit.soft < FEW_PROCESSES:
        yield Finding(
            "processes",
            "advice",
            f"this user may run {limit.soft} processes and threads in all: workers beyond that fail to start",
            "ulimit -u 4096, or lower num_workers and OMP_NUM_THREADS",
        )
        return
    yield Finding("processes", "good", "enough may be started")
