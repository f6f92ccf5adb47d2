"""Measure how much of the Python interpreter a loader leaves to the trainer's other threads.

Method: The trainer is pinned to one core and its workers to the others. A thread of the trainer counts in a pure Python loop,
first while nothing else runs, and then while the main thread takes batches as fast as possible. The native paths are measured:
rows of 64 float32 (batches of 1,024) and records of 1 MiB (batches of 16), both from arrays of random numbers. Each case runs
in a fresh process.

How to read: `per CPU second` is the number of counts per second of the thread's CPU time, loaded over idle. It shows how much
more a count costs if caches and interpreter are shared. `per second` is the same by wall time: the main thread also needs the
GIL and the core for its own work. It would be low if a loader held the GIL while copying.

Predicted: per CPU second 0.98 for shmload in both cases; per second 0.95 with large records, and 0.6 with rows, because most of
the trainer's time is then its own CPU per batch.

Result (2 cores, 2 workers): The counter makes the main thread wait for the GIL, and so sets its pace. Therefore rows cost less
than predicted.
| workload | per CPU second | per second | batches/s | torch: per CPU second | per second | batches/s |
|---|---|---|---|---|---|---|
| rows of 64 | 0.985 | 0.95 | 692 | 1.04 | 0.98 | 32 |
| records of 1 MiB | 1.02 | 0.99 | 409 | 1.00 | 0.92 | 30 |
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common import Result, Row, Settings, endless, fresh, in_order, main
from shmload import ShmLoader
from shmload.tools.bench.spread import Spread

SHAPES = {"rows of 64": ((200_000, 64), 1024), "records of 1 MiB": ((400, 262_144), 16)}
LOADERS: dict[str, Callable[..., Any]] = {"shmload": ShmLoader, "torch": torch.utils.data.DataLoader}


class Counter(threading.Thread):
    """A thread that counts until `is_over` is set. `rates` are then its counts per CPU second and per second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.is_over = False

    def run(self) -> None:
        count, cpu, clock = 0, time.thread_time(), time.perf_counter()
        while not self.is_over:
            count += 1
        self.rates = count / (time.thread_time() - cpu), count / (time.perf_counter() - clock)


def counted(work: Callable[[], None]) -> tuple[float, float]:
    """Returns a counter's rates while `work` runs."""
    counter = Counter()
    counter.start()
    work()
    counter.is_over = True
    counter.join()
    return counter.rates


def kept(shape: str, name: str, seconds: float) -> tuple[float, float, float]:
    """Returns the counter's rates with the loader at work over its idle rates, as in `Counter.rates`, and batches per second."""
    (extent, batch_size), cores = SHAPES[shape], sorted(os.sched_getaffinity(0))
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(np.random.default_rng(0).random(extent, np.float32)))
    os.sched_setaffinity(0, cores[1:] or cores)  # workers inherit it
    loader = LOADERS[name](
        dataset, batch_size=batch_size, shuffle=True, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    batches = endless(loader)
    for _ in range(20):
        next(batches)
    os.sched_setaffinity(0, cores[:1])
    idle = counted(lambda: time.sleep(seconds))
    num_batches = 0

    def consume() -> None:
        nonlocal num_batches
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            next(batches)
            num_batches += 1

    loaded = counted(consume)
    return loaded[0] / idle[0], loaded[1] / idle[1], num_batches / seconds


def measure(settings: Settings) -> Result:
    """Measures both loaders on both shapes."""
    rows, measured = [], {}
    for shape in SHAPES:
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in LOADERS}
        for number in range(settings.rounds):
            for name in in_order(LOADERS, number):
                found[name].append(fresh(kept, shape, name, settings.seconds))
        of = {name: [Spread.of(list(each)).median for each in zip(*runs, strict=True)] for name, runs in found.items()}
        mine, torchs = of["shmload"], of["torch"]
        rows.append(
            Row(
                f"a thread counting in the trainer beside {shape}: its rate per CPU second, of the idle one",
                mine[0],
                "",
                f"per second {mine[1]:.2f} at {mine[2]:.0f} batches/s; torch {torchs[0]:.2f}, {torchs[1]:.2f} at {torchs[2]:.0f}",
                ">= 0.95",
                mine[0] >= 0.95,
            )
        )
        measured[shape] = found
    return Result(rows, measured)


if __name__ == "__main__":
    main("gil", __doc__, measure)
