"""Find the rank and the world size of this process: as given, from torch.distributed, or from the launcher's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

OWN_CPUS = "SHMLOAD_RANK_CPUS"  # set by `shmload.launch`: the number of the node's processors that belong to this rank alone


class Place(NamedTuple):
    """A process's place as its launcher reports it: its rank in the run and on its node, and the number of ranks of each."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


# mpirun and srun set other variables than torchrun. PMI's are set by Hydra, which starts processes for MPICH and Intel MPI.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # not SLURM_NTASKS: sbatch and salloc set it, too, for a single process that srun has not started
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def launched_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that an mpirun (OpenMPI, MVAPICH, MPICH, Intel MPI) or Slurm's srun has set; None if none has."""
    for names in _LAUNCHERS:
        if all(name in environ for name in names):
            rank, world_size, local_rank, local = (environ[name] for name in names)
            num_local = int(local) if local.isdecimal() else _tasks_of_node(local, int(environ.get("SLURM_NODEID", "0")))
            return Place(int(rank), int(world_size), int(local_rank), num_local)
    return None


def _tasks_of_node(text: str, node: int) -> int:
    """Return the tasks of one node from Slurm's list of tasks by node, such as "4(x2),3"."""
    counts = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[node]


def local_place(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return (local rank, ranks on this node) as torchrun, mpirun or srun set them; None if they are not set."""
    rank, size = environ.get("LOCAL_RANK", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal():
        return int(rank), max(int(size), 1)
    place = launched_place(environ)
    return place and (place.local_rank, place.local_world_size)


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world_size): as given, else torch.distributed's if initialized, else RANK (or LOCAL_RANK) and WORLD_SIZE.

    If the rank or WORLD_SIZE is missing, return what mpirun or srun has set, unless WORLD_SIZE contradicts it. If nothing is set,
    return (0, 1).

    Raises:
        ValueError: only one of the two is given, the variables are incomplete or invalid, or rank is not below world_size.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together; got rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        if (distributed := _distributed()) is not None:
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        else:
            rank, world_size = _place_by_environment()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is at least 0 and below world_size; got rank={rank}, world_size={world_size}")
    return rank, world_size


def source_of_rank() -> str:
    """Return the source from which `rank_and_world_size` reads the rank if none is given, for messages."""
    if _distributed() is not None:
        return "torch.distributed"
    return "RANK and WORLD_SIZE" if os.environ.get("WORLD_SIZE") else "the launcher's environment"


def _distributed() -> Any:
    """Return torch.distributed if it is initialized here, or was in the process that this one was forked from; else None."""
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


class OwnRank:
    """A callable that returns the reader's (rank, world_size): as given, else as `rank_and_world_size` finds them.

    A spawned worker cannot know its rank, so a pickle contains the sender's. Only workers use it: an unpickled copy in a process
    that is a rank itself, as in torch.multiprocessing.spawn, uses that process's own.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self._given = rank, world_size
        self._sender: tuple[int, int] | None = None

    def __call__(self) -> tuple[int, int]:
        if self._sender is None:
            return rank_and_world_size(*self._given)
        data = sys.modules.get("torch.utils.data")
        if self._sender[1] > 1 and data is not None and data.get_worker_info() is not None and _distributed() is None:
            return self._sender  # whatever the environment says, because the sender may know better
        found = rank_and_world_size()
        return found if found[1] > 1 else self._sender

    @property
    def given(self) -> tuple[int, int] | None:
        """Return the values as given; None if they were not."""
        rank, world_size = self._given
        return None if rank is None or world_size is None else (rank, world_size)

    def __getstate__(self) -> dict[str, Any]:
        return {"_given": self._given, "_sender": self() if self._given == (None, None) else None}


def _place_by_environment() -> tuple[int, int]:
    size = os.environ.get("WORLD_SIZE") or None
    found = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")  # Lightning's children know only the second at first
    if size is None or not found:
        place = launched_place()
        # batch scripts export WORLD_SIZE alone, for torch's env:// to find
        if place is not None and (size is None or size == str(place.world_size)):
            return place[:2]
    try:
        rank, world_size = int(found or "0"), int(size or "1")
    except ValueError:
        rank, world_size = -1, 1
    if not found and world_size > 1:
        raise ValueError(
            f"WORLD_SIZE says that there are {world_size} ranks, and neither RANK nor torch.distributed which of them this "
            "is: give rank and world_size, or start the program by torchrun, mpirun or srun"
        )
    if not 0 <= rank < world_size:
        shown = ", ".join(f"{name}={os.environ[name]!r}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ)
        raise ValueError(
            f"the environment says {shown}, which is not a valid rank and world size: set RANK and WORLD_SIZE, or neither, or give "
            "rank and world_size"
        )
    return rank, world_size
