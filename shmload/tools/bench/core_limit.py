"""Measure the limit of one core without any loader."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmload.batch.row_placer import RowOut, empty_rows
from shmload.introspect.abilities import ability_of
from shmload.tools.bench.batch_contents import leaves
from shmload.tools.bench.decoded_samples import samples_of
from shmload.tools.object_reference import is_map_style
from shmload.worker.decoding_protocol import declares_decoding
from shmload.worker.sample_rng import begin_sample, end_samples

Fill = Callable[[Sequence[int], dict[str, Any]], None]

SOURCE_NBYTES = 64 << 20  # larger than most caches


@dataclass(frozen=True)
class Reading:
    """The rate at which one core reads batches without handing them over."""

    samples_per_s: float  # includes the least time of a copy if samples are only read
    cpu_s: float  # per sample, without the copy
    blocked_s: float  # per sample: asleep while waiting for the sample's source


def sample_nbytes(dataset: Any, key: Any = 0) -> int:
    """Return the bytes of the arrays and tensors in the sample with a key; in the first one of an iterable dataset."""
    samples = samples_of(dataset)
    sample = _sample(samples, key) if is_map_style(samples) else next(iter(samples))
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


def filler(dataset: Any) -> Fill:
    """Return a function of (indices, arrays) that fills the arrays' first rows by the dataset's own protocol.

    Call this once and not for each batch: to find the protocol takes as long as reading a small batch.
    """
    if protocol(dataset) == "read_batch_into":
        read_batch_into: Fill = dataset.read_batch_into
        return read_batch_into
    return functools.partial(_fill_rows, dataset)


def _fill_rows(dataset: Any, indices: Sequence[int], out: dict[str, Any]) -> None:
    try:
        for row, index in enumerate(indices):
            begin_sample(None, 0, index, 0, reseed=False)  # for `sample_rng()`
            dataset.read_into(index, RowOut(out, row))
    except Exception as error:
        error.add_note(f"sample {index}")
        raise
    finally:
        end_samples()


def read(
    dataset: Any,
    batches: Iterator[list[Any]],
    *,
    seconds: float,
    copy_bytes_per_s: float,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Reading:
    """Measure how fast one core reads samples into a resident batch, without handing the batch over.

    A dataset with a protocol fills the batch itself. Of any other the samples are only read, and the least time in which their
    bytes can be copied is added, so that the limit is not slower than a good loader. The user's collate function is run, because
    every loader must run it.

    Args:
        dataset: the dataset.
        batches: the keys of the batches to read, without end. The first one only warms up.
        seconds: time to read.
        copy_bytes_per_s: rate of a copy.
        collate: the user's function.
    """
    first = next(batches)
    read_batch = reader(dataset, first, collate)
    read_batch(first)  # imports, page faults
    count = nbytes = 0
    elapsed_s = 0.0
    cpu0_s, runnable0_s, start_s = time.process_time(), runnable_s(), time.perf_counter()
    for indices in batches:
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


def random_batches(dataset: Any, rows: int) -> Iterator[list[int]]:
    """Yield the indices of random batches endlessly. An iterable dataset is read in its own order."""
    if not is_map_style(samples_of(dataset)):
        yield from itertools.repeat(list(range(rows)))
    draw, length = np.random.default_rng(0), len(dataset)
    rows = min(rows, -(-length // 2))  # the first batch only warms up
    while True:
        yield draw.integers(0, length, rows).tolist()


def reader(dataset: Any, first: list[Any], collate: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], int]:
    """Return a function that reads the samples of a batch's keys, and returns the bytes left to copy into the batch.

    Args:
        dataset: the dataset.
        first: keys of a batch that is as large as the others.
        collate: the user's function.
    """
    rows = len(first)
    if collate is None and declares_decoding(dataset) and (out := _rows_of(dataset.schema, rows)) is not None:
        fill = filler(dataset)

        def fill_resident(indices: list[int]) -> int:
            begin_sample(None, 0, indices[0], 0, reseed=False)  # for `sample_rng(index)`
            try:
                fill(indices, {name: array[: len(indices)] for name, array in out.items()})
            finally:
                end_samples()
            return 0

        return fill_resident
    nbytes, samples = sample_nbytes(dataset, first[0]), samples_of(dataset)
    stream = itertools.chain.from_iterable(itertools.repeat(samples))  # an iterable dataset, pass after pass
    take: Callable[[Any], Any] = functools.partial(_sample, samples) if is_map_style(samples) else lambda index: next(stream)

    def read_only(indices: list[Any]) -> int:
        if collate is not None:
            collate([take(index) for index in indices])
            return 0
        for index in indices:
            take(index)
        return len(indices) * nbytes

    return read_only


def _sample(samples: Any, key: Any) -> Any:
    """Return a sample; an exception is raised with a note that has its key."""
    try:
        return samples[key]
    except Exception as error:
        error.add_note(f"sample {key!r:.200}")
        raise


def _rows_of(schema: Mapping[str, Any], rows: int) -> dict[str, Any] | None:
    """Return memory for a batch; None if fields have no fixed size."""
    specs = {name: spec if isinstance(spec, tuple) else (spec, ()) for name, spec in schema.items()}
    if any(dtype in (str, bytes) or None in shape for dtype, shape in specs.values()):
        return None
    return {name: empty_rows(dtype, (rows, *shape)) for name, (dtype, shape) in specs.items()}
