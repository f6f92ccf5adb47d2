"""What a pass was like: batches, waits and bytes are counted while it runs, and reported to whoever has asked at its end.

A progress bar over a loader's batches: how many of how many, samples/s, and how much of the time the program waited.

It is drawn by the loop itself, a few times a second, so there is no thread; on stderr, and only where that is a terminal.

Reading in the trainer itself (`num_workers=0`): the same samples, randomness and batches, without a ring.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import monotonic, monotonic_ns
from typing import Any, TypeVar

import numpy as np
import torch

from shmload._core.trainer import Order
from shmload.batch.collate import RowOut, pack_samples, private_rows, private_tensors, registered_functions
from shmload.batch.deliver import Jagged, Padded, PrivateBatch, unpack
from shmload.batch.layout import structure
from shmload.batch.ragged import Arenas, Ragged, RaggedRows
from shmload.engine.bad_samples import BadSamples
from shmload.engine.builder import EngineBuilder
from shmload.engine.config import LoaderConfig
from shmload.engine.delivery_log import DeliveryLog
from shmload.engine.outcome import NOTHING
from shmload.metrics import EpochCallback, EpochMetrics, callbacks_of_environment
from shmload.worker.reader import Job, can_be_joined, index_of, joined, no_end, no_room
from shmload.worker.sample_rng import Sample, begin_many, drew_for_many, kept_generators, reading_of, seed_globals
from shmload.world import rank_and_world_size

log = logging.getLogger("shmload")

WAITS_KEPT = 1 << 16  # the newest of a pass, of which the quantiles are taken
NO_TOTALS = {"nbytes": 0, "num_restarts": 0, "busy_s": 0.0}


class EpochWatches:
    """The accounts of a loader's passes, one at a time.

    Attributes:
        callbacks: who hears what an epoch was like.
    """

    def __init__(self) -> None:
        self.callbacks = callbacks_of_environment()
        self._newest: weakref.ref[EpochWatch] | None = None

    def begin(self, config: LoaderConfig, builder: EngineBuilder, deliveries: DeliveryLog, epoch: int) -> EpochWatch:
        """Begins a pass that somebody wants to know of. One before it that has not ended was broken off."""
        self.close()
        watch = EpochWatch(config, builder, deliveries, epoch, self.callbacks)
        self._newest = weakref.ref(watch)
        return watch

    def close(self) -> None:
        """A pass that has not ended was broken off."""
        if self._newest is not None and (watch := self._newest()) is not None:
            watch.end(is_complete=False)


class EpochWatch:
    """The account of one pass. Its iterator owns it."""

    def __init__(
        self, config: LoaderConfig, builder: EngineBuilder, deliveries: DeliveryLog, epoch: int, callbacks: list[EpochCallback]
    ) -> None:
        self._builder, self._deliveries, self._callbacks = builder, deliveries, callbacks
        self._num_workers = config.total_workers
        self._epoch = epoch
        self._place = rank_and_world_size(config.rank, config.world_size)
        self._num_bad = builder.bad_samples.count
        self._engine = builder.last
        self._totals = NO_TOTALS if self._engine is None else self._engine.totals()
        self._count = samples_counter(config)
        self._waits: deque[int] = deque(maxlen=WAITS_KEPT)
        self._num_batches = self._waited_ns = self._samples = self._nbytes = 0
        self._asked_ns = self._began_ns = self._last_ns = 0
        self._has_ended = False
        self._pid = os.getpid()

    def asked(self) -> None:
        """A batch is asked for."""
        self._asked_ns = monotonic_ns()

    def delivered(self, batch: Any) -> None:
        """It is handed out."""
        now = monotonic_ns()
        if self._num_batches == 0:
            self._began_ns = self._asked_ns
            if self._builder.last is not self._engine:  # workers have started only now
                self._engine, self._totals = self._builder.last, NO_TOTALS
        self._last_ns = now
        self._waits.append(now - self._asked_ns)
        self._num_batches += 1
        self._waited_ns += now - self._asked_ns
        order = self._deliveries.last
        assert order is not None
        self._samples += self._count(order, batch)
        if self._num_workers == 0:
            self._nbytes += nbytes_of(batch)

    def end(self, *, is_complete: bool) -> None:
        """Tells what the pass was like; once."""
        if self._has_ended or self._pid != os.getpid():  # a forked worker has a copy
            return
        self._has_ended = True
        if not is_complete and self._num_batches == 0:
            return
        now = monotonic_ns() if is_complete else self._last_ns
        metrics = self._metrics(now - self._began_ns if self._num_batches else 0, is_complete)
        for callback in list(self._callbacks):
            try:
                callback(metrics)
            except Exception:  # what only looks on must not end a training
                log.exception("a callback of on_epoch_end failed; training goes on")

    def _metrics(self, wall_ns: int, is_complete: bool) -> EpochMetrics:
        totals = self._totals if self._engine is None else self._engine.totals()
        wall_s = wall_ns / 1e9
        busy, quantiles = None, np.quantile(list(self._waits) or [0], (0.5, 0.99)) / 1e9
        if self._num_workers:
            self._nbytes = int(totals["nbytes"] - self._totals["nbytes"])
            busy = min((totals["busy_s"] - self._totals["busy_s"]) / (self._num_workers * wall_s), 1.0) if wall_s else 0.0
        return {
            "epoch": self._epoch,
            "rank": self._place[0],
            "world_size": self._place[1],
            "is_complete": is_complete,
            "batches": self._num_batches,
            "samples": self._samples,
            "nbytes": self._nbytes,
            "wall_s": wall_s,
            "samples_per_s": self._samples / wall_s if wall_s else 0.0,
            "nbytes_per_s": self._nbytes / wall_s if wall_s else 0.0,
            "wait_share": self._waited_ns / wall_ns if wall_ns else 0.0,
            "wait_p50_s": float(quantiles[0]),
            "wait_p99_s": float(quantiles[1]),
            "workers_busy_share": busy,
            "num_bad_samples": self._builder.bad_samples.count - self._num_bad,
            "num_restarts": int(totals["num_restarts"] - self._totals["num_restarts"]),
        }

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing() and hasattr(self, "_pid"):
            self.end(is_complete=False)


def after_batch(function: Callable[[Any], Any], batch: Any, where: str) -> Any:
    """What the user's function makes of a delivered batch; its error says which batch that was."""
    try:
        return function(batch)
    except StopIteration as error:
        raise no_end(error, f"after_batch ({where})") from error
    except Exception as error:
        error.add_note(f"shmload: raised by after_batch ({where}); that batch is lost, and the next is behind it")
        raise


