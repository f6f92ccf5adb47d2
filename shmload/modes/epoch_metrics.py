"""Measure each pass and report it at its end to the callbacks of `on_epoch_end`.

Nothing is measured unless there is a callback.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any

import numpy as np
import torch

from shmload._core.trainer import Order
from shmload.batch.ragged_forms import Jagged, Padded
from shmload.engine.builder import EngineBuilder
from shmload.engine.config import LoaderConfig
from shmload.engine.delivery_log import DeliveryLog
from shmload.metrics import EpochCallback, EpochMetrics, callbacks_of_environment
from shmload.processes.ranks import rank_and_world_size

log = logging.getLogger("shmload")

WAITS_KEPT = 1 << 16  # the quantiles are taken of the newest waits of a pass
NO_TOTALS = {"nbytes": 0, "num_restarts": 0, "busy_s": 0.0}


class EpochWatches:
    """The measurements of a loader's passes, one at a time.

    Attributes:
        callbacks: called with the metrics of each pass at its end.
    """

    def __init__(self) -> None:
        self.callbacks = callbacks_of_environment()
        self._newest: weakref.ref[EpochWatch] | None = None

    def begin(self, config: LoaderConfig, builder: EngineBuilder, deliveries: DeliveryLog, epoch: int) -> EpochWatch:
        """Begin to measure a pass, and report an earlier one that has not ended as incomplete.

        Args:
            config: the loader's arguments for this pass.
            builder: makes the loader's engines.
            deliveries: its `last` is the order of the batch just yielded.
            epoch: number of the pass.
        """
        self.close()
        watch = EpochWatch(config, builder, deliveries, epoch, self.callbacks)
        self._newest = weakref.ref(watch)
        return watch

    def close(self) -> None:
        """Report the newest pass as incomplete if it has not ended."""
        if self._newest is not None and (watch := self._newest()) is not None:
            watch.end(is_complete=False)


class EpochWatch:
    """The measurements of one pass. Its iterator owns it."""

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
        """Record that a batch was requested."""
        self._asked_ns = monotonic_ns()

    def delivered(self, batch: Any) -> None:
        """Record that the batch is about to be yielded."""
        now = monotonic_ns()
        if self._num_batches == 0:
            self._began_ns = self._asked_ns
            if self._builder.last is not self._engine:  # the workers were started by this request
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
        """Report the pass to the callbacks, once.

        Args:
            is_complete: whether the pass reached its end.
        """
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
            except Exception:  # an observer must not end the training
                log.exception("a callback of on_epoch_end failed; training continues")

    def _metrics(self, wall_ns: int, is_complete: bool) -> EpochMetrics:
        """Return the metrics of the epoch so far."""
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


def nbytes_of(batch: Any) -> int:
    """Return the total size of the tensors, arrays and strings in a batch, in bytes."""
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

    The number may differ from the number ordered, at the end of an iterable dataset or with `__getitems__`.

    Args:
        config: arguments of the loader.
        is_final: whether the function gets the result of `after_batch`, whose number of samples may not be recognizable.
    """
    is_iterable = config.is_iterable
    shows_rows = is_iterable or (config.plan.has_getitems and config.custom_collate_fn is None)
    shows_rows = shows_rows and not (is_final and config.after_batch is not None)

    def count(order: Order, batch: Any) -> int:
        rows = rows_of(batch) if shows_rows else None
        return order.nrows if rows is None else min(rows, order.nrows) if is_iterable else rows

    return count


def rows_of(batch: Any) -> int | None:
    """Return the number of samples in a batch made by default collation; None if it cannot be recognized.

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
