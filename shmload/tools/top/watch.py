"""Watch the loaders of this host: each look reports what has happened since the last one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from shmload.engine.process_usage import Process, add_memory_usage, command_of, usage_of
from shmload.engine.ring_reader import ControlBlock, HostRings, RingReader
from shmload.engine.stage_record import StagePlaces
from shmload.engine.stats import Report, describe
from shmload.engine.time_shares import Snapshot

HISTORY = 60  # looks whose samples per second are kept
FINDING_SHARE = 20  # the search for loaders in /proc takes at most 1 / FINDING_SHARE of the time
FINDING_S = 2.0  # and happens at most once in this many seconds


class Watch:
    """The loaders of this host, or of some of its processes.

    Args:
        pids: trainers, or the processes that have started them. If empty, all loaders are shown.
    """

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._pids = frozenset(pids)
        self._found, self._search_at_s = HostRings([], []), 0.0
        self._known: dict[str, tuple[Snapshot, deque[float], str]] = {}  # by stem: the last look, samples/s, its command

    def look(self) -> Report:
        """Return what has happened since the last look; for a new loader, since it began.

        Returns:
            loaders, one report each (docs/top.md); totals over them; what dead ones have left; blocks that could not be read.
        """
        began = time.monotonic()
        if began >= self._search_at_s:
            self._found = RingReader.find()
            self._search_at_s = began + max(FINDING_S, FINDING_SHARE * (time.monotonic() - began))
        found = self._found
        reports, unreadable = [], []
        for block in found.blocks:
            process = usage_of(block.pid)
            if self._pids and self._pids.isdisjoint({block.pid, process and process.parent}):
                continue
            try:
                reader = RingReader.open(block.path)
                seen, stage_places = reader.snapshot(block.pid), reader.pipeline_stages
            except (FileNotFoundError, PermissionError):  # it has closed since, or belongs to another user
                continue
            except (OSError, ValueError) as error:
                unreadable.append({"path": block.path, "uid": block.uid, "pid": block.pid, "why": str(error)})
                continue
            reports.append(self._report(block, seen, process, stage_places))
        self._known = {report["stem"]: self._known[report["stem"]] for report in reports}
        reports.sort(key=lambda report: (report["parent_pid"] or 0, report["world_size"], report["rank"], -report["age_s"]))
        return {
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

    def _report(self, block: ControlBlock, seen: Snapshot, process: Process | None, stage_places: StagePlaces | None) -> Report:
        known = self._known.get(block.stem)
        last, history, command = known or (None, deque(maxlen=HISTORY), command_of(block.pid))
        report = describe(seen, last)
        # elsewhere the workers' pids belong to another PID namespace, and mean other processes here
        add_memory_usage(report, seen["owner_pid"], is_known=block.pid == seen["owner_pid"])
        history.append(report["samples_per_s"])
        self._known[block.stem] = seen, history, command
        return {
            "stem": block.stem,
            "kind": block.kind,
            "uid": block.uid,
            "pid": block.pid,
            "owner_pid": seen["owner_pid"],
            "parent_pid": None if process is None else process.parent,
            "is_stopped": None if process is None else process.is_stopped,
            "command": command,
            "rank": seen["rank"],
            "world_size": seen["world_size"],
            **report,
            "stages": stage_places and [{"name": name, "where": where} for name, where in stage_places],
            "history": list(history),
        }


def totals(reports: list[Report]) -> Report:
    """Return the totals over all loaders."""
    summed = ("samples_per_s", "nbytes_per_s", "num_bad_samples", "num_restarts")
    return {
        "num_loaders": len(reports),
        "num_workers": sum(len(report["workers"]) for report in reports),
        "ring_nbytes": sum(report["memory"]["ring_nbytes"] for report in reports),
        **{name: sum(report[name] for report in reports) for name in summed},
    }
