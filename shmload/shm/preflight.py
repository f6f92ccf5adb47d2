"""How much memory there is, before any is taken: free memory, this process's cgroup, /dev/shm.

Parsers take the root of the file system as an argument, so that tests can show them trees of other machines.
"""

from __future__ import annotations

import os
from pathlib import Path

from shmload.errors import RingTooSmall
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
    return min([_free_memory(root), *_cgroup_rests(root)])


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


def _free_memory(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62


def _cgroup_rests(root: Path) -> list[int]:
    """What is left below each memory limit on the way from this process's cgroups to their roots, v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rests = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.strip("/")
        while True:
            rest = _rest(folder, limit, usage)
            if rest is not None:
                rests.append(rest)
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return rests


def _rest(folder: Path, limit: str, usage: str) -> int | None:
    """What is left in one cgroup; None if it has no limit. Page cache that the kernel would drop counts as free."""
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= 1 << 60:
        return None
    return max(int(most) - used + _droppable(folder), 0)


def _droppable(folder: Path) -> int:
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
