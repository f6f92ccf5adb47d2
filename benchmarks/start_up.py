"""Measure the time to the first batch of a loader, to the first batch of a new pass, and to get a batch that is ready.

Method: A fresh process per case, loaders in turn, 2 forked workers, shuffled. The dataset is created before the clock starts.
The first time is from before the loader is created to its first batch. Then the iterator is dropped, which is timed separately,
and the second time is from `iter(loader)` to the first batch of the new pass; workers are not persistent. Then a dozen more
batches are taken from that pass, twice as many as the ring has slots, and the next pass is timed in the same way. This is the
pause between two epochs, whereas a pass that was abandoned at its first batch has not yet allocated most of its pages. A sample
is a row of 64 float32 (a view), a copy of a picture, or a copy of 64 MiB, with batches of 1 GiB; the latter is skipped if too
little memory is free.

`next()`: batches of 64 rows, 2 persistent workers, and 5 ms of computing in the trainer between batches, so that the next batch
is always ready. The figure is the median time of the call.

How to read: Compare ratios within a round, medians over rounds. For every loader, most of the time of a small first batch is
forking two workers, and most of the time of a large one is copying, and allocating pages.

Result (2 cores, nothing else on the machine, 3 rounds); a new pass in seed mode reuses the workers and the ring:
| | torch | torch mode | seed mode |
|---|---|---|---|
| first batch, rows, ms | 36.6 | 24.3 | 25.2 |
| the same of 64 pictures, of 512, of 1 GiB | 40.5, 121, 815 | 29.8, 71.8, 832 | 27.7, 46.0, 431 |
| a new pass, rows, ms | 35.6 | 18.8 | 1.1 |
| the same of 64 pictures, of 512, of 1 GiB | 39.1, 135, 998 | 20.9, 68.8, 824 | 8.2, 18.5, 324 |
| next(), us | 672 | 13.1 | 12.8 |
"""

import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.common import Result, Row, Settings, fresh, in_order, main
from shmload import ShmLoader

LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (DataLoader, {}),
    "torch mode": (ShmLoader, {}),
    "seed mode": (ShmLoader, {"seed": 1}),
}
STEP_S = 0.005
NEEDED_BYTES = 9 << 30  # six batches in flight, one in hand, and the rest of the program


class Rows:
    """Samples of 64 float32 and a number; each is a view."""

    def __init__(self) -> None:
        self.rows = np.random.default_rng(0).random((1 << 17, 64), np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.rows[index], index


class Copies:
    """Samples that are copies of an array, as a decoder makes them."""

    def __init__(self, arrays: Any, num_samples: int) -> None:
        self.arrays, self.num_samples = arrays, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.arrays[index % len(self.arrays)].copy(), index


def pictures() -> Copies:
    return Copies(np.random.default_rng(1).integers(0, 256, (64, 3, 224, 224), np.uint8), 1 << 14)


def huge() -> Copies:
    return Copies(np.random.default_rng(2).random((1, 1 << 24), np.float32), 256)


CASES: dict[str, tuple[Any, int, float, int]] = {  # dataset, batch size, aim over torch, additional batches
    "1,024 rows of 64": (Rows, 1024, 0.9, 12),
    "64 pictures": (pictures, 64, 0.9, 12),
    "512 pictures": (pictures, 512, 0.9, 12),
    "1 GiB": (huge, 16, 1.0, 0),  # a dozen would take 15 s
}


def started(case: str, name: str) -> dict[str, float]:
    """Measures the milliseconds to the first batch, to drop its iterator, and to the first batch of new passes.

    The pass before a new pass ends after one batch, and then after `num_more` further batches.
    """
    (make, batch_size, _, num_more), (loader_class, mode) = CASES[case], LOADERS[name]
    dataset = make()
    began = time.perf_counter()
    loader = loader_class(dataset, batch_size, shuffle=True, num_workers=2, multiprocessing_context="fork", **mode)
    batches = iter(loader)
    batch = next(batches)
    first = time.perf_counter()
    del batch, batches
    dropped = time.perf_counter()
    batches = iter(loader)
    next(batches)
    again = time.perf_counter()
    found = {"first_ms": (first - began) * 1e3, "drop_ms": (dropped - first) * 1e3, "again_ms": (again - dropped) * 1e3}
    if num_more:
        for _ in range(num_more):
            next(batches)
        del batches
        later = time.perf_counter()
        next(iter(loader))
        found["later_ms"] = (time.perf_counter() - later) * 1e3
    return found


def waited(seconds: float, name: str) -> dict[str, float]:
    """Measures the median microseconds in `next()` while the trainer computes between batches."""
    loader_class, mode = LOADERS[name]
    loader = loader_class(Rows(), 64, shuffle=True, num_workers=2, multiprocessing_context="fork", persistent_workers=True, **mode)
    batches = iter(loader)
    next(batches)
    waits: list[float] = []
    while sum(waits) + STEP_S * len(waits) < seconds or len(waits) < 20:
        end = time.perf_counter() + STEP_S
        while time.perf_counter() < end:
            pass
        began = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - began)
    return {"next_us": median(waits) * 1e6}


