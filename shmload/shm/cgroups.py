"""This process's cgroups, as the kernel tells them: where its limits stand, v1 and v2, from its own up to the root.

A container sees its own cgroup mounted at the top, while /proc still names the path on the host: folders that are not there are
passed by on the way up, and the top is always looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 60  # v1 says "none" by a number near 2^63


class Memory(NamedTuple):
    """One cgroup with a memory limit.

    Attributes:
        limit, used: bytes; `used` includes shared memory that its processes were the first to touch.
        rest: bytes still to be had. Page cache that the kernel would drop counts as free.
    """

    folder: Path
    version: int
    limit: int
    used: int
    rest: int


def folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """(1 or 2, folder) of each cgroup that may rule over a controller, the innermost first."""
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


def memory(root: Path = Path("/")) -> list[Memory]:
    """Every cgroup on the way up that limits this process's memory."""
    found = []
    for version, folder in folders("memory", root):
        limit, usage = (
            ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        most, used = number(folder / limit), number(folder / usage)
        if most is not None and used is not None:
            found.append(Memory(folder, version, most, used, max(most - used + _droppable(folder), 0)))
    return found


def cpus(root: Path = Path("/")) -> float | None:
    """How many processors' time this process may use; None if no cgroup limits that."""
    found = []
    for version, folder in folders("cpu", root):
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


def number(path: Path) -> int | None:
    """The number in a file; None if there is none or it stands for "no limit"."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value < _NO_LIMIT else None


def _droppable(folder: Path) -> int:
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
