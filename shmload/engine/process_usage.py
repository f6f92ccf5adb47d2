"""Read the memory, state and command line of a loader's processes from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from shmload.processes.proc_stat import PARENT, stat_of

PAGE = os.sysconf("SC_PAGE_SIZE")
# modules in the command lines of multiprocessing's helper processes; for these the parent's command line is shown
_HELPERS = ("multiprocessing.spawn", "multiprocessing.forkserver", "shmload.worker.template")


class Process(NamedTuple):
    """One process of this PID namespace.

    Attributes:
        parent: pid of its parent.
        is_stopped: whether a signal or a debugger has stopped it.
        rss_bytes: resident memory, including the ring that it maps.
        private_bytes: the part of `rss_bytes` that is not shared with a file or a segment.
    """

    parent: int
    is_stopped: bool
    rss_bytes: int
    private_bytes: int


def usage_of(pid: int | None, proc: str = "/proc") -> Process | None:
    """Return the usage of a process; None if it has ended or is not readable."""
    if not pid:
        return None
    try:
        fields = stat_of(pid, proc)
        pages = [int(word) for word in Path(f"{proc}/{pid}/statm").read_bytes().split()]
        return Process(int(fields[PARENT]), fields[0] in ("T", "t"), pages[1] * PAGE, (pages[1] - pages[2]) * PAGE)
    except (OSError, IndexError, ValueError):
        return None


def command_of(pid: int | None, proc: str = "/proc") -> str:
    """Return a process's command line, or its parent's if multiprocessing started it; empty if it is not readable."""
    if not pid:
        return ""
    try:
        words = Path(f"{proc}/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    if any(helper in word for word in words for helper in _HELPERS):
        found = usage_of(pid, proc)
        return command_of(None if found is None else found.parent, proc) or " ".join(words)
    return " ".join(words)


def add_memory_usage(report: dict[str, Any], owner: int, proc: str = "/proc", *, is_known: bool = True) -> None:
    """Add to a report the memory of the workers' processes and whether one is stopped; None if unknown.

    Args:
        report: a report of `stats.describe`, which is changed in place.
        owner: process id of the trainer. A worker with this id is a thread of it, and has no memory of its own.
        proc: mount point of procfs.
        is_known: whether the pids belong to this PID namespace.
    """
    names = ("is_stopped", "rss_bytes", "private_bytes")
    for worker in report["workers"]:
        found = usage_of(worker["pid"], proc) if is_known and worker["pid"] != owner else None
        worker.update({name: None if found is None else getattr(found, name) for name in names})
    for name in names[1:]:
        report["memory"][f"workers_{name}"] = sum(worker[name] or 0 for worker in report["workers"]) or None
