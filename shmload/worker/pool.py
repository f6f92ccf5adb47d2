"""Worker pools: the protocol that the engine uses, and the pool of processes of this machine."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import select
import signal
import warnings
import weakref
from collections import abc
from collections.abc import Callable
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

from shmload import faults
from shmload._core.mapping import Mapping
from shmload.processes.child import Child, Children
from shmload.processes.exit_codes import describe_exit, wait_exit_code
from shmload.processes.interrupts import interrupts_held
from shmload.shm import fork_copies, reaper
from shmload.shm.segment import Segment
from shmload.shm.segment_group import SegmentGroup
from shmload.worker.fork_warnings import warn_of_fork
from shmload.worker.job import Job, WorkerLink
from shmload.worker.job_pickling import pickled_once
from shmload.worker.process import STACK_SIGNAL, main
from shmload.worker.template import process_maker

log = logging.getLogger("shmload")

STACK_NBYTES = 65536  # size of the segment for a worker's stack
STACK_LOOKS, STACK_LOOK_MS = 100, 5  # a worker has half a second to write its stack
STOP_GRACE_S = 1.0  # a worker's time to finish its sample when the loader closes


class Death(NamedTuple):
    """A worker process that has ended.

    Attributes:
        worker_id: number of the worker.
        pid: process id.
        exitcode: exit code, negative for a signal; None if it is not known.
        is_thread: the worker is a thread, and `pid` the system's number of it.
    """

    worker_id: int
    pid: int
    exitcode: int | None
    is_thread: bool = False

    def __str__(self) -> str:
        return f"worker {self.worker_id} (pid {self.pid}) {describe_exit(self.exitcode)}"


class WorkerPool(Protocol):
    """The workers of one engine: processes or threads of this machine, or actors of a Ray cluster, named by their numbers."""

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the current workers, in worker order."""

    @property
    def processes(self) -> list[BaseProcess]:
        """Return the multiprocessing processes of the workers that have one, in worker order."""

    def reads_samples(self, worker_id: int) -> bool:
        """Return whether the worker's own process reads samples, so that a sample can end it or time out."""

    def start(self, num_workers: int) -> None:
        """Start the first `num_workers` workers."""

    def start_worker(self, worker_id: int) -> None:
        """Start a worker that has not been started yet, or has been reaped."""

    def reap(self, worker_id: int) -> None:
        """Forget a worker that has ended and will not be replaced."""

    def deaths(self) -> list[Death]:
        """Return the workers that have ended; each is returned again until it is replaced or reaped."""

    def replace(self, worker_id: int) -> None:
        """Start a new worker in place of a dead one whose rows have been recovered."""

    def stack(self, worker_id: int) -> str:
        """Return a worker's Python stack, or the reason why it is unknown. The worker must have a stack segment."""

    def kill(self, worker_id: int) -> Death | None:
        """End a worker at once; it can then be replaced. Return None for a thread that has just finished its claim."""

    def stop(self, grace_s: float) -> None:
        """End every worker. The ring is closing already, and its bells have been rung."""


class WorkerProcess(Child):
    """A worker's process.

    Attributes:
        worker_id: the worker.
        process: the process as multiprocessing knows it.
    """

    def __init__(self, worker_id: int, process: BaseProcess) -> None:
        self.worker_id, self.process = worker_id, process
        # multiprocessing must learn that the process has ended
        super().__init__(process.pid or 0, partial(wait_exit_code, process))