def nbytes_of(batch: Any) -> int:
    """Bytes of the tensors, arrays and strings in a batch."""
    if isinstance(batch, torch.Tensor):
        if batch.is_nested:
            return nbytes_of(batch.values())
        return batch.numel() * batch.element_size()
    if isinstance(batch, np.ndarray):
        return batch.nbytes
    if isinstance(batch, bytes):
        return len(batch)
    if isinstance(batch, str):
        return len(batch.encode("utf-8", "surrogatepass"))
    if isinstance(batch, Mapping):
        return sum(map(nbytes_of, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(nbytes_of, batch))
    return 0


def samples_counter(config: LoaderConfig, *, is_final: bool = False) -> Callable[[Order, Any], int]:
    """Return a function of an order and its batch that returns the number of samples delivered.

    The end of an iterable dataset, and `__getitems__`, may give another number than was ordered.

    Args:
        config: arguments of the loader.
        is_final: whether it gets what `after_batch` returns, which need not show its samples.
    """
    is_iterable = config.is_iterable
    shows_rows = is_iterable or (config.plan.has_getitems and config.custom_collate_fn is None)
    shows_rows = shows_rows and not (is_final and config.after_batch is not None)

    def count(order: Order, batch: Any) -> int:
        rows = rows_of(batch) if shows_rows else None
        return order.nrows if rows is None else min(rows, order.nrows) if is_iterable else rows

    return count


def rows_of(batch: Any) -> int | None:
    """Return the number of samples in a batch, as default collation makes it; None if it does not show.

    A list is either the columns of tuples, which have equally many rows, or the rows of a column: text, or arrays that differ in
    shape.
    """
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else None
    if isinstance(batch, Jagged):
        return len(batch.offsets) - 1
    if isinstance(batch, Padded):
        return len(batch.values)
    if isinstance(batch, Mapping):
        return next((rows for rows in map(rows_of, batch.values()) if rows is not None), None)
    if isinstance(batch, list | tuple):
        counts = {rows_of(part) for part in batch}
        rows = counts.pop() if len(counts) == 1 else None
        return len(batch) if rows is None else rows
    return None


T = TypeVar("T")

LOOK_S = 0.1  # between two drawings
NUM_LOOKS = 30  # over which samples/s and the share of waiting are taken


def shown(
    batches: Iterator[T],
    total: int | None,
    done: int,
    log: DeliveryLog,
    description: str,
    console: Any,
    count: Callable[[Order, Any], int],
) -> Iterator[T]:
    """The batches of one pass, with a bar.

    Args:
        total: batches of a whole pass, of which `done` lie behind; None: nobody knows.
        log: knows of how many samples the batch just yielded is made.
        console: rich's, where it is drawn; None: stderr.
        count: (order, batch) -> samples delivered.
    """
    # slow to import, and few loaders show a bar
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True) if console is None else console
    title, rate = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[rate]}"))
    columns = title, BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), rate
    looks: deque[tuple[float, int, float]] = deque([(monotonic(), 0, 0.0)], maxlen=NUM_LOOKS)  # when, rows, waited
    rows, waited, due = 0, 0.0, 0.0
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total, completed=done, rate="")
        while True:
            began = monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                progress.update(task, completed=done)
                return
            now = monotonic()
            order = log.last
            assert order is not None
            done, rows, waited = done + 1, rows + count(order, batch), waited + now - began
            if now >= due:
                due = now + LOOK_S
                since = looks[0]
                looks.append((now, rows, waited))
                progress.update(task, completed=done, rate=_rate(since, looks[-1]), refresh=True)
            yield batch
            del batch  # the loop has its own reference: this one must not keep the slot


