"""When this process began: what comes before a worker's first order is its start-up, imports and all."""

from __future__ import annotations

import os
from time import CLOCK_BOOTTIME, clock_gettime_ns, monotonic_ns


def process_begin_ns() -> int:
    """CLOCK_MONOTONIC at the start of this process, to a clock tick (10 ms); 0 where /proc does not say.

    Source: proc_pid_stat(5), field 22, which counts from boot, suspended time included.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - (clock_gettime_ns(CLOCK_BOOTTIME) - monotonic_ns())
