"""Recording loaders from outside: their control blocks are found, mapped read-only, and read at intervals. Nothing is written."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from time import monotonic, sleep

from shmload._core.mapping import Mapping
from shmload.engine.timeline import Tape, Timeline, timeline_of
from shmload.tools.top.watch import find

SHORTEST_S, LONGEST_S = 0.0005, 0.05  # between two looks
FILLED_SHARE = 0.25  # of a recorder, that a look should find
SEARCH_S = 0.1  # between two looks for new rings: torch mode makes one for each epoch


@dataclass
class Watch:
    """The rings that are being recorded. A context manager is not needed: mappings end with it.

    Args:
        pid: of the trainer whose rings are wanted; None: everyone's.
    """

    pid: int | None = None
    tapes: dict[str, Tape] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # name -> why it cannot be read

    def search(self, *, with_history: bool = True) -> None:
        """Attaches to rings that are new since the last search."""
        for block in find().blocks:
            name, path = block.stem, block.path
            if block.uid != os.geteuid() or name in self.tapes or name in self.refused:
                continue
            try:
                tape = Tape(_mapped(path), with_history=with_history)
            except FileNotFoundError:  # it has just gone
                continue
            except (OSError, ValueError) as error:
                self.refused[name] = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
                continue
            if self.pid is None or tape.owner_pid == self.pid:
                self.tapes[name] = tape
            else:
                self.refused[name] = f"{path}: it is of process {tape.owner_pid}"

    def record(self, seconds: float) -> None:
        """Reads for so long, as often as the fullest recorder demands."""
        end, next_search = monotonic() + seconds, 0.0
        pause = SHORTEST_S
        while True:
            now = monotonic()
            if now >= next_search:
                self.search()
                next_search = now + SEARCH_S
            most = max((tape.drain() / tape.capacity for tape in self.tapes.values()), default=0.0)
            pause = min(max(pause * min(FILLED_SHARE / max(most, 0.01), 2.0), SHORTEST_S), LONGEST_S)
            if now >= end:
                return
            sleep(min(pause, end - now))  # nobody rings for an onlooker

    def timelines(self) -> list[Timeline]:
        """What was recorded, ring by ring; without those that did nothing."""
        told = [timeline_of(tape) for tape in self.tapes.values()]
        return [timeline for timeline in told if timeline.has_content]


def _mapped(path: str) -> Mapping:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Mapping(fd, os.fstat(fd).st_size, writable=False)
    finally:
        os.close(fd)
