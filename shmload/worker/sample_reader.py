"""Reading the samples of the claimed rows: one by one, all at once, or by several threads; and who is to blame while it lasts.

Several threads of one worker reading samples at once: for datasets that wait, for a disk or a network, or give up the GIL.

Rows are given out in order and their results taken in order, so the worker always waits for the oldest row, and that one gets the
blame for a delay. A death may be any row's: whoever takes the rows over reads them one by one, so that the next death names the
right one. No read may outlive its chunk: it could write into a row that is another batch's by then.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from shmload import faults
from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload.worker.reader import InPlace
from shmload.worker.sample_rng import begin_many, begin_sample, drew_for_many, end_samples
from shmload.worker.spec import Job

T = TypeVar("T")


class ReadingThreads:
    """`num_threads` threads that live as long as the worker."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="shmload-read")

    def results(self, read: Callable[[int], T], rows: Sequence[int], begin: Callable[[int], None]) -> Iterator[T]:
        """What `read` gives for each row, in order. When the iterator is closed, nothing is being read any more.

        Args:
            begin: told of each row before it is waited for.
        Raises:
            what the first row that cannot be read raised.
        """
        reads: list[Future[T]] = [self._pool.submit(read, row) for row in rows]
        try:
            for row, one in zip(rows, reads, strict=True):
                begin(row)
                yield one.result()
        finally:
            for one in reads:
                one.cancel()
            wait(reads)


class SampleReader:
    """One worker's way to its dataset.

    Args:
        open_memory: (path) -> mapping of a segment the trainer has made.

    Attributes:
        key, row: of the sample being read; None and -1 while no one sample is.
    """

    def __init__(
        self, ring: WorkerRing, job: Job, in_place: InPlace | None, open_memory: Callable[[str], Mapping]
    ) -> None:
        self._ring = ring
        self._job = job
        self._in_place = in_place
        self._open = open_memory
        self._kept: tuple[Any, Any] | None = None  # (key, sample) decoded to learn the layout, not to be read twice
        self._given: Any = None  # the batch sampler's own object, if it is no list of int
        self._reads_many = job.plan.has_getitems  # until its samples draw random numbers
        self._threads = ReadingThreads(job.num_threads) if job.num_threads > 1 else None
        self.key: Any = None
        self.row = -1

    @property
    def threads(self) -> ReadingThreads | None:
        """What reads several samples at once, if the loader wants that.

        None if a worker has died over the claimed rows: read one by one they show which of them it was.
        """
        return None if self._threads is None or self._ring.is_suspect else self._threads

    @property
    def reads_all(self) -> bool:
        """Whether a batch's samples come together, not one by one."""
        return (self._job.plan.path == "__getitems__" and self._reads_many) or self.threads is not None

    def keys(self) -> Any:
        """What the order asks for: the whole batch's indices (an array for `read_batch_into`), or the sampler's keys."""
        ring = self._ring
        path = ring.order_path
        raw = bytes(memoryview(self._open(path.decode()))[: ring.order_nbytes]) if path else ring.order_bytes()
        self._given = None
        if ring.is_pickled:
            keys = self._given = pickle.loads(raw)  # written by the trainer
            return keys if type(keys) is list else list(keys)
        indices = np.frombuffer(raw, np.int64)
        return indices if self._job.plan.path == "read_batch_into" else indices.tolist()

    def begin(self, row: int, key: Any) -> None:
        """Says which sample is read next, and seeds its randomness."""
        self.key, self.row = key, row
        index = _index_of(key)
        self._ring.begin_row(row, index)
        job = self._job
        begin_sample(job.seed, self._ring.epoch, index, self._ring.worker_id, reseed=job.seed_samples)
        if faults.armed:
            faults.hit("mid_decode")

    def begin_all(self, row: int, key: Any) -> None:
        """Says that many samples are read at once, from this one on."""
        self.begin(row, key.item() if isinstance(key, np.integer) else key)
        self.end()
        begin_many(can_repeat=False)

    def end(self) -> None:
        """Says that no one sample is being read."""
        self.key, self.row = None, -1

    def one(self, row: int, key: Any) -> Any:
        """Reads one sample."""
        self.begin(row, key)
        if self._kept is not None and self._kept[0] == (self._ring.epoch, key):
            sample, self._kept = self._kept[1], None
            return sample
        return self._job.plan.sample(self._job.dataset, key)

    def keep(self, key: Any, sample: Any) -> None:
        """Keeps a sample that was read in vain, so that it need not be read twice."""
        if not self.reads_all:
            self._kept = ((self._ring.epoch, key), sample)

    def many(self, keys: list[Any], first: int, end: int) -> list[Any]:
        """Reads rows `first` to `end` into a list, by `__getitems__` if the dataset has it."""
        if first >= end:
            return []
        dataset, job = self._job.dataset, self._job
        if self._reads_many:
            self.begin_all(first, keys[first])
            begin_many(can_repeat=True, compares=job.seed_samples)
            is_whole = self._given is not None and end - first == len(keys)
            samples = dataset.__getitems__(self._given if is_whole else keys[first:end])
            if not drew_for_many():
                return samples if type(samples) is list else list(samples)
            self._reads_many = False  # what a sample draws is keyed by the sample
        if self.threads is None:
            samples = [self.one(row, keys[row]) for row in range(first, end)]
        else:
            samples = list(self.by_threads(lambda row: job.plan.sample(dataset, keys[row]), keys, first, end))
        self.end()
        return samples

    def by_threads(self, read: Callable[[int], Any], keys: list[Any], first: int, end: int) -> Iterator[Any]:
        """What `read` gives for each row, several at a time."""
        threads = self.threads
        assert threads is not None
        job, epoch, worker = self._job, self._ring.epoch, self._ring.worker_id

        def read_row(row: int) -> Any:
            begin_sample(job.seed, epoch, _index_of(keys[row]), worker, reseed=False)
            try:
                return read(row)
            finally:
                end_samples()

        return threads.results(read_row, range(first, end), lambda row: self.begin(row, keys[row]))

    def bad_rows(self) -> tuple[int, ...]:
        """The claimed rows that cannot be read, one of which has just shown itself; none if it is the batch that failed."""
        ring = self._ring
        first, end = (0, ring.nrows) if ring.is_packed else (ring.first_row, ring.end_row)
        keys = self.keys()
        bad = [] if self.row < 0 else [self.row]
        for row in range(first if self.row < 0 else self.row + 1, end):
            try:
                self.begin(row, keys[row] if type(keys) is list else keys[row].item())
                self._job.plan.try_sample(self._job.dataset, self._in_place, keys[row])
            except Exception:
                bad.append(row)
        return tuple(bad)


def _index_of(key: Any) -> int:
    """The sample's index; -1 if the sampler's key is no integer."""
    return key if type(key) is int and -(1 << 63) <= key < 1 << 63 else -1
