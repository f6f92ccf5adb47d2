"""Read what the kernel reports about a process in /proc/PID/stat."""

from __future__ import annotations

# Positions in the result of `stat_of`. Times are in ticks.
PARENT, START_TICKS = 1, 19
REAPED_TICKS = slice(13, 15)  # the user's and the system's time of children that have been reaped
REAPED_USER_TICKS, REAPED_SYSTEM_TICKS = 13, 14  # of its children that have been reaped


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
