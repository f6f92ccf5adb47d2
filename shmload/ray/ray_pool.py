"""The trainer's worker pool of Ray actors: one child process, the agent, represents all of them."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from shmload import faults
from shmload.processes.child import Child, Children
from shmload.processes.exit_codes import wait_popen_exit_code
from shmload.ray import life_lock
from shmload.ray.agent_config import ARRIVED, AgentConfig
from shmload.shm import pickling, reaper
from shmload.shm.segment import Segment
from shmload.worker.pool import Death

log = logging.getLogger("shmload")

LOG_S = 5.0  # interval of log messages while actors outlive their agent


class RayPool:
    """A worker pool of Ray actors, which starts and replaces their agent.

    If the agent ends, all of its workers count as dead; a new agent starts once the rows of all workers have been recovered. The
    deaths of single actors are not visible here: the agent handles them.

    Args:
        config: the agent's settings.
        parcel: the pickled job, which `start` writes to `segment` while the agent starts.
        segment: the shared memory that receives the pickled job.
        control: the ring's control segment, which actors that write into the ring lock.
    """

    def __init__(self, config: AgentConfig, parcel: pickling.Parcel, segment: Segment, control: Segment) -> None:
        self._config = config
        self._parcel, self._segment, self._control = parcel, segment, control
        self._logged = 0.0  # time of the last log message that actors outlive their agent; 0 before the first
        self._agent: Child | None = None
        self._children: Children[Child] = Children()  # the agent, until it is reaped
        self._ending: Any = None  # the finalizer that ends the agent
        self._dead: set[int] = set()  # workers of an agent that has ended, whose rows have not been recovered yet
        self._pid = os.getpid()

    def reads_samples(self, worker_id: int) -> bool:
        """Return False, because actors read the samples, not this machine's processes."""
        return False

    @property
    def pids(self) -> list[int]:
        """Return the agent's process id for each worker."""
        return [] if self._agent is None else [self._agent.pid] * len(self._config.links)

    @property
    def processes(self) -> list[Any]:
        """Return an empty list, because the agent is not a multiprocessing process."""
        return []

    def start(self, num_workers: int) -> None:
        """Start the agent for all workers without waiting for it, and write the pickled job in the meantime."""
        faults.hit("starting")
        self._launch(self._config, self._write)

    def _write(self) -> None:
        self._segment.reserve(self._segment.nbytes)
        self._parcel.write(self._segment.fd)
        del self._parcel  # frees the memory that pickling used

    def _launch(self, config: AgentConfig, ship: Callable[[], None] = lambda: None) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(config.paths), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "shmload.ray.agent"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        reaper.watch(process.pid)
        self._agent = Child(process.pid, partial(wait_popen_exit_code, process))
        self._children.add(self._agent)
        self._ending = weakref.finalize(self, _end, self._agent, os.getpid())
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it has ended already; `deaths` will report it
            with suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps(config))
                process.stdin.flush()
            ship()
            process.stdin.write(ARRIVED)

    def start_worker(self, worker_id: int) -> None:
        """Raise NotImplementedError, because a worker pool of Ray actors does not change its size."""
        raise NotImplementedError("a worker pool of Ray actors cannot change its size")

    reap = start_worker

    def deaths(self) -> list[Death]:
        """Return all workers once their agent and its actors have ended, until they are replaced. Cost: one poll."""
        agent = self._agent
        if agent is None or not self._children.ended():
            return []
        if not self._dead:
            if life_lock.is_held(self._control.fd):
                self._log_wait_for_actors()
                return []
            self._logged, self._dead = 0.0, set(range(len(self._config.links)))
        return [Death(worker, agent.pid, agent.wait()) for worker in sorted(self._dead)]

    def _log_wait_for_actors(self) -> None:
        """Log every LOG_S seconds that actors outlive their agent, so their rows cannot be reused yet."""
        now = monotonic()
        self._logged = self._logged or now
        if now - self._logged > LOG_S:
            self._logged = now
            log.warning("the Ray agent has ended, but some of its actors still run: waiting until Ray has ended them")

    def replace(self, worker_id: int) -> None:
        """Count a worker whose rows have been recovered, and start a new agent after the last one, because it claims for all."""
        self._dead.discard(worker_id)
        if self._dead or self._agent is None:
            return
        self._reap(self._agent)
        links = tuple(dataclasses.replace(link, resume=b"") for link in self._config.links)
        self._launch(dataclasses.replace(self._config, links=links, is_replacement=True))

    def stack(self, worker_id: int) -> str:
        """Return a placeholder, because the stack of a process on another machine is unknown."""
        return "(unknown: it is decoded on another machine)"

    def kill(self, worker_id: int) -> Death:
        """End the agent at once, and wait until the actors that write into the ring have ended."""
        assert self._agent is not None
        ended, pause = Death(worker_id, self._agent.pid, self._agent.kill()), threading.Event()
        while not self.deaths():
            pause.wait(life_lock.LOOK_S)
        return ended

    def stop(self, grace_s: float) -> None:
        """Wait for the agent to leave, then kill it. Ray ends its actors in both cases. Idempotent.

        This does not wait for actors, because their rows are not reused. They keep the ring's memory until they end.

        Args:
            grace_s: seconds to wait.
        """
        if self._agent is None or os.getpid() != self._pid:
            return
        patience_s = 0.0
        try:
            faults.hit("closing")
            patience_s = grace_s
        finally:
            self._children.end(patience_s, self._reap_ended)
            self._agent = None

    def _reap_ended(self, timeout_s: float | None) -> None:
        for agent in self._children.wait(timeout_s)[0]:
            self._reap(agent)

    def _reap(self, agent: Child) -> None:
        self._children.reap(agent)
        self._ending()
        reaper.forget(agent.pid)


def _end(agent: Child, pid: int) -> None:
    """Kill and reap an agent whose pool has died, because its loader was not closed."""
    if os.getpid() == pid:
        agent.kill()
        agent.reap()
