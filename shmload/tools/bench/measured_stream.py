"""Time a stream of batches from a loader."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shmload.tools.bench.batch_contents import num_rows, touch
from shmload.tools.bench.contestants import Loader
from shmload.tools.bench.spread import quantile
from shmload.tools.bench.tree_usage import tree_cpu_s, tree_pss_bytes

GIB = 1 << 30
SHORT_EPOCH = 20  # batches


class MeasuredStream:
    """The batches of one epoch after another, with the number of samples in each.

    Args:
        loader: the loader.
        num_samples: number of samples of an epoch.
        batch_size: largest number of samples of a batch. Without `num_samples`, the rows of each batch are counted up to it,
            because a collate function may put several rows of a sample end to end; without `batch_size`, all rows.
    """

    def __init__(self, loader: Loader, num_samples: int | None, batch_size: int | None) -> None:
        self.loader, self.num_samples, self.batch_size = loader, num_samples, batch_size
        self.batches: Iterator[Any] | None = None
        self.position = 0  # batches delivered in the current epoch
        self.num_epochs = 0  # epochs begun
        self.epoch_batches: int | None = None  # batches of the last epoch that ended

    def next(self) -> tuple[Any, int]:
        """Return the next batch and its number of samples; begin a new epoch where one ends."""
        if self.batches is None:
            self.batches, self.position = iter(self.loader), 0
            self.num_epochs += 1
        try:
            batch = next(self.batches)
        except StopIteration:
            if self.position == 0:
                again = ", after others that had some: is it a generator? It is iterated again for each epoch"
                words = f"the loader delivered no batch in a whole epoch{again if self.num_epochs > 1 else ''}"
                raise RuntimeError(words) from None
            self.batches, self.epoch_batches = None, self.position
            return self.next()
        self.position += 1
        if self.num_samples is None or self.batch_size is None:
            return batch, min(num_rows(batch), self.batch_size or sys.maxsize)
        return batch, max(1, min(self.batch_size, self.num_samples - (self.position - 1) * self.batch_size))

    def close(self) -> None:
        self.batches = None
        close = getattr(self.loader, "close", None)
        if close is not None:
            close()


@dataclass
class MeasuredSegment:
    """The measurements between two moments of a stream."""

    num_samples: int = 0
    nbytes: int = 0
    wall_s: float = 0.0
    tree_cpu_s: float = 0.0
    trainer_cpu_s: float = 0.0
    touch_cpu_s: float = 0.0
    touch_s: float = 0.0
    step_s: float = 0.0  # the requested steps
    slept_s: float = 0.0  # the actual duration of the steps
    waits_s: list[float] = field(default_factory=list)
    boundary_waits_s: list[float] = field(default_factory=list)  # waits during which an epoch ended

    def values(self) -> dict[str, float]:
        """Return the metrics of the report."""
        num_batches = len(self.waits_s)
        loader_cpu_s = self.trainer_cpu_s - self.touch_cpu_s
        waits_s = sorted(self.waits_s)
        values = {
            "num_batches": float(num_batches),
            "measured_s": self.wall_s,
            "samples_per_batch": self.num_samples / num_batches,
            "samples_per_s": self.num_samples / self.wall_s,
            "mb_per_s": self.nbytes / self.wall_s / 1e6,
            "batch_wall_ms": self.wall_s / num_batches * 1e3,
            "cpu_us_per_sample": (self.tree_cpu_s - self.touch_cpu_s) / self.num_samples * 1e6,
            "wait_p50_ms": quantile(waits_s, 0.50) * 1e3,
            "wait_p99_ms": quantile(waits_s, 0.99) * 1e3,
            "wait_mean_ms": sum(waits_s) / num_batches * 1e3,
            "wait_share": min(1.0, sum(waits_s) / self.wall_s),
            "trainer_us_per_batch": loader_cpu_s / num_batches * 1e6,
            "trainer_own_ms_per_batch": (self.touch_s + self.slept_s) / num_batches * 1e3,
        }
        if self.nbytes:
            values["trainer_s_per_gib"] = loader_cpu_s / self.nbytes * GIB
        if self.step_s:
            values["step_efficiency"] = num_batches * self.step_s / self.wall_s
        if self.boundary_waits_s:
            values["boundary_ms"] = quantile(sorted(self.boundary_waits_s), 0.50) * 1e3
        return values


def record(stream: MeasuredStream, is_over: Callable[[MeasuredSegment, float], bool], step_s: float = 0.0) -> MeasuredSegment:
    """Consume batches until `is_over(segment, seconds)`, at least one, or to the end; sleep `step_s` after each."""
    segment = MeasuredSegment(step_s=step_s)
    tree0_s, cpu0_s, start_s = tree_cpu_s(), time.process_time(), time.perf_counter()
    while True:
        epoch, before_s = stream.num_epochs, time.perf_counter()
        try:
            batch, rows = stream.next()
        except StopIteration:
            break
        now_s, touch0_s = time.perf_counter(), time.thread_time()
        segment.waits_s.append(now_s - before_s)
        if stream.num_epochs != epoch:
            segment.boundary_waits_s.append(now_s - before_s)
        segment.nbytes += touch(batch)
        segment.touch_cpu_s += time.thread_time() - touch0_s
        segment.num_samples += rows
        touched_s = time.perf_counter()
        segment.touch_s += touched_s - now_s
        if step_s:
            time.sleep(step_s)
            segment.slept_s += time.perf_counter() - touched_s
        if is_over(segment, time.perf_counter() - start_s):
            break
    segment.wall_s = time.perf_counter() - start_s
    segment.trainer_cpu_s = time.process_time() - cpu0_s
    segment.tree_cpu_s = tree_cpu_s() - tree0_s
    return segment


def after(seconds: float, num_batches: int = 1, limit_s: float = math.inf) -> Callable[[MeasuredSegment, float], bool]:
    """Return a condition that is true once both so many seconds and so many batches have passed, or `limit_s`."""
    return lambda segment, elapsed_s: elapsed_s >= limit_s or (elapsed_s >= seconds and len(segment.waits_s) >= num_batches)


def after_whole_epochs(
    stream: MeasuredStream, seconds: float, num_batches: int, limit_s: float
) -> Callable[[MeasuredSegment, float], bool]:
    """Return a condition as `after`, which waits for the end of an epoch if epochs are short, and for at most `limit_s`.

    The last batches of an epoch may be small, and workers idle while the last one is made: with a few epochs in part, the rate
    would depend on where in an epoch the measurement begins.
    """
    is_over = after(seconds, num_batches, limit_s)

    def is_over_and_whole(segment: MeasuredSegment, elapsed_s: float) -> bool:
        length = stream.epoch_batches
        is_whole = not length or length > SHORT_EPOCH or len(segment.waits_s) % length == 0
        return is_over(segment, elapsed_s) and (is_whole or elapsed_s >= limit_s)

    return is_over_and_whole


def peak_pss_bytes(stream: MeasuredStream, seconds: float) -> int:
    """Return the peak memory of all processes while batches are consumed, sampled every 50 ms."""
    peak, end_s = tree_pss_bytes(os.getpid()), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        record(stream, after(0.05))
        peak = max(peak, tree_pss_bytes(os.getpid()))
    return peak