def free_bytes() -> int:
    """Returns the bytes that shared tensors may still use."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) * 1024, shutil.disk_usage("/dev/shm").free)


def in_rounds(settings: Settings, call: Any, *arguments: Any) -> dict[str, list[dict[str, float]]]:
    """Returns the measurements of each loader, round by round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
    for number in range(settings.rounds):
        for name in in_order(LOADERS, number):
            found[name].append(fresh(call, *arguments, name))
    return found


def rows_of(what: str, metric: str, found: dict[str, list[dict[str, float]]], aim: float) -> list[Row]:
    """Returns a row for each mode: its time over torch's."""
    rows = []
    for name in list(LOADERS)[1:]:
        ratio = median(mine[metric] / theirs[metric] for mine, theirs in zip(found[name], found["torch"], strict=True))
        ms, torchs = (median(each[metric] for each in found[one]) for one in (name, "torch"))
        beside = f"{ms:.1f} ms, torch {torchs:.1f}"
        if metric == "again_ms":
            beside += "; dropping {:.1f} and {:.1f}".format(*(median(e["drop_ms"] for e in found[one]) for one in (name, "torch")))
        rows.append(Row(f"{what}, {name}: over torch's", ratio, "x", beside, f"<= {aim}x", ratio <= aim))
    return rows


def measure(settings: Settings) -> Result:
    """Measures every case."""
    rows: list[Row] = []
    measured: dict[str, Any] = {}
    for case, (make, _, aim, num_more) in CASES.items():
        if make is huge and (free := free_bytes()) < NEEDED_BYTES:
            measured["left out"] = f"batches of {case}: {free >> 30} GiB are free, {NEEDED_BYTES >> 30} needed"
            print(f"left out: {measured['left out']}", file=sys.stderr)
            continue
        found = in_rounds(settings, started, case)
        measured[case] = found
        rows += rows_of(f"first batch of {case}", "first_ms", found, aim)
        rows += rows_of(f"first batch of a new pass, {case}", "again_ms", found, aim)
        rows += rows_of(f"first batch of a pass behind {num_more} batches, {case}", "later_ms", found, aim) if num_more else []
    waits = in_rounds(settings, waited, settings.seconds)
    us = {name: median(each["next_us"] for each in found) for name, found in waits.items()}
    for name in list(LOADERS)[1:]:
        what = f"next() with 5 ms of work between batches of 64 rows, {name}"
        rows.append(Row(what, us[name], "us", f"torch {us['torch']:.0f}", "<= 40 us", us[name] <= 40))
    return Result(rows, {**measured, "next": waits})


if __name__ == "__main__":
    main("start_up", __doc__, measure)
