"""Workers that are threads of the trainer: they share its dataset, start in a millisecond, and need neither a fork nor a pickle.

A thread runs the same loop over the same ring as a worker process (loop.py), and draws from generators of its own
(thread_generators.py), so batches are the same. A crash in C code ends the whole program, and a thread that is stuck in a sample
cannot be killed. Such a thread is left behind: private memory takes the place of what it has mapped of the ring, so that nothing it
does when it wakes up reaches a batch or another worker.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import errno
import logging
import operator
import os
import sys
import threading
import traceback
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from time import monotonic, monotonic_ns
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

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
from shmload.worker.thread_generators import TorchDraws, make_set

log = logging.getLogger("shmload")

MAX_LENGTH = 100_000  # entries of a container that each thread gets a copy of; longer ones are data, which threads share
MAX_NBYTES = 1 << 20  # size of an array that each thread gets a copy of
MAX_SEARCHED = 100  # entries of a container in which objects to copy are searched for
MAX_COPIES = 1000  # objects that are copied for a thread
_CONTAINERS = {list, dict, set, deque, defaultdict, OrderedDict, Counter}
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event)
_OF_PYTHON = sys.stdlib_module_names - {"__main__"}  # packages whose objects are shared: queues, files, generators of numbers
_OWN_WAYS = ("__copy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__del__")

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
            dataset = _own_copy_for_passes(dataset)
        elif self._job.worker_init_fn is not None and isinstance(dataset, Dataset):
            dataset = _own_copy(dataset)  # worker_init_fn may set attributes of this worker's, by get_worker_info()
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


def _own_copy(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, and of the iterable datasets among its attributes and in lists there (ChainDataset)."""
    return _Copies(lambda _: False).of(dataset)


def _own_copy_for_passes(dataset: Any) -> Any:
    """Return a shallow copy of an iterable dataset, and of what it is made of, where passes keep their positions and buffers."""
    return _Copies(_keeps_state_of_a_pass).of(dataset)


class _Copies:
    """Shallow copies of a dataset and of objects that it holds, which refer to each other as the originals do.

    Args:
        is_copied: whether to copy an object that was found. Other objects are shared.
    """

    def __init__(self, is_copied: Callable[[Any], bool]) -> None:
        self._is_copied = is_copied
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (original, copy); the first is kept so that its id stays its own
        self._unvisited: deque[Any] = deque()

    def of(self, dataset: Any) -> Any:
        """Return the copy of a dataset."""
        copied = self._copy(dataset)
        while self._unvisited:
            _replace_in(self._unvisited.popleft(), self._own)
        return copied

    def _copy(self, value: Any) -> Any:
        made = copy.copy(value)
        self._made[id(value)] = value, made
        self._unvisited.append(made)
        return made

    def _own(self, value: Any) -> Any:
        """Return the copy of a value, or the value if it is shared."""
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, MethodType):
            of = self._own(value.__self__)
            return value if of is value.__self__ else MethodType(value.__func__, of)
        if isinstance(value, IterableDataset):
            return self._copy(value)
        has_datasets = type(value) in (list, tuple) and any(isinstance(part, IterableDataset) for part in value)
        if type(value) is tuple and (has_datasets or len(value) <= MAX_SEARCHED):
            parts = tuple(map(self._own, value))
            return value if all(map(operator.is_, parts, value)) else parts
        return self._copy(value) if has_datasets or (len(self._made) < MAX_COPIES and self._is_copied(value)) else value


def _replace_in(holder: Any, own: Callable[[Any], Any]) -> None:
    """Replace each value in a list, a dict or an object's attributes by what `own` returns for it."""
    if isinstance(holder, list | deque):
        if len(holder) <= MAX_SEARCHED or isinstance(holder[0], IterableDataset):
            for at, value in enumerate(list(holder)):
                holder[at] = own(value)
        return
    values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    if values is not holder or len(values) <= MAX_SEARCHED:
        for name, value in list(values.items()):
            values[name] = own(value)


def _keeps_state_of_a_pass(value: Any) -> bool:
    """Return whether a pass may change this object without meaning to change it for other workers.

    These are containers and arrays (a buffer, an order that each pass shuffles in place) unless they are large, and objects of
    Python classes, except for those with a lock, which are made to be shared. A class that defines how it is copied, pickled or
    ended may hold what must not be copied, such as a file.
    """
    kind = type(value)
    if kind in _CONTAINERS:
        return len(value) <= MAX_LENGTH
    if kind is np.ndarray:
        return value.base is None and value.nbytes <= MAX_NBYTES
    package = kind.__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | ModuleType | FunctionType)
        and package != "shmload"
        and package not in _OF_PYTHON
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _OWN_WAYS)
        and not any(isinstance(held, _LOCKS) for held in vars(value).values())
    )


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