class ProcessPool:
    """A worker pool of processes of this machine, started by any of multiprocessing's start methods.

    Args:
        links: one for each worker; they need not begin at worker 0, because other workers of the ring may be Ray actors.
        job: the work. A fork inherits it; for other start methods it is pickled once, into the segment that `links` name. If it
            contains objects that only multiprocessing can pickle (locks, queues, shared memory), it is pickled for each process.
        make: makes a process without starting it, like the `Process` of a multiprocessing context.
        inherits_job: pass the job to each process as an argument instead of in the segment.
        stacks: the segment to which each worker writes its Python stack on request, by worker.
    """

    def __init__(
        self,
        links: list[WorkerLink],
        job: Job,
        make: Callable[..., BaseProcess],
        *,
        inherits_job: bool,
        stacks: abc.Mapping[int, Segment],
    ) -> None:
        self._links = {link.worker_id: link for link in links}
        self._job, self._make, self._inherits_job, self._stacks = job, make, inherits_job, stacks
        self._workers: dict[int, WorkerProcess] = {}
        self._children: Children[WorkerProcess] = Children()
        self._pid = os.getpid()
        _pools.add(self)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the current workers, in worker order."""
        return [self._workers[worker].pid for worker in sorted(self._workers)]

    @property
    def processes(self) -> list[BaseProcess]:
        """Return the workers' process objects, in worker order."""
        return [self._workers[worker].process for worker in sorted(self._workers)]

    def reads_samples(self, worker_id: int) -> bool:
        """Return True, because every worker reads samples."""
        return True

    def start(self, num_workers: int) -> None:
        """Start those of the ring's first `num_workers` workers that belong to this pool, without waiting for them."""
        for link in self._links.values():
            if link.worker_id < num_workers:
                self._start(link)
                if faults.armed:
                    faults.hit("starting")

    def start_worker(self, worker_id: int) -> None:
        """Start one more worker, without waiting for it and without the snapshot of its link."""
        self._start(dataclasses.replace(self._links[worker_id], resume=b""))

    def reap(self, worker_id: int) -> None:
        """Forget a worker that has ended."""
        self._reap(self._workers.pop(worker_id))

    def _start(self, link: WorkerLink) -> None:
        inherited = self._job if self._inherits_job else None
        process = self._make(target=main, args=(link, inherited), daemon=True, name=f"shmload worker {link.worker_id}")
        with fork_copies.without_copies(), warnings.catch_warnings():
            # Python warns if threads run, but the worker starts none before its own code runs, and only reads inherited memory
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
        reaper.watch(process.pid or 0)
        worker = WorkerProcess(link.worker_id, process)
        self._workers[link.worker_id] = worker
        self._children.add(worker)

    def deaths(self) -> list[Death]:
        """Return workers that have ended and have not been replaced. Cost: one poll, about 0.5 us."""
        return [Death(worker.worker_id, worker.pid, worker.wait()) for worker in self._children.ended()]

    def _reap(self, worker: WorkerProcess) -> None:
        self._children.reap(worker)
        reaper.forget(worker.pid)
        worker.process.close()

    def replace(self, worker_id: int) -> None:
        """Start a new worker in place of a dead one. If that fails, `deaths` continues to report the dead one."""
        dead = self._workers[worker_id]
        faults.hit("replacing")
        self.start_worker(worker_id)  # not from the snapshot, because the progress since then is lost
        self._reap(dead)

    def stack(self, worker_id: int) -> str:
        """Return a worker's Python stack, or the reason why it is unknown."""
        return request_stack(self._workers[worker_id].pidfd, self._stacks[worker_id].fd)

    def kill(self, worker_id: int) -> Death:
        """End a worker at once. It can then be replaced."""
        worker = self._workers[worker_id]
        return Death(worker_id, worker.pid, worker.kill())

    def stop(self, grace_s: float) -> None:
        """Wait for workers to leave, then kill the others. Idempotent.

        Args:
            grace_s: seconds to wait.
        """
        if os.getpid() != self._pid:
            return
        patience_s = 0.0
        try:
            faults.hit("closing")
            patience_s = grace_s
        finally:  # an exception such as ^C ends the grace period, but workers are still reaped
            self._children.end(patience_s, self._reap_ended)

    def _reap_ended(self, timeout_s: float | None) -> None:
        ended, _ = self._children.wait(timeout_s)
        with interrupts_held():
            for worker in ended:
                self._workers.pop(worker.worker_id, None)
                self._reap(worker)


