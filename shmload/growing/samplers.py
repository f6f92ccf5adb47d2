"""The trainer's hold on its samplers: starts their supervisor, hears of them, ends them.

What supervises them is the supervisor (supervisor.py). Here it is only looked, when an epoch begins, whether there still is one.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import warnings
import weakref
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from shmload.errors import WorkerDied
from shmload.growing.files import CONTROL
from shmload.growing.sampler_supervisor import GRACE_S, MakeWriter, Sampler, keep
from shmload.shm import forks, reaper
from shmload.worker.failure import describe_exit
from shmload.worker.pool import context_of, interrupts_held, warn_of_fork

log = logging.getLogger("shmload")


class Samplers:
    """Processes that run a sampler and write what it yields into a cache; made by `SampleCache.start`. A context manager.

    Ends with `stop`, with the cache, or with the process that started it, however that ends.

    Args:
        folder: of the cache.
        sampler, num_processes, max_restarts, multiprocessing_context: as of SampleCache.start.
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
        self._told = folder / CONTROL / "samplers" / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._told.parent.mkdir(parents=True, exist_ok=True)
        self._job = (sampler, num_processes, max_restarts, make_writer)
        self._num_supervisors = 0
        self._newest: list[dict[str, Any]] = []
        if self._context.get_start_method() == "fork":
            warn_of_fork()
        self._start()

    def _start(self) -> None:
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(  # type: ignore[attr-defined]  # every concrete context has it
            target=keep, args=(os.getpid(), reader, self._told, *self._job), daemon=True, name="shmload supervisor"
        )
        with interrupts_held(), forks.ours(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
            reaper.watch(process.pid or 0)
        reader.close()
        self._num_supervisors += 1
        self._process = process
        self._end = weakref.finalize(self, _end, process, writer, self._told, os.getpid())

    @property
    def states(self) -> list[dict[str, Any]]:
        """Each sampler's worker_id, pid (0: it does not run), state, restarts, and its newest error."""
        try:
            self._newest = json.loads(self._told.read_bytes())
        except FileNotFoundError:  # the supervisor is not up yet, or has ended
            pass
        return self._newest

    def look(self) -> None:
        """Starts a new supervisor if somebody has killed this one.

        Raises:
            WorkerDied: every sampler has failed again and again, and is given up.
        """
        if not self._end.alive:
            return
        states = self.states
        if self._process.exitcode is not None:
            log.warning("the samplers' supervisor %s; a new one is started", describe_exit(self._process.exitcode))
            self._end()
            self._start()
            return
        if states and all(state["state"] == "given up" for state in states):
            worst = states[0]
            raise WorkerDied(
                f"all {self.num_processes} samplers have failed and are given up, so the cache does not grow. Repair the sampler, "
                f"or give start() a larger max_restarts. The newest error of sampler {worst['worker_id']}: {worst['error']}"
            )

    @property
    def are_done(self) -> bool:
        """Whether every sampler has come to its end, or was given up."""
        states = self.states
        return bool(states) and all(state["state"] in ("finished", "given up") for state in states)

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the supervisor has ended."""
        return int(self._process.sentinel)

    def stop(self) -> None:
        """Ends the samplers, which publish what they have collected. Twice is no error."""
        self._newest = self.states
        self._end()

    def __enter__(self) -> Samplers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _end(process: Any, commands: Any, told: Path, pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        commands.send_bytes(b"end")
    except OSError:  # it has ended
        pass
    process.join(2 * GRACE_S)
    if process.exitcode is None:  # it is stopped, say; its samplers end with it
        process.kill()
        process.join()
    reaper.forget(process.pid or 0)
    commands.close()
    process.close()
    told.unlink(missing_ok=True)
