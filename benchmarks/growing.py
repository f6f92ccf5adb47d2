"""Measure reading from a growing cache: the trainer's rate, the interpreter time left to its threads, and the rate of writing.

Method: Records of 1 MiB of random float32 in batches of 16, on this machine's disk (that is, in its page cache). Two samplers
write 100 MB/s each, from random numbers made in advance, while 2 workers read in shuffled order and verify every checksum. An
epoch contains what has been written when it begins. The trainer is pinned to one core, the workers and samplers to the others.
First, a thread of the trainer counts in a pure Python loop while the main thread is idle, and then while it takes batches as
fast as possible. Then batches are taken without the counter.

Two other loaders are measured in turn, in fresh processes, with the same two samplers. "A DataLoader an epoch" is the recipe of
creating a new torch DataLoader for every epoch over the existing files (struct and np.frombuffer from a mapping, without
verifying checksums). TensorFlow's TFRecordDataset with decode_raw takes part if SHMLOAD_TENSORFLOW names a Python that has it
(with its own threads; checksums are verified).

Writing: One process writes arrays of 1 MiB, as raw records and as a field of a dict, into a cache that evicts all the time; the
best of three timed parts.

How to read: The figures without the counter are MB/s, and CPU seconds of the trainer's process per GB (for TensorFlow, this
includes its threads, which run in the trainer). "kept" is the number of counts per second of the counter's CPU time, loaded
over idle.

Predicted: 2,000 MB/s, 0.02 s/GB, kept 0.97; the recipe 300 MB/s, 1 s/GB; writing 1,500 MB/s.

Result (2 cores with 8 to 13 other processes waiting, 2 rounds of 1.5 s):
| | MB/s | trainer's CPU, s/GB | kept |
|---|---|---|---|
| shmload | 1,440 | 0.015 | 0.99 |
| a DataLoader an epoch | 189 | 0.11 | 0.99 |
| TFRecordDataset | 385 | 0.97 | 1.00 |

Writing: 1,110 MB/s of raw records, 696 in dicts. The recipe's trainer mostly waits, so the counter keeps its rate; per GB, it
uses seven times as much CPU as shmload's.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Result, Row, Settings, fresh, in_order, main, repeated
from benchmarks.gil import counted
from benchmarks.tfrecord import InPython
from shmload import ShmLoader
from shmload.growing import SampleCache
from shmload.tools.bench.spread import Spread

NUMEL, BATCH = 1 << 18, 16
MB_PER_RECORD = 4 * NUMEL / 1e6
SCHEMA = {"x": ("float32", (NUMEL,))}
CAPACITY_BYTES, FIRST = 3 << 30, 256
PACE = 100.0  # MB/s of a sampler
TENSORFLOW = "SHMLOAD_TENSORFLOW"

Rates = dict[str, float]


def records() -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.random(NUMEL, np.float32) for _ in range(16)]


def sampler(worker_id: int, num_workers: int) -> Iterator[Any]:
    """Yields records at a fixed rate in MB/s, as from a store."""
    some, began = records(), time.perf_counter()
    for number in count():
        ahead = began + number * MB_PER_RECORD / PACE - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)
        yield some[number % len(some)]


def filled(cache: SampleCache) -> None:
    some = records()
    with cache.writer() as writer:
        for number in range(FIRST):
            writer.write(some[number % len(some)])


def rates(batches: Iterator[Any], seconds: float) -> Rates:
    """Returns the rate and the CPU of a source of batches, and the share of its idle rate that a concurrent counter keeps."""

    def take() -> tuple[int, float]:
        return repeated(lambda: next(batches), seconds)

    for _ in range(8):
        next(batches)
    idle, _ = counted(lambda: threading.Event().wait(seconds / 2) and None)
    loaded, _ = counted(lambda: take() and None)
    cpu = time.process_time()
    number, clock = take()
    cpu = time.process_time() - cpu
    megabytes = number * BATCH * MB_PER_RECORD
    return {"MB/s": megabytes / clock, "CPU s/GB": cpu / megabytes * 1000, "kept": loaded / idle}


def of_shmload(cache: SampleCache) -> Iterator[Any]:
    dataset = cache.dataset(SCHEMA, records="raw")
    with ShmLoader(dataset, BATCH, shuffle=True, seed=1, num_workers=2) as loader:
        while True:
            yield from loader


def of_recipe(cache: SampleCache) -> Iterator[Any]:
    while True:
        dataset = InPython(str(cache.path / "*.tfrecord"))
        yield from torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=2)


KINDS = {"shmload": of_shmload, "a DataLoader an epoch": of_recipe}


def measured(kind: str, seconds: float) -> Rates:
    """Measures one loader in this process while two samplers write."""
    cores = sorted(os.sched_getaffinity(0))
    folder = tempfile.mkdtemp(prefix="shmload-bench-")
    try:
        with SampleCache(folder, CAPACITY_BYTES) as cache:
            filled(cache)
            os.sched_setaffinity(0, cores[1:] or cores)  # samplers and workers inherit it
            cache.start(sampler, 2, publish_s=0.5)
            batches = KINDS[kind](cache)
            next(batches)
            os.sched_setaffinity(0, cores[:1])
            found = rates(batches, seconds)
            batches.close()  # type: ignore[attr-defined]  # it is a generator
            return found
    finally:
        shutil.rmtree(folder)


def of_tensorflow(seconds: float) -> Rates:
    """Measures the same for TFRecordDataset, which runs in another Python."""
    folder = tempfile.mkdtemp(prefix="shmload-bench-")
    try:
        with SampleCache(folder, CAPACITY_BYTES) as cache:
            filled(cache)
            process = subprocess.Popen(
                [os.environ[TENSORFLOW], "-c", PROGRAM, folder, str(seconds), str(BATCH)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
            assert process.stdout is not None
            process.stdout.readline()  # waits until TensorFlow has been imported
            cache.start(sampler, 2, publish_s=0.5)
            said, _ = process.communicate("go\n")
    finally:
        shutil.rmtree(folder)
    rate, cpu, kept = map(float, said.split())
    return {"MB/s": rate * MB_PER_RECORD, "CPU s/GB": cpu / MB_PER_RECORD * 1000, "kept": kept}


PROGRAM = """
import glob, sys, threading, time
import tensorflow as tf

