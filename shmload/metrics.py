"""Report the metrics of each epoch: as a log line, to TensorBoard, or to a function of yours.

    loader.on_epoch_end(shmload.metrics.to_log)
    loader.on_epoch_end(shmload.metrics.to_tensorboard(SummaryWriter()))

SHMLOAD_SUMMARY=1 logs the line for every loader, without a change to the program. Without a callback nothing is measured.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypedDict

__all__ = ["EpochCallback", "EpochMetrics", "summary_line", "to_log", "to_tensorboard"]

log = logging.getLogger("shmload")


class EventCount:
    """A number of events in this process, or in one of its threads if it counts alone.

    Thread/process safety: any number of threads may add; a forked child continues from its parent's number.
    """

    def __init__(self) -> None:
        self._of_process = 0
        self._of_thread = threading.local()
        self._is_divided = False  # whether any thread has counted alone: a missing attribute of a thread takes long to look up
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # another thread of the parent may have held it

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """Return the number of events so far."""
        if not self._is_divided:
            return self._of_process
        own: int | None = getattr(self._of_thread, "value", None)
        return self._of_process if own is None else own

    def count_alone(self) -> None:
        """Count the events of this thread apart from those of the process, from 0 on."""
        self._of_thread.value = 0
        self._is_divided = True

    def add(self) -> None:
        """Count one event."""
        if hasattr(self._of_thread, "value"):
            self._of_thread.value += 1
            return
        with self._lock:
            self._of_process += 1


irregular_files = EventCount()  # decoded although they break a rule of their format: `stats()["num_irregular"]`


class EpochMetrics(TypedDict):
    """The metrics of one pass over a loader, from its first `next()` to its end, or to its last batch if the loop was left early.

    A wait is the time that one `next()` took. p50 and p99 are computed from the newest 65,536 waits of the epoch.
    """

    epoch: int  # in torch mode: the number of earlier passes
    rank: int
    world_size: int
    is_complete: bool  # False if the loop was left early
    batches: int
    samples: int  # rows delivered, including padding
    nbytes: int  # bytes delivered
    wall_s: float
    samples_per_s: float
    nbytes_per_s: float
    wait_share: float  # share of the wall time, 0 to 1
    wait_p50_s: float
    wait_p99_s: float
    workers_busy_share: float | None  # share of the workers' wall time, 0 to 1; None without workers
    num_bad_samples: int
    num_restarts: int  # workers replaced


EpochCallback = Callable[[EpochMetrics], object]


class ScalarWriter(Protocol):
    """The method of torch.utils.tensorboard.SummaryWriter that is needed."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> object:
        """Record one value."""


def summary_line(metrics: EpochMetrics) -> str:
    """Format the metrics of an epoch as one line.

    Args:
        metrics: as a callback of `ShmLoader.on_epoch_end` receives them.
    """
    m = metrics
    rank = f"rank {m['rank']}, " if m["world_size"] > 1 else ""
    broken = "" if m["is_complete"] else ", left early"
    busy = m["workers_busy_share"]
    workers = "no workers" if busy is None else f"workers busy {busy:.0%}"
    return (
        f"{rank}epoch {m['epoch']}{broken}: {m['batches']:,} batches, {m['samples']:,} samples in {m['wall_s']:.2f} s: "
        f"{m['samples_per_s']:,.0f} samples/s, {m['nbytes_per_s'] / 1e6:,.1f} MB/s; waited {m['wait_share']:.0%} "
        f"(p50 {m['wait_p50_s'] * 1e3:.3g} ms, p99 {m['wait_p99_s'] * 1e3:.3g} ms); {workers}; "
        f"{m['num_bad_samples']} bad samples, {m['num_restarts']} restarts"
    )


def to_log(metrics: EpochMetrics) -> None:
    """Log the metrics of an epoch to the `shmload` logger at INFO: a callback for `ShmLoader.on_epoch_end`.

    Args:
        metrics: the metrics of the epoch.
    """
    log.info("%s", summary_line(metrics))


def to_tensorboard(writer: ScalarWriter, prefix: str = "shmload") -> EpochCallback:
    """Return a callback that writes every metric of an epoch as a scalar, with the epoch as its step.

    Args:
        writer: a torch.utils.tensorboard.SummaryWriter, or anything with its add_scalar.
        prefix: prefix of the tags, as in "shmload/samples_per_s".
    """

    def write(metrics: EpochMetrics) -> None:
        for name, value in metrics.items():
            if name not in ("epoch", "rank", "world_size") and value is not None:
                writer.add_scalar(f"{prefix}/{name}", value, metrics["epoch"])

    return write


def callbacks_of_environment() -> list[EpochCallback]:
    """Return the callbacks that SHMLOAD_SUMMARY requests."""
    return [] if os.environ.get("SHMLOAD_SUMMARY", "") in ("", "0") else [_to_log_or_stderr]


def _to_log_or_stderr(metrics: EpochMetrics) -> None:
    """Log the line, or print it to stderr if the logger has no handler: the user has set the variable in order to see it."""
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        to_log(metrics)
    else:
        print(f"shmload: {summary_line(metrics)}", file=sys.stderr)
