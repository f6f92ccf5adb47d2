"""A trace taken by the program itself: `with loader.trace("trace.json"):`.

There is no thread for it. After each delivery the recorders are read if one of them is filling up; between two deliveries workers
can do no more than what is ordered, which a recorder holds unless a worker has hundreds of chunks on order.
"""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shmload.tools.trace.chrome import write
from shmload.tools.trace.timeline import Tape, Timeline, timeline_of

if TYPE_CHECKING:
    from shmload.engine.engine import Engine
    from shmload.observed import ObservedLoader

log = logging.getLogger("shmload")


class Trace:
    """What `ShmLoader.trace` gives: a context manager that records within its block and writes the file at its end.

    Attributes:
        path: the file.
        num_lost: events that were overwritten before they were read; known at the end.
        num_batches: batches delivered in the block; known at the end.
    """

    def __init__(self, loader: ObservedLoader[Any], path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if loader.num_workers == 0:
            raise ValueError(
                "trace() needs num_workers > 0: without workers the samples are read in next() itself, and there is nothing to "
                "record. torch.profiler shows where that time goes"
            )
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.path}: trace() needs an existing folder to write to")
        self._loader = loader
        self._tapes: list[Tape] = []
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.num_lost = self.num_batches = 0

    def __enter__(self) -> Self:
        loader = self._loader
        if (other := loader._trace) is not None:
            raise RuntimeError(
                f"this loader is being traced already, to {other.path}: one trace at a time; leave that block first"
            )
        loader._trace = self
        for engine in loader._engines:
            self.follow(engine, with_history=False)
        return self

    def follow(self, engine: Engine, *, with_history: bool = True) -> None:
        """Records a ring of the loader's, too."""
        tape = Tape(engine.control, with_history=with_history)
        self._tapes.append(tape)
        self._engines.add(engine)
        engine.on_delivery = tape.drain_if_due

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loader._trace = None
        for engine in self._engines:
            engine.on_delivery = None
        for tape in self._tapes:
            tape.drain()
        told = [timeline_of(tape) for tape in self._tapes]
        timelines = [timeline for timeline in told if timeline.has_content]
        self._tapes.clear()
        write(timelines, self.path)
        self._tell(timelines)

    def _tell(self, timelines: list[Timeline]) -> None:
        self.num_lost = sum(timeline.num_lost for timeline in timelines)
        self.num_batches = sum(timeline.num_batches for timeline in timelines)
        if self.num_lost:
            log.warning(
                "%s: %d events are not in the trace: they were overwritten before the next batch was asked for",
                self.path,
                self.num_lost,
            )
