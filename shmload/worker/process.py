"""A worker process from start to end: arrange to end with the trainer, attach to the ring, get the job, run the loop."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import pickle
import signal
import sys
from contextlib import suppress
from typing import Any, NamedTuple

from shmload import faults
from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.watch import die_with, keep_freed
from shmload.shm.doorbell import Doorbell
from shmload.shm.segment import map_segment, open_segment
from shmload.worker.failure import Failure
from shmload.worker.generator_states import GeneratorStreams
from shmload.worker.helping import HelpedRanks
from shmload.worker.iterable_pass import IterablePass, with_shared_seed
from shmload.worker.job import Job, WorkerLink
from shmload.worker.loop import WorkerLoop, process_begin_ns
from shmload.worker.snapshot import Snapshot, Snapshots, load_own_states

STACK_SIGNAL = signal.SIGRTMAX - 3  # asks a worker for its Python stack; no library is known to use it

GONE = 3  # exit code of a worker that found its ring gone


def open_memory(path: str) -> Mapping:
    """Map a segment of the trainer's. Children that this process forks do not inherit the mapping."""
    faults.hit("opening_memory")
    return map_segment(path, inherit=False)


class Attached(NamedTuple):
    """A worker's end of the ring, and its bells; see `WorkerLoop`."""

    ring: WorkerRing
    ready: Doorbell
    orders: Doorbell
    grants: Doorbell

    def loop(self, job: Job, **options: Any) -> WorkerLoop:
        """Return the loop over the ring, with the further arguments of `WorkerLoop`."""
        return WorkerLoop(
            self.ring, job, ready=self.ready, orders=self.orders, grants=self.grants, open_memory=open_memory, **options
        )


def attach(link: WorkerLink) -> Attached:
    """Attach to the ring and the bells of a link.

    Raises:
        FileNotFoundError: the loader has been closed.
    """
    ring = WorkerRing(open_memory(link.control_path), link.worker_id)
    return Attached(ring, *(Doorbell.attach(name) for name in (link.ready_bell, link.orders_bell, link.grants_bell)))


def main(link: WorkerLink, inherited: Job | None) -> None:
    """Run one worker.

    Args:
        link: the worker's number, bells and segments.
        inherited: the job, if it was inherited by a fork or had to be pickled with the process. If None, the job is read from the
            segment with the pickled job, which all workers share.
    """
    die_with(link.trainer_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole process group; the trainer handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler inherited from the trainer would keep this worker alive
    faults.hit("start")
    os.sched_setaffinity(0, link.affinity)
    set_batch_scheduling()
    keep_freed()
    # pages inherited from the trainer are shared until they are written to, and the collector writes to every object it visits
    gc.freeze()
    try:
        attached = attach(link)
    except FileNotFoundError:
        os._exit(GONE)  # the loader was closed before this process had started
    if link.stack_path:
        # the signal handler itself writes the stack, so this also works for a worker that is stuck in C with the GIL held
        faulthandler.register(STACK_SIGNAL, open_segment(link.stack_path), all_threads=False)
    where = f"in DataLoader worker process {link.worker_id}"
    job, failure = inherited, None
    source: IterablePass | None = None
    snapshots: Snapshots | None = None
    try:
        if job is None:
            pickled_job = open_memory(link.pickled_job_path)
            job = pickle.loads(memoryview(pickled_job)[: link.pickled_job_nbytes])
            del pickled_job
        assert job is not None
        job, source, snapshots = set_up(job, link)
    except Exception as error:
        failure = Failure.of(error, where, "")
        job = job or Job(None, None, None, True, None, False)
    helped_ranks = None
    if link.peer_rings and failure is None:
        helped_ranks = HelpedRanks(link.peer_rings, link.worker_id, job, orders=attached.orders, open_memory=open_memory)
    loop = attached.loop(job, source=source, snapshots=snapshots, helped_ranks=helped_ranks, init_failure=failure)
    with suppress(KeyboardInterrupt):  # raised by a sample: torch's worker also exits without a message
        loop.run(process_begin_ns())


def set_batch_scheduling() -> None:
    """Set SCHED_BATCH, so that this process never preempts another when it wakes up, unless it already has a scheduling policy.

    The trainer wakes workers within `next()`. A worker that wakes up on the trainer's processor could otherwise run at once, and
    the trainer would wait while it decodes. A batch process takes a free processor at once, and a busy one at the next tick.
    """
    with suppress(OSError):  # a sandbox may forbid the call
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def limit_library_threads() -> None:
    """Make libraries compute in one thread unless the user has set a number, because there is a worker for each processor."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # for an OpenCV imported later; below for an inherited one
    cv2: Any = sys.modules.get("cv2")
    if cv2 is not None and cv2.getNumThreads() == cv2.getNumberOfCPUs():
        cv2.setNumThreads(0)  # only the caller's thread; with 1, OpenCV would wait for threads that a forked child does not have


def set_up(job: Job, link: WorkerLink) -> tuple[Job, IterablePass | None, Snapshots | None]:
    """Set this process's threads, seeds and worker info, and prepare the work.

    In seed mode, torch is used only if the dataset has imported it, so a worker that decodes without torch stays small.

    Returns:
        the result of `prepare`.
    """
    limit_library_threads()
    if job.shared_seed is not None:
        job = dataclasses.replace(job, dataset=with_shared_seed(job.dataset, job.shared_seed))
    if job.seed is None or "torch" in sys.modules:
        from shmload.worker import torch_side

        torch_side.prepare(job.dataset, link.worker_id, link.num_workers, link.base_seed)
    return prepare(job, link)


def prepare(job: Job, link: WorkerLink) -> tuple[Job, IterablePass | None, Snapshots | None]:
    """Call the user's worker_init_fn, and restore the saved state, if any. The worker has been seeded.

    Returns:
        the job with the worker's dataset, the pass through it if it is iterable, and the `Snapshots` if they are needed.
    """
    if job.worker_init_fn is not None:
        job.worker_init_fn(link.worker_id)
    resumed: Snapshot = pickle.loads(link.resume) if link.resume else {}
    if not (job.snapshot_every or resumed or job.is_iterable):
        return job, None, None
    streams = GeneratorStreams()  # before the dataset loads its state, because it may set generators
    load_own_states(job.dataset, resumed)
    streams.go_to(resumed.get("streams", {}))
    source = None
    if job.is_iterable:
        has_ended, is_over = resumed.get("has_ended", False), resumed.get("is_over", False)
        source = IterablePass(job.dataset, resumed.get("iterator"), has_ended=has_ended, is_over=is_over)
    return job, source, Snapshots(job, source, link.num_workers, streams)
