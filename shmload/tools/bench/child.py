"""The fresh process: reads jobs from stdin, measures them, writes one JSON line an event to the given file descriptor.

Its stdout stays free for what a user's dataset prints. It samples no memory itself: it says when the parent should.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from shmload.tools.bench import limits, measure, own_loader
from shmload.tools.bench.contestants import LoaderOptions, factory
from shmload.tools.bench.measure import Stream, after, digest, record, rest_of_epoch, rows_digest, whole_epochs
from shmload.tools.bench.peers import PEERS
from shmload.tools.bench.settings import Job
from shmload.tools.named import BenchError, is_map_style, make_dataset, one_line, resolve


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
    dropped = {"resident_share": measure.drop(job.cold_files)} if job.cold_files else {}
    if not job.loader:
        values, protocol = probe(job)
        return {"values": values | dropped, "digests": [protocol]}
    dataset = None if job.torch_loader else make_dataset(job.dataset, job.arguments)
    if job.write_peer:
        importlib.import_module(PEERS[job.loader].module).write(dataset, Path(job.peer_folder or ""))
        return {}
    if job.cold_files:
        found = time_cold(dataset, job)
        found["values"] |= dropped
        return found
    found = time_loader(dataset, job, tell) if job.seconds or job.epochs else {}
    if job.num_digests:
        found["digests"] = digests(dataset, job)
    if job.digest_epoch:
        found["rows_digest"] = epoch_digest(dataset, job)
    return found


def probe(job: Job) -> tuple[dict[str, float], str]:
    """The limit on one core; fails early and clearly where the dataset itself does."""
    batch_size, num_workers = job.batch_size, job.num_workers
    collate = resolve(job.collate, what="--collate") if job.collate else None
    if job.torch_loader:
        own = own_loader.make_torch_loader(job.torch_loader, job.seed)
        dataset: Any = own.dataset
        batch_size = own.batch_size or 1
        num_workers = own.num_workers if num_workers is None else num_workers
        is_plain = own.collate_fn is torch.utils.data.default_collate or own.batch_size is None
        collate = None if is_plain else own.collate_fn
    else:
        dataset = make_dataset(job.dataset, job.arguments)
    length = len(dataset) if is_map_style(dataset) else 0
    rows = min(batch_size or 1, length or sys.maxsize)
    try:
        nbytes = rows * limits.sample_nbytes(dataset)
        if job.cold_files:
            measure.drop(job.cold_files)
        copy_rate = limits.memcpy_bytes_per_s(nbytes)
        reading = limits.read(
            dataset,
            batch_size=rows,
            seconds=job.seconds,
            copy_bytes_per_s=copy_rate,
            once=bool(job.cold_files),
            collate=collate,
        )
    except Exception as error:
        raise BenchError(f"{job.workload}: reading samples of the dataset raised {one_line(error)}") from error
    values = {
        "num_samples": float(length),
        "batch_size": float(batch_size or 1),
        "num_workers": float(num_workers or 0),
        "batch_nbytes": float(nbytes),
        "fill_samples_per_s": reading.samples_per_s,
        "read_cpu_us_per_sample": reading.cpu_s * 1e6,
        "read_blocked_us_per_sample": reading.blocked_s * 1e6,
        "memcpy_mb_per_s": copy_rate / 1e6,
    }
    return values, limits.protocol(dataset)


def open_stream(dataset: Any, job: Job) -> Stream:
    if job.torch_loader:
        own = own_loader.make_torch_loader(job.torch_loader, job.seed)
        beside = own_loader.contestant(job.loader, own, job.num_workers, job.prefetch_factor)
        return Stream(beside, own_loader.num_samples(own), own.batch_size)
    torch.manual_seed(job.seed)  # a dataset that draws from the global generator then does so repeatably
    options = LoaderOptions(
        batch_size=min(job.batch_size or 1, len(dataset)),
        num_workers=job.num_workers or 0,
        prefetch_factor=job.prefetch_factor,
        seed=job.seed,
        shuffle=job.shuffle,
        start_method=job.start_method,
        collate=resolve(job.collate, what="--collate") if job.collate else None,
        peer_folder=job.peer_folder,
    )
    made = factory(job.loader)(dataset, options)
    counts_rows = job.loader in PEERS and not PEERS[job.loader].keeps_order  # these cut batches where a shard ends
    return Stream(made, None if counts_rows else len(dataset), options.batch_size)


def time_loader(dataset: Any, job: Job, tell: Any) -> dict[str, Any]:
    start_s = time.perf_counter()
    stream = open_stream(dataset, job)
    record(stream, after(0.0))
    first_batch_s = time.perf_counter() - start_s
    if job.epochs:
        if stream.num_batches is None:
            raise BenchError(
                "--epochs: needs a loader whose length is known, given one without; give --seconds instead"
            )
        record(stream, rest_of_epoch(stream))
        segment = record(stream, whole_epochs(stream, job.epochs), job.step_s)
    else:
        record(stream, after(job.warmup_s, num_batches=4 * (job.num_workers or 2) + 1), job.step_s)
        segment = record(stream, after(job.seconds, num_batches=3), job.step_s)
    values = {"first_batch_ms": first_batch_s * 1e3, **segment.values()}
    if job.memory_s:
        tell(event="memory")
        record(stream, after(job.memory_s))
    stream.close()
    del stream
    gc.collect()
    return {"values": values, "wait_quantiles_ms": segment.wait_quantiles_ms()}


def time_cold(dataset: Any, job: Job) -> dict[str, Any]:
    """One pass from the first batch on: what workers had read ahead by then, at most their prefetch, is not counted."""
    start_s = time.perf_counter()
    stream = open_stream(dataset, job)
    record(stream, after(0.0))
    first_batch_s = time.perf_counter() - start_s
    segment = record(stream, rest_of_epoch(stream, 4 * job.seconds), job.step_s)
    stream.close()
    values = {"first_batch_ms": first_batch_s * 1e3, **segment.values()}
    return {"values": values, "wait_quantiles_ms": segment.wait_quantiles_ms()}


def digests(dataset: Any, job: Job) -> list[str]:
    """Digests of the first batches, through epoch ends, of a loader of its own."""
    stream = open_stream(dataset, job)
    found = [digest(stream.next()[0]) for _ in range(job.num_digests)]
    stream.close()
    return found


def epoch_digest(dataset: Any, job: Job) -> str:
    """One digest of all rows of an epoch, whatever their order."""
    stream = open_stream(dataset, job)
    total = sum(rows_digest(batch) for batch in stream.loader)
    stream.close()
    return f"{total % (1 << 128):032x}"
