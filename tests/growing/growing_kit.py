"""Samples that identify themselves, in files of known sizes; samplers; waiting for other processes."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from shmload import ShmLoader
from shmload.formats import TFRecordWriter
from shmload.growing import GrowingDataset, SampleCache

WIDTH = 8
SCHEMA = {"x": ("float32", (WIDTH,))}
RECORD_NBYTES = 4 * WIDTH + 16
DEADLINE_S = 60.0


def sample(value: int) -> np.ndarray[Any, Any]:
    return np.full(WIDTH, value, np.float32)


def put(cache: SampleCache, values: Any, **options: Any) -> str:
    """Publishes these samples and returns the name of their file, or of the last one."""
    before = {file.name for file in cache.files()}
    with cache.writer(publish_s=1e9, **options) as writer:
        for value in values:
            writer.write(sample(value))
    return max({file.name for file in cache.files()} - before)


def put_foreign(path: Path, values: Any, compression: str | None = None) -> Path:
    """Writes a file as another program would."""
    with TFRecordWriter(path, compression=compression) as writer:
        for value in values:
            writer.write(sample(value))
    return path


def dataset_of(cache: SampleCache, **options: Any) -> GrowingDataset:
    return cache.dataset(SCHEMA, records="raw", **{"timeout_s": 0.0, **options})


def loader_of(dataset: GrowingDataset, **options: Any) -> ShmLoader[Any]:
    uneven = {} if options.get("drop_last") else {"uneven": "exact"}
    return ShmLoader(dataset, **{"batch_size": 4, "seed": 7, **uneven, **options})


def values_of(batch: Any) -> list[int]:
    return [int(value) for value in batch["x"][:, 0]]


def epoch_of(loader: ShmLoader[Any]) -> list[int]:
    """Returns the samples of the next epoch, in order."""
    return [value for batch in loader for value in values_of(batch)]


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Waits until a condition on another process is true."""
    deadline, pause = monotonic() + DEADLINE_S, threading.Event()
    while not (found := condition()):
        assert monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        pause.wait(0.01)
    return found


def flip(path: Path, at: int) -> None:
    """Damages one byte of a file without changing its size."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


# ------------------------------------------------------------ samplers, which spawned processes import by name


def endless(worker_id: int, num_workers: int) -> Iterator[Any]:
    number = worker_id
    while True:
        yield sample(number)
        number += num_workers


def ten(worker_id: int, num_workers: int) -> Iterator[Any]:
    for number in range(worker_id, 10 * num_workers, num_workers):
        yield sample(number)


def broken(worker_id: int, num_workers: int) -> Iterator[Any]:
    yield sample(1)
    raise ConnectionError("the far store is gone")


def stuck_after_one(worker_id: int, num_workers: int) -> Iterator[dict[str, Any]]:
    """Yields one sample, and waits forever for the next."""
    yield {"x": 0}
    threading.Event().wait()


def stuck_at_once(worker_id: int, num_workers: int) -> Iterator[Any]:
    raise ConnectionError("the far store was never there")
    yield


def dies_once(folder: Path, worker_id: int, num_workers: int) -> Iterator[Any]:
    """Is killed after three samples the first time; then continues with the fourth."""
    mark = folder / f"was-here-{worker_id}"
    if not mark.exists():
        mark.touch()
        for number in range(3):
            yield sample(number)
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(3, 6):
        yield sample(number)


class FullLog(io.StringIO):
    """A log on a full disk."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def first_ends_with_a_full_log(worker_id: int, num_workers: int) -> Iterator[Any]:
    """Ends after one sample, and its standard output cannot be written; the other samplers go on."""
    yield sample(worker_id)
    if worker_id:
        yield from endless(worker_id, num_workers)
    sys.stdout = FullLog()


def draws(worker_id: int, num_workers: int) -> Iterator[Any]:
    yield sample(int(np.random.randint(1 << 20)))
