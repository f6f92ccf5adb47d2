"""Which rank this process is, of how many."""

from __future__ import annotations

import os
import sys


def rank_and_world_size(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """(rank, world_size): as given, else torch.distributed's if it is initialised, else RANK and WORLD_SIZE, else (0, 1).

    Raises:
        ValueError: only one of the two is given, or rank is not below world_size.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together; got rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        else:
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is at least 0 and below world_size; got rank={rank}, world_size={world_size}")
    return rank, world_size