def request_stack(pidfd: int, fd: int) -> str:
    """Make a worker process write its Python stack to its stack segment. Return the stack, or the reason why it is unknown.

    Args:
        pidfd: descriptor of the process.
        fd: descriptor of the segment, which has `STACK_NBYTES` bytes and is overwritten.
    """
    os.pwrite(fd, bytes(STACK_NBYTES), 0)
    try:
        signal.pidfd_send_signal(pidfd, STACK_SIGNAL)
    except OSError:
        return "(unknown: the process is gone)"
    died = select.poll()
    died.register(pidfd, select.POLLIN)
    text = b""
    for _ in range(STACK_LOOKS):
        died.poll(STACK_LOOK_MS)
        before, text = text, os.pread(fd, STACK_NBYTES, 0).rstrip(b"\0")
        if text and text == before:
            return text.decode(errors="replace")
    return "(unknown: the process is stopped, or waits in the kernel)"


_pools: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


def _forget_workers_of_parent() -> None:
    """Forget the parent's workers in a child of a bare os.fork, because multiprocessing would end them when the child exits."""
    for pool in _pools:
        multiprocessing.process._children.difference_update(pool.processes)  # type: ignore[attr-defined]  # private
    _pools.clear()


os.register_at_fork(after_in_child=_forget_workers_of_parent)


def context_of(wanted: Any) -> BaseContext:
    """Return the multiprocessing context for a loader's argument: a context, a start method, or None for the platform's default."""
    if wanted is None or isinstance(wanted, str):
        return multiprocessing.get_context(wanted)
    return wanted  # type: ignore[no-any-return]  # torch has checked it


@dataclasses.dataclass(frozen=True)
class PreparedWorkers:
    """The argument of a `Backend`: the job, a link for each worker, and settings for processes of this machine.

    Attributes:
        job: the work, the same for all workers.
        group: the segments of the ring.
        links: one for each worker.
        multiprocessing_context: the loader's argument.
        stacks: the segment to which each worker writes its Python stack on request; a worker without one cannot be asked.
        end: closes the ring, so that the workers leave.
        num_ahead: number of batches ordered ahead for each worker.
        sample_timeout_s: seconds that reading a sample may take; None for no limit.
    """

    job: Job
    group: SegmentGroup
    links: list[WorkerLink]
    multiprocessing_context: Any
    stacks: dict[int, Segment]
    end: Callable[[], None]
    num_ahead: int = 1
    sample_timeout_s: float | None = None


Backend = Callable[[PreparedWorkers], WorkerPool]  # makes a pool that is not started; decides on which machines its workers run


def process_pool(prepared: PreparedWorkers) -> ProcessPool:
    """Return a worker pool of processes of this machine, not started."""
    context, links = context_of(prepared.multiprocessing_context), prepared.links
    inherits_job = context.get_start_method() == "fork"
    modules: set[str] = set()
    if inherits_job:
        warn_of_fork()
    else:
        pickled_job: bytes | None = pickled_once(prepared.job, modules)
        if pickled_job is None:
            inherits_job = True
        else:
            links = with_pickled_job(prepared.group, "pickled_job-local", pickled_job, links)
    make = process_maker(context, modules, needs_torch=prepared.job.seed is None)
    return ProcessPool(links, prepared.job, make, inherits_job=inherits_job, stacks=prepared.stacks)


def with_pickled_job(group: SegmentGroup, name: str, pickled_job: bytes, links: list[WorkerLink]) -> list[WorkerLink]:
    """Write the pickled job to a new segment, and return the links with its path."""
    segment = group.segment(name, len(pickled_job))
    memoryview(Mapping(segment.fd, len(pickled_job)))[:] = pickled_job
    return with_job_path(links, segment)


def with_job_path(links: list[WorkerLink], segment: Segment) -> list[WorkerLink]:
    """Return the links with the path of the segment that holds the pickled job."""
    return [dataclasses.replace(link, pickled_job_path=segment.path, pickled_job_nbytes=segment.nbytes) for link in links]
