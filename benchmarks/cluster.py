"""Measure a worker pool of Ray actors compared with plain Ray, Ray Data, and workers on this machine.

Method: Batches of 8 records of 1 MiB. Every case runs in a fresh process, in turn, in an order that is reversed in every other
round, on a real Ray cluster on this machine. One cluster has one node. The other has two nodes with all actors on the second
one, which has its own /dev/shm, as a separate machine has (this requires root, or `unshare -rn` as below). `ray.get` is plain
Ray with as many actors and four calls in flight for each; its batches stay in Ray's read-only memory. "The seed's way" is one
actor per worker with two calls in flight, which sends tensors by pickle. "Waiting" has samples that take 10 ms and no CPU. If
Ray cannot use this machine's own address, run the benchmark in its own network namespace:

    unshare -rn sh -c 'ip link set lo up; python -m benchmarks.cluster'

How to read: Both nodes, all actors and the trainer share this machine's cores, so compare figures within a round. CPU seconds
per GB are more reliable than rates. The trainer's CPU is that of its whole process, without its own reading of the batch and
without the agent. The total CPU includes the cluster.

Shipping: The figures are the seconds to the first batch from a dataset of 1 GB in one array, and from one of 8 KB, with one
actor on the other node. They are compared with ray.put and ray.get of the same array to that node, from a process that is
already connected, to a task whose process has already started.

Result (2 cores, quiet, two rounds of 1.5 s):
| | actors | one node: MB/s | trainer s/GB | all s/GB | two nodes: MB/s | trainer s/GB | all s/GB |
|---|---|---|---|---|---|---|---|
| shmload | 1 | 7,871-8,046 | 0.007-0.008 | 0.22-0.23 | 737-899 | 0.015-0.018 | 2.05-2.51 |
| shmload | 2 | 7,440-7,453 | 0.007-0.008 | 0.24-0.25 | 826-861 | 0.015 | 2.19-2.28 |
| shmload | 4 | 6,592-7,553 | 0.006-0.007 | 0.26-0.29 | 864 | 0.011 | 2.21 |
| ray.get | 1 | 2,280-3,963 | 0.11-0.14 | 0.48-0.79 | 814-939 | 0.24-0.30 | 1.96-2.27 |
| ray.get | 2 | 3,023-3,561 | 0.10-0.11 | 0.52-0.62 | 866-884 | 0.27 | 2.08-2.13 |
| ray.get | 4 | 2,720-3,042 | 0.09 | 0.62-0.71 | 809-881 | 0.25-0.28 | 2.18-2.38 |
| the seed's way | 2 | 611-619 | 0.50-0.64 | 2.9-3.0 | 393-435 | 0.74 | 4.1-4.5 |
| Ray Data | 2 | 180-234 | 2.1-2.9 | 6.9-9.0 | 168-184 | 2.6-2.8 | 9.1-10.3 |
| torch, local | 2 | 1,314-1,395 | 0.10-0.11 | 1.25-1.36 | | | |
| shmload, local | 2 | 22,006-27,811 | 0.004 | 0.07-0.09 | | | |
The rows of shmload and ray.get are from later runs under `chrt -f 1`, those of one node beside other programs (load 11); the
other rows are from a run without it.

Rate over `ray.get`'s (medians of two ratios): with two nodes, 0.93 and 0.96 for 1 and 2 actors, and 0.98 for 4 actors in one
round; in the other round, all processes competed (89 MB/s). With one node 2.7 (2.0, 3.5), 2.3 (2.1, 2.5) and 2.5 (2.4, 2.5),
because actors there write directly into the ring. Before, when the agent copied the batches, it was 0.91, 0.69 and 0.76, and
3.0 over the seed's way. Two and four waiting actors: 1.00 and 1.01 of linear scaling (11.9 batches/s with one).

Shipping took 2.5-3.9 s for 1 GB, 1.4-1.8 s for 8 KB, and 1.1-2.8 s by ray.put and ray.get. This is 0.6 to 1.5 times as long as
ray.put and ray.get, with a median of 1.0 in fourteen rounds beside other programs. With the whole dataset in the pickle it took
5.9-6.3 s. The trainer waits for each batch of one or two actors, and its code is then no longer in the cache, which costs about
200 us per batch.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Result, Row, Settings, in_order, main

ROOT = Path(__file__).resolve().parents[1]
NUMS_WORKERS = (1, 2, 4)
OWN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o mode=1777 shm /dev/shm && exec "$@"', "sh"]
NODES = {"one node": ("4",), "two nodes": ("0", "4")}
CASES: dict[str, list[tuple[str, int]]] = {
    "one node": [
        *((name, count) for name in ("shmload", "ray.get", "waiting") for count in NUMS_WORKERS),
        *((name, 2) for name in ("Ray Data", "seed's way", "torch, local", "shmload, local")),
    ],
    "two nodes": [
        *((name, count) for name in ("shmload", "ray.get") for count in NUMS_WORKERS),
        *((name, 2) for name in ("Ray Data", "seed's way")),
        *((name, 1) for name in ("ship", "ship nothing", "ray.put")),
    ],
}
Found = dict[str, list[dict[str, float]]]  # case -> the figures of each round


@contextmanager
def cluster(nodes: str) -> Iterator[tuple[str, int]]:
    """Yields the address and process id of a running cluster."""
    command = [sys.executable, "-m", "benchmarks.cluster_host", *NODES[nodes]]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        try:
            address = host.stdout.readline().strip()
            if not address:
                raise SystemExit("the Ray cluster has not started: see its output above")
            yield address, host.pid
        finally:
            host.communicate()


def run(case: str, num_workers: int, seconds: float, address: str, host_pid: int, nodes: str) -> dict[str, float]:
    """Runs one case in a fresh process."""
    begin = OWN_MEMORY if nodes == "two nodes" else []
    given = [case, str(num_workers), str(seconds), address, str(host_pid)]
    command = [*begin, sys.executable, "-W", "ignore", "-m", "benchmarks.cluster_cases", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    values: dict[str, float] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return values


def in_turn(cases: dict[str, list[tuple[str, int]]], settings: Settings) -> Found:
    """Runs every case on its cluster, round after round."""
    found: Found = {}
    for number in range(settings.rounds):
        for nodes, wanted in cases.items():
            with cluster(nodes) as (address, host_pid):
                for case, num_workers in in_order(wanted, number):
                    values = run(case, num_workers, settings.seconds, address, host_pid, nodes)
                    found.setdefault(f"{case} x {num_workers}, {nodes}", []).append(values)
                    print(f"{case} x {num_workers}, {nodes}: {_words(values)}", file=sys.stderr)
    return found


def _words(values: dict[str, float]) -> str:
    if "seconds" in values:
        return f"{values['seconds']:.2f} s"
    return (
        f"{values['mb_per_s']:.0f} MB/s, {values['trainer_s_per_gb']:.3f} s/GB in the trainer, "
        f"{values['cpu_s_per_gb']:.2f} s/GB in all"
    )


def ratio(found: Found, metric: str, case: str, other: str) -> float:
    """Returns the median of the ratios within rounds."""
    return median(mine[metric] / theirs[metric] for mine, theirs in zip(found[case], found[other], strict=True))


def middle(found: Found, case: str) -> dict[str, float]:
    return {metric: median(values[metric] for values in found[case]) for metric in found[case][0]}


def rows_of(found: Found) -> list[Row]:
    rows = []
    seeds = ratio(found, "mb_per_s", "shmload x 2, one node", "seed's way x 2, one node")
    beside = ", ".join(
        f"{name} {middle(found, f'{name} x 2, one node')['mb_per_s']:.0f}"
        for name in ("shmload", "seed's way", "Ray Data", "torch, local", "shmload, local")
    )
    rows.append(Row("2 actors on one node: rate over the seed's way", seeds, "x", f"MB/s: {beside}", ">= 5x", seeds >= 5))
    for nodes in NODES:
        for count in NUMS_WORKERS:
            mine, plain = (f"{name} x {count}, {nodes}" for name in ("shmload", "ray.get"))
            share = ratio(found, "mb_per_s", mine, plain)
            beside = f"{_words(middle(found, mine))}; ray.get {_words(middle(found, plain))}"
            rows.append(Row(f"{count} actors, {nodes}: rate over ray.get", share, "x", beside, ">= 0.8x", share >= 0.8))
    shipped = zip(*(found[f"{name} x 1, two nodes"] for name in ("ship", "ship nothing", "ray.put")), strict=True)
    share = median((all_of["seconds"] - start["seconds"]) / plain["seconds"] for all_of, start, plain in shipped)
    beside = ", ".join(f"{name} {_words(middle(found, f'{name} x 1, two nodes'))}" for name in ("ship", "ship nothing", "ray.put"))
    what = "1 GB to another node: first batch, less that of a loader that ships nothing, over ray.put and ray.get"
    rows.append(Row(what, share, "x", beside, "<= 1.2x", share <= 1.2))
    trainer = max(middle(found, f"shmload x 2, {nodes}")["trainer_s_per_gb"] for nodes in NODES)
    beside = f"torch, local {middle(found, 'torch, local x 2, one node')['trainer_s_per_gb']:.3f}"
    rows.append(Row("trainer's CPU, 2 actors", trainer, "s/GB", beside, "<= 0.02 s/GB", trainer <= 0.02))
    for count in NUMS_WORKERS[1:]:
        gain = ratio(found, "batches_per_s", f"waiting x {count}, one node", "waiting x 1, one node") / count
        alone = middle(found, "waiting x 1, one node")["batches_per_s"]
        beside = f"one actor {alone:.1f} batches/s"
        rows.append(Row(f"{count} actors that wait: share of linear", gain, "", beside, ">= 0.9", gain >= 0.9))
    return rows


def measure(settings: Settings) -> Result:
    """Measures every case, or nothing if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        print('left out: Ray is not installed (pip install "shmload[ray]")', file=sys.stderr)
        return Result([])
    found = in_turn(CASES, settings)
    measured: dict[str, Any] = {"cases": found}
    return Result(rows_of(found), measured)


if __name__ == "__main__":
    main("cluster", __doc__, measure)
