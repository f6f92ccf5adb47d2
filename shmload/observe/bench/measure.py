"""The stop-watch: what a stream of batches costs, seen from the trainer.

    loader made -> first batch | warm-up | timed part | memory part        one process, one loader, epoch after epoch

Wall time and waits are taken around `next()`, with the previous batch still held, as in a plain `for` loop. Touching
the batch stands for the trainer's own work: it counts in the wall time, but its CPU is subtracted from the trainer's,
so that the trainer figures hold what the loader costs there: waiting, mapping, unpickling, releasing and every helper
thread. A simulated training step is a sleep in the kernel behind it, as a trainer sleeps that waits for its GPU: the
core is free for workers meanwhile.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shmload.observe.bench.batches import num_rows, touch
from shmload.observe.bench.contestants import Loader
from shmload.observe.bench.procfs import host_cpu_s, tree_cpu_s
from shmload.observe.bench.summary import WAIT_SHARES, quantile

GIB = 1 << 30


class Stream:
    """Batches of one epoch after another, with the number of samples in each.

    Args:
        num_samples, batch_size: of an epoch; without them rows are counted in the batches.
    """

    def __init__(self, loader: Loader, num_samples: int | None, batch_size: int | None) -> None:
        self.loader, self.num_samples, self.batch_size = loader, num_samples, batch_size
        self.num_batches = -(-num_samples // batch_size) if num_samples and batch_size else known_length(loader)
        self.batches: Iterator[Any] | None = None
        self.position = 0  # batches delivered of the running epoch
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
            self.batches, self.num_batches = None, self.position
            return self.next()
        self.position += 1
        return batch, self._rows(batch)

    def _rows(self, batch: Any) -> int:
        if self.num_samples is None or self.batch_size is None:
            return num_rows(batch)
        return max(1, min(self.batch_size, self.num_samples - (self.position - 1) * self.batch_size))

    @property
    def is_at_end(self) -> bool:
        """Whether the running epoch has delivered all that it is known to hold."""
        return self.num_batches is not None and self.position >= self.num_batches

    def close(self) -> None:
        self.batches = None
        close = getattr(self.loader, "close", None)
        if close is not None:
            close()


def known_length(loader: Loader) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]  # asked for, not assumed
    except TypeError:
        return None


@dataclass
class Segment:
    """What was seen between two moments of a stream."""

    num_samples: int = 0
    nbytes: int = 0
    wall_s: float = 0.0
    tree_cpu_s: float = 0.0
    host_cpu_s: float = 0.0
    trainer_cpu_s: float = 0.0
    touch_cpu_s: float = 0.0
    touch_s: float = 0.0
    step_s: float = 0.0  # as asked for
    slept_s: float = 0.0  # what the steps took
    busy_s: float | None = None  # of all workers, filling batches; as the loader counts it
    num_workers: int = 0
    waits_s: list[float] = field(default_factory=list)
    boundary_waits_s: list[float] = field(default_factory=list)  # those in which an epoch ended

    def values(self) -> dict[str, float]:
        """The metrics of the report."""
        num_batches = len(self.waits_s)
        loader_cpu_s = self.trainer_cpu_s - self.touch_cpu_s
        waits_s = sorted(self.waits_s)
        values = {
            "num_batches": float(num_batches),
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
            "trainer_s_per_gib": loader_cpu_s / self.nbytes * GIB if self.nbytes else math.nan,
            "touch_us_per_batch": self.touch_cpu_s / num_batches * 1e6,
            "consumer_ms_per_batch": (self.touch_s + self.slept_s) / num_batches * 1e3,
            "others_cpu_cores": max(0.0, self.host_cpu_s - self.tree_cpu_s) / self.wall_s,
        }
        if self.step_s:
            values["step_efficiency"] = num_batches * self.step_s / self.wall_s
        if self.busy_s is not None and self.num_workers:
            values["worker_busy_share"] = min(1.0, self.busy_s / self.num_workers / self.wall_s)
        if self.boundary_waits_s:
            values["boundary_ms"] = quantile(sorted(self.boundary_waits_s), 0.50) * 1e3
        return values

    def wait_quantiles_ms(self) -> list[float]:
        """The waits at `WAIT_SHARES`, ascending."""
        waits_s = sorted(self.waits_s)
        return [quantile(waits_s, share) * 1e3 for share in WAIT_SHARES]


def worker_busy_s(loader: Any) -> tuple[float, int] | None:
    """Seconds that a ShmLoader's workers have spent filling batches, and how many they are; None for any other loader."""
    stats = getattr(loader, "stats", None)
    workers = stats().get("workers") if callable(stats) else None
    if not workers or "busy_s" not in workers[0]:
        return None
    return sum(worker["busy_s"] for worker in workers), len(workers)


def record(stream: Stream, is_over: Callable[[Segment, float], bool], step_s: float = 0.0) -> Segment:
    """Consumes batches until `is_over(segment, seconds)`, at least one; sleeps `step_s` after each."""
    segment = Segment()
    busy0 = worker_busy_s(stream.loader)
    tree0_s, host0_s = tree_cpu_s(), host_cpu_s()
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
        touched_s = time.perf_counter()
        segment.touch_s += touched_s - now_s
        if step_s:
            time.sleep(step_s)
            segment.step_s = step_s
            segment.slept_s += time.perf_counter() - touched_s
        if is_over(segment, time.perf_counter() - start_s):
            break
    segment.wall_s = time.perf_counter() - start_s
    segment.trainer_cpu_s = time.process_time() - cpu0_s
    segment.tree_cpu_s = tree_cpu_s() - tree0_s
    segment.host_cpu_s = host_cpu_s() - host0_s
    busy = worker_busy_s(stream.loader)
    if busy is not None:
        segment.busy_s, segment.num_workers = busy[0] - (busy0[0] if busy0 else 0.0), busy[1]
    return segment


def after(seconds: float, num_batches: int = 1) -> Callable[[Segment, float], bool]:
    """Over when both so many seconds and so many batches have passed."""
    return lambda segment, elapsed_s: elapsed_s >= seconds and len(segment.waits_s) >= num_batches


def whole_epochs(stream: Stream, count: int) -> Callable[[Segment, float], bool]:
    """Over when the stream, which must stand at an epoch's end, has delivered `count` more epochs."""
    last = stream.num_epochs + count
    return lambda segment, elapsed_s: stream.num_epochs > last or (stream.num_epochs == last and stream.is_at_end)


def rest_of_epoch(stream: Stream, seconds: float = math.inf) -> Callable[[Segment, float], bool]:
    """Over at the end of the running epoch, or after so many seconds."""
    epoch = stream.num_epochs
    return lambda segment, elapsed_s: elapsed_s >= seconds or stream.num_epochs > epoch or stream.is_at_end
