"""Measure the cost of keeping a million paths: building, reading, the memory of every worker, and the bytes sent to a spawned one.

Method: Every kind runs in a fresh process, with 1 M strings of 50 characters (the tuples: with an int) from one generator.
Building: the same process builds `list(generator)` and the kind in turn, so that the ratio compares adjacent runs. Reading:
200,000 entries, including the loop around them, once of the first thousand (which stay in the cache) and once of all, in turn
with a list in the same process. Growth: two forked workers read every entry once, and report /proc/self/smaps_rollup before and
after: private memory, and PSS, which divides a shared page among its processes. Pickled: the bytes sent to each spawned worker.

How to read: Private memory is the cost of one more worker. The PSS of a shared index grows in the worker by its share of the
one copy, while the trainer's falls by as much. Therefore the sum over the trainer and its workers, divided by the number of
workers, is measured, too; the row of the table is the larger of that and the private memory. A distant entry costs cache misses
for its word, its bytes and the new str. In a list, it costs one only for the str, but reading it writes to the str.

Predicted: building 1.0x, because neither list nor strings need new pages; growth below 1 MiB; reading 100 ns.

Result (2 cores, other work on the machine; in the run before, building was at 0.95 and 0.96):
| | list of str | list of tuples | numpy array of str | SharedIndex of str | SharedIndex of tuples |
|---|---|---|---|---|---|
| building over list's | 1 | 1 | 1.30 | 1.05 | 1.06 |
| ns, of a thousand | 10 | 10 | 136 | 33 | 61 |
| ns, of a million | 104 | 105 | 342 | 243 | 408 |
| private MiB per worker | 92 | 184 | 0.1 | 0.1 | 0.1 |
| PSS MiB per worker | 61 | 123 | 0.2 | 17.6 | 20.1 |
| PSS MiB of all per worker | 92 | 184 | 0.1 | 0.1 | 0.1 |
| pickled bytes | 50 M | 57 M | 188 M | 409 | 472 |
"""

import multiprocessing
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Result, Row, Settings, main
from shmload import SharedIndex

N, STRIDE, NUM_WORKERS = 1_000_000, 7919, 2
MIB = 1 << 20


def paths() -> Iterator[str]:
    return (f"/data/photos/train/n{i % 1000:08d}/photo_{i:08d}.jpg" for i in range(N))


def rows() -> Iterator[tuple[str, int]]:
    return ((path, number) for number, path in enumerate(paths()))


class Kind(NamedTuple):
    """A way to store entries: their source, the container, and a function that uses an entry as a sample would."""

    entries: Callable[[], Iterator[Any]]
    build: Callable[[Iterator[Any]], Any]
    look: Callable[[Any], object]


KINDS = {
    "list of str": Kind(paths, list, len),
    "list of tuples": Kind(rows, list, list),
    "numpy array of str": Kind(paths, lambda entries: np.array(list(entries)), len),
    "SharedIndex of str": Kind(paths, SharedIndex, len),
    "SharedIndex of tuples": Kind(rows, SharedIndex, list),
}


def one(name: str, rounds: int) -> dict[str, float]:
    """Measures everything about one kind; runs in a fresh process."""
    entries, build, look = KINDS[name]
    ratios, seconds = [], []
    for _ in range(rounds):
        listed = seconds_of(lambda: list(entries()))
        seconds.append(seconds_of(lambda: build(entries())))
        ratios.append(seconds[-1] / listed)
    kept, listed_too = build(entries()), list(entries())
    read = {f"{whose}_{where}_ns": [] for whose in ("read", "list") for where in ("near", "far")}
    for _ in range(rounds):
        for whose, what in (("read", kept), ("list", listed_too)):
            read[f"{whose}_near_ns"].append(read_ns(what, 1000))
            read[f"{whose}_far_ns"].append(read_ns(what, N))
    del listed_too
    private, pss, whole = growth(kept, look)
    return {
        "build_s": median(seconds),
        "build_ratio": median(ratios),
        **{name: median(values) for name, values in read.items()},
        "private_bytes": private,
        "pss_bytes": pss,
        "whole_bytes": whole,
        "pickled_bytes": float(len(pickle.dumps(kept))),
    }


