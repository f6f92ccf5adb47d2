"""Assign the positions of a stream of items to ranks, step by step.

    batches of 3, 2 ranks    position  0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 ...
                             rank      0 0 0 1 1 1 | 0 0 0 1  1  1 |
    items, 2 ranks           position  0 1 2 3 4 5   6 7 ...          fetched several at a time: here 3 rounds
                             rank      0 1 0 1 0 1 | 0 1 ...

A step is named by its first position, so any number of ranks can continue from any step with exactly the remaining items.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shmload._core.permutation import MAX_N


def stream_positions(
    step: int, rank: int, *, n: int | None, uneven: str, world_size: int, batch_size: int | None, num_rounds: int = 1
) -> NDArray[np.int64]:
    """Return the positions of a rank's rows in a step, as int64; positions of n and more are padding.

    Args:
        step: the step, named by its first position.
        rank: the rank.
        n: number of items in the stream, or None if it never ends.
        uneven: how the last step is divided: "pad", "drop" or "exact".
        world_size: number of ranks.
        batch_size: items in one step of one rank, or None for single items, fetched `num_rounds` at a time.
        num_rounds: number of single items that a rank fetches in one step.
    """
    left = MAX_N if n is None else n - step
    if batch_size is None:
        needed = {"pad": 1, "drop": world_size, "exact": rank + 1}[uneven]
        if num_rounds == 1:
            return np.array([step + rank] if needed <= left else [], np.int64)
        first = world_size * np.arange(num_rounds)
        return step + rank + first[first + needed <= left]
    return np.arange(*rows_of(step, rank, left, uneven, world_size, batch_size))


def rows_of(first: int, rank: int, left: int, uneven: str, world_size: int, batch_size: int) -> tuple[int, int]:
    """Return the positions of a rank's rows in the step that begins at `first`, as (start, stop).

    `left` is the number of positions from `first` to the end; the last step has fewer than a global batch. Other arguments are as
    for `stream_positions`.
    """
    each, longer = batch_size, 0
    if left < batch_size * world_size:
        if uneven == "drop":
            return first, first
        each, longer = (-(-left // world_size), 0) if uneven == "pad" else divmod(left, world_size)
    start = first + rank * each + min(rank, longer)
    return start, start + each + (rank < longer)


def stream_end(n: int | None, rank: int, *, uneven: str, stride: int) -> int:
    """Return a bound of the steps (named by their first positions) that exist for `rank`: each is below it.

    `stride` is the number of items in a step over all ranks; `n` and `uneven` are as for `stream_positions`.
    """
    if n is None:
        return int(MAX_N)
    if uneven == "drop":
        return max(n - stride + 1, 0)
    return max(n - rank, 0) if uneven == "exact" else n
