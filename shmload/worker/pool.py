"""The processes that fill a ring: prepared, started, watched, replaced and ended.

Also what a fork does not take along, said before workers are forked. CUDA's state cannot be used in a forked child, and a dataset
that touches the GPU fails there: that is a warning. A thread that holds a lock at the fork leaves it held for
ever in the child. Seldom one does, so that goes to the log, once, and daemonic threads do not count: progress bars and loggers have
one in almost every program.

A worker process from its first line to its last: attach, die with the parent, learn the job, work.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import types
import warnings
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context as spawning
from multiprocessing import reduction
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple, Protocol

from shmload import faults
from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.watch import die_with, keep_freed
from shmload.shm import owners, travel
from shmload.shm.segment import Doorbell, Group, Segment, map_segment, open_segment
from shmload.worker.failure import Failure
from shmload.worker.job import Job, Post
from shmload.worker.loop import Visits, WorkerLoop
from shmload.worker.sample_rng import Streams
from shmload.worker.snapshot import IterablePass, Snapshot, Snapshots, load_own_states, with_shared_seed
from shmload.worker.template import process_maker
from shmload.world import describe_exit, parts_of, settle

STACK_NBYTES = 65536
STACK_SIGNAL = signal.SIGRTMAX - 3  # asks a worker for its Python stack; no library is known to use it
GONE = 3  # exit code of a worker that found its ring gone


def open_memory(path: str) -> Mapping:
    """Maps a segment of the trainer's; nothing this process forks will see it."""
    faults.hit("opening_memory")
    return map_segment(path, inherit=False)


