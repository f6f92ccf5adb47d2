"""Workers that are threads of the trainer: they share its dataset, start in a millisecond, and need neither a fork nor a pickle.

A thread runs the same loop over the same ring as a worker process (loop.py), and draws from generators of its own
(thread_generators.py), so batches are the same. A crash in C code ends the whole program, and a thread that is stuck in a sample
cannot be killed. Such a thread is left behind: private memory takes the place of what it has mapped of the ring, so that nothing it
does when it wakes up reaches a batch or another worker.
"""

from __future__ import annotations

import atexit
import dataclasses
import errno
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from time import monotonic, monotonic_ns

from torch.utils.data import Dataset

from shmload.metrics import irregular_files
from shmload.worker import thread_side
from shmload.worker.failure import Failure
from shmload.worker.iterable_pass import IterablePass
from shmload.worker.job import Job, WorkerLink
from shmload.worker.loop import WorkerLoop
from shmload.worker.own_generators import separate
from shmload.worker.pool import Death, PreparedWorkers
from shmload.worker.process import attach, prepare, set_batch_scheduling
from shmload.worker.sample_rng import use_generators
from shmload.worker.snapshot import Snapshots
from shmload.worker.thread_copies import copy_for_passes, copy_of_datasets
from shmload.worker.thread_generators import TorchDraws, make_set

log = logging.getLogger("shmload")

EXIT_GRACE_S = 5.0  # seconds that a thread gets at the program's end to finish its sample


class WorkerThread(threading.Thread):
    """One worker.

    Args:
        link: the worker's number, bells and segments.
        job: the work, which all threads share.

    Attributes:
        exitcode: the argument of `sys.exit` if a sample called it, 1 for any other exception that ended the thread.
        is_ending: the loader is closing, so that the segments may be gone before this thread has attached to them.
        loop: the loop that it runs; None before and after it.
    """

    def __init__(self, link: WorkerLink, job: Job) -> None:
        super().__init__(name=f"shmload worker {link.worker_id}", daemon=True)
        self._link, self._job = link, job
        self.exitcode, self.is_ending = 0, False
        self.loop: WorkerLoop | None = None

    def run(self) -> None:
        """Fill orders until the ring closes or no longer wants this worker."""
        began = monotonic_ns()
        link = self._link
        try:
            _run(self, link, self._job, began)
        except SystemExit as error:  # raised by a sample: a worker process would end, too
            self.exitcode = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:
            if self.is_ending and isinstance(error, FileNotFoundError):
                return
            self.exitcode = 1
            log.exception("worker thread %d ended with an exception", link.worker_id)
        finally:
            self.loop = None
            del self._job  # the thread object may live as long as the loader


def _run(thread: WorkerThread, link: WorkerLink, job: Job, began: int) -> None:
    os.sched_setaffinity(0, link.affinity)  # 0 is the calling thread
    set_batch_scheduling()
    generators = make_set()
    use_generators(generators)
    irregular_files.count_alone()
    with TorchDraws(generators.torch_home.default_generator):
        attached = attach(link)
        failure: Failure | None = None
        source: IterablePass | None = None
        snapshots: Snapshots | None = None
        try:
            thread_side.prepare(job.dataset, link.worker_id, link.num_workers, link.base_seed, generators)
            job, source, snapshots = prepare(job, link)
        except Exception as error:
            failure = Failure.of(error, f"in DataLoader worker thread {link.worker_id}", "")
        thread.loop = attached.loop(job, source=source, snapshots=snapshots, init_failure=failure, kind="thread")
        thread.loop.run(began)


