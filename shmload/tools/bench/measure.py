"""The measuring process: it reads jobs from stdin, measures them, and writes one line of JSON for each job to the given file.

Its stdout is left to the user's dataset. From top to bottom: CPU, memory and page cache as the kernel reports them; touching and
digesting batches; timing a stream of batches; the limit of one core without any loader; the jobs.

CPU: a process's own clock has nanoseconds (clock_getcpuclockid(3) computes its id from the pid), /proc/PID/stat only ticks of 10
ms; the ticks are used for children that have been reaped. Memory: the proportional set size (proc_pid_smaps(5)), in which a page
shared by n processes counts 1/n in each, so that a sum over the tree counts it once.
"""

import gc
import itertools
import json
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmload.audit.batch_digest import digest_of
from shmload.batch.row_placer import RowOut
from shmload.tools.bench.contestants import Loader, LoaderOptions, factory, like_users, num_samples, users_loader
from shmload.tools.bench.rounds import BenchJob
from shmload.tools.bench.spread import quantile
from shmload.tools.object_reference import BenchError, is_map_style, make_dataset, one_line, resolve
from shmload.worker.decoding_protocol import declares_decoding
from shmload.world import ability_of

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
GIB = 1 << 30


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (field 3 of proc_pid_stat(5) is element 0)."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def descendants(root: int) -> list[int]:
    """Return the process ids of everything below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children.setdefault(int(stat(int(name))[1]), []).append(int(name))
            except (OSError, IndexError):
                continue  # it ended between listing and reading
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def clock_s(pid: int) -> float:
    """Return the CPU seconds of a process, dead threads included."""
    return time.clock_gettime((~pid << 3) | 2)


def tree_cpu_s() -> float:
    """Return the CPU seconds used so far by this process and all below it, reaped ones included."""
    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + dead.ru_utime + dead.ru_stime
    for pid in descendants(os.getpid()):
        try:
            fields = stat(pid)
            total += clock_s(pid) + (int(fields[13]) + int(fields[14])) * TICK_S
        except (OSError, IndexError):
            continue
    return total


def tree_pss_bytes(root: int) -> int:
    """Return the proportional set size of `root` and all below it, without mapped files, which belong to the page cache."""
    total = 0
    for pid in [root, *descendants(root)]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
        total += (sizes.get("Pss", 0) - sizes.get("Pss_File", 0)) * 1024
    return total


TOUCHED_EVERY = 4096


def leaves(batch: Any) -> Iterator[Any]:
    """Yield everything in a batch that is not a container, in order; mappings in their own order."""
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        yield batch
        return
    for value in batch:
        yield from leaves(value)


def touch(batch: Any) -> int:
    """Read one byte of every page of every tensor and array, and return the bytes delivered."""
    nbytes = 0
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            flat = (leaf.values() if leaf.is_nested else leaf).detach().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        else:
            continue
        flat[::TOUCHED_EVERY].max(initial=0)
        nbytes += flat.nbytes
    return nbytes


def num_rows(batch: Any) -> int:
    """Return the samples in a batch of unknown type: the length of its first tensor or array, else of its first list of strings."""
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim:
            return len(leaf)
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def digest(batch: Any) -> int:
    """Return a digest of dtypes, shapes and all bytes, to compare loaders without keeping batches. Container types are ignored."""
    return digest_of(list(leaves(batch)))[0]


class MeasuredStream:
    """The batches of one epoch after another, with the number of samples in each.

    Args:
        loader: the loader.
        num_samples, batch_size: of an epoch; without them the rows of each batch are counted.
    """

    def __init__(self, loader: Loader, num_samples: int | None, batch_size: int | None) -> None:
        self.loader, self.num_samples, self.batch_size = loader, num_samples, batch_size
        self.batches: Iterator[Any] | None = None
        self.position = 0  # batches delivered in the current epoch
        self.num_epochs = 0  # epochs begun

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
            self.batches = None
            return self.next()
        self.position += 1
        if self.num_samples is None or self.batch_size is None:
            return batch, num_rows(batch)
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
            "trainer_own_ms_per_batch": (self.touch_s + self.slept_s) / num_batches * 1e3,
        }
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


def after(seconds: float, num_batches: int = 1) -> Callable[[MeasuredSegment, float], bool]:
    """Return a condition that is true once both so many seconds and so many batches have passed."""
    return lambda segment, elapsed_s: elapsed_s >= seconds and len(segment.waits_s) >= num_batches


def peak_pss_bytes(stream: MeasuredStream, seconds: float) -> int:
    """Return the peak memory of all processes while batches are consumed, sampled every 50 ms."""
    peak, end_s = tree_pss_bytes(os.getpid()), time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        record(stream, after(0.05))
        peak = max(peak, tree_pss_bytes(os.getpid()))
    return peak


SOURCE_NBYTES = 64 << 20  # larger than most caches


@dataclass(frozen=True)
class Reading:
    """The rate at which one core reads batches without handing them over."""

    samples_per_s: float  # includes the least time of a copy if samples are only read
    cpu_s: float  # per sample, without the copy
    blocked_s: float  # per sample: asleep while waiting for the sample's source


def sample_nbytes(dataset: Any) -> int:
    """Return the bytes of the arrays and tensors in the first sample."""
    sample = dataset[0] if is_map_style(dataset) else next(iter(dataset))
    return sum(leaf.nbytes for leaf in leaves(sample) if isinstance(leaf, (np.ndarray, torch.Tensor)))


def memcpy_bytes_per_s(target_nbytes: int) -> float:
    """Return the bytes a core copies per second from a large buffer into one resident batch; the best of several passes."""
    target = np.ones(min(max(target_nbytes, 1 << 16), SOURCE_NBYTES), np.uint8)
    parts = np.ones(SOURCE_NBYTES // target.nbytes * target.nbytes, np.uint8).reshape(-1, target.nbytes)
    best_s = float("inf")
    for _ in range(12):
        start_s = time.perf_counter()
        for part in parts:
            np.copyto(target, part)
        best_s = min(best_s, time.perf_counter() - start_s)
    return parts.nbytes / best_s


def protocol(dataset: Any) -> str:
    """Return the name of the protocol by which samples get into a batch: the dataset's own, or `__getitem__` or `__iter__`."""
    if declares_decoding(dataset):
        return "read_batch_into" if ability_of(dataset, "read_batch_into") is not None else "read_into"
    return "__getitem__" if is_map_style(dataset) else "__iter__"


