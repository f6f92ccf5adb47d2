"""How much memory there is, before any is taken: free memory, this process's cgroup, /dev/shm.

Parsers take the root of the file system as an argument, so that tests can show them trees of other machines.
"""

from __future__ import annotations

import os
from pathlib import Path

from shmload.errors import RingTooSmall
from shmload.shm import cgroups
from shmload.shm.names import SHM_DIR


def shm_free_bytes(root: str = SHM_DIR) -> int:
    """Bytes free in /dev/shm; 0 if it is missing or read-only."""
    try:
        if not os.access(root, os.W_OK):
            return 0
        status = os.statvfs(root)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may still take: free memory, and what every cgroup it is in leaves."""
    return min([free_memory_bytes(root), *(cgroup.rest for cgroup in cgroups.memory(root))])


def check_fits(nbytes: int, *, num_slots: int, slot_nbytes: int, root: Path = Path("/")) -> None:
    """Refuses a ring that is larger than the memory there is.

    Raises:
        RingTooSmall: says bytes needed and free, how many slots would fit, and what to change.
    """
    free = available_bytes(root)
    if nbytes > free:
        raise RingTooSmall(
            f"the ring needs {nbytes} bytes, {num_slots} slots of {slot_nbytes}; this process may take {free} more, room for "
            f"{free // max(slot_nbytes, 1)} slots. Lower prefetch_factor, num_workers or batch_size, or free memory"
        )


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that programs may take before the kernel swaps or kills; very many if it does not tell."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
