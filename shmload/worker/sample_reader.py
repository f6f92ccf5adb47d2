"""Read the samples of the claimed rows, one by one, all at once, or by several threads, and record which row is being read."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np

from shmload import faults
from shmload._core.filler import ChunkWriter, WorkerRing
from shmload._core.mapping import Mapping as MemoryMapping
from shmload._core.twister import index_of
from shmload.batch.row_placer import RowPlacer
from shmload.worker.in_place_dataset import InPlace
from shmload.worker.job import Job
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import (
    Sample,
    begin_many,
    begin_sample,
    drew_between_samples,
    end_samples,
    generators_kept,
    global_generators,
    global_states,
)
from shmload.worker.thread_reader import read_by_threads

log = logging.getLogger("shmload")

NUM_WATCHED = 4  # reads by threads that are searched for draws from shared generators, at about 0.2 ms each


def can_be_joined(batch: Any) -> bool:
    """Return whether a result of `__getitems__` is a sequence of samples that can be concatenated with others."""
    torch = sys.modules.get("torch")
    return type(batch) in (list, tuple, np.ndarray) or (torch is not None and type(batch) is torch.Tensor)


def joined(batches: list[Any]) -> Any:
    """Concatenate the results of `__getitems__` for single keys; return None if they are not sequences of one type.

    A result may have any number of samples, because a dataset may filter or add samples.
    """
    kind = type(batches[0])
    if not can_be_joined(batches[0]) or any(type(batch) is not kind for batch in batches):
        return None
    if kind in (list, tuple):
        return kind(chain.from_iterable(batches))
    return np.concatenate(batches) if kind is np.ndarray else sys.modules["torch"].cat(batches)


class SampleReader:
    """The reader of one worker's samples. It records the sample being read in the ring, so that a death can be blamed on it.

    Args:
        ring: the worker's end of the ring.
        job: the work.
        in_place: the dataset's in-place reader, or None.
        open_memory: (path) -> mapping of a segment of the trainer's.
    """

    def __init__(self, ring: WorkerRing, job: Job, in_place: InPlace | None, open_memory: Callable[[str], MemoryMapping]) -> None:
        self._ring, self._job, self._in_place, self._open = ring, job, in_place, open_memory
        self._kept: tuple[Any, Any] | None = None  # (key, sample) that was decoded to learn the layout
        self._given: Any = None  # the batch sampler's own object, if the order was pickled
        self._keys: list[Any] | None = None  # keys of the order; None if its samples are not begun one by one
        self._has_read_all = False  # whether all samples of the claimed rows have been read, and only the rest can fail
        self._reads_many = job.plan.has_getitems  # False once its samples have drawn random numbers
        self.decodes_many = True  # for `read_batch_into`; False once its samples have drawn random numbers
        self._own = job.own_generators()
        self._threads = ThreadPoolExecutor(job.num_threads, "shmload-read") if job.num_threads > 1 else None
        self._reseeds = job.seed_samples and job.seed is not None
        self._generators = global_generators()  # of the worker's process or thread, in which it is constructed
        self._num_watched = 0 if ring.worker_id == 0 else NUM_WATCHED  # one worker's warning is enough

    @property
    def begun(self) -> int:
        """Return a number that differs for each call of `begin`, for `sample_info` and `sample_rng`; 0 before the claim's first."""
        return self._ring.begun

    def sample(self) -> Sample:
        """Return the sample that was begun last."""
        ring = self._ring
        return self._job.seed, ring.epoch, ring.index, ring.worker_id

    def own_key(self) -> None:
        """Return None: in torch mode the key is drawn from the worker's stream."""

    @property
    def threads(self) -> ThreadPoolExecutor | None:
        """Return the threads that read several samples at once; None if the loader has none.

        They are also None if a worker died while reading the claimed rows, because reading one by one finds the row that causes it.
        """
        return None if self._threads is None or self._ring.is_suspect else self._threads

    @property
    def reads_all(self) -> bool:
        """Return whether the samples of a batch are read together, not one by one."""
        return self._job.plan.path == "__getitems__" or self.threads is not None

    def keys(self) -> Any:
        """Return the keys of the whole claimed order: an array if they are int64 and `read_batch_into` reads them, else a list."""
        ring = self._ring
        path = ring.order_path
        raw = bytes(memoryview(self._open(path.decode()))[: ring.order_nbytes]) if path else ring.order_bytes()
        self._given = self._keys = None
        if ring.is_pickled:
            keys = self._given = pickle.loads(raw)  # written by the trainer
            self._keys = keys if type(keys) is list else list(keys) if hasattr(keys, "__len__") else [keys]  # a slice, for example
            return self._keys
        indices = np.frombuffer(raw, np.int64)
        if self._job.plan.path == "read_batch_into":
            return indices
        self._keys = indices.tolist()
        return self._keys

    def beginning(self) -> Callable[[int, Any], bool]:
        """Return a faster equivalent of `begin` for this order. It omits unneeded steps, most of the cost of small samples."""
        seed_globals = self._generators.begin
        begin_row, ring, seed, epoch, keys = self._ring.begin_row, self._ring, self._job.seed, self._ring.epoch, self._keys
        if faults.armed or self._own is not None:
            return self.begin
        if not self._reseeds or seed is None:
            return begin_row

        def begin(row: int, key: Any) -> bool:
            is_wanted = begin_row(row, key)
            seed_globals(seed, epoch, ring.index, keys, row)
            return is_wanted

        return begin

    def writer(self, placer: RowPlacer | None, keys: list[Any], row: int) -> ChunkWriter:
        """Return a writer for the chunk's samples from `row` on, which must have been begun. Without a placer, it collects them."""
        seed, part = self._job.seed, None if placer is None else placer.part
        if faults.armed or self._own is not None:
            return ChunkWriter(self._ring, part, keys, row, begin=self.begin)
        if not self._reseeds or seed is None:
            return ChunkWriter(self._ring, part, keys, row)
        generators = self._generators
        return ChunkWriter(self._ring, part, keys, row, reseeder=generators.reseeder, seed=seed, seed_rest=generators.seed_rest)

    def begin(self, row: int, key: Any) -> bool:
        """Record which sample is read next and seed its randomness. Return False if the batch is no longer wanted."""
        ring = self._ring
        is_wanted = ring.begin_row(row, key)
        if self._reseeds:
            assert self._job.seed is not None
            self._generators.begin(self._job.seed, ring.epoch, ring.index, self._keys, row)
            if self._own is not None:
                self._own.begin(self._job.seed, ring.epoch, ring.index)
        if faults.armed:
            faults.hit("mid_decode")
        return is_wanted

    def begin_all(self, row: int, key: Any, count: int, *, can_repeat: bool = False) -> None:
        """Record that `count` samples are read at once, the first of which is in row `row`.

        With `can_repeat`, `sample_rng()` works without an index, because the samples will be read again one by one.
        """
        key = key.item() if isinstance(key, np.integer) else key
        self.begin(row, key)
        if count > 1:
            self._ring.begin_row(-1, key)  # if the worker dies, its successor reads them one by one to find the culprit
        self._ring.end_sample()
        may_draw = self._in_place is None or not self._in_place.draws_nothing
        begin_many(can_repeat=can_repeat, compares=self._reseeds and may_draw and count > 1, own=self._own)

    def decoded_without_draws(self) -> bool:
        """Return whether samples that were decoded at once have drawn no random numbers.

        If they have, they and all later ones must be decoded one by one, because draws are keyed by the sample.
        """
        self.decodes_many = not drew_between_samples()
        return self.decodes_many

    def one(self, row: int, key: Any) -> Any:
        """Read one sample, as `ReadPlan.read` does."""
        self.begin(row, key)
        return self.read(key)

    def read(self, key: Any) -> Any:
        """Read the sample that was begun last, or return it if it was kept."""
        if self._kept is not None and self._kept[0] == (self._ring.epoch, key):
            sample, self._kept = self._kept[1], None
            return sample
        return self._job.plan.read(self._job.dataset, key)

    __getitem__ = read

    def keep(self, key: Any, sample: Any) -> None:
        """Keep a sample that was read too early, so that it need not be read twice. If samples are read together, do nothing."""
        if not self.reads_all:
            self._kept = ((self._ring.epoch, key), sample)

    def many(self, keys: list[Any], first: int, end: int) -> Any:
        """Read rows `first` to `end`.

        Returns:
            a list of their samples; or the result of the dataset's `__getitems__`, which may have fewer or more samples.
        """
        if not keys and self._job.plan.has_getitems:
            return self._job.dataset.__getitems__(keys if self._given is None else self._given)
        if first >= end:
            return []
        plan, is_suspect = self._job.plan, self._ring.is_suspect
        if self._reads_many and not is_suspect:
            batch = self._read_at_once(keys, first, end)
            if not drew_between_samples() or not can_be_joined(batch):
                return batch
            self._reads_many = False  # samples must be read one by one, because draws are keyed by the sample
        if self.threads is None:
            source = self if plan.has_getitems else self._job.dataset
            read = self.writer(None, keys, first).gather(self.one(first, keys[first]), source)
        else:
            read = list(self.by_threads(lambda row: plan.read(self._job.dataset, keys[row]), keys, first, end))
        self._ring.end_sample()
        if not plan.has_getitems:
            return read
        batch = joined(read)
        if batch is not None and (not self._reads_many or all(len(one) == 1 for one in read)):
            return batch
        # rows were read one by one to find the one that ends the worker, but `__getitems__` returns something else for the batch
        at_once = self._read_at_once(keys, first, end)
        return batch if batch is not None and drew_between_samples() else at_once

    def _read_at_once(self, keys: list[Any], first: int, end: int) -> Any:
        """Return the result of the dataset's `__getitems__` for rows `first` to `end`."""
        job = self._job
        self.begin_all(first, keys[first], end - first, can_repeat=True)
        is_whole = self._given is not None and end - first == len(keys)
        return job.dataset.__getitems__(self._given if is_whole else keys[first:end])

    def by_threads(self, read: Callable[[int], Any], keys: list[Any], first: int, end: int) -> Iterator[Any]:
        """Yield `read(row)` for each row, reading several at a time."""
        threads = self.threads
        assert threads is not None
        job, epoch, worker = self._job, self._ring.epoch, self._ring.worker_id

        def read_row(row: int) -> Any:
            begin_sample(job.seed, epoch, index_of(keys[row]), worker, reseed=False)
            try:
                return read(row)
            finally:
                end_samples()

        read_rows = read_by_threads(threads, read_row, range(first, end), lambda row: self.begin(row, keys[row]))
        if self._num_watched >= NUM_WATCHED:
            return read_rows
        self._num_watched += 1
        return self._watched(read_rows)

    def _watched(self, read_rows: Iterator[Any]) -> Iterator[Any]:
        """Yield what threads read, and log a warning if they drew from generators that they share."""
        own = OwnGenerators(self._job.dataset)
        before = global_states(), own.states()
        yield from read_rows
        if (global_states(), own.states()) != before:
            self._num_watched = NUM_WATCHED
            log.warning(
                "threads_per_worker=%d: the dataset draws from generators that the threads share, global ones or its own, so its "
                "random numbers depend on the threads' timing; give a seed and draw from shmload.sample_rng(), or leave out "
                "threads_per_worker",
                self._job.num_threads,
            )

    def begin_order(self) -> None:
        """Record that the samples of another order follow."""
        self._has_read_all = False

    def end(self) -> None:
        """Record that all samples of the claimed rows have been read, so that none is blamed for an error, a death or a timeout."""
        self._ring.end_sample()
        self._ring.end_rows()
        self._has_read_all = True

    def bad_key(self) -> Any:
        """Return the key of the sample that has just failed. If several were read at once, read them one by one to find it.

        Return None if it is unknown, and for shmload's own datasets, whose errors name what failed and may take long to occur.
        """
        if (key := self._ring.key) is not None or self._in_place is None or self._in_place.draws_nothing:
            return key
        bad = self.bad_rows(most=1)
        return self._key_at(self.keys(), bad[0]) if bad else None

    def bad_rows(self, most: int | None = None) -> tuple[int, ...]:
        """Read the claimed rows after the one that has just failed. Return all bad rows; empty if the batch failed as a whole.

        With `most`, stop after so many.

        Generators, the dataset's own too, stay as the failure has left them. If all rows had been read, nothing is read again.
        """
        if self._has_read_all:
            return ()
        ring = self._ring
        first, end = (0, ring.nrows) if ring.is_packed else (ring.first_row, ring.end_row)
        keys = self.keys()
        failed = ring.row
        bad = [] if failed < 0 else [failed]
        with generators_kept(), OwnGenerators(self._job.dataset).kept():
            for row in range(first if failed < 0 else failed + 1, end):
                if most is not None and len(bad) >= most:
                    break
                try:
                    self.begin(row, self._key_at(keys, row))
                    self._job.plan.try_sample(self._job.dataset, self._in_place, keys[row])
                except Exception:
                    bad.append(row)
        return tuple(bad)

    @staticmethod
    def _key_at(keys: Any, row: int) -> Any:
        return keys[row] if type(keys) is list else keys[row].item()
