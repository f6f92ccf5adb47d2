"""Trace a loader from within the program: `with loader.trace("trace.json"):`.

The recorders are read after each delivery, without a thread, if one of them is filling up. Between two deliveries, workers can only
fill the published orders, whose events fit in a recorder unless one worker has hundreds of chunks. `shmload trace` records from
another process.
"""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shmload.engine.tracing.event_log import EventLog
from shmload.engine.tracing.ring_timeline import timelines_of
from shmload.engine.tracing.trace_file import write

if TYPE_CHECKING:
    from shmload.engine.batch_source import BatchSource
    from shmload.engine.builder import EngineBuilder

log = logging.getLogger("shmload")


class Trace:
    """The result of `ShmLoader.trace`: a context manager that records within its block and writes the file at its end.

    Args:
        builder: the maker of the loader's engines; all of them are recorded.
        num_workers: number of workers of the loader.
        path: path of the file to write.
    Raises:
        ValueError: there are no workers.
        FileNotFoundError: the folder of the file does not exist.
    Attributes:
        path: path of the file.
        num_lost: number of events that were overwritten before they were read; known at the end.
        num_batches: number of batches delivered in the block; known at the end.
    """

    def __init__(self, builder: EngineBuilder, num_workers: int, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if num_workers == 0:
            raise ValueError(
                "trace() needs num_workers > 0: without workers next() itself reads the samples, and there is nothing to "
                "record. torch.profiler shows where that time goes"
            )
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.path}: trace() needs an existing folder to write to")
        self._builder = builder
        self._event_logs: list[EventLog] = []
        self._engines: weakref.WeakSet[BatchSource] = weakref.WeakSet()
        self.num_lost = self.num_batches = 0

    def __enter__(self) -> Self:
        builder = self._builder
        if (other := builder.trace) is not None:
            raise RuntimeError(f"this loader is already being traced to {other.path}: leave that block first")
        builder.trace = self
        for engine in builder.engines:
            self.follow(engine, with_history=False)
        return self

    def follow(self, engine: BatchSource, *, with_history: bool = True) -> None:
        """Also record another engine of the loader; see `builder.Tracing`."""
        event_log = EventLog(engine.control, with_history=with_history)
        self._event_logs.append(event_log)
        self._engines.add(engine)
        engine.on_delivery = event_log.drain_if_due

    def __exit__(self, *exc: object) -> None:
        self._builder.trace = None
        for engine in self._engines:
            engine.on_delivery = None
        for event_log in self._event_logs:
            event_log.drain()
        timelines = timelines_of(self._event_logs)
        self._event_logs.clear()
        write(timelines, self.path)
        self.num_lost = sum(timeline.num_lost for timeline in timelines)
        self.num_batches = sum(timeline.num_batches for timeline in timelines)
        if self.num_lost:
            log.warning(
                "%s: %d events are missing from the trace: they were overwritten before the next batch was requested",
                self.path,
                self.num_lost,
            )
