"""The cases of `benchmarks.cluster`, each run in a process of its own: batches of 8 records of 1 MiB from a cluster.

    python -m benchmarks.cluster_cases CASE NUM_WORKERS SECONDS ADDRESS HOST_PID        prints what it measured as JSON

It also measures the time until a dataset that consists of one array has arrived on another node. The array has 1 GB, or
proportionally less if SECONDS is below 1.

The consumer reads one number of each record, because the benchmark measures the transport to the trainer, not the trainer's own
reading. Time and CPU are measured in the middle of a stream, after `WARM_UP` batches and at least twice SECONDS.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, default_collate

from shmload import Ray, ShmLoader
from shmload.processes.proc_stat import cpu_ns
from shmload.tools.bench.tree_usage import descendants

BATCH_SIZE = 8
NUM_VALUES = 1 << 18  # float32 values of a record
NUM_SAMPLES = 1 << 19
NUM_AHEAD = 4  # calls in flight for each actor of plain Ray; the seed's way and torch's DataLoader have two
WARM_UP = 12
WAIT_S = 0.010


class Records:
    """Samples of 1 MiB from 16 records in memory: reading one costs only its copy into the batch."""

    def __init__(self) -> None:
        self.pool: list[NDArray[np.float32]] = []  # created in the reading process, so that it is not sent

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        if not self.pool:
            self.pool = list(np.random.default_rng(6).random((16, NUM_VALUES), np.float32))
        return self.pool[index % 16]


class Waiting(Records):
    """Samples that each take 10 ms to arrive, and no CPU."""

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        time.sleep(WAIT_S)
        return np.full(64, index, np.float32)


def indices() -> Iterator[list[int]]:
    order = np.random.default_rng(1).permutation(NUM_SAMPLES).tolist()
    for at in range(0, NUM_SAMPLES, BATCH_SIZE):
        yield order[at : at + BATCH_SIZE]


# ---------------------------------------------------------------- the transports to the trainer


def on_the_cluster(dataset: Records | Heavy, num_workers: int, address: str) -> Any:
    return ShmLoader(dataset, BATCH_SIZE, shuffle=True, seed=1, num_workers=num_workers, backend=Ray(address=address))


def locally(dataset: Records, num_workers: int, address: str) -> Any:
    return ShmLoader(dataset, BATCH_SIZE, shuffle=True, seed=1, num_workers=num_workers)


def torchs(dataset: Records, num_workers: int, address: str) -> Any:
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]  # not a Dataset


def stacked(dataset: Records, batch: list[int]) -> NDArray[np.float32]:
    return np.stack([dataset[index] for index in batch])


def collated(dataset: Records, batch: list[int]) -> Any:
    return default_collate([dataset[index] for index in batch])


class Reader:
    """An actor of plain Ray."""

    def __init__(self, dataset: Records, read: Callable[[Records, list[int]], Any]) -> None:
        self.dataset, self.read = dataset, read

    def get(self, batch: list[int]) -> Any:
        return self.read(self.dataset, batch)


def by_ray_get(
    dataset: Records,
    num_workers: int,
    address: str,
    read: Callable[[Records, list[int]], Any] = stacked,
    num_ahead: int = NUM_AHEAD,
) -> Iterator[Any]:
    """Yields batches in order, from the actors in turn, with `num_ahead` calls in flight for each.

    The batches stay in Ray's memory; they are not copied.
    """
    import ray

    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    made = ray.remote(Reader).options(num_cpus=1)
    actors = [made.remote(dataset, read) for _ in range(num_workers)]
    under_way: deque[Any] = deque()
    for number, batch in enumerate(indices()):
        under_way.append(actors[number % num_workers].get.remote(batch))
        if len(under_way) >= num_ahead * num_workers:
            yield ray.get(under_way.popleft())


def by_ray_data(dataset: Records, num_workers: int, address: str) -> Any:
    import ray
    import ray.data

    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def read(rows: dict[str, Any]) -> dict[str, Any]:
        return {"x": stacked(dataset, rows["id"].tolist())}

    numbers = ray.data.range(NUM_SAMPLES // 16, override_num_blocks=NUM_SAMPLES // 16 // BATCH_SIZE)
    batches = numbers.map_batches(read, batch_size=BATCH_SIZE, concurrency=num_workers)
    return (batch["x"] for batch in batches.iter_torch_batches(batch_size=BATCH_SIZE, prefetch_batches=NUM_AHEAD))


CASES: dict[str, Callable[[int, str], Any]] = {
    "shmload": partial(on_the_cluster, Records()),
    "ray.get": partial(by_ray_get, Records()),
    "Ray Data": partial(by_ray_data, Records()),
    "seed's way": partial(by_ray_get, Records(), read=collated, num_ahead=2),
    "torch, local": partial(torchs, Records()),
    "shmload, local": partial(locally, Records()),
    "waiting": partial(on_the_cluster, Waiting()),
}


# ---------------------------------------------------------------- sending a dataset to another node


class Heavy:
    """A dataset that is one array."""

    def __init__(self, nbytes: int) -> None:
        self.rows = np.random.default_rng(2).integers(0, 1 << 62, nbytes // 8)

    def __len__(self) -> int:
        return min(1024, len(self.rows))

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def ship(nbytes: int, address: str) -> float:
    """Returns the seconds from the creation of a loader to its first batch."""
    dataset = Heavy(nbytes)
    began = time.perf_counter()
    loader = on_the_cluster(dataset, 1, address)
    next(iter(loader))
    took_s = time.perf_counter() - began
    loader.close()
    return took_s


def length(refs: list[Any]) -> int:
    import ray

    return len(ray.get(refs[0]))


def put_and_get(nbytes: int, address: str) -> float:
    """Returns the seconds from `ray.put` of an array to its arrival in a task on the other node, whose process already runs."""
    import ray

    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    task = ray.remote(length).options(num_cpus=1)
    ray.get(task.remote([ray.put(np.zeros(4))]))
    rows = Heavy(nbytes).rows
    began = time.perf_counter()
    assert ray.get(task.remote([ray.put(rows)])) == len(rows)
    return time.perf_counter() - began


SHIPPING: dict[str, Callable[[int, str], float]] = {
    "ship": ship,
    "ship nothing": lambda nbytes, address: ship(8192, address),
    "ray.put": put_and_get,
}


# ---------------------------------------------------------------- measuring


def all_cpu_s(host_pid: int) -> float:
    """Returns the CPU seconds used so far by this process, the cluster, and all their children."""
    total = 0.0
    for root in (os.getpid(), host_pid):
        for pid in [root, *descendants(root)]:
            try:
                total += cpu_ns(pid) / 1e9
            except OSError:
                continue
    return total


def measure(batches: Iterator[Any], seconds: float, host_pid: int) -> dict[str, float]:
    """Reads a stream for `seconds`, and holds each batch until the next one arrives."""
    batch, began = next(batches), time.perf_counter()
    for _ in range(WARM_UP):
        batch = next(batches)
    while time.perf_counter() - began < 2 * seconds:  # the last actor may start after the first batch
        batch = next(batches)
    num_batches, nbytes, reading_s = 0, 0, 0.0
    cpu_s, trainer_s, began = all_cpu_s(host_pid), time.process_time(), time.perf_counter()
    while (wall_s := time.perf_counter() - began) < seconds or num_batches < 2:
        batch = next(batches)
        began_s = time.thread_time()
        for row in batch:
            float(row[0])
        reading_s += time.thread_time() - began_s
        num_batches, nbytes = num_batches + 1, nbytes + batch.nbytes
    trainer_s, cpu_s = time.process_time() - trainer_s, all_cpu_s(host_pid) - cpu_s
    return {
        "mb_per_s": nbytes / wall_s / 1e6,
        "batches_per_s": num_batches / wall_s,
        "trainer_s_per_gb": (trainer_s - reading_s) / nbytes * 1e9,
        "cpu_s_per_gb": cpu_s / nbytes * 1e9,
    }


def main(case: str, num_workers: str, seconds: str, address: str, host_pid: str) -> None:
    if case in SHIPPING:
        nbytes = int(min(float(seconds), 1.0) * 1e9)
        print(json.dumps({"seconds": SHIPPING[case](nbytes, address), "nbytes": nbytes}), flush=True)
        return
    loader = CASES[case](int(num_workers), address)
    print(json.dumps(measure(iter(loader), float(seconds), int(host_pid))), flush=True)
    close = getattr(loader, "close", None)
    if close is not None:
        close()


if __name__ == "__main__":
    main(*sys.argv[1:])
