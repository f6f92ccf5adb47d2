"""Compute how much memory this process may still allocate, and check that a ring fits.

A process may allocate the machine's free memory, but no more than any of its cgroups has left (cgroups.py). Functions take the root
of the file system as an argument, so that tests can pass the trees of other machines.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shmload.errors import RingTooSmall
from shmload.shm.cgroups import memory_cgroups
from shmload.shm.names import SHM_DIR


def shm_free_bytes(root: str = SHM_DIR) -> int:
    """Return the free bytes in /dev/shm; 0 if it is missing or read-only."""
    try:
        if not os.access(root, os.W_OK):
            return 0
        status = os.statvfs(root)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still allocate: the free memory, limited by each of its cgroups."""
    return min([free_memory_bytes(root), *(cgroup.rest for cgroup in memory_cgroups(root))])


def check_fits(nbytes: int, slots: tuple[int, int] | None = None, root: Path = Path("/"), *, promised_nbytes: int = 0) -> None:
    """Raise if `nbytes` exceeds the available memory. Allocating more would not fail, but invoke the kernel's OOM killer.

    Args:
        nbytes: the size of the segment.
        slots: (number, bytes each) of a ring's slots, for the message.
        root: the root of the file system.
        promised_nbytes: bytes of other segments that have no memory yet: the kernel counts them as free, but they will be needed.
    Raises:
        RingTooSmall: the memory is too small. The message has the bytes needed and free, how many slots would fit, and a remedy.
    """
    free = max(available_bytes(root) - promised_nbytes, 0)
    if nbytes > free:
        needed, room = f"a segment needs {nbytes} bytes", ""
        if slots is not None:
            needed = f"the ring needs {nbytes} bytes, {slots[0]} slots of {slots[1]}"
            room = f", enough for {free // max(slots[1], 1)} slots"
        raise RingTooSmall(
            f"{needed}, but only {free} bytes are available{room}. Lower prefetch_factor, num_workers or batch_size, or free memory"
        )


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that programs may allocate before the kernel swaps or kills; a very large number if unknown."""
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
