"""A worker process from its first line to its last: attach, die with the parent, learn the job, work."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import pickle
import signal
import sys

from shmload import faults
from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.watch import die_with
from shmload.shm.group import Doorbell
from shmload.shm.segment import open_segment
from shmload.worker.failure import Failure
from shmload.worker.loop import WorkerLoop
from shmload.worker.snapshot import IterablePass, Snapshot, Snapshots, with_shared_seed
from shmload.worker.spec import Job, Post

STACK_NBYTES = 65536
STACK_SIGNAL = signal.SIGRTMAX - 3  # asks a worker for its Python stack; no library is known to use it
GONE = 3  # exit code of a worker that found its ring gone


def open_memory(path: str) -> Mapping:
    """Maps a segment of the trainer's; nothing this process forks will see it."""
    faults.hit("opening_memory")
    fd = open_segment(path)
    try:
        return Mapping(fd, os.fstat(fd).st_size, inherit=False, populate=True)
    finally:
        os.close(fd)


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
    # what the trainer had before the fork is shared memory until written to, and the collector writes to every object it visits
    gc.freeze()
    try:
        ring = WorkerRing(open_memory(post.control_path), post.worker_id)
        ready, orders, grants = (
            Doorbell.attach(name) for name in (post.ready_bell, post.orders_bell, post.grants_bell)
        )
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
        from shmload.worker.helping import Visits  # few loaders share

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
    try:
        body.run()
    except KeyboardInterrupt:  # a sample raised it: torch's worker leaves without a word, too
        pass


def prepare(job: Job, post: Post) -> tuple[Job, IterablePass | None, Snapshots | None]:
    """Threads, seeds, worker info, the user's worker_init_fn; then to where a saved state says.

    In seed mode torch is only touched if the dataset has brought it along: a worker that decodes without torch stays small.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if job.shared_seed is not None:
        job = dataclasses.replace(job, dataset=with_shared_seed(job.dataset, job.shared_seed))
    if job.seed is None or "torch" in sys.modules:
        from shmload.worker import torch_side

        torch_side.prepare(job.dataset, post.worker_id, post.num_workers, post.base_seed)
    if job.worker_init_fn is not None:
        job.worker_init_fn(post.worker_id)
    resumed: Snapshot = pickle.loads(post.resume) if post.resume else {}
    if "dataset" in resumed:
        job.dataset.load_state_dict(resumed["dataset"])
    source = (
        IterablePass(job.dataset, resumed.get("iterator"), has_ended=resumed.get("has_ended", False))
        if job.is_iterable
        else None
    )
    if not (job.snapshot_every or resumed or job.is_iterable):
        return job, source, None
    snapshots = Snapshots(job, source, post.num_workers)
    snapshots.resume(resumed)
    return job, source, snapshots
