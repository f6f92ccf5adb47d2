"""What one core can do with no loader at all: the bound that stands beside every figure."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmload.observe.bench.batches import leaves
from shmload.observe.bench.contestants import fill, filled_batch, fills_batches

COPY_NBYTES = 64 << 20


def memcpy_bytes_per_s() -> float:
    """Bytes a core copies per second, between buffers larger than its caches; the best of a few."""
    source = np.ones(COPY_NBYTES, np.uint8)
    target = np.zeros(COPY_NBYTES, np.uint8)
    best_s = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - start_s)
    return COPY_NBYTES / best_s


def protocol(dataset: Any) -> str:
    """How a sample gets into a batch: the dataset's own protocol, or plain `__getitem__`."""
    if fills_batches(dataset):
        return "read_batch_into" if hasattr(dataset, "read_batch_into") else "read_into"
    return "__getitem__"


def fill_samples_per_s(dataset: Any, *, batch_size: int, seconds: float) -> float:
    """Samples per second that one core puts into a resident batch, in random order, with no hand-over at all."""
    rows = min(batch_size, len(dataset))
    order = np.random.default_rng(0)
    fill_batch = filler(dataset, rows)
    fill_batch(order.integers(0, len(dataset), rows).tolist())  # imports, page faults
    num_samples = 0
    start_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < seconds or not num_samples:
        fill_batch(order.integers(0, len(dataset), rows).tolist())
        num_samples += rows
    elapsed_s = time.perf_counter() - start_s
    return num_samples / elapsed_s


def filler(dataset: Any, rows: int) -> Callable[[list[int]], None]:
    if fills_batches(dataset):
        out = {name: tensor.numpy() for name, tensor in filled_batch(dataset, range(rows)).items()}
        return lambda indices: fill(dataset, indices, out)
    arrays = [np.asarray(leaf) for leaf in leaves(dataset[0]) if isinstance(leaf, (np.ndarray, torch.Tensor))]
    targets = [np.zeros((rows, *array.shape), array.dtype) for array in arrays]

    def copy_samples(indices: list[int]) -> None:
        for row, index in enumerate(indices):
            found = [leaf for leaf in leaves(dataset[index]) if isinstance(leaf, (np.ndarray, torch.Tensor))]
            for target, leaf in zip(targets, found, strict=False):
                if target.shape[1:] == tuple(leaf.shape):
                    np.copyto(target[row, ...], np.asarray(leaf))

    return copy_samples
