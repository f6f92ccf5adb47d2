"""The stop-watch: what a stream of batches costs, seen from the trainer.

    loader made -> first batch | warm-up | timed part | memory part        one process, one loader, epoch after epoch

Wall time and waits are taken around `next()`, with the previous batch still held, as in a plain `for` loop. Touching
the batch stands for the trainer's own work: it counts in the wall time, but its CPU is subtracted from the trainer's,
so that the trainer figures hold what the loader costs there: waiting, mapping, unpickling, releasing and every helper
thread.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shmload.observe.bench.batches import touch
from shmload.observe.bench.contestants import Loader
from shmload.observe.bench.procfs import tree_cpu_s
from shmload.observe.bench.summary import quantile

GIB = 1 << 30


class Stream:
    """Batches of one epoch after another, with the number of samples in each."""

    def __init__(self, loader: Loader, num_samples: int, batch_size: int) -> None:
        self.loader, self.num_samples, self.batch_size = loader, num_samples, batch_size
        self.batches: Iterator[Any] | None = None
        self.position = 0  # samples delivered of the running epoch
        self.num_epochs = 0  # epochs begun

    def next(self) -> tuple[Any, int]:
        """The next batch and its samples; begins a new epoch where one ends."""
        if self.batches is None:
            self.batches, self.position = iter(self.loader), 0
            self.num_epochs += 1
        try:
            batch = next(self.batches)
        except StopIteration:
            if self.position == 0:
                raise RuntimeError("the loader delivered no batch in a whole epoch") from None
            self.batches = None
            return self.next()
        rows = min(self.batch_size, self.num_samples - self.position)
        self.position += rows
        return batch, rows

    def close(self) -> None:
        self.batches = None
        close = getattr(self.loader, "close", None)
        if close is not None:
            close()


@dataclass
class Segment:
    """What was seen between two moments of a stream."""

    num_samples: int = 0
    nbytes: int = 0
    wall_s: float = 0.0
    tree_cpu_s: float = 0.0
    trainer_cpu_s: float = 0.0
    touch_cpu_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    boundary_waits_s: list[float] = field(default_factory=list)  # those in which an epoch ended

    def values(self) -> dict[str, float]:
        """The metrics of the report."""
        num_batches = len(self.waits_s)
        loader_cpu_s = self.trainer_cpu_s - self.touch_cpu_s
        waits_s = sorted(self.waits_s)
        values = {
            "num_batches": float(num_batches),
            "samples_per_s": self.num_samples / self.wall_s,
            "mb_per_s": self.nbytes / self.wall_s / 1e6,
            "cpu_us_per_sample": (self.tree_cpu_s - self.touch_cpu_s) / self.num_samples * 1e6,
            "wait_p50_ms": quantile(waits_s, 0.50) * 1e3,
            "wait_p99_ms": quantile(waits_s, 0.99) * 1e3,
            "trainer_us_per_batch": loader_cpu_s / num_batches * 1e6,
            "trainer_s_per_gib": loader_cpu_s / self.nbytes * GIB if self.nbytes else math.nan,
            "touch_us_per_batch": self.touch_cpu_s / num_batches * 1e6,
        }
        if self.boundary_waits_s:
            values["boundary_ms"] = quantile(sorted(self.boundary_waits_s), 0.50) * 1e3
        return values


def record(stream: Stream, is_over: Callable[[Segment, float], bool]) -> Segment:
    """Consumes batches until `is_over(segment, seconds)`, at least one."""
    segment = Segment()
    tree0_s = tree_cpu_s()
    cpu0_s = time.process_time()
    start_s = time.perf_counter()
    while True:
        epoch = stream.num_epochs
        before_s = time.perf_counter()
        batch, rows = stream.next()
        now_s = time.perf_counter()
        segment.waits_s.append(now_s - before_s)
        if stream.num_epochs != epoch:
            segment.boundary_waits_s.append(now_s - before_s)
        touch0_s = time.thread_time()
        segment.nbytes += touch(batch)
        segment.touch_cpu_s += time.thread_time() - touch0_s
        segment.num_samples += rows
        if is_over(segment, time.perf_counter() - start_s):
            break
    segment.wall_s = time.perf_counter() - start_s
    segment.trainer_cpu_s = time.process_time() - cpu0_s
    segment.tree_cpu_s = tree_cpu_s() - tree0_s
    return segment


def after(seconds: float, num_batches: int = 1) -> Callable[[Segment, float], bool]:
    """Over when both so many seconds and so many batches have passed."""
    return lambda segment, elapsed_s: elapsed_s >= seconds and len(segment.waits_s) >= num_batches


def whole_epochs(stream: Stream, count: int) -> Callable[[Segment, float], bool]:
    """Over when the stream, which must stand at an epoch's end, has delivered `count` more epochs."""
    last = stream.num_epochs + count
    return lambda segment, elapsed_s: stream.num_epochs >= last and stream.position >= stream.num_samples
