"""Wait for room in a budgeted folder.

The pauses between two tries double from 2 to 50 ms. Polling is needed because a process that dies frees its files without notice;
one try costs 0.1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

from shmload.errors import CacheFull

__all__ = ["T", "wait_for_room"]

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05  # pauses between two tries


def wait_for_room(
    try_once: Callable[[], T], timeout_s: float | None, waits_out: tuple[type[Exception], ...] = (CacheFull, TimeoutError)
) -> T:
    """Call `try_once` until it succeeds, and return its result. Pauses double between tries.

    Args:
        try_once: one try.
        timeout_s: seconds after which the exception of the last try is raised; None for no limit.
        waits_out: exceptions after which to try again: CacheFull, because there is no room, and TimeoutError, because another
            process is still writing the file.
    """
    deadline = math.inf if timeout_s is None else monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return try_once()
        except waits_out:
            if (left_s := deadline - monotonic()) <= 0:
                raise
        sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
