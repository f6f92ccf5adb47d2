"""Measure the CPU time per record of reading records and Examples from TFRecord files, and the rate of writing them.

Method: Files of random numbers in the page cache are read in shuffled order by 2 workers; loaders take turns in fresh
processes. First 1,024 records of 1 MiB float32, in batches of 16: shmload verifies every checksum. torch's DataLoader and a
thread pool (one sample at a time), and SPDL's threads (one copy into the batch) read the same files with struct and
np.frombuffer from a mapping, and verify none. Then 65,536 Examples of 4 KiB (bytes, 16 floats, an integer), in batches of 64,
shuffled: the `tfrecord` package reads them in order in torch's DataLoader, verifies no checksum, and does not deliver the bytes
as a tensor.

"Into rows" is `read_batch_into` alone, in this process; the memcpy copies the same records from a mapping into the same rows.
Writing goes to the page cache of this machine's disk; the best of five files is compared with a plain write() of as many bytes.
Packages that are not installed (tfrecord, spdl) are skipped.

How to read: The figures are CPU microseconds over all processes, trainer and workers. The ratios of rates are from the same
run.

Predicted: 1 MiB: shmload 150 us (a copy of 100, which hides the checksum, and page faults), torch 900, SPDL 250. Examples: 1.0
us into rows, 1.7 through the loader, the package 60. Writing 1,000 MB/s.

Result (2 cores shared with other programs, 2 workers, 2 rounds): 1 MiB: shmload 143 us, torch 1,518, SPDL's threads 207; 7,715
samples/s, SPDL's 3,223; into rows 113 us, memcpy 112 (212 us, and 131 into rows, when large values did not yet bypass the
caches). Examples: 0.90 us into rows, 2.5 through the loader, the package 45. Writing 1,019 MB/s in 4 KiB Examples, 3,063 in 1
MiB ones, write() 5,943. Again, with seven other processes waiting: 137 us, torch 1,595, SPDL 248, 1.35x SPDL's samples/s;
Examples 1.05 us into rows. FFCV needed 140 us on another day, on a similar machine, which is where the aim comes from.

Again on a quiet machine, after short records were summed with 512-bit products, and each record was written as soon as it was
found: 1 MiB 141 us, torch 1,490, threads 422, into rows 119 (memcpy 112); Examples 0.70 us into rows (at load 15, in turn:
1.04, and 1.49 before), 2.15 through the loader, the package 58. Writing 902 and 2,845 MB/s, write() 4,323.

Trainer's CPU, s per GiB of 4 KiB Examples. Predicted: 36 us per batch of any size, so 0.02 from 460 records on. Result, torch
mode and seed mode: 0.10 and 0.12 in batches of 64, 0.015 and 0.028 of 1,024, 0.010 and 0.016 of 2,048. A trainer that sleeps
for a millisecond finds cold caches when it wakes up, so a large batch costs it 60 to 130 us where a small one costs 25.
"""

import importlib.util
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import THREADS, Result, Row, Settings, in_turn, main, plain
from shmload.formats import TFRecordDataset, TFRecordWriter
from shmload.tools.bench.bench_job import BenchJob
from shmload.tools.bench.contestants import LoaderOptions

NUMEL = 1 << 18
MANY = 2048  # records of 4 KiB in a large batch
LARGE = {"x": ("float32", (NUMEL,))}
SMALL = {"bytes": ("uint8", (4096,)), "floats": ("float32", (16,)), "number": "int64"}


@contextmanager
def files() -> Iterator[tuple[str, str]]:
    """Writes both sets of files and yields their patterns."""
    rng = np.random.default_rng(12)
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        for shard in range(4):
            with TFRecordWriter(f"{folder}/large-{shard}.tfrecord", index=True) as writer:
                for _ in range(256):
                    writer.write(rng.random(NUMEL, np.float32))
            with TFRecordWriter(f"{folder}/small-{shard}.tfrecord", index=True) as writer:
                for number in range(16384):
                    writer.write(example(rng, number))
        yield f"{folder}/large-*.tfrecord", f"{folder}/small-*.tfrecord"


def example(rng: np.random.Generator, number: int) -> dict[str, Any]:
    return {"bytes": rng.bytes(4096), "floats": rng.random(16, np.float32), "number": number}


def large(pattern: str) -> TFRecordDataset:
    return TFRecordDataset(pattern, LARGE, records="raw")


def small(pattern: str) -> TFRecordDataset:
    return TFRecordDataset(pattern, SMALL)


