"""The fresh process: reads jobs from stdin, measures them, writes one JSON line an event to the given file descriptor.

Its stdout stays free for what a user's dataset prints. It samples no memory itself: it says when the parent should.
"""

import gc
import json
import os
import sys
import time
import traceback
from typing import Any

import torch

from shmload.observe.bench import limits
from shmload.observe.bench.batches import digest
from shmload.observe.bench.contestants import LoaderOptions, factory
from shmload.observe.bench.job import Job
from shmload.observe.bench.measure import Stream, after, record, whole_epochs
from shmload.observe.bench.spec import BenchError, make_dataset, one_line, resolve


def main() -> None:
    """Entry of the process: the descriptor's number is the last argument."""
    events = os.fdopen(int(sys.argv[-1]), "w", buffering=1)

    def tell(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    torch.set_num_threads(1)
    for number, fields in enumerate(json.load(sys.stdin)):
        try:
            tell(event="done", job=number, **run(Job(**fields), tell))
        except BenchError as error:
            tell(event="failed", job=number, error=str(error), bad_usage=True, details="")
        except Exception as error:
            tell(event="failed", job=number, error=one_line(error), bad_usage=False, details=traceback.format_exc())
    events.close()


def run(job: Job, tell: Any) -> dict[str, Any]:
    dataset = make_dataset(job.dataset, job.arguments)
    if not job.loader:
        return {"values": probe(dataset, job), "digests": [limits.protocol(dataset)]}
    values = time_loader(dataset, job, tell) if job.seconds or job.epochs else {}
    return {"values": values, "digests": digests(dataset, job) if job.num_digests else []}


def probe(dataset: Any, job: Job) -> dict[str, float]:
    """The limit on one core; fails early and clearly where the dataset itself does."""
    try:
        nbytes = limits.batch_nbytes(dataset, min(job.batch_size, len(dataset)))
        copy_rate = limits.memcpy_bytes_per_s(nbytes)
        fill_rate = limits.fill_samples_per_s(
            dataset, batch_size=job.batch_size, seconds=job.seconds, copy_bytes_per_s=copy_rate
        )
    except Exception as error:
        raise BenchError(f"{job.workload}: reading samples of the dataset raised {one_line(error)}") from error
    return {
        "num_samples": float(len(dataset)),
        "fill_samples_per_s": fill_rate,
        "memcpy_mb_per_s": copy_rate / 1e6,
    }


def open_stream(dataset: Any, job: Job) -> Stream:
    torch.manual_seed(job.seed)  # a dataset that draws from the global generator then does so repeatably
    options = LoaderOptions(
        batch_size=min(job.batch_size, len(dataset)),
        num_workers=job.num_workers,
        seed=job.seed,
        shuffle=job.shuffle,
        start_method=job.start_method,
        collate=resolve(job.collate, what="--collate") if job.collate else None,
    )
    return Stream(factory(job.loader)(dataset, options), len(dataset), options.batch_size)


def time_loader(dataset: Any, job: Job, tell: Any) -> dict[str, float]:
    start_s = time.perf_counter()
    stream = open_stream(dataset, job)
    record(stream, after(0.0))
    first_batch_s = time.perf_counter() - start_s
    if job.epochs:
        while stream.position < stream.num_samples:
            record(stream, after(0.0))
        segment = record(stream, whole_epochs(stream, job.epochs))
    else:
        record(stream, after(job.warmup_s, num_batches=4 * job.num_workers + 1))
        segment = record(stream, after(job.seconds, num_batches=3))
    values = {"first_batch_ms": first_batch_s * 1e3, **segment.values()}
    if job.memory_s:
        tell(event="memory")
        record(stream, after(job.memory_s))
    stream.close()
    del stream
    gc.collect()
    return values


def digests(dataset: Any, job: Job) -> list[str]:
    """Digests of the first batches, through epoch ends, of a loader of its own."""
    stream = open_stream(dataset, job)
    found = [digest(stream.next()[0]) for _ in range(job.num_digests)]
    stream.close()
    return found
