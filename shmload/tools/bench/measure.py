"""The measuring process: it reads jobs from stdin, measures them, and writes one line of JSON for each job to the given file.

Its stdout is left to the user's dataset.
"""

import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shmload.tools.bench.batch_contents import digest
from shmload.tools.bench.bench_job import LIMIT_S, BenchJob
from shmload.tools.bench.contestants import LoaderOptions, factory
from shmload.tools.bench.core_limit import memcpy_bytes_per_s, random_batches, read, sample_nbytes
from shmload.tools.bench.decoded_samples import samples_of
from shmload.tools.bench.measured_stream import MeasuredStream, after, after_whole_epochs, peak_pss_bytes, record
from shmload.tools.bench.users_loader import key_batches, like_users, num_samples, users_collate, users_loader
from shmload.tools.object_reference import UsageError, is_map_style, make_dataset, one_line, resolve
from shmload.worker.decoding_protocol import declares_decoding


def main() -> None:
    """Run the process: the last argument is the file for the answers."""
    torch.set_num_threads(1)
    with open(sys.argv[-1], "w", buffering=1) as answers:
        for fields in json.load(sys.stdin):
            try:
                answer = run(BenchJob(**fields))
            except UsageError as error:
                answer = {"error": str(error), "bad_usage": True}
            except Exception as error:
                answer = {"error": one_line(error), "details": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # some loaders hang in their own shutdown


def run(job: BenchJob) -> dict[str, Any]:
    """Return the answer to a job, as fields of a TaskOutcome."""
    if not job.loader:
        return {"values": probe(job)}
    dataset = None if job.torch_loader else make_dataset(job.dataset, job.arguments)
    found: dict[str, Any] = {}
    if job.seconds:
        found["values"] = time_loader(dataset, job)
    if job.num_digests and (job.torch_loader or getattr(factory(job.loader), "keeps_order", True)):
        stream = open_stream(dataset, job)
        digests = [digest(stream.next()[0]) for _ in range(job.num_digests)]
        found["digests"] = [] if None in digests else digests  # objects without bytes are not compared
        stream.close()
    return found


def probe(job: BenchJob) -> dict[str, float]:
    """Measure the limit of one core. Raise UsageError if reading the dataset fails, so that this is not blamed on a loader."""
    batch_size, num_workers = job.batch_size, job.num_workers
    collate = resolve(job.collate, what="--collate") if job.collate else None
    batches: Iterator[list[Any]] | None = None
    if job.torch_loader:
        own = users_loader(job.torch_loader, job.seed)
        dataset: Any = own.dataset
        batch_size, batches, collate = own.batch_size, key_batches(own), users_collate(own)
        num_workers = own.num_workers if num_workers is None else num_workers
    else:
        dataset = make_dataset(job.dataset, job.arguments)
    length = len(dataset) if is_map_style(samples_of(dataset)) else 0
    rows = min(batch_size or 1, length or sys.maxsize)
    try:
        if batches is None:
            batches, key = random_batches(dataset, rows), 0
        else:
            first = next(batches)
            batches, key, rows = itertools.chain([first], batches), first[0], len(first)
        nbytes = rows * sample_nbytes(dataset, key)
        copy_rate = memcpy_bytes_per_s(nbytes)
        reading = read(dataset, batches, seconds=job.seconds, copy_bytes_per_s=copy_rate, collate=collate)
    except Exception as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise UsageError(f"{job.workload}: reading samples of the dataset raised {one_line(error)}{where}") from error
    return {
        "num_samples": float(length),
        "decodes_in_place": float(declares_decoding(dataset)),
        "has_collate_fn": float(collate is not None),
        "batch_size": float(batch_size or rows),
        "num_workers": float(num_workers or 0),
        "batch_nbytes": float(nbytes),
        "fill_samples_per_s": reading.samples_per_s,
        "read_cpu_us_per_sample": reading.cpu_s * 1e6,
        "read_blocked_us_per_sample": reading.blocked_s * 1e6,
        "memcpy_mb_per_s": copy_rate / 1e6,
    }


def open_stream(dataset: Any, job: BenchJob) -> MeasuredStream:
    if job.torch_loader:
        own = users_loader(job.torch_loader, job.seed)
        beside = like_users(job.loader, own, job.num_workers, job.prefetch_factor)
        is_single = own.batch_size is None and own.batch_sampler is None  # each item is a sample
        return MeasuredStream(beside, num_samples(own), 1 if is_single else own.batch_size)
    torch.manual_seed(job.seed)  # makes a dataset that draws from the global generator repeatable
    if job.collate or not job.loader.startswith("shmload"):  # a collate function and other loaders need samples
        dataset = samples_of(dataset)
    length = len(dataset) if is_map_style(samples_of(dataset)) else None
    options = LoaderOptions(
        batch_size=min(job.batch_size or 1, length or sys.maxsize),
        shuffle=length is not None,
        num_workers=job.num_workers or 0,
        prefetch_factor=job.prefetch_factor,
        seed=job.seed,
        start_method=job.start_method,
        collate=resolve(job.collate, what="--collate") if job.collate else None,
        scratch=Path(job.scratch) if job.scratch else None,
    )
    make = factory(job.loader)
    if options.scratch:
        options.scratch.mkdir(parents=True, exist_ok=True)
    # a loader with an order of its own may also choose its own batch boundaries
    known = length if getattr(make, "keeps_order", True) else None
    return MeasuredStream(make(dataset, options), known, options.batch_size)


def time_loader(dataset: Any, job: BenchJob) -> dict[str, float]:
    """Run the timed part, after the first batch and a warm-up."""
    start_s = time.perf_counter()
    stream = open_stream(dataset, job)
    record(stream, after(0.0))
    first_batch_s = time.perf_counter() - start_s
    limit_s = max(LIMIT_S, job.seconds)
    record(stream, after(job.warmup_s, 4 * (job.num_workers or 2) + 1, limit_s), job.step_s)
    segment = record(stream, after_whole_epochs(stream, job.seconds, job.min_batches, limit_s), job.step_s)
    values = {"first_batch_ms": first_batch_s * 1e3, **segment.values()}
    if job.memory_s:
        values["peak_pss_mb"] = peak_pss_bytes(stream, job.memory_s) / 1e6
    stream.close()
    del stream
    gc.collect()
    return values
