"""Measure which share of the time reading a loader's samples holds Python's lock (the GIL).

A process of its own reads the first samples, so that the trainer's dataset, generators and sampler stay as they are: a dataset that
opens its files at first use must not have opened them before workers are forked. One thread reads, and the main thread looks at
random moments whether it has to wait for the lock.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import default_convert

from shmload._core.gil import sleep_and_wait
from shmload._core.trainer import Order
from shmload._core.watch import die_with
from shmload.engine.backend_choice import NotSent
from shmload.engine.bad_samples import BadSamples
from shmload.engine.config import LoaderConfig
from shmload.modes.default_collate import collated
from shmload.modes.inline_reader import InlineReader
from shmload.processes.child import Child
from shmload.processes.exit_codes import wait_exit_code
from shmload.processes.trial import begin_trial
from shmload.shm import fork_copies
from shmload.worker.iterable_pass import IterablePass
from shmload.worker.job import Job, WorkerLink
from shmload.worker.job_pickling import pickled_once
from shmload.worker.pool import context_of
from shmload.worker.process import set_up
from shmload.worker.template import process_maker

T = TypeVar("T")

MEASURED_S = 0.05  # least time of a measurement, after the first sample, which also opens files and imports modules
LIMIT_S = 1.0  # longest time in all: samples may be slow
CHUNK = 4  # samples that are read and collated together; a measurement has at least one whole chunk, unless LIMIT_S ends it

START_S = 60.0  # longest wait for the process, which may have to import the dataset's modules and call worker_init_fn
ANSWER_S = 10.0  # longest wait beyond LIMIT_S; a sample that keeps the lock in C code keeps the measuring thread from its answer

_SWITCH_S = 1e-4  # Python code gives the lock away after this time, so that a wait is not much longer than a pause
_PAUSE_NS = (100_000, 500_000)  # between two looks; random, so that no rhythm of the samples matters
_HELD_NS = 5_000  # a longer wait means that the lock was held: taking a free lock takes less than 1 us


def measured_share(config: LoaderConfig) -> float:
    """Return the share of the time for which reading the first samples holds the lock, measured in a child process.

    Raises:
        NotSent: the dataset cannot be sent to a process.
        RuntimeError: the process has no result; the message says why.
    """
    job, context = config.job(), context_of(None)
    modules: set[str] = set()
    make: Any = context.Process  # type: ignore[attr-defined]  # each context has its own
    if context.get_start_method() != "fork":
        try:
            pickled_once(job, modules)
        except TypeError as error:
            raise NotSent(str(error)) from error
        make = process_maker(context, modules, needs_torch=True)
    link = WorkerLink(0, config.num_workers, os.getpid(), "", 0, "", "", "", 0, ())
    answers, sender = context.Pipe(duplex=False)
    with answers:
        with sender:
            arguments = (job, link, config.index_sampler, sender)
            process = make(target=report, args=arguments, daemon=True, name="shmload measures the GIL")
            with fork_copies.without_copies(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)  # see ProcessPool
                process.start()
        child = Child(process.pid, partial(wait_exit_code, process))
        try:
            return _share_in(answers)
        finally:
            child.kill()
            child.reap()
            process.close()


def _share_in(answers: Connection) -> float:
    """Return the child's result, or raise an error that says what came in its place."""
    try:
        for what, limit_s in (("did not start", START_S), ("read no sample", LIMIT_S + ANSWER_S)):
            if not answers.poll(limit_s):
                raise RuntimeError(f"the measuring process {what} within {limit_s:g} s")
            answer = answers.recv()
            if answer is not None:
                break
    except EOFError:
        raise RuntimeError("the measuring process died") from None
    if isinstance(answer, float):
        return answer
    raise RuntimeError(answer)