def fill(dataset: Any, indices: Sequence[int], out: dict[str, Any]) -> None:
    """Fill the first len(indices) rows of the arrays in `out` by the dataset's own protocol."""
    if protocol(dataset) == "read_batch_into":
        dataset.read_batch_into(indices, out)
        return
    for row, index in enumerate(indices):
        dataset.read_into(index, RowOut(out, row))


def read(
    dataset: Any, *, batch_size: int, seconds: float, copy_bytes_per_s: float, collate: Callable[[list[Any]], Any] | None = None
) -> Reading:
    """Measure how fast one core reads samples into a resident batch, in random order, without handing the batch over.

    A dataset with a protocol fills the batch itself. Of any other the samples are only read, and the least time in which their
    bytes can be copied is added, so that the limit is not slower than a good loader. The user's collate function is run, because
    every loader must run it.
    """
    draws = orders(dataset, batch_size)
    read_batch = reader(dataset, batch_size, collate)
    read_batch(next(draws))  # imports, page faults
    count = nbytes = 0
    elapsed_s = 0.0
    cpu0_s, runnable0_s, start_s = time.process_time(), runnable_s(), time.perf_counter()
    for indices in draws:
        before_s = time.perf_counter()
        nbytes += read_batch(indices)
        elapsed_s += time.perf_counter() - before_s
        count += len(indices)
        if elapsed_s >= seconds:
            break
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu0_s
    # the dataset's own threads may compute while this one sleeps
    blocked_s = max(0.0, wall_s - max(runnable_s() - runnable0_s, cpu_s))
    return Reading(count / (elapsed_s + nbytes / copy_bytes_per_s), cpu_s / count, blocked_s / count)