def seconds_of(make: Callable[[], object]) -> float:
    began = time.perf_counter()
    made = make()
    took = time.perf_counter() - began
    del made
    return took


def read_ns(entries: Sequence[Any], num_entries: int, count: int = 200_000) -> float:
    """Returns the nanoseconds to read one of the first `num_entries`, at random."""
    indices = random.Random(0).choices(range(num_entries), k=count)
    began = time.perf_counter()
    for index in indices:
        entries[index]
    return (time.perf_counter() - began) / count * 1e9


def growth(entries: Sequence[Any], look: Callable[[Any], object]) -> tuple[float, float, float]:
    """Returns the memory that one worker gains in an epoch.

    Returns:
        its private memory, its PSS, and the PSS of the trainer and all workers divided by the number of workers.
    """
    ways = [(os.pipe(), os.pipe()) for _ in range(NUM_WORKERS)]
    pids = []
    for (go, _), (_, answer) in ways:
        pid = os.fork()
        if pid == 0:
            for _ in range(2):  # before and after the epoch, each once all workers have answered
                os.read(go, 1)
                os.write(answer, f"{memory('Private_')} {memory('Pss:')}".encode().ljust(64))
                os.read(go, 1)
                for position in range(N):
                    look(entries[position * STRIDE % N])
                os.write(answer, b"read".ljust(64))
            os._exit(0)
        pids.append(pid)

    def ask() -> list[bytes]:
        for (_, go), _ in ways:
            os.write(go, b".")
        return [os.read(answer, 64) for _, (answer, _) in ways]

    def figures() -> tuple[np.ndarray, int]:
        told = np.array([list(map(int, answer.split())) for answer in ask()])
        return told.mean(axis=0), int(told[:, 1].sum()) + memory("Pss:")

    before, whole_before = figures()
    ask()
    after, whole_after = figures()
    ask()
    for pid in pids:
        os.waitpid(pid, 0)
    for way in ways:
        for pipe in way:
            os.close(pipe[0]), os.close(pipe[1])
    private, pss = after - before
    return float(private), float(pss), (whole_after - whole_before) / NUM_WORKERS


def memory(field: str) -> int:
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(settings: Settings) -> Result:
    """Measures every kind."""
    found: dict[str, dict[str, float]] = {}
    for name in KINDS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[name] = pool.apply(one, (name, settings.rounds))
    mine, rows_of = found["SharedIndex of str"], found["SharedIndex of tuples"]

    def beside(metric: str, unit: float, form: str) -> str:
        return ", ".join(f"{name} {found[name][metric] / unit:{form}}" for name in KINDS if name != "SharedIndex of str")

    grown = max(mine["private_bytes"], mine["whole_bytes"]) / MIB
    grown_rows = max(rows_of["private_bytes"], rows_of["whole_bytes"]) / MIB
    held = f"{beside('private_bytes', MIB, '.1f')}; PSS of a worker alone {mine['pss_bytes'] / MIB:.1f}"
    ratio, sent = mine["build_ratio"], mine["pickled_bytes"]
    near, far = mine["read_near_ns"], mine["read_far_ns"]
    lists_near, lists_far = (f"list in the same process {mine[f'list_{where}_ns']:.0f}" for where in ("near", "far"))
    table = [
        Row("1 M paths: building over list's", ratio, "x", beside("build_ratio", 1, ".2f"), "<= 1.2x", ratio <= 1.2),
        Row("growth per worker and epoch", grown, "MiB", held, "<= 10 MiB", grown <= 10),
        Row("the same, of rows", grown_rows, "MiB", "", "<= 10 MiB", grown_rows <= 10),
        Row("reading one of a thousand", near, "ns", lists_near, "<= 100 ns", near <= 100),
        Row("reading one of a million", far, "ns", lists_far, "<= 100 ns", far <= 100),
        Row("sent to a spawned worker", sent, "bytes", beside("pickled_bytes", 1, ".3g"), "<= 4096", sent <= 4096),
    ]
    return Result(table, {"kinds": found})


if __name__ == "__main__":
    main("shared_index", __doc__, measure)