class InPython:
    """The large records, read with struct and np.frombuffer, without verifying checksums."""

    def __init__(self, pattern: str) -> None:
        self.paths = large(pattern).paths
        self.where = [(file, start) for file, path in enumerate(self.paths) for start in _starts(path)]
        self.mappings: list[mmap.mmap] | None = None

    def __len__(self) -> int:
        return len(self.where)

    def record(self, index: int) -> Any:
        if self.mappings is None:  # opened in the process that reads
            self.mappings = [_mapped(path) for path in self.paths]
        file, start = self.where[index]
        (nbytes,) = struct.unpack_from("<Q", self.mappings[file], start)
        return np.frombuffer(self.mappings[file], np.float32, nbytes // 4, start + 12)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.from_numpy(self.record(index).copy())}

    def batch(self, indices: Any) -> dict[str, torch.Tensor]:
        rows = np.empty((len(indices), NUMEL), np.float32)
        for row, index in enumerate(indices):
            rows[row] = self.record(index)
        return {"x": torch.from_numpy(rows)}


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _starts(path: str) -> Iterator[int]:
    with _mapped(path) as data:
        start = 0
        while start < len(data):
            yield start
            start += struct.unpack_from("<Q", data, start)[0] + 16


class Spdl:
    """SPDL's threads in the trainer, with one task per batch."""

    def __init__(self, dataset: InPython, options: LoaderOptions) -> None:
        self.dataset, self.options, self.epoch = dataset, options, 0

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        order = np.random.default_rng(self.epoch).permutation(len(self.dataset))
        self.epoch += 1
        size, threads = self.options.batch_size, self.options.num_workers
        source = [order[i : i + size].tolist() for i in range(0, len(order), size)]
        builder = PipelineBuilder().add_source(source)
        pipeline = builder.pipe(self.dataset.batch, concurrency=threads, output_order="input").add_sink(2)
        built = pipeline.build(num_threads=threads)
        with built.auto_stop():
            yield from built.get_iterator()


def tfrecord_package(dataset: TFRecordDataset, options: LoaderOptions) -> Any:
    """Returns the `tfrecord` package's dataset over the same files in torch's DataLoader. Each worker reads half of each file."""
    from tfrecord.torch.dataset import TFRecordDataset as Theirs

    description = {"bytes": "byte", "floats": "float", "number": "int"}
    parts = [Theirs(path, path + ".tfindex", description) for path in dataset.paths]
    return torch.utils.data.DataLoader(
        torch.utils.data.ChainDataset(parts),
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        multiprocessing_context=options.start_method,
        persistent_workers=True,
    )


def write_tfindex(dataset: TFRecordDataset) -> None:
    """Writes the index that the package needs to divide a file among workers."""
    for path in dataset.paths:
        starts = [*_starts(path), os.path.getsize(path)]
        lines = [f"{a} {b - a}\n" for a, b in pairwise(starts)]
        Path(path + ".tfindex").write_text("".join(lines))


def into_rows(dataset: Any, schema: dict[str, Any], batch_size: int) -> float:
    """Returns the CPU microseconds per record of `read_batch_into` alone, in the best of several shuffled epochs."""
    fields = {name: spec if isinstance(spec, tuple) else (spec, ()) for name, spec in schema.items()}
    rows = {name: np.empty((batch_size, *shape), dtype) for name, (dtype, shape) in fields.items()}
    return best_us(dataset, batch_size, lambda indices: dataset.read_batch_into(indices, rows))


def copied(dataset: InPython, batch_size: int) -> float:
    """Returns the CPU microseconds per record of a plain memcpy."""
    rows = np.empty((batch_size, NUMEL), np.float32)

    def copy(indices: Any) -> None:
        for row, index in enumerate(indices):
            rows[row] = dataset.record(index)

    return best_us(dataset, batch_size, copy)


def best_us(dataset: Any, batch_size: int, read: Callable[[Any], None]) -> float:
    rng, found = np.random.default_rng(3), []
    for _ in range(7):
        order = rng.permutation(len(dataset) // batch_size * batch_size).reshape(-1, batch_size)
        start = time.process_time()
        for indices in order:
            read(indices)
        found.append((time.process_time() - start) / order.size * 1e6)
    return min(found)


def write_rates() -> dict[str, float]:
    """Returns the MB of files per CPU second: Examples of 4 KiB, of 1 MiB, and plain writes."""
    rng = np.random.default_rng(13)
    samples = {
        "4 KiB": [example(rng, number) for number in range(10_000)],
        "1 MiB": [{"x": rng.random(NUMEL, np.float32)} for _ in range(64)],
    }
    block = rng.bytes(1 << 20)
    found: dict[str, list[float]] = {name: [] for name in (*samples, "write()")}
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        path = f"{folder}/written"
        for _ in range(5):
            for name, records in samples.items():
                start = time.process_time()
                with TFRecordWriter(path) as writer:
                    for record in records:
                        writer.write(record)
                found[name].append(os.path.getsize(path) / (time.process_time() - start) / 1e6)
                os.unlink(path)
            start = time.process_time()
            with open(path, "wb", buffering=0) as file:
                for _ in range(64):
                    file.write(block)
            found["write()"].append(os.path.getsize(path) / (time.process_time() - start) / 1e6)
            os.unlink(path)
    return {name: max(rates) for name, rates in found.items()}


def job(name: str, dataset: str, pattern: str, loader: str, batch_size: int, seconds: float) -> BenchJob:
    return BenchJob(
        workload=name,
        dataset=f"benchmarks.tfrecord:{dataset}",
        arguments={"pattern": pattern},
        loader=loader,
        batch_size=batch_size,
        num_workers=2,
        start_method="fork",
        seconds=seconds,
    )


def measure(settings: Settings) -> Result:
    """Measures large records, Examples and writing."""
    with files() as (of_large, of_small):
        write_tfindex(small(of_small))
        large_jobs = {"shmload": job("1 MiB", "large", of_large, "shmload", 16, settings.seconds)}
        for name, loader in (("torch", "torch"), ("threads", THREADS), ("spdl", "benchmarks.tfrecord:Spdl")):
            if name != "spdl" or importlib.util.find_spec("spdl"):
                large_jobs[name] = job("1 MiB", "InPython", of_large, loader, 16, settings.seconds)
        small_jobs = {"shmload": job("4 KiB", "small", of_small, "shmload", 64, settings.seconds)}
        small_jobs["large batches"] = job("4 KiB", "small", of_small, "shmload", MANY, settings.seconds)
        if importlib.util.find_spec("tfrecord"):
            theirs = "benchmarks.tfrecord:tfrecord_package"
            small_jobs["tfrecord"] = job("4 KiB", "small", of_small, theirs, 64, settings.seconds)
        found_large, found_small = in_turn(large_jobs, settings), in_turn(small_jobs, settings)
        us = {
            "1 MiB": into_rows(large(of_large), LARGE, 16),
            "memcpy": copied(InPython(of_large), 16),
            "4 KiB": into_rows(small(of_small), SMALL, 64),
        }
    written = write_rates()
    rows = _large_rows(found_large, us) + _small_rows(found_small, us["4 KiB"])
    slowest = min(written["4 KiB"], written["1 MiB"])
    beside = f"1 MiB {written['1 MiB']:.0f}, 4 KiB {written['4 KiB']:.0f}, plain write() {written['write()']:.0f} MB/s"
    rows.append(Row("TFRecordWriter, Examples, MB per CPU second", slowest, "MB/s", beside, ">= 500", slowest >= 500))
    return Result(rows, {"large": plain(found_large), "small": plain(found_small), "us": us, "written": written})


def _large_rows(found: dict[str, Any], us: dict[str, float]) -> list[Row]:
    cost = {name: each["cpu_us_per_sample"].median for name, each in found.items()}
    rate = {name: each["samples_per_s"].median for name, each in found.items()}
    title = "TFRecord of 1 MiB float32, checksums on"
    times = cost["torch"] / cost["shmload"]
    beside = ", ".join(f"{name} {each:.0f}" for name, each in cost.items()) + " us"
    rows = [Row(f"{title}, CPU a sample: torch over shmload", times, "x", beside, ">= 5x", times >= 5)]
    rows.append(Row(f"{title}, CPU a sample", cost["shmload"], "us", beside, "<= 140", cost["shmload"] <= 140))
    if "spdl" in rate:
        faster = rate["shmload"] / rate["spdl"]
        beside = ", ".join(f"{name} {each:.0f}" for name, each in rate.items()) + " samples/s"
        rows.append(Row(f"{title}, samples/s over SPDL's threads", faster, "x", beside, ">= 1.3x", faster >= 1.3))
    share = us["memcpy"] / us["1 MiB"]
    beside = f"{us['1 MiB']:.0f} us, memcpy {us['memcpy']:.0f}"
    rows.append(Row(f"{title}, into rows: share of memcpy's rate", share, "", beside, ">= 0.8", share >= 0.8))
    return rows


def _small_rows(found: dict[str, Any], us: float) -> list[Row]:
    title = "TFRecord Examples of 4 KiB"
    through = found["shmload"]["cpu_us_per_sample"].median
    rows = [Row(f"{title}, CPU a record into rows", us, "us", f"{through:.2f} through the loader", "<= 1", us <= 1)]
    if "tfrecord" in found:
        theirs = found["tfrecord"]["cpu_us_per_sample"].median
        times, beside = theirs / through, f"{through:.2f} us, tfrecord {theirs:.1f}"
        rows.append(Row(f"{title}, CPU a sample: tfrecord over shmload", times, "x", beside, ">= 10x", times >= 10))
    for name, batch_size in (("shmload", 64), ("large batches", MANY)):
        per_gib = found[name]["trainer_s_per_gib"].median
        beside = f"{found[name]['trainer_us_per_batch'].median:.0f} us a batch"
        what = f"{title}, trainer CPU s per GiB, batches of {batch_size:,}"
        rows.append(Row(what, per_gib, "s", beside, "<= 0.02", per_gib <= 0.02))
    return rows


if __name__ == "__main__":
    main("tfrecord", __doc__, measure)