def runnable_s() -> float:
    """Return the seconds in which this thread ran or waited for a core, from /proc/thread-self/schedstat if the kernel has it.

    So a busy machine does not make a thread that only computes look like one that waits for data.
    """
    try:
        delay_s = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        delay_s = 0.0
    return time.thread_time() + delay_s


def orders(dataset: Any, rows: int) -> Iterator[list[int]]:
    """Yield the indices of random batches endlessly. An iterable dataset is read in its own order."""
    if not is_map_style(dataset):
        yield from itertools.repeat(list(range(rows)))
    draw, length = np.random.default_rng(0), len(dataset)
    rows = min(rows, -(-length // 2))  # the first batch only warms up
    while True:
        yield draw.integers(0, length, rows).tolist()


def reader(dataset: Any, rows: int, collate: Callable[[list[Any]], Any] | None) -> Callable[[list[int]], int]:
    """Return a function that reads the samples of some indices, and returns the bytes left to copy into a batch."""
    if collate is None and protocol(dataset) in ("read_batch_into", "read_into"):
        out = {name: np.empty((rows, *shape), dtype) for name, (dtype, shape) in dataset.schema.items()}

        def fill_resident(indices: list[int]) -> int:
            fill(dataset, indices, {name: array[: len(indices)] for name, array in out.items()})
            return 0

        return fill_resident
    nbytes = sample_nbytes(dataset)
    stream = itertools.chain.from_iterable(itertools.repeat(dataset))  # an iterable dataset, pass after pass
    take = dataset.__getitem__ if is_map_style(dataset) else lambda index: next(stream)

    def read_only(indices: list[int]) -> int:
        if collate is not None:
            collate([take(index) for index in indices])
            return 0
        for index in indices:
            take(index)
        return len(indices) * nbytes

    return read_only


def main() -> None:
    """Run the process: the last argument is the file for the answers."""
    torch.set_num_threads(1)
    with open(sys.argv[-1], "w", buffering=1) as answers:
        for fields in json.load(sys.stdin):
            try:
                answer = run(BenchJob(**fields))
            except BenchError as error:
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
        found["digests"] = [digest(stream.next()[0]) for _ in range(job.num_digests)]
        stream.close()
    return found


def probe(job: BenchJob) -> dict[str, float]:
    """Measure the limit of one core; fails early and clearly if the dataset itself does."""
    batch_size, num_workers = job.batch_size, job.num_workers
    collate = resolve(job.collate, what="--collate") if job.collate else None
    if job.torch_loader:
        own = users_loader(job.torch_loader, job.seed)
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
        nbytes = rows * sample_nbytes(dataset)
        copy_rate = memcpy_bytes_per_s(nbytes)
        reading = read(dataset, batch_size=rows, seconds=job.seconds, copy_bytes_per_s=copy_rate, collate=collate)
    except Exception as error:
        raise BenchError(f"{job.workload}: reading samples of the dataset raised {one_line(error)}") from error
    return {
        "num_samples": float(length),
        "batch_size": float(batch_size or 1),
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
        return MeasuredStream(beside, num_samples(own), own.batch_size)
    torch.manual_seed(job.seed)  # makes a dataset that draws from the global generator repeatable
    length = len(dataset) if is_map_style(dataset) else None
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
    record(stream, after(job.warmup_s, num_batches=4 * (job.num_workers or 2) + 1), job.step_s)
    segment = record(stream, after(job.seconds, num_batches=3), job.step_s)
    values = {"first_batch_ms": first_batch_s * 1e3, **segment.values()}
    if job.memory_s:
        values["peak_pss_mb"] = peak_pss_bytes(stream, job.memory_s) / 1e6
    stream.close()
    del stream
    gc.collect()
    return values
