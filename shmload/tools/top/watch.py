"""The loaders of this host, looked at again and again: what has happened since the last look."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from shmload.engine.reader import Block, Found, Process, RingReader, add_memory, command_of, look
from shmload.engine.stats import Report, Snapshot, describe

HISTORY = 60  # looks of which the samples per second are kept
FINDING_SHARE = 20  # finding takes at most one part in so many of the time
FINDING_S = 2.0  # and happens at most so often


class Watch:
    """The loaders of this host, or of some of its processes.

    Args:
        pids: trainers, or the processes that have started them; none: all loaders.
        caches: folders of growing caches, to look at, too.
    """

    def __init__(self, pids: Iterable[int] = (), caches: Iterable[Path] = ()) -> None:
        self._pids = frozenset(pids)
        self._caches = list(caches)
        self._found = Found([], [])
        self._found_at, self._finding_s = -float("inf"), 0.0
        self._last: dict[str, Snapshot] = {}
        self._history: dict[str, deque[float]] = {}
        self._commands: dict[str, str] = {}

    def look(self) -> Report:
        """What has happened since the last look; of a loader that was not there then, since it began.

        Returns:
            loaders, one report each (docs/top.md); totals over them; what dead ones have left; blocks that could not be read;
            caches, if some were named.
        """
        found = self._find()
        reports, unreadable = [], []
        for block in found.blocks:
            process = look(block.pid)
            if self._pids and self._pids.isdisjoint({block.pid, process and process.parent}):
                continue
            try:
                seen = RingReader.open(block.path).snapshot()
            except (FileNotFoundError, PermissionError):  # it has closed since, or is another user's
                continue
            except (OSError, ValueError) as error:
                unreadable.append({"path": block.path, "uid": block.uid, "pid": block.pid, "why": str(error)})
                continue
            reports.append(self._report(block, seen, process))
        self._forget({report["stem"] for report in reports})
        reports.sort(key=lambda report: (report["parent_pid"] or 0, report["rank"], -report["age_s"]))
        seen_now = {
            "time_s": time.time(),
            "loaders": reports,
            "totals": totals(reports),
            "leftovers": {
                "num": len(found.leftovers),
                "nbytes": sum(leftover.nbytes for leftover in found.leftovers),
                "pids": [leftover.pid or None for leftover in found.leftovers],
            },
            "unreadable": unreadable,
        }
        if self._caches:
            from shmload.growing.cache import SampleCache

            seen_now["caches"] = {str(path): SampleCache.look(path) for path in self._caches}
        return seen_now

    def _find(self) -> Found:
        began = time.monotonic()
        if began - self._found_at >= max(FINDING_S, FINDING_SHARE * self._finding_s):
            self._found = RingReader.find()
            self._found_at, self._finding_s = began, time.monotonic() - began
        return self._found

    def _report(self, block: Block, seen: Snapshot, process: Process | None) -> Report:
        report = describe(seen, self._last.get(block.stem))
        # elsewhere its workers' pids are of another PID namespace, and here another's
        add_memory(report, is_known=block.pid == seen["owner_pid"])
        self._last[block.stem] = seen
        history = self._history.setdefault(block.stem, deque(maxlen=HISTORY))
        history.append(report["samples_per_s"])
        if block.stem not in self._commands:
            self._commands[block.stem] = command_of(block.pid)
        return {
            "stem": block.stem,
            "kind": block.kind,
            "uid": block.uid,
            "pid": block.pid,
            "owner_pid": seen["owner_pid"],
            "parent_pid": None if process is None else process.parent,
            "is_stopped": None if process is None else process.is_stopped,
            "command": self._commands[block.stem],
            "rank": seen["rank"],
            "world_size": seen["world_size"],
            **report,
            "history": list(history),
        }

    def _forget(self, stems: set[str]) -> None:
        for kept in (self._last, self._history, self._commands):
            for stem in [stem for stem in kept if stem not in stems]:
                del kept[stem]


def totals(reports: list[Report]) -> Report:
    """What all loaders do together."""
    summed = ("samples_per_s", "nbytes_per_s", "num_bad_samples", "num_restarts")
    return {
        "num_loaders": len(reports),
        "num_workers": sum(len(report["workers"]) for report in reports),
        "ring_nbytes": sum(report["memory"]["ring_nbytes"] for report in reports),
        **{name: sum(report[name] for report in reports) for name in summed},
    }
