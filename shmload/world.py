"""Which rank this process is, of how many."""

from __future__ import annotations

import os
import sys

_RUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """(rank, world_size): as given, else torch.distributed's if it is initialised, else RANK (or LOCAL_RANK) and WORLD_SIZE.

    Raises:
        ValueError: only one of the two is given or set, or rank is not below world_size.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together; got rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        else:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            found = os.environ.get("RANK") or os.environ.get(
                "LOCAL_RANK"
            )  # Lightning's children know only the second at first
            if found is None and world_size > 1:
                raise ValueError(
                    f"WORLD_SIZE says that there are {world_size} ranks, and neither RANK nor torch.distributed which of them this "
                    "is: give rank and world_size, or start the program by torchrun"
                )
            rank = int(found or "0")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is at least 0 and below world_size; got rank={rank}, world_size={world_size}")
    return rank, world_size


def run_key() -> tuple[str, ...]:
    """What the processes of one run on one node have in common, and no other run there has.

    Launchers tell every rank where all meet (MASTER_ADDR and MASTER_PORT, torchrun's run id, Slurm's job and step). Without one the
    ranks are one process's children (torch.multiprocessing.spawn): then it is that process, told by its id and start. Ids
    mean nothing across containers, so their PID namespace goes with them.
    """
    namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    told = tuple(os.environ.get(name, "") for name in _RUN_VARIABLES)
    if any(told):
        return (namespace, *told)
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat", encoding="utf-8", errors="replace") as stat:
            began = stat.read().rpartition(")")[2].split()[19]  # proc(5): the 22nd field; the second may hold blanks
    except OSError:  # it is in another PID namespace, and its number here is 0
        began = ""
    return namespace, str(parent), began
