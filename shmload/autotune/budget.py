"""What "auto" may take: processors and bytes.

Processors are those this process may run on, by affinity and cgroup quota, divided by the ranks on this node (LOCAL_WORLD_SIZE,
which launchers set): ranks share them, unless our own launcher has given each its own. SHMLOAD_MAX_WORKERS says another number, for
one loader: a smaller one where several loaders run side by side, a larger one where samples wait for a network more than they
compute.

Bytes are `ring_bytes`, or a quarter of what free memory and cgroups leave to a rank, the ring's own included. /dev/shm is no limit,
as slots that come later lie in memfds where it has little room.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shmload.shm import segment
from shmload.shm.segment import available_bytes

LIMIT = "SHMLOAD_MAX_WORKERS"
OWN_CPUS = "SHMLOAD_RANK_CPUS"  # set by `shmload.launch`: so many of the node's processors are this rank's alone
MEMORY_SHARE = 4  # the ring takes at most one part in so many
FIXED_MAX = 16  # workers in torch mode, where nothing tells whether more are of use


def num_cpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Processors that this rank may keep busy, at least 1."""
    quota, num_ranks = segment.cpus(root), num_ranks_here(environ)
    usable = len(os.sched_getaffinity(0))
    own = environ.get(OWN_CPUS, "")
    if not own.isdecimal() or usable > int(own):  # the second: somebody has undone the division
        usable //= num_ranks
    if quota is not None:
        usable = min(usable, int(quota) // num_ranks)
    return max(usable, 1)


def most_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """The largest crew that "auto" may take.

    Raises:
        ValueError: SHMLOAD_MAX_WORKERS is no number from 1 up.
    """
    given = environ.get(LIMIT, "")
    if not given:
        return num_cpus(root, environ)
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(
            f'{LIMIT} is a whole number from 1 up, the most workers that num_workers="auto" takes; got {given!r}'
        )
    return int(given)


def fixed_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """The crew where it must be the same on every run: one processor is the trainer's, and no more than 16 workers."""
    given = most_workers(root, environ)
    return given if environ.get(LIMIT) else max(min(given - 1, FIXED_MAX), 1)


def first_workers(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """The crew to begin with where it may change: half of the processors, and 4 at most."""
    return max(min(num_cpus(root, environ) // 2, most_workers(root, environ), 4), 1)


def ring_budget(limit: int | None, taken: int, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Bytes that a ring may take in all.

    Args:
        limit: `ring_bytes`; None: a share of what there is.
        taken: bytes of that the ring has.
    """
    if limit is not None:
        return limit
    return (available_bytes(root) // num_ranks_here(environ) + taken) // MEMORY_SHARE


def num_ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of this run on this node, as its launcher says; 1 if none does."""
    given = environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(given), 1) if given.isdecimal() else 1
