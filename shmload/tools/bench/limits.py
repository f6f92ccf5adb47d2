"""What one core can do with no loader at all: the bound that stands beside every figure.

Reading is also taken apart into what it computes and what it waits: the thread's time on a core, and the time it slept.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmload.tools.bench.contestants import fill, filled_batch, fills_batches
from shmload.tools.bench.measure import leaves, run_delay_s
from shmload.tools.named import is_map_style

SOURCE_NBYTES = 64 << 20  # larger than most caches


@dataclass(frozen=True)
class Reading:
    """One core that reads batches and hands them to nobody."""

    samples_per_s: float  # the least time of a copy included, where samples are only read
    cpu_s: float  # per sample, the copy not included
    blocked_s: float  # per sample: asleep, waiting for what the sample is read from


def sample_nbytes(dataset: Any) -> int:
    """Bytes of the arrays and tensors in a sample like the first."""
    sample = dataset[0] if is_map_style(dataset) else next(iter(dataset))
    return sum(leaf.nbytes for leaf in leaves(sample) if isinstance(leaf, (np.ndarray, torch.Tensor)))


def memcpy_bytes_per_s(target_nbytes: int) -> float:
    """Bytes a core copies per second out of a large buffer into one resident batch; the best of some passes."""
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
    """How a sample gets into a batch: the dataset's own protocol, or plain `__getitem__` or `__iter__`."""
    if fills_batches(dataset):
        return "read_batch_into" if getattr(dataset, "read_batch_into", None) else "read_into"
    return "__getitem__" if is_map_style(dataset) else "__iter__"


def read(
    dataset: Any,
    *,
    batch_size: int,
    seconds: float,
    copy_bytes_per_s: float,
    once: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Reading:
    """What one core reads into a resident batch, in random order, with no hand-over at all.

    A dataset with a protocol fills the batch itself. From any other the samples are only read, and the least time that
    a copy of their bytes takes is added: the limit must not be slower than a good loader's own way to place them. A
    collate function of the user's is run, for its work is theirs as well.

    Args:
        once: no sample twice, and so at most one pass: the second reading of a cold file is a warm one.
    """
    draws = orders(dataset, batch_size, once=once)
    read_batch = reader(dataset, batch_size, collate)
    read_batch(next(draws))  # imports, page faults
    num_samples = nbytes = 0
    elapsed_s = 0.0
    cpu0_s, runnable0_s, start_s = time.process_time(), runnable_s(), time.perf_counter()
    for indices in draws:
        before_s = time.perf_counter()
        nbytes += read_batch(indices)
        elapsed_s += time.perf_counter() - before_s
        num_samples += len(indices)
        if elapsed_s >= seconds:
            break
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu0_s
    # threads of the dataset's own may compute while this one sleeps
    blocked_s = max(0.0, wall_s - max(runnable_s() - runnable0_s, cpu_s))
    if not num_samples:  # a single batch is the whole dataset
        return read(dataset, batch_size=max(1, batch_size // 2), seconds=0.0, copy_bytes_per_s=copy_bytes_per_s)
    return Reading(num_samples / (elapsed_s + nbytes / copy_bytes_per_s), cpu_s / num_samples, blocked_s / num_samples)


def runnable_s() -> float:
    """Seconds in which this thread ran or could have run."""
    return time.thread_time() + run_delay_s()


def orders(dataset: Any, rows: int, *, once: bool) -> Iterator[list[int]]:
    """Indices of batches: drawn at random without end, or each once. An iterable dataset is read as it comes."""
    if not is_map_style(dataset):
        while True:
            yield list(range(rows))
    draw = np.random.default_rng(0)
    rows = min(rows, len(dataset))
    if once:
        order = draw.permutation(len(dataset))
        yield from (order[start : start + rows].tolist() for start in range(0, len(order), rows))
        return
    while True:
        yield draw.integers(0, len(dataset), rows).tolist()


def reader(dataset: Any, rows: int, collate: Callable[[list[Any]], Any] | None) -> Callable[[list[int]], int]:
    """Reads the samples of some indices; returns the bytes that still would have to be copied into a batch."""
    if collate is None and fills_batches(dataset):
        rows = min(rows, len(dataset))
        out = {name: tensor.numpy() for name, tensor in filled_batch(dataset, range(rows)).items()}

        def fill_resident(indices: list[int]) -> int:
            fill(dataset, indices, {name: array[: len(indices)] for name, array in out.items()})
            return 0

        return fill_resident
    nbytes = sample_nbytes(dataset)
    take = dataset.__getitem__ if is_map_style(dataset) else Endless(dataset).next

    def read_only(indices: list[int]) -> int:
        samples = [take(index) for index in indices] if collate else None
        if samples is not None and collate is not None:
            collate(samples)
            return 0
        for index in indices:
            take(index)
        return len(indices) * nbytes

    return read_only


class Endless:
    """Samples of an iterable dataset, pass after pass."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.samples: Iterator[Any] = iter(dataset)

    def next(self, _: int) -> Any:
        for sample in self.samples:
            return sample
        self.samples = iter(self.dataset)
        return next(self.samples)
