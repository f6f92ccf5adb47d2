"""Which rank this process is, of how many."""

from __future__ import annotations

import os
import sys


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
