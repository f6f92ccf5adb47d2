"""What /proc says about the processes of a loader: command line, parent, memory, whether one is stopped.

Only files that cost the process nothing are read. Proportional sizes (smaps) would be fairer to shared pages, but reading them
holds the process's map of its memory while all its pages are counted, which a view that promises not to disturb must not do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")
_HELPERS = ("multiprocessing.spawn", "multiprocessing.forkserver")  # the command is their parent's


class Process(NamedTuple):
    """One process of this PID namespace.

    Attributes:
        rss_bytes: what it has in memory, the ring it maps included.
        private_bytes: of that, what it shares with no file and no segment.
        is_stopped: by a signal or a debugger.
    """

    parent: int
    is_stopped: bool
    rss_bytes: int
    private_bytes: int


def look(pid: int | None, proc: str = "/proc") -> Process | None:
    """What is known of a process; None if it has gone, or nothing of it may be read."""
    if not pid:
        return None
    try:
        words = Path(f"{proc}/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        pages = [int(word) for word in Path(f"{proc}/{pid}/statm").read_bytes().split()]
        return Process(int(words[1]), words[0] in (b"T", b"t"), pages[1] * PAGE, (pages[1] - pages[2]) * PAGE)
    except (OSError, IndexError, ValueError):
        return None


def command_of(pid: int | None, proc: str = "/proc") -> str:
    """Its command line; its parent's if multiprocessing has started it; empty if that cannot be read."""
    if not pid:
        return ""
    try:
        words = Path(f"{proc}/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    if any(helper in word for word in words for helper in _HELPERS):
        found = look(pid, proc)
        return command_of(None if found is None else found.parent, proc) or " ".join(words)
    return " ".join(words)


def add_memory(report: dict[str, Any], proc: str = "/proc", *, is_known: bool = True) -> None:
    """Adds to a report (meaning.describe) what its workers' processes take and whether one is stopped; None where unknown.

    Args:
        is_known: their pids are those of this PID namespace.
    """
    rss = private = 0
    for worker in report["workers"]:
        found = look(worker["pid"], proc) if is_known else None
        worker["is_stopped"] = None if found is None else found.is_stopped
        worker["rss_bytes"] = None if found is None else found.rss_bytes
        worker["private_bytes"] = None if found is None else found.private_bytes
        rss += 0 if found is None else found.rss_bytes
        private += 0 if found is None else found.private_bytes
    report["memory"].update(workers_rss_bytes=rss or None, workers_private_bytes=private or None)
