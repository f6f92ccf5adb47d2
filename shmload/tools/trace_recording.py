"""Record the events of running loaders from another process, for `shmload trace`.

Rings are found and mapped read-only, and their recorders are read at intervals; nothing is written to them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from time import monotonic, sleep

from shmload.engine.process_usage import usage_of
from shmload.engine.ring_reader import RingReader
from shmload.engine.tracing.event_log import EventLog

SHORTEST_S, LONGEST_S = 0.0005, 0.05  # limits of the pause between two looks
FILLED_SHARE = 0.25  # the share of a recorder that should be full at each look
SEARCH_S = 0.1  # interval between searches for new rings: torch mode creates one for each epoch


@dataclass
class TraceRecording:
    """The rings that are being recorded. Their mappings end with the object, so it need not be closed.

    Args:
        pid: the trainer whose rings to record, or the process that has started it; None for all rings.

    Attributes:
        event_logs: the recorders of the attached rings, by the rings' names.
        refused: rings that are not recorded, and why, by name.
    """

    pid: int | None = None
    event_logs: dict[str, EventLog] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # name -> why it cannot be read

    def search(self) -> None:
        """Attach to rings that are new since the last search."""
        for block in RingReader.find().blocks:
            name, path = block.stem, block.path
            if block.uid != os.geteuid() or name in self.event_logs or name in self.refused:
                continue
            try:
                event_log = EventLog(RingReader.open(path).control, with_history=True)
            except FileNotFoundError:  # it has just been removed
                continue
            except (OSError, ValueError) as error:
                self.refused[name] = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
                continue
            process = None if self.pid is None else usage_of(event_log.owner_pid)
            if self.pid in (None, event_log.owner_pid, process and process.parent):
                self.event_logs[name] = event_log
            else:
                self.refused[name] = f"{path}: it is of process {event_log.owner_pid}"

    def record(self, seconds: float) -> None:
        """Record for `seconds`, reading as often as the fullest recorder requires."""
        end, next_search = monotonic() + seconds, 0.0
        pause = SHORTEST_S
        while True:
            now = monotonic()
            if now >= next_search:
                self.search()
                next_search = now + SEARCH_S
            most = max((event_log.drain() / event_log.capacity for event_log in self.event_logs.values()), default=0.0)
            pause = min(max(pause * min(FILLED_SHARE / max(most, 0.01), 2.0), SHORTEST_S), LONGEST_S)
            if now >= end:
                return
            sleep(min(pause, end - now))  # there is no event to wait for
