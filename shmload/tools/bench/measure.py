"""CPU time and memory of a process and everything below it, read from the kernel without a further package.

CPU: a process' own clock has nanoseconds (clock_getcpuclockid(3) makes its id from the pid), /proc/PID/stat only 10
ms ticks; the ticks serve for children that are dead and reaped. Memory: proportional set size (proc_pid_smaps(5)), in
which a page shared by n processes counts 1/n in each, so that a sum over the tree counts it once.
"""

import ctypes
import hashlib
import math
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmload.tools.bench.contestants import Loader
from shmload.tools.bench.report import WAIT_SHARES, quantile

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (field 3 of proc_pid_stat(5) is element 0)."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def descendants(root: int) -> list[int]:
    """Process ids of everything below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children.setdefault(int(stat(int(name))[1]), []).append(int(name))
            except (OSError, IndexError):
                continue  # it ended between the listing and the reading
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def clock_s(pid: int) -> float:
    """CPU seconds of a process, dead threads included."""
    return time.clock_gettime((~pid << 3) | 2)


def tree_cpu_s() -> float:
    """CPU seconds used so far by this process and all below it, the dead ones included."""
    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + dead.ru_utime + dead.ru_stime
    for pid in descendants(os.getpid()):
        try:
            fields = stat(pid)
            total += clock_s(pid) + (int(fields[13]) + int(fields[14])) * TICK_S
        except (OSError, IndexError):
            continue
    return total


def host_cpu_s() -> float:
    """CPU seconds used so far by everything on the machine, as proc_stat(5) counts them; what a hypervisor took not."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:8])
    return (user + nice + system + irq + softirq) * TICK_S


def run_delay_s() -> float:
    """Seconds this thread has waited for a core so far (/proc/thread-self/schedstat); 0 on a kernel that does not count them.

    A thread that only computes is not taken for one that waits for its data because the machine is busy.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def tree_pss_bytes(root: int) -> int:
    """Proportional set size of `root` and all below it, without pages of mapped files: those are the page cache's."""
    total = 0
    for pid in [root, *descendants(root)]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
        total += (sizes.get("Pss", 0) - sizes.get("Pss_File", 0)) * 1024
    return total


def first_difference(reference: Sequence[str], other: Sequence[str]) -> int | None:
    """Number of the first batch whose digests differ or that only one of them has; None if all are equal."""
    for number, (expected, got) in enumerate(zip(reference, other, strict=False)):
        if expected != got:
            return number
    return None if len(reference) == len(other) else min(len(reference), len(other))


TOUCHED_EVERY = 4096


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in a batch that is not a container, in order; mappings by their own order."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def flat_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes in row-major order, of a nested one its values'; a view if it is contiguous."""
    if tensor.is_nested:
        tensor = tensor.values()
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def touch(batch: Any) -> int:
    """Reads one byte of every page of every tensor and array; returns the bytes delivered."""
    nbytes = 0
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            flat = flat_bytes(leaf)
        elif isinstance(leaf, np.ndarray) and leaf.flags.c_contiguous and not leaf.dtype.hasobject:
            flat = leaf.reshape(-1).view(np.uint8)
        else:
            continue
        flat[::TOUCHED_EVERY].max(initial=0)
        nbytes += flat.nbytes
    return nbytes


def num_rows(batch: Any) -> int:
    """Samples in a batch of unknown make: the length of its first tensor or array, else of its first list of strings."""
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim:
            return len(leaf)
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def rows_digest(batch: Any) -> int:
    """The sum of the digests of a batch's rows: summed over an epoch it tells which samples came, whatever their order."""
    found = list(leaves(batch))
    total = 0
    for row in range(num_rows(batch)):
        state = hashlib.blake2b(digest_size=16)
        for leaf in found:
            values = np.ascontiguousarray(
                leaf[row].numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf[row])
            )
            state.update(f"{values.dtype} {values.shape}".encode())
            state.update(values.tobytes())
        total += int.from_bytes(state.digest(), "little")
    return total % (1 << 128)


def digest(batch: Any) -> str:
    """A digest of structure, dtypes, shapes and every byte: two loaders are compared without keeping batches."""
    state = hashlib.blake2b(digest_size=16)
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            state.update(f"tensor {leaf.dtype} {tuple(leaf.shape)}".encode())
            state.update(np.ascontiguousarray(flat_bytes(leaf)).data)
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            state.update(f"array {leaf.dtype} {leaf.shape}".encode())
            state.update(np.ascontiguousarray(leaf).tobytes())
        else:
            state.update(f"{type(leaf).__name__} {leaf!r}".encode())
    return state.hexdigest()


PAGE = mmap.PAGESIZE


def files_below(paths: Iterable[Path]) -> list[str]:
    """The files that are named, and those in named folders, sorted; absolute, so that a folder may change."""
    found: set[Path] = set()
    for path in paths:
        found.update([path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()])
    return sorted(str(path.absolute()) for path in found)


def drop(files: Sequence[str]) -> float:
    """Asks the kernel to forget the files' pages; returns the share of their bytes that is still in memory."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return resident_share(files)


def resident_share(files: Sequence[str]) -> float:
    """The share of the files' pages that are in memory."""
    pages = resident = 0
    for file in files:
        count, found = resident_pages(file)
        pages, resident = pages + count, resident + found
    return resident / pages if pages else 0.0


def resident_pages(file: str) -> tuple[int, int]:
    """Pages of a file, and how many of them are in memory."""
    length = os.stat(file).st_size
    if not length:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        # Private and writable, because ctypes only tells the address of a writable buffer; nothing is written or read.
        with mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            count = -(-length // PAGE)
            found = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(mapped)
            try:
                if libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(length), found):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), file)
            finally:
                del first  # a mapping with a pointer into it cannot be closed
            return count, sum(byte & 1 for byte in found)
    finally:
        os.close(descriptor)


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