class ThreadPool:
    """A worker pool of threads of this process; see `WorkerPool`.

    Args:
        links: one for each worker.
        job: the work.
        end: makes the ring close, so that the threads end.
    """

    def __init__(self, links: list[WorkerLink], job: Job, end: Callable[[], None]) -> None:
        self._links, self._job, self._end = links, job, end
        self._threads: dict[int, WorkerThread] = {}
        self._pid = os.getpid()
        _pools.add(self)

    @property
    def pids(self) -> list[int]:
        """Return the id of this process for each current thread."""
        return [self._pid for _ in self._threads]

    @property
    def processes(self) -> list[BaseProcess]:
        """Return an empty list, because no worker has a process."""
        return []

    def reads_samples(self, worker_id: int) -> bool:
        """Return True, because every worker reads samples."""
        return True

    def start(self, num_workers: int) -> None:
        """Start the first `num_workers` workers, without waiting for them."""
        for link in self._links[:num_workers]:
            self._start(link)

    def start_worker(self, worker_id: int) -> None:
        """Start one more worker, without the snapshot of its link."""
        self._start(dataclasses.replace(self._links[worker_id], resume=b""))

    def _start(self, link: WorkerLink) -> None:
        dataset, collate_fn = separate(self._job.dataset, self._job.collate_fn)  # no two threads draw from one generator
        if self._job.is_iterable:
            dataset = copy_for_passes(dataset)
        elif self._job.worker_init_fn is not None and isinstance(dataset, Dataset):
            dataset = copy_of_datasets(dataset)  # worker_init_fn may set attributes of this worker's, by get_worker_info()
        thread = WorkerThread(link, dataclasses.replace(self._job, dataset=dataset, collate_fn=collate_fn))
        try:
            thread.start()
        except RuntimeError as error:  # the limit on threads is reached
            raise OSError(errno.EAGAIN, str(error)) from error
        self._threads[link.worker_id] = thread

    def reap(self, worker_id: int) -> None:
        """Forget a worker that has ended."""
        thread = self._threads.pop(worker_id, None)
        if thread is not None:  # otherwise it was left behind
            thread.join()

    def deaths(self) -> list[Death]:
        """Return the workers that have ended and have not been replaced."""
        return [_death(worker, thread) for worker, thread in list(self._threads.items()) if not thread.is_alive()]

    def replace(self, worker_id: int) -> None:
        """Start a new worker in place of one that has ended."""
        self.start_worker(worker_id)

    def stack(self, worker_id: int) -> str:
        """Return a worker's Python stack."""
        frame = sys._current_frames().get(self._threads[worker_id].ident or 0)
        return "(the thread has ended)" if frame is None else "".join(traceback.format_stack(frame))

    def kill(self, worker_id: int) -> Death | None:
        """Leave a thread that is stuck in a sample behind; it can then be replaced. Return None if it has no claim.

        It keeps running, but reaches neither the ring nor the memory of batches any more, and ends when the sample does.
        """
        thread = self._threads[worker_id]
        loop = thread.loop
        if loop is None or not loop.detach():
            return None
        del self._threads[worker_id]
        return _death(worker_id, thread)

    def stop(self, grace_s: float) -> None:
        """Wait for the threads to end. Idempotent. One that is still in a sample then ends after it, and logs nothing.

        Args:
            grace_s: seconds to wait.
        """
        if os.getpid() != self._pid:
            return
        threads = list(self._threads.items())
        for _, thread in threads:
            thread.is_ending = True
        deadline = monotonic() + grace_s
        for worker, thread in threads:
            if thread is threading.current_thread():  # the garbage collector may close a loader in one of its own threads
                continue
            thread.join(max(deadline - monotonic(), 0))
            if not thread.is_alive():
                self._threads.pop(worker, None)  # during the join, the collector or another thread may have stopped the pool, too

    def end_at_exit(self) -> None:
        """End the threads before the interpreter stops threads wherever they are, which crashes those in C++ code."""
        if self._threads and os.getpid() == self._pid:
            self._end()
            self.stop(EXIT_GRACE_S)


def _death(worker: int, thread: WorkerThread) -> Death:
    return Death(worker, thread.native_id or 0, thread.exitcode, is_thread=True)


_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for pool in list(_pools):
        pool.end_at_exit()


def thread_pool(prepared: PreparedWorkers) -> ThreadPool:
    """Return a worker pool of threads of this process, not started."""
    return ThreadPool(prepared.links, prepared.job, prepared.end)
