"""A process told from a later one that has its number: by when it began.

A *ticket* is both in one word of shared memory: number << 40 | start time, in the kernel's ticks since boot.
"""

from __future__ import annotations

import os

_START_BITS = 40


def start_of(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[19]  # proc(5): the 22nd field; the second may hold blanks
    except OSError:
        return ""


def pidfd_of(pid: int, began: str) -> int:
    """A descriptor of the process that began then; -1: it has ended.

    Raises:
        OSError: there is no descriptor left.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if began and start_of(pid) == began:  # looked at with the process in hand: its number is not given away now
        return pidfd
    os.close(pidfd)
    return -1


def own_ticket() -> int:
    """This process's; never 0."""
    return os.getpid() << _START_BITS | int(start_of(os.getpid()) or 0) & (1 << _START_BITS) - 1


def of_ticket(ticket: int) -> tuple[int, str]:
    """The number and the start of a ticket's process."""
    return ticket >> _START_BITS, str(ticket & (1 << _START_BITS) - 1)
