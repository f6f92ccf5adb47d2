"""What one core can do with no loader at all: the bound that stands beside every figure."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmload.observe.bench.batches import leaves
from shmload.observe.bench.contestants import fill, filled_batch, fills_batches

SOURCE_NBYTES = 64 << 20  # larger than most caches


def batch_nbytes(dataset: Any, rows: int) -> int:
    """Bytes of the arrays and tensors in a batch of that many samples like the first."""
    return rows * sum(leaf.nbytes for leaf in leaves(dataset[0]) if isinstance(leaf, (np.ndarray, torch.Tensor)))


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
    """How a sample gets into a batch: the dataset's own protocol, or plain `__getitem__`."""
    if fills_batches(dataset):
        return "read_batch_into" if getattr(dataset, "read_batch_into", None) else "read_into"
    return "__getitem__"


def fill_samples_per_s(dataset: Any, *, batch_size: int, seconds: float, copy_bytes_per_s: float) -> float:
    """Samples per second that one core puts into a resident batch, in random order, with no hand-over at all.

    A dataset with a protocol fills the batch itself. From any other the samples are only read, and the least time that
    a copy of their bytes takes is added: the limit must not be slower than a good loader's own way to place them.
    """
    rows = min(batch_size, len(dataset))
    draw = np.random.default_rng(0)
    read_batch = reader(dataset, rows)
    read_batch(draw.integers(0, len(dataset), rows).tolist())  # imports, page faults
    num_samples = nbytes = 0
    elapsed_s = 0.0
    while elapsed_s < seconds or not num_samples:
        indices = draw.integers(0, len(dataset), rows).tolist()
        start_s = time.perf_counter()
        nbytes += read_batch(indices)
        elapsed_s += time.perf_counter() - start_s
        num_samples += rows
    return num_samples / (elapsed_s + nbytes / copy_bytes_per_s)


def reader(dataset: Any, rows: int) -> Callable[[list[int]], int]:
    """Reads the samples of some indices; returns the bytes that still would have to be copied into a batch."""
    if fills_batches(dataset):
        out = {name: tensor.numpy() for name, tensor in filled_batch(dataset, range(rows)).items()}

        def fill_resident(indices: list[int]) -> int:
            fill(dataset, indices, out)
            return 0

        return fill_resident
    sample_nbytes = batch_nbytes(dataset, 1)

    def read_only(indices: list[int]) -> int:
        for index in indices:
            dataset[index]
        return len(indices) * sample_nbytes

    return read_only
