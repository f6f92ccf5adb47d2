"""Compute the limits of "auto": how many processors and bytes a loader may use.

The processors are those that this process may use by affinity and cgroup quota, divided by the number of ranks on this node,
because ranks share them. They are not divided if shmload's launcher, or Slurm with --cpus-per-task, has given each rank its own.
SHMLOAD_MAX_WORKERS overrides the number for each loader of the process: set it lower if several loaders run side by side, and
higher if samples wait for a network more than they compute.

The bytes are `ring_bytes`, or a quarter of the memory that is free for a rank within its cgroups, including the ring's own.
/dev/shm is not a limit, because slots that are added later are in memfds if it has little room.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shmload.processes.ranks import OWN_CPUS, launched_place
from shmload.shm.cgroups import cpu_limit
from shmload.shm.free_memory import available_bytes

LIMIT = "SHMLOAD_MAX_WORKERS"
MEMORY_SHARE = 4  # the ring takes at most this fraction of the memory
FIXED_MAX = 16  # most workers in torch mode, because the number is fixed there and cannot be tuned


def num_cpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processors that this rank may use, at least 1."""
    quota, num_ranks = cpu_limit(root), num_ranks_here(environ)
    usable = len(os.sched_getaffinity(0))
    own = environ.get(OWN_CPUS if "LOCAL_WORLD_SIZE" in environ else "SLURM_CPUS_PER_TASK", "")
    if not own.isdecimal() or usable > int(own):  # not divided by the launcher, or the affinity was widened afterwards
        usable //= num_ranks
    if quota is not None:
        usable = min(usable, int(quota) // num_ranks)
    return max(usable, 1)


def most_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Return the largest number of workers that "auto" may choose.

    Args:
        root: root of the file system, for tests.
        environ: the environment.
    Raises:
        ValueError: SHMLOAD_MAX_WORKERS is not a positive integer.
    """
    given = environ.get(LIMIT, "")
    if not given:
        return num_cpus(root, environ)
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f'{LIMIT} must be an integer of at least 1, the most workers that num_workers="auto" takes; got {given!r}')
    return int(given)


def fixed_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of workers if it cannot change later (torch mode): all processors but the trainer's, at most 16.

    SHMLOAD_MAX_WORKERS, if set, is the number itself.
    """
    given = most_workers(root, environ)
    return given if environ.get(LIMIT) else max(min(given - 1, FIXED_MAX), 1)


def first_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Return the initial number of workers if it may change later: half of the processors, at least 1 and at most 4."""
    return max(min(num_cpus(root, environ) // 2, most_workers(root, environ), 4), 1)


def ring_budget(limit: int | None, taken: int, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Return the maximum total size of a ring in bytes.

    Args:
        limit: `ring_bytes`; None for a share of the available memory.
        taken: bytes that the ring already uses.
        root: root of the file system, for tests.
        environ: the environment.
    """
    if limit is not None:
        return limit
    return (available_bytes(root) // num_ranks_here(environ) + taken) // MEMORY_SHARE


def num_ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks of this run on this node according to its launcher; 1 without a launcher."""
    given = environ.get("LOCAL_WORLD_SIZE", "")
    if given.isdecimal():
        return max(int(given), 1)
    place = launched_place(environ)
    return 1 if place is None else place.local_world_size
