"""Tell a process from a later one with the same id, by its start time.

An *identity* holds both in one word of shared memory: process id << 40 | start time, in the kernel's ticks since boot.
"""

from __future__ import annotations

import os

from shmload.processes.proc_stat import START_TICKS, stat_of

_START_BITS = 40


def start_of(pid: int | str) -> str:
    """Return when a process began, in the kernel's ticks since boot, or "" if there is no such process.

    Args:
        pid: the process id, or "self".
    """
    try:
        return stat_of(pid)[START_TICKS]
    except OSError:
        return ""


def pidfd_of(pid: int, began: str) -> int:
    """Return a pidfd of the process that began at a given time, or -1 if it has ended.

    Args:
        pid: the process id.
        began: its start time, a result of `start_of`.

    Raises:
        OSError: no descriptor is left.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if began and start_of(pid) == began:  # read after the pidfd was opened, so the id cannot be reused in between
        return pidfd
    os.close(pidfd)
    return -1


def own_identity() -> int:
    """Return this process's identity; never 0."""
    return os.getpid() << _START_BITS | int(start_of(os.getpid()) or 0) & (1 << _START_BITS) - 1


def pid_and_start(identity: int) -> tuple[int, str]:
    """Return the process id and start time that an identity holds."""
    return identity >> _START_BITS, str(identity & (1 << _START_BITS) - 1)