def main(post: Post, inherited: Job | None) -> None:
    """Runs one worker.

    Args:
        inherited: the job itself, where it came by fork or could only travel with the process; else it lies pickled in
            the pickled job segment, once for all workers.
    """
    die_with(post.trainer_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole group; the trainer decides what it means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a trainer's own handler, come by fork, would keep this worker alive
    faults.hit("start")
    os.sched_setaffinity(0, post.affinity)
    give_way()
    keep_freed()
    # what the trainer had before the fork is shared memory until written to, and the collector writes to every object it visits
    gc.freeze()
    try:
        ring = WorkerRing(open_memory(post.control_path), post.worker_id)
        ready, orders, grants = (Doorbell.attach(name) for name in (post.ready_bell, post.orders_bell, post.grants_bell))
    except FileNotFoundError:
        os._exit(GONE)  # the loader has been closed before this process was up
    if post.stack_path:
        # written by the signal handler itself, so it also comes from a worker that is stuck in C with the GIL held
        faulthandler.register(STACK_SIGNAL, open_segment(post.stack_path), all_threads=False)
    where = f"in DataLoader worker process {post.worker_id}"
    job, failure = inherited, None
    source: IterablePass | None = None
    snapshots: Snapshots | None = None
    try:
        if job is None:
            pickled_job = open_memory(post.pickled_job_path)
            job = pickle.loads(memoryview(pickled_job)[: post.pickled_job_nbytes])
            del pickled_job
        assert job is not None
        job, source, snapshots = prepare(job, post)
    except Exception as error:
        failure = Failure.of(error, where, "")
        job = job or Job(None, None, None, True, None, False)
    visits = None
    if post.neighbours and failure is None:
        visits = Visits(post.neighbours, post.worker_id, job, orders=orders, open_memory=open_memory)
    body = WorkerLoop(
        ring,
        job,
        ready=ready,
        orders=orders,
        grants=grants,
        open_memory=open_memory,
        source=source,
        snapshots=snapshots,
        visits=visits,
        init_failure=failure,
    )
    with suppress(KeyboardInterrupt):  # a sample raised it: torch's worker leaves without a word, too
        body.run()


def give_way() -> None:
    """Has this process take no processor from another by waking up, unless it was given a policy of its own.

    The trainer rings for a worker within `next()`, and one that wakes up on its processor would run first, for as long as it
    decodes. As a batch process it takes a free processor at once, and a busy one when its turn comes, at the next tick.
    """
    with suppress(OSError):  # a sandbox may forbid to ask
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def compute_alone() -> None:
    """Has libraries compute in one thread, where nobody has said otherwise: there is a worker for each processor."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # for OpenCV when it is imported; below for one that came by fork
    cv2: Any = sys.modules.get("cv2")
    if cv2 is not None and cv2.getNumThreads() == cv2.getNumberOfCPUs():
        cv2.setNumThreads(0)  # none beside the caller; for 1, OpenCV waits to stop threads that a forked child does not have


def prepare(job: Job, post: Post) -> tuple[Job, IterablePass | None, Snapshots | None]:
    """Threads, seeds, worker info, the user's worker_init_fn; then to where a saved state says.

    In seed mode torch is only touched if the dataset has brought it along: a worker that decodes without torch stays small.
    """
    compute_alone()
    if job.shared_seed is not None:
        job = dataclasses.replace(job, dataset=with_shared_seed(job.dataset, job.shared_seed))
    if job.seed is None or "torch" in sys.modules:
        from shmload.worker import torch_side

        torch_side.prepare(job.dataset, post.worker_id, post.num_workers, post.base_seed)
    if job.worker_init_fn is not None:
        job.worker_init_fn(post.worker_id)
    resumed: Snapshot = pickle.loads(post.resume) if post.resume else {}
    if not (job.snapshot_every or resumed or job.is_iterable):
        return job, None, None
    streams = Streams()  # before the dataset loads its state, because it may set generators
    load_own_states(job.dataset, resumed)
    streams.go_to(resumed.get("streams", {}))
    source = None
    if job.is_iterable:
        has_ended, is_over = resumed.get("has_ended", False), resumed.get("is_over", False)
        source = IterablePass(job.dataset, resumed.get("iterator"), has_ended=has_ended, is_over=is_over)
    return job, source, Snapshots(job, source, post.num_workers, streams)


log = logging.getLogger("shmload")
_has_told_of_threads = False


def warn_of_fork() -> None:
    """Says what workers forked now cannot use."""
    global _has_told_of_threads
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        warnings.warn(
            "CUDA is in use in this process, and workers started by fork cannot use it: a dataset that touches the GPU will fail "
            'there. Keep the dataset on the CPU, or give multiprocessing_context="spawn" or "forkserver"',
            RuntimeWarning,
            stacklevel=2,
        )
    here = threading.current_thread(), threading.main_thread()
    others = [thread.name for thread in threading.enumerate() if thread not in here and not thread.daemon]
    if others and not _has_told_of_threads:
        _has_told_of_threads = True
        log.warning(
            "workers are forked while %d other thread%s (%s): a lock that %s at that moment stays held in them for ever. If a "
            'worker hangs before its first sample, give multiprocessing_context="forkserver"',
            len(others),
            " runs" if len(others) == 1 else "s run",
            ", ".join(others),
            "it holds" if len(others) == 1 else "they hold",
        )


STACK_LOOKS, STACK_LOOK_MS = 100, 5  # a worker is given half a second to write its stack
STOP_GRACE_S = 1.0  # how long a worker may take over the sample it is on when the loader closes


class Death(NamedTuple):
    """A worker process that has ended."""

    worker_id: int
    pid: int
    exitcode: int | None

    def __str__(self) -> str:
        return f"worker {self.worker_id} (pid {self.pid}) {describe_exit(self.exitcode)}"


class WorkerPool(Protocol):
    """What the engine needs of workers, whatever they run on."""

    @property
    def pids(self) -> list[int]:
        """Of the processes that are the workers now, in worker order."""

    @property
    def processes(self) -> list[BaseProcess]:
        """Those that are multiprocessing's, in worker order."""

    def reads_samples(self, worker_id: int) -> bool:
        """Whether the worker's own process does: then its death may be a sample's fault, and a sample of its can time out."""

    def start(self, num_workers: int) -> None:
        """Starts the first so many workers."""

    def start_worker(self, worker_id: int) -> None:
        """Starts one that was not started yet, or has been reaped."""

    def reap(self, worker_id: int) -> None:
        """Forgets a worker that has ended and is not to be replaced."""

    def deaths(self) -> list[Death]:
        """Workers that have ended and have not been replaced: each is reported again until it is."""

    def replace(self, worker_id: int) -> None:
        """Starts a new worker in the place of a dead one whose rows have been taken back."""

    def stack(self, worker_id: int) -> str:
        """Where a worker is now, in Python; or why that is not known."""

    def kill(self, worker_id: int) -> Death:
        """Ends a worker at once; it can then be replaced."""

    def stop(self, grace_s: float) -> None:
        """Ends every worker; the ring already says it is closing, and bells have been rung."""


class ProcessPool:
    """Workers as processes of this machine, by any of multiprocessing's start methods.

    Args:
        posts: one per worker; the first is not worker 0 where others of the ring are not this machine's.
        make: makes a process that is not started, as a context's Process does.
        job: what they do. By fork it is inherited; else it is pickled once into the pickled job that `posts` name. If it contains
            what only multiprocessing can pickle (locks, queues, shared memory), it is pickled for each process as that starts.
        stacks: where workers write their Python stacks when asked to, one segment each, by worker.
    """

    def __init__(
        self, posts: list[Post], job: Job, make: Callable[..., BaseProcess], *, travels: bool, stacks: abc.Mapping[int, Segment]
    ) -> None:
        self._posts = {post.worker_id: post for post in posts}
        self._job, self._make, self._travels, self._stacks = job, make, travels, stacks
        self._processes: dict[int, BaseProcess] = {}
        self._pidfds: dict[int, int] = {}  # pidfd -> worker_id
        self._poll = select.poll()
        self._pid = os.getpid()
        _pools.add(self)

    @property
    def pids(self) -> list[int]:
        """Of the workers now, in worker order."""
        return [self._processes[w].pid or 0 for w in sorted(self._processes)]

    @property
    def processes(self) -> list[BaseProcess]:
        """The workers' process objects, in worker order."""
        return [self._processes[w] for w in sorted(self._processes)]

    def reads_samples(self, worker_id: int) -> bool:
        """All of them do."""
        return True

    def start(self, num_workers: int) -> None:
        """Starts the ring's first so many workers, as far as they are this worker pool's; none is waited for."""
        for post in self._posts.values():
            if post.worker_id < num_workers:
                self._start(post)
                if faults.armed:
                    faults.hit("starting")

    def start_worker(self, worker_id: int) -> None:
        """Starts one more worker, later than the others; it is not waited for."""
        self._start(dataclasses.replace(self._posts[worker_id], resume=b""))

    def reap(self, worker_id: int) -> None:
        """Forgets a worker that has ended."""
        self._reap(self._pidfd_of(worker_id), self._processes.pop(worker_id))

    def _start(self, post: Post) -> None:
        inherited = self._job if self._travels else None
        process = self._make(target=main, args=(post, inherited), daemon=True, name=f"shmload worker {post.worker_id}")
        with owners.ours(), warnings.catch_warnings():
            # the worker starts no thread before its own code runs, and what it inherits it only reads
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
        owners.watch(process.pid or 0)
        try:
            pidfd = os.pidfd_open(process.pid or 0)
        except ProcessLookupError:  # started by a fork server, which has already reaped it
            pidfd = os.dup(process.sentinel)
        except OSError:  # no descriptor is left: a worker nobody watches must not be
            process.kill()
            process.join()
            raise
        self._processes[post.worker_id] = process
        self._pidfds[pidfd] = post.worker_id
        self._poll.register(pidfd, select.POLLIN)

    def deaths(self) -> list[Death]:
        """Workers that have ended and have not been replaced. Cost: one poll, about 0.5 us."""
        return [self._death(self._pidfds[pidfd]) for pidfd, _ in self._poll.poll(0)]

    def _death(self, worker_id: int) -> Death:
        process = self._processes[worker_id]
        return Death(worker_id, process.pid or 0, settle(process))

    def _reap(self, pidfd: int, process: BaseProcess) -> None:
        del self._pidfds[pidfd]
        self._poll.unregister(pidfd)
        os.close(pidfd)
        settle(process)
        owners.forget(process.pid or 0)
        process.close()

    def replace(self, worker_id: int) -> None:
        """Starts a new worker in the place of a dead one. If that fails, `deaths` goes on reporting the dead one."""
        pidfd, dead = self._pidfd_of(worker_id), self._processes[worker_id]
        faults.hit("replacing")
        self.start_worker(worker_id)  # without its snapshot: what it has done since it resumed is not there to go on from
        self._reap(pidfd, dead)

    def stack(self, worker_id: int) -> str:
        """Where a worker is now, in Python; or why that is not known."""
        return written_stack(self._pidfd_of(worker_id), self._stacks[worker_id].fd)

    def _pidfd_of(self, worker_id: int) -> int:
        return next(pidfd for pidfd, worker in self._pidfds.items() if worker == worker_id)

    def kill(self, worker_id: int) -> Death:
        """Ends a worker at once; it can then be replaced."""
        _kill(self._pidfd_of(worker_id))
        return self._death(worker_id)

    def stop(self, grace_s: float) -> None:
        """Gives workers that long to leave, then kills those that have not. Safe to call twice."""
        if os.getpid() != self._pid:
            return
        deadline = monotonic() + grace_s
        try:
            faults.hit("closing")
            while self._pidfds and (left := deadline - monotonic()) > 0:
                ended = self._poll.poll(left * 1000)
                with interrupts_held():
                    for pidfd, _ in ended:
                        self._reap(pidfd, self._processes.pop(self._pidfds[pidfd]))
        finally:  # ^C, say, ends the patience and not the closing
            with interrupts_held():
                for pidfd in self._pidfds:
                    _kill(pidfd)  # ends a stopped process, too
                for pidfd, worker_id in list(self._pidfds.items()):
                    self._reap(pidfd, self._processes.pop(worker_id))


def _kill(pidfd: int) -> None:
    """End a process by its descriptor: its number may be another's, if the program has waited for the process."""
    with suppress(OSError):  # it has ended, or this is the sentinel of one that has
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def written_stack(pidfd: int, fd: int) -> str:
    """Has a worker process write its Python stack to its segment `fd`; gives that, or why it is not known."""
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


def _disown() -> None:
    """In a child of a bare os.fork: at its exit multiprocessing would end the parent's workers, taking them for its own."""
    for pool in _pools:
        multiprocessing.process._children.difference_update(pool.processes)  # type: ignore[attr-defined]  # private
    _pools.clear()


os.register_at_fork(after_in_child=_disown)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Lets ^C wait until the block is done: a worker started but not recorded would be one too many."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    calls: list[tuple[Any, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if calls:
            handler(*calls[-1])


# reducers of multiprocessing's pickler that do what plain pickle does by now, or did not need
_PLAIN = {getattr(reduction, name) for name in ("_reduce_method", "_reduce_method_descriptor", "_reduce_partial")}


class _Sources(travel.LocalPickler):
    """Pickles for all workers, and notes the modules of what it pickles.

    Attributes:
        needs_process: something in it has to be pickled by multiprocessing while a process starts: shared memory, a socket, or an
            object with a reducer of the user's that was registered with `multiprocessing.reduction.ForkingPickler`.
    """

    def __init__(self, file: io.BytesIO, modules: set[str]) -> None:
        super().__init__(file)
        self._modules = modules
        self._reducers = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # private
        self.needs_process = False

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, (type, types.FunctionType)) else type(value)
        self._modules.add(kind.__module__)
        reducer = self._reducers.get(type(value))
        if reducer is not None and reducer not in _PLAIN:
            is_torchs = reducer.__module__ == "torch.multiprocessing.reductions"
            self.needs_process |= not is_torchs or _is_shared(value)
        return NotImplemented