def report(job: Job, link: WorkerLink, index_sampler: Any, answers: Connection) -> None:
    """Run the process: send None when reading begins, then the share, or a text that says why there is none. Never return.

    Args:
        job: the job of the loader's workers.
        link: the number and base seed of worker 0. It needs no ring.
        index_sampler: yields the keys of each batch, or one key, as torch's loader has it.
        answers: where to send the answers.
    """
    die_with(link.trainer_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole process group; the trainer handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    begin_trial()
    answer: float | str
    try:
        job, source, _ = set_up(job, link)
        answers.send(None)
        answer = held_share(_reads(job, index_sampler) if source is None else _reads_of_stream(job, source))
    except BaseException as error:  # SystemExit, too: this process has nobody else to report it
        answer = f"{type(error).__name__}: {error}"
    answers.send(answer)
    os._exit(0)  # the thread may still read, and nothing that was inherited from the trainer may run


def held_share(reads: Iterator[None]) -> float:
    """Return the share of the time during which a thread that runs `reads` holds the lock, 0 to 1.

    Args:
        reads: reads a few samples at each step; the first step is not measured unless it takes longer than LIMIT_S.
    Raises:
        Exception: the error of `reads`.
        LookupError: it read nothing.
    """
    reader = _ReadingThread(reads)
    pauses = random.Random()
    sys.setswitchinterval(_SWITCH_S)
    reader.start()
    began = since = monotonic()
    held_ns = total_ns = 0
    is_warm = False
    while reader.is_alive() and monotonic() - began < LIMIT_S:
        slept, waited = sleep_and_wait(pauses.randrange(*_PAUSE_NS))
        if reader.num_reads and not is_warm:
            is_warm, since, held_ns, total_ns = True, monotonic(), 0, 0
            continue
        total_ns += slept + waited
        if waited > _HELD_NS:
            held_ns += slept + waited
        if reader.num_reads > 1 and monotonic() - since >= MEASURED_S:
            break
    if reader.error is not None:
        raise reader.error
    if not total_ns or (not reader.num_reads and not reader.is_alive()):
        raise LookupError("there is no sample to read")
    return held_ns / total_ns


class _ReadingThread(threading.Thread):
    """The thread that reads.

    Attributes:
        num_reads: steps done.
        error: the exception that ended it.
    """

    def __init__(self, reads: Iterator[None]) -> None:
        super().__init__(daemon=True)
        self._reads, self.num_reads = reads, 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in self._reads:
                self.num_reads += 1
        except BaseException as error:
            self.error = error


def _reads(job: Job, index_sampler: Any) -> Iterator[None]:
    """Read the samples that the sampler yields, a few at each step, and one alone in the first."""
    reader = InlineReader(job, BadSamples("raise", None))
    for step, keys in enumerate(_again(lambda: _chunks(index_sampler, job.auto_collation))):
        try:
            if step == 0:
                reader.read(Order(0, step, keys[:1]))
                yield
            reader.read(Order(0, step, keys))
        except Exception:
            if not job.tolerates_bad_samples:
                raise
            continue
        yield


def _chunks(index_sampler: Any, auto_collation: bool) -> Iterator[list[Any]]:
    for given in index_sampler:
        keys = [given] if not auto_collation else given.tolist() if isinstance(given, np.ndarray) else list(given)
        for first in range(0, len(keys), CHUNK):
            yield keys[first : first + CHUNK]


def _reads_of_stream(job: Job, source: IterablePass) -> Iterator[None]:
    """Read the samples of an iterable dataset, a few at each step, and one alone in the first."""
    if job.auto_collation:
        size, collate = CHUNK, job.collate_fn or partial(collated, ragged=job.plan.ragged)
    else:
        size, collate = 1, lambda samples: (job.collate_fn or default_convert)(samples[0])
    samples = _again(lambda: iter(source.dataset))
    chunk = list(islice(samples, 1))
    while chunk:
        collate(chunk)
        yield
        chunk = list(islice(samples, size))


def _again(begin: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Yield what an iterator yields, and begin again at its end, unless it is empty."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for each in begin():
            is_empty = False
            yield each
