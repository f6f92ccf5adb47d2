"""Which positions of a stream of items a rank is given at a step.

    batches of 3, 2 ranks    position  0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 ...
                             rank      0 0 0 1 1 1 | 0 0 0 1  1  1 |
    items, 2 ranks           position  0 1 2 3 4 5   6 7 ...          fetched several at a time: here 3 rounds
                             rank      0 1 0 1 0 1 | 0 1 ...

A step goes by its first position, so any number of ranks goes on from any of them, with exactly the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmload.schedule.permutation import MAX_N

__all__ = ["stream_end", "stream_positions"]


def stream_positions(
    step: int, rank: int, *, n: int | None, uneven: str, world_size: int, batch_size: int | None, num_rounds: int = 1
) -> NDArray[np.int64]:
    """The positions of a rank's rows; at n and beyond stands padding.

    Args:
        n: where the stream ends; None: nowhere.
        uneven: of the last step: "pad", "drop" or "exact".
        batch_size: of one rank; None: items come singly, `num_rounds` of them together.
    """
    left = MAX_N if n is None else n - step
    if batch_size is None:
        first = world_size * np.arange(num_rounds)
        needed = {"pad": 1, "drop": world_size, "exact": rank + 1}[uneven]
        return step + rank + first[first + needed <= left]
    if left >= batch_size * world_size:
        return np.arange(step + rank * batch_size, step + (rank + 1) * batch_size)
    if uneven == "drop":
        return np.empty(0, np.int64)
    if uneven == "pad":
        each = -(-left // world_size)
        return np.arange(step + rank * each, step + (rank + 1) * each)
    each, longer = divmod(left, world_size)
    start = step + rank * each + min(rank, longer)
    return np.arange(start, start + each + (rank < longer))


def stream_end(n: int | None, rank: int, *, uneven: str, stride: int) -> int:
    """Steps from here on do not exist for that rank; `stride` is the number of items in one, over all ranks."""
    if n is None:
        return int(MAX_N)
    if uneven == "drop":
        return max(n - stride + 1, 0)
    return max(n - rank, 0) if uneven == "exact" else n
