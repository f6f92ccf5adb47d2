"""What a pass was like: batches, waits and bytes are counted while it runs, and whoever has asked is told at its end."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmload.metrics import EpochCallback, EpochMetrics, callbacks_of_environment
from shmload.world import rank_and_world_size

if TYPE_CHECKING:
    from shmload.engine.builder import EngineBuilder, LoaderConfig
    from shmload.engine.orders import DeliveryLog

SUB_BITS = 4  # buckets per power of two, as bits: a bucket is at most 1/16 of its values wide


class Waits:
    """A count per bucket of durations in ns. A bucket spans less than 1/16 of its values, so its middle is right to 1/32."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total_ns = 0

    def add(self, ns: int) -> None:
        """Takes one in."""
        self.count += 1
        self.total_ns += ns
        shift = max(ns.bit_length() - SUB_BITS - 1, 0)
        bucket = (shift << (SUB_BITS + 1)) | (ns >> shift)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def quantile(self, q: float) -> float:
        """The value in ns below or at which a share `q` of them lie; 0 if there is none."""
        wanted = q * self.count
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                shift, head = bucket >> (SUB_BITS + 1), bucket & ((1 << (SUB_BITS + 1)) - 1)
                return (head << shift) + ((1 << shift) - 1) / 2
        return 0.0


log = logging.getLogger("shmload")

NO_TOTALS = {"nbytes": 0, "num_restarts": 0, "busy_s": 0.0}


class EpochWatches:
    """The accounts of a loader's passes, one at a time.

    Attributes:
        callbacks: who is told what an epoch was like.
    """

    def __init__(self) -> None:
        self.callbacks = callbacks_of_environment()
        self._newest: weakref.ref[EpochWatch] | None = None

    def begin(
        self, config: LoaderConfig, builder: EngineBuilder, deliveries: DeliveryLog, epoch: int
    ) -> EpochWatch | None:
        """Begins a pass; None if nobody wants to know. One before it that has not ended was broken off."""
        self.close()
        if not self.callbacks:
            return None
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
        self,
        config: LoaderConfig,
        builder: EngineBuilder,
        deliveries: DeliveryLog,
        epoch: int,
        callbacks: list[EpochCallback],
    ) -> None:
        self._builder, self._deliveries, self._callbacks = builder, deliveries, callbacks
        self._num_workers = config.total_workers
        self._epoch = epoch
        self._place = rank_and_world_size(config.rank, config.world_size)
        self._num_bad = builder.bad_samples.count
        self._engine = builder.last
        self._totals = NO_TOTALS if self._engine is None else self._engine.totals()
        self._is_iterable = config.is_iterable
        self._waits = Waits()
        self._samples = self._nbytes = 0
        self._asked_ns = self._began_ns = self._last_ns = 0
        self._has_ended = False
        self._pid = os.getpid()

    def asked(self) -> None:
        """A batch is asked for."""
        self._asked_ns = monotonic_ns()

    def delivered(self, batch: Any) -> None:
        """It is handed out."""
        now = monotonic_ns()
        if self._waits.count == 0:
            self._began_ns = self._asked_ns
            if self._builder.last is not self._engine:  # workers have started only now
                self._engine, self._totals = self._builder.last, NO_TOTALS
        self._last_ns = now
        self._waits.add(now - self._asked_ns)
        order = self._deliveries.last
        assert order is not None
        self._samples += rows_of(batch, order.nrows) if self._is_iterable else order.nrows
        if self._num_workers == 0:
            self._nbytes += nbytes_of(batch)

    def end(self, *, is_complete: bool) -> None:
        """Tells what the pass was like; once."""
        if self._has_ended or self._pid != os.getpid():  # a forked worker has a copy
            return
        self._has_ended = True
        if not is_complete and self._waits.count == 0:
            return
        now = monotonic_ns() if is_complete else self._last_ns
        metrics = self._metrics(now - self._began_ns if self._waits.count else 0, is_complete)
        for callback in list(self._callbacks):
            try:
                callback(metrics)
            except Exception:  # what only looks on must not end a training
                log.exception("a callback of on_epoch_end failed; training goes on")

    def _metrics(self, wall_ns: int, is_complete: bool) -> EpochMetrics:
        totals = self._totals if self._engine is None else self._engine.totals()
        wall_s = wall_ns / 1e9
        busy = None
        if self._num_workers:
            self._nbytes = int(totals["nbytes"] - self._totals["nbytes"])
            busy = (
                min((totals["busy_s"] - self._totals["busy_s"]) / (self._num_workers * wall_s), 1.0) if wall_s else 0.0
            )
        return {
            "epoch": self._epoch,
            "rank": self._place[0],
            "world_size": self._place[1],
            "is_complete": is_complete,
            "batches": self._waits.count,
            "samples": self._samples,
            "nbytes": self._nbytes,
            "wall_s": wall_s,
            "samples_per_s": self._samples / wall_s if wall_s else 0.0,
            "nbytes_per_s": self._nbytes / wall_s if wall_s else 0.0,
            "wait_share": self._waits.total_ns / wall_ns if wall_ns else 0.0,
            "wait_p50_s": self._waits.quantile(0.5) / 1e9,
            "wait_p99_s": self._waits.quantile(0.99) / 1e9,
            "workers_busy_share": busy,
            "num_bad_samples": self._builder.bad_samples.count - self._num_bad,
            "num_restarts": int(totals["num_restarts"] - self._totals["num_restarts"]),
        }

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing() and hasattr(self, "_pid"):
            self.end(is_complete=False)


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


def rows_of(batch: Any, ordered: int) -> int:
    """Rows of an iterable dataset's batch, whose last one may hold fewer than were ordered: its first tensor's."""
    if isinstance(batch, torch.Tensor) and batch.ndim:
        return min(len(batch), ordered)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return rows_of(batch[0], ordered)
    return ordered