def _rate(since: tuple[float, int, float], now: tuple[float, int, float]) -> str:
    elapsed, rows, waited = (b - a for a, b in zip(since, now, strict=True))
    return f"{rows / elapsed:,.0f} samples/s, waiting {waited / elapsed:.0%}" if elapsed > 0 else ""


class InlineReader:
    """Reads whole batches of a dataset into private memory.

    Args:
        bad_samples: what is done about samples that cannot be read.
    """

    def __init__(self, job: Job, bad_samples: BadSamples) -> None:
        self._job, self._bad_samples = job, bad_samples
        self._in_place = job.plan.in_place(job.dataset)
        self._reads_many = job.plan.has_getitems  # until its samples draw random numbers
        self._own = job.own_generators()
        self._arenas = Arenas()
        self._row = -1
        self.begun = object()  # another for each sample, and reading of several: for `sample_info` and `sample_rng`, as `sample`
        self._key: Any = None
        self._epoch = 0

    def sample(self) -> Sample:
        """What was begun last."""
        return self._job.seed, self._epoch, index_of(self._key), 0

    def read(self, order: Order) -> Any:
        """The batch of an order; NOTHING if every sample of it is skipped. Seed mode leaves the trainer's generators alone."""
        with reading_of(self), self._bad_samples.counting_irregular():
            if self._job.seed is None or not self._job.seed_samples:
                return self._read_good(order)
            with kept_generators():
                return self._read_good(order)

    def _read_good(self, order: Order) -> Any:
        is_empty = order.nrows == 0  # as a batch sampler gave it
        while order.nrows or is_empty:
            indices = order.indices
            keys = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
            self._row = -1
            try:
                return self._read(keys, order.epoch)
            except Exception as error:
                bad = self._bad_rows(keys, order.epoch) if self._bad_samples.are_tolerated else ()
                if not bad:
                    raise
                order.indices = self._bad_samples.replaced(order, bad, partial(lambda raised: raised, error))
        return NOTHING

    def _bad_rows(self, keys: list[Any], epoch: int) -> list[int]:
        """The rows that cannot be read, one of which has just shown itself; none if it is the batch that failed."""
        bad = [] if self._row < 0 else [self._row]
        for row in range(self._row + 1, len(keys)):
            try:
                self._begin(row, keys, epoch)
                self._job.plan.try_sample(self._job.dataset, self._in_place, keys[row])
            except Exception:
                bad.append(row)
        return bad

    def _read(self, keys: list[Any], epoch: int) -> Any:
        job = self._job
        if self._in_place is not None and self._in_place.takes(keys):
            return self._read_in_place(keys, epoch)
        if not job.auto_collation:
            self._begin(0, keys, epoch)
            sample = job.dataset[keys[0]]
            self._row = -1
            return (job.collate_fn or torch.utils.data.default_convert)(sample)
        if self._reads_many and keys:
            self._begin(-1, keys, epoch)
            begin_many(can_repeat=True, compares=job.seed_samples, own=self._own)
            samples = job.dataset.__getitems__(keys)
            self._reads_many = not (drew_for_many() and can_be_joined(samples))  # what a sample draws is keyed by the sample
        if not (self._reads_many and keys):
            samples = self._read_one_by_one(keys, epoch)
        return (job.collate_fn or partial(collated, ragged=job.plan.ragged))(samples)

    def _read_one_by_one(self, keys: list[Any], epoch: int) -> Any:
        """Return a list of the samples; or what the dataset's `__getitems__` returns for each key, joined."""
        read, begin, plan, dataset = [], self._begin, self._job.plan, self._job.dataset
        for row, key in enumerate(keys):
            begin(row, keys, epoch)
            read.append(plan.read(dataset, key))
        self._row = -1
        if not (plan.has_getitems and keys):
            return read
        if (samples := joined(read)) is not None:
            return samples
        begin(-1, keys, epoch)
        return dataset.__getitems__(keys)

    def _begin(self, row: int, keys: list[Any], epoch: int) -> None:
        """Begins the sample of a row; -1: the first of several that are read at once."""
        self._row, self._epoch, job = row, epoch, self._job
        key = self._key = keys[row if row > 0 else 0]
        self.begun = object()
        if job.seed_samples and job.seed is not None:
            seed_globals(job.seed, epoch, index_of(key), keys, row)
            if self._own is not None:
                self._own.begin(job.seed, epoch, index_of(key))

    def _begin_ragged(self, keys: list[Any], row: int, epoch: int) -> bool:
        self._begin(row, keys, epoch)
        if row < 0:
            begin_many(can_repeat=False)
        return True

    def _read_in_place(self, keys: list[Any], epoch: int) -> Any:
        assert self._in_place is not None
        plan = self._job.plan
        layout = plan.layout
        assert layout is not None
        if plan.is_whole:
            assert plan.ragged is not None
            ragged_rows = RaggedRows(layout, plan.ragged, len(keys), no_room, self._arenas)
            self._in_place.read_ragged(keys, ragged_rows, lambda row: self._begin_ragged(keys, row, epoch))
            return unpack(PrivateBatch(ragged_rows.finish()))
        tensors = private_tensors(layout, len(keys))
        rows = private_rows(layout, len(keys), tensors)
        if self._in_place.read_batch_into is not None:
            self._begin(-1, keys, epoch)
            begin_many(can_repeat=False)
            self._in_place.read_batch_into(np.asarray(keys, np.int64), RowOut(rows, slice(0, len(keys))))
        else:
            assert self._in_place.read_into is not None
            for row, key in enumerate(keys):
                self._begin(row, keys, epoch)
                self._in_place.read_into(key, RowOut(rows, row))
        return structure(layout.tree, tensors)


def collated(samples: Any, ragged: Ragged | None) -> Any:
    """The batch of some samples, in private memory: torch's default collate, and with a rule what that does not take.

    Args:
        samples: a list; or what the dataset's `__getitems__` returned.
    """
    packed = None if ragged is None else pack_samples(samples, ragged, registered_functions())
    return torch.utils.data.default_collate(samples) if packed is None else unpack(PrivateBatch(packed))


def next_of_dataset(config: LoaderConfig, order: Order, row: int) -> int:
    """The index that takes a bad sample's place where a sampler orders: the dataset's next.

    Raises:
        TypeError: the sampler gives keys.
    """
    ordered = order.indices[row]
    if not isinstance(ordered, int | np.integer):
        raise TypeError(f'on_error="substitute" needs integer indices: the sampler gave {ordered!r}. Use "skip"')
    return (int(ordered) + 1) % len(config.dataset)