folder, seconds, batch_size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])

def endless():
    while True:
        files = sorted(glob.glob(folder + "/*.tfrecord"))
        dataset = tf.data.TFRecordDataset(files, num_parallel_reads=2)
        dataset = dataset.map(lambda text: tf.io.decode_raw(text, tf.float32), num_parallel_calls=2)
        yield from dataset.batch(batch_size).prefetch(4)

class Counter(threading.Thread):
    def run(self):
        self.is_over, count, cpu = False, 0, time.thread_time()
        while not self.is_over:
            count += 1
        self.rate = count / (time.thread_time() - cpu)

def counted(work):
    counter = Counter()
    counter.start()
    found = work()
    counter.is_over = True
    counter.join()
    return counter.rate, found

def take():
    began, number = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        next(batches)
        number += 1
    return number, time.perf_counter() - began

print("ready", flush=True)
sys.stdin.readline()
batches = endless()
for _ in range(8):
    next(batches)
idle, _ = counted(lambda: time.sleep(seconds / 2))
loaded, _ = counted(take)
cpu = time.process_time()
number, clock = take()
cpu = time.process_time() - cpu
print(number * batch_size / clock, cpu / (number * batch_size), loaded / idle)
"""


def written(as_dict: bool, seconds: float) -> float:
    """Returns the MB/s of one writer into a full cache."""
    some, best = records(), 0.0
    folder = tempfile.mkdtemp(prefix="shmload-bench-")
    try:
        with SampleCache(folder, 1 << 30) as cache, cache.writer(raw=["x"] if as_dict else []) as writer:
            for _ in range(3):
                began, number = time.perf_counter(), 0
                while time.perf_counter() < began + seconds:
                    record = some[number % len(some)]
                    writer.write({"x": record} if as_dict else record)
                    number += 1
                best = max(best, number * MB_PER_RECORD / (time.perf_counter() - began))
    finally:
        shutil.rmtree(folder)
    return best


def measure(settings: Settings) -> Result:
    """Measures each loader in turn, round after round, and then writing."""
    found: dict[str, list[Rates]] = {kind: [] for kind in KINDS}
    has_tensorflow = os.environ.get(TENSORFLOW, "") != "" and Path(os.environ[TENSORFLOW]).exists()
    if has_tensorflow:
        found["TFRecordDataset"] = []
    for number in range(settings.rounds):
        for kind in in_order(found, number):
            found[kind].append(fresh(measured, kind, settings.seconds) if kind in KINDS else of_tensorflow(settings.seconds))
    if not has_tensorflow:
        print(f"without TensorFlow: {TENSORFLOW} names no Python that has it", file=sys.stderr)
    middle = {kind: {name: Spread.of([one[name] for one in each]).median for name in each[0]} for kind, each in found.items()}
    ours, others = middle["shmload"], {kind: each for kind, each in middle.items() if kind != "shmload"}

    def beside(name: str, digits: int) -> str:
        return ", ".join(f"{kind} {each[name]:.{digits}f}" for kind, each in others.items())

    raw, of_dicts = (fresh(written, as_dict, settings.seconds) for as_dict in (False, True))
    rows = [
        Row("1 MiB records while two samplers write", ours["MB/s"], "MB/s", beside("MB/s", 0), ">= 600", ours["MB/s"] >= 600),
        Row("the trainer's CPU", ours["CPU s/GB"], "s/GB", beside("CPU s/GB", 3), "<= 0.05", ours["CPU s/GB"] <= 0.05),
        Row("what a counter keeps", ours["kept"], "of idle", beside("kept", 2), ">= 0.95", ours["kept"] >= 0.95),
        Row("written by one process", raw, "MB/s", f"in dicts {of_dicts:.0f}", ">= 500", min(raw, of_dicts) >= 500),
    ]  # fmt: skip
    return Result(rows, {"loaders": found, "written": {"raw": raw, "dicts": of_dicts}})


if __name__ == "__main__":
    main("growing", __doc__, measure)
