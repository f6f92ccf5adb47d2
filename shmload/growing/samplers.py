"""The trainer's handle on its samplers: it starts their supervisor, reads their states, and ends them.

The supervisor writes the samplers' states into the trainer's report at each change. When an epoch begins, the trainer checks that
the supervisor is still running.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
import weakref
from contextlib import suppress
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from shmload.errors import WorkerDied
from shmload.growing.cache_file import CONTROL
from shmload.growing.process_report import WriterReport
from shmload.growing.sampler_process import MakeWriter, Sampler
from shmload.growing.sampler_supervisor import GRACE_S, SamplerSupervisor, starting_state
from shmload.processes.child import Child, has_ended
from shmload.processes.exit_codes import describe_exit, wait_exit_code
from shmload.processes.interrupts import interrupts_held
from shmload.shm import fork_copies, reaper
from shmload.worker.fork_warnings import warn_of_fork
from shmload.worker.pool import context_of

log = logging.getLogger("shmload")


class Samplers:
    """Processes that run a sampler and write its samples into a cache. `SampleCache.start` creates them.

    They end with `stop`, with the cache, or with the process that started them, for whatever reason it ends.

    Args:
        folder: the cache's folder.
        sampler, num_processes, max_restarts, multiprocessing_context: see SampleCache.start.
        make_writer: opens the cache in a sampler.
    """

    def __init__(
        self,
        folder: Path,
        sampler: Sampler,
        num_processes: int,
        *,
        max_restarts: int,
        multiprocessing_context: Any,
        make_writer: MakeWriter,
    ) -> None:
        self.num_processes = num_processes
        self._context: BaseContext = context_of(multiprocessing_context)
        self._control = folder / CONTROL
        self._job = (sampler, num_processes, max_restarts, make_writer)
        if self._context.get_start_method() == "fork":
            warn_of_fork()
        self._start()

    def _start(self) -> None:
        self._newest = [starting_state(worker_id) for worker_id in range(self.num_processes)]
        self._report = WriterReport(self._control, "samplers")  # the report of one supervisor, removed at its end
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(  # type: ignore[attr-defined]  # every concrete context has it
            target=SamplerSupervisor(os.getpid(), reader, self._report.path, *self._job).run, daemon=True, name="shmload supervisor"
        )
        with interrupts_held(), fork_copies.without_copies(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
            reaper.watch(process.pid or 0)
            self._child = Child(process.pid or 0, partial(wait_exit_code, process))
        reader.close()
        self._end = weakref.finalize(self, _end, self._child, process, writer, self._report, os.getpid())

    @property
    def states(self) -> list[dict[str, Any]]:
        """Return the worker_id, pid (0 if it does not run), state, restarts, and newest error of each sampler."""
        with suppress(FileNotFoundError):  # the supervisor has not reported yet, or has ended
            self._newest = json.loads(self._report.path.read_bytes())
        return self._newest

    def look(self) -> None:
        """Start a new supervisor if this one was killed.

        Raises:
            WorkerDied: all samplers have been given up.
        """
        if not self._end.alive:
            return
        states = self.states
        if not self._child.lives:
            log.warning("the samplers' supervisor %s; a new one is started", describe_exit(self._child.wait()))
            self._end()
            self._start()
            return
        if all(state["state"] == "given up" for state in states):
            worst = states[0]
            raise WorkerDied(
                f"all {self.num_processes} samplers have failed and are given up, so the cache does not grow. Repair the sampler, "
                f"or give start() a larger max_restarts. The newest error of sampler {worst['worker_id']}: {worst['error']}"
            )

    @property
    def are_done(self) -> bool:
        """Return whether every sampler has finished or was given up."""
        return all(state["state"] in ("finished", "given up") for state in self.states)

    def stop(self) -> None:
        """End the samplers, which publish their samples first. Idempotent."""
        self._newest = self.states
        self._end()


def _end(child: Child, process: Any, commands: Any, report: WriterReport, pid: int) -> None:
    if os.getpid() != pid:  # a forked child's copy
        return
    with suppress(OSError):  # it has ended
        commands.send_bytes(b"end")
    if not has_ended(child.pidfd, 2 * GRACE_S):  # for example because it is stopped; its samplers end with it
        child.kill()
    child.reap()
    reaper.forget(child.pid)
    commands.close()
    process.close()
    report.close()