def _is_shared(value: Any) -> bool:
    """Return whether a tensor or storage is in shared memory, which workers are to share."""
    try:
        return bool(getattr(value, "_untyped_storage", value).is_shared())  # a TypedStorage warns if it is asked itself
    except (AttributeError, NotImplementedError, RuntimeError):  # a sparse tensor
        return False


class _Trial:
    """Stands for a process that is being started, while it is tried whether multiprocessing can pickle something."""

    DupFd = staticmethod(int)

    def duplicate_for_child(self, fd: int) -> int:
        return fd


def _refusal(value: Any) -> Exception | None:
    """Return why multiprocessing cannot send an object to a process that it starts; None: it can."""
    spawning.set_spawning_popen(_Trial())  # type: ignore[arg-type]  # has what reducers ask for
    try:
        reduction.ForkingPickler.dumps(value)
    except Exception as error:
        return error
    finally:
        spawning.set_spawning_popen(None)
    return None


def pickled_once(job: Job, modules: set[str]) -> bytes | None:
    """The job as bytes for all workers; None if only multiprocessing can pickle it, process by process.

    Args:
        modules: gets those that a worker imports to unpickle it.
    Raises:
        TypeError: no pickle of it is possible; names the attribute.
    """
    pickled = io.BytesIO()
    pickler = _Sources(pickled, modules)
    try:
        pickler.dump(job)
        return None if pickler.needs_process else pickled.getvalue()
    except Exception:
        error = _refusal(job)
        if error is None:
            return None
        # attribute paths of what neither plain pickle nor multiprocessing's takes, deepest first: ("dataset.fn", <lambda>)
        culprits = [found for part in dataclasses.fields(job) for found in _refused(getattr(job, part.name), part.name, set())]
        where = "; ".join(f"{path} ({type(value).__qualname__})" for path, value in culprits) or "the dataset"
        raise TypeError(
            f"workers started by spawn or forkserver need a dataset, collate_fn and worker_init_fn that pickle takes; it does not "
            f"take {where}: {type(error).__name__}: {error}. Make it at first use in the worker, define functions at module level, "
            'or use multiprocessing_context="fork"'
        ) from error


