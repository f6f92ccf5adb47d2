"""Read the limits that cgroups, v1 and v2, set on this process's memory and processors.

Every cgroup counts, from the process's own up to the root. A container sees its own cgroup mounted at the top, while /proc still
names the path on the host. So missing folders are skipped on the way up, and the top is always read. Functions take the root of
the file system as an argument, so that tests can pass the trees of other machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 60  # v1 expresses "no limit" by a number near 2^63


class CgroupMemory(NamedTuple):
    """One cgroup with a memory limit.

    Attributes:
        folder: its directory in the cgroup file system.
        version: 1 or 2.
        limit, used: in bytes; `used` includes shared memory that its processes were the first to touch.
        rest: bytes still available. Page cache that the kernel would drop counts as free.
    """

    folder: Path
    version: int
    limit: int
    used: int
    rest: int


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield (1 or 2, folder) for each cgroup that may limit a controller, the innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, top = 2, mount / "unified" if (mount / "unified").is_dir() else mount
        elif controller in controllers.split(","):
            version, top = 1, mount / controller
        else:
            continue
        folder = top / path.strip("/")
        while True:
            yield version, folder
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def memory_cgroups(root: Path = Path("/")) -> list[CgroupMemory]:
    """Return every cgroup that limits this process's memory, its own first."""
    found = []
    for version, folder in cgroup_folders("memory", root):
        limit, usage = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most = read_limit(folder / limit)
        if most is not None and (used := read_limit(folder / usage)) is not None:
            found.append(CgroupMemory(folder, version, most, used, max(most - used + _droppable(folder), 0)))
    return found


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process, in processors (1.5 means 150 % of one); None if no cgroup limits it."""
    found = []
    for version, folder in cgroup_folders("cpu", root):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota not in ("max", "-1"):
                found.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(found, default=None)


def read_limit(path: Path) -> int | None:
    """Return the number in a file; None if there is no number or it means "no limit"."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value < _NO_LIMIT else None


def _droppable(folder: Path) -> int:
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
