"""Measure the gain from processes of this machine in addition to Ray actors, also if an actor takes longer than they do.

Method: Samples wait and use no CPU; batches of 4, with two batches ordered ahead for each worker. A batch takes 40 ms in a
process of this machine, and as long, twice or four times as long in an actor. The cases are 2 processes alone, 2 actors alone,
and both; each runs in a fresh process, in turn, on a real Ray cluster with one node. If Ray cannot use this machine's own
address, run the benchmark in its own network namespace:

    unshare -rn sh -c 'ip link set lo up; python -m benchmarks.local_workers'

How to read: The figure is the rate of both over the sum of the rates of each alone.

Result (2 cores, other work on the machine at load 4 to 8; single rounds of 3 s), batches/s:
| an actor takes | processes | actors | both | of the sum | both, if any free worker takes the oldest batch |
|---|---|---|---|---|---|
| as long | 47.9-48.1 | 33.2-46.4 | 89.8-94.0 | 0.95-1.16 | |
| twice as long | 47.8 | 23.9 | 69.7 | 0.97 | 47.1 (of the sum 0.65) |
| four times as long | 48.3 | 12.2 | 51.3 | 0.85 | 24.6 (0.42) |
Measured by hand, with actors that take four times as long and four batches ordered ahead for each worker: both 57.5 and 58.4.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cluster import ROOT, cluster
from benchmarks.common import Result, Row, Settings, in_order, main
from shmload import Ray, ShmLoader

HERE = "SHMLOAD_BENCHMARK_HERE"  # set only in the environment of the trainer and its children, because Ray gives actors another one
WAIT_S = 0.010
SLOWNESSES = (1, 2, 4)
POOLS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "actors": {"num_workers": 2, "backend": "ray"},
    "both": {"num_workers": 2, "backend": Ray(num_local_workers=2)},
}
WARM_UP_S = 3.0


class Waiting:
    """Samples that take some time to arrive, and longer in actors."""

    def __init__(self, slowness: int) -> None:
        self.slowness = slowness

    def __len__(self) -> int:
        return 1 << 17

    def __getitem__(self, index: int) -> Any:
        time.sleep(WAIT_S * (1 if HERE in os.environ else self.slowness))
        return np.full(64, index, np.float32)


def rate(pool: str, slowness: int, seconds: float, address: str) -> float:
    """Returns the batches per second, measured in this process."""
    given = {**POOLS[pool], "address": address} if "backend" in POOLS[pool] else POOLS[pool]
    with ShmLoader(Waiting(slowness), 4, shuffle=True, seed=1, **given) as loader:
        batches = iter(loader)
        while not all(worker["num_samples"] for worker in (loader.stats().get("workers") or [{"num_samples": 0}])):
            next(batches)
        begin = time.monotonic() + WARM_UP_S
        while time.monotonic() < begin:
            next(batches)
        count, begin = 0, time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            next(batches)
            count += 1
        return count / (now - begin)


def run(pool: str, slowness: int, seconds: float, address: str) -> float:
    """Returns the batches per second, measured in a fresh process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.local_workers", "--case"]
    command += [pool, str(slowness), str(seconds), address]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, HERE: "yes"}, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{pool}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return float(json.loads(done.stdout.strip().rpartition("\n")[2]))


def measure(settings: Settings) -> Result:
    """Measures every case, or nothing if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        print('left out: Ray is not installed (pip install "shmload[ray]")', file=sys.stderr)
        return Result([])
    found: dict[str, list[float]] = {}
    with cluster("one node") as (address, _):
        for number in range(settings.rounds):
            for slowness in SLOWNESSES:
                for pool in in_order(POOLS, number):
                    found.setdefault(f"{pool}, {slowness}", []).append(run(pool, slowness, settings.seconds, address))
                    print(f"{pool}, {slowness}: {found[f'{pool}, {slowness}'][-1]:.1f} batches/s", file=sys.stderr)
    rows = []
    for slowness in SLOWNESSES:
        processes, actors, both = (median(found[f"{pool}, {slowness}"]) for pool in POOLS)
        beside = f"batches/s: both {both:.1f}, processes {processes:.1f}, actors {actors:.1f}"
        share = both / (processes + actors)
        rows.append(Row(f"actors {slowness}x as slow: share of the sum", share, "", beside, ">= 0.75", share >= 0.75))
    return Result(rows, {"batches_per_s": found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        pool, slowness, seconds, address = sys.argv[2:]
        print(json.dumps(rate(pool, int(slowness), float(seconds), address)))
    else:
        main("local_workers", __doc__, measure)