def _refused(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or len(seen) > 10_000:
        return
    seen.add(id(value))
    with suppress(Exception):
        pickle.dumps(value, protocol=5)
        return
    if _refusal(value) is None:
        return
    found = False
    for name, part in parts_of(value):
        for culprit in _refused(part, path + name, seen):
            found = True
            yield culprit
    if not found:
        yield path, value


def context_of(wanted: Any) -> BaseContext:
    """multiprocessing's context by name or as given; None: the platform's own."""
    if wanted is None or isinstance(wanted, str):
        return multiprocessing.get_context(wanted)
    return wanted  # type: ignore[no-any-return]  # torch has checked it


@dataclasses.dataclass(frozen=True)
class PreparedWorkers:
    """What a worker pool is made of: the job, a post for each worker, and what processes of this machine need besides.

    Attributes:
        stacks: where workers write their Python stacks when asked to, a segment each; one without cannot be asked.
        num_ahead: batches that are ordered ahead for each worker.
    """

    job: Job
    group: Group
    posts: list[Post]
    multiprocessing_context: Any
    stacks: dict[int, Segment]
    num_ahead: int = 1
    sample_timeout_s: float | None = None


Backend = Callable[[PreparedWorkers], WorkerPool]  # where workers run


def processes(called: PreparedWorkers) -> ProcessPool:
    """A worker pool of processes of this machine, not started."""
    context, posts = context_of(called.multiprocessing_context), called.posts
    travels = context.get_start_method() == "fork"
    modules: set[str] = set()
    if travels:
        warn_of_fork()
    else:
        pickled_job: bytes | None = pickled_once(called.job, modules)
        if pickled_job is None:
            travels = True
        else:
            posts = with_pickled_job(called.group, "pickled_job-local", pickled_job, posts)
    make = process_maker(context, modules, needs_torch=called.job.seed is None)
    return ProcessPool(posts, called.job, make, travels=travels, stacks=called.stacks)


def with_pickled_job(group: Group, name: str, pickled_job: bytes, posts: list[Post]) -> list[Post]:
    """The posts, with the job in a segment that all of them name."""
    segment = group.segment(name, len(pickled_job))
    memoryview(Mapping(segment.fd, len(pickled_job)))[:] = pickled_job
    return named(posts, segment)


def named(posts: list[Post], segment: Segment) -> list[Post]:
    """The posts, which say where the pickled job is."""
    return [dataclasses.replace(post, pickled_job_path=segment.path, pickled_job_nbytes=segment.nbytes) for post in posts]
