"""Read what the kernel reports about a process: /proc/PID/stat, and its CPU clock."""

from __future__ import annotations

import time

# Positions in the result of `stat_of`. Times are in ticks. The reaped times are those of children that have been reaped: the user's
# time and the system's.
PARENT, START_TICKS = 1, 19
REAPED_TICKS = slice(13, 15)
REAPED_USER_TICKS, REAPED_SYSTEM_TICKS = 13, 14
_CPU_OF_PROCESS = 2  # the kernel's clock ids: ~pid << 3, plus the kind of clock (include/linux/posix-timers.h)


def stat_of(pid: int | str, proc: str = "/proc") -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: field 3 of proc_pid_stat(5) is element 0.

    Args:
        pid: the process id, or "self".
        proc: mount point of procfs.

    Raises:
        OSError: there is no such process, or it is not readable.
    """
    with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()  # field 2, the name, may contain blanks and parentheses


def cpu_ns(pid: int) -> int:
    """Return how long a process has computed, in nanoseconds, ended threads included. Threads that compute at once add up.

    Args:
        pid: the process; it may be another user's.
    Raises:
        OSError: the process does not exist.
    """
    return time.clock_gettime_ns(~pid << 3 | _CPU_OF_PROCESS)
