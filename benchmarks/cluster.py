"""What does a crew of Ray actors bring, beside plain Ray, Ray Data, and workers of this machine?

Method: batches of 8 records of 1 MiB; every case in a fresh process, cases in turn, forwards and backwards by rounds, over a real
Ray cluster of this machine: of one node, and of two where all actors are on the node that is not the trainer's. `ray.get` is
plain Ray with as many actors, four calls under way at each, whose batches stay in Ray's read-only memory. The seed's way
is an actor a worker, two calls under way, tensors by pickle. Waiting: samples of 10 ms that cost no CPU. Where Ray cannot use
this machine's own address, run it in a network of its own: `unshare -rn sh -c 'ip link set lo up; python -m benchmarks.cluster'`.

How to read: both nodes, all actors and the trainer share this machine's cores, so compare within a round; CPU seconds a GB say more
than rates. The trainer's CPU is its whole process's, less its own
reading of the batch, and without the agent's; the whole CPU is the cluster's too.

Result (2 cores, others' work beside it: load 3 to 12 on one node, falling from 178 to 34 over two; single rounds of 1.5 s):
| | actors | one node: MB/s | trainer s/GB | all s/GB | two nodes: MB/s | trainer s/GB | all s/GB |
|---|---|---|---|---|---|---|---|
| shmload | 1 | 858 | 0.022 | 1.34 | 283-429 | 0.039-0.046 | 3.54-3.75 |
| shmload | 2 | 811-881 | 0.020-0.023 | 1.26-1.42 | 408-419 | 0.031-0.032 | 3.28-3.49 |
| shmload | 4 | 916-1,001 | 0.018-0.019 | 1.46-1.52 | 335-370 | 0.027-0.031 | 3.38-3.54 |
| ray.get | 1 | 1,277-1,394 | 0.13-0.16 | 0.77-0.92 | 369-479 | 0.33-0.35 | 2.89-2.93 |
| ray.get | 2 | 1,163-1,853 | 0.14-0.16 | 0.86-1.08 | 413-424 | 0.33-0.36 | 3.09-3.28 |
| ray.get | 4 | 821-886 | 0.21-0.24 | 1.34-1.72 | 414-577 | 0.32-0.40 | 3.06-3.65 |
| the seed's way | 2 | 141-450 | 0.65-1.21 | 3.1-5.6 | 251-362 | 0.90-0.95 | 5.3-5.8 |
| Ray Data | 2 | 100-198 | 1.7-2.3 | 6.2-8.0 | 143 | 2.2 | 9.9 |
| torch, local | 2 | 839-1,500 | 0.06-0.07 | 0.87-1.10 | | | |
| shmload, local | 2 | 8,612-8,741 | 0.007 | 0.12 | | | |
Over `ray.get`: two actors over two nodes 0.96 and 1.01 (four 0.58 and 0.89), on one node two 0.44 and 0.64, four 1.03 and 1.22: on
two cores that are always busy, the agent's copy costs what it costs in CPU. Over the seed's way 1.8 and 3.7 on one node. Two and
four actors that wait: 1.01 and 1.06 of linear (10.8 batches/s with one). Before several errands were under way and batches went
whole (same method, but the reading counted): one actor 401 MB/s, 2.60 s/GB in all.
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

from benchmarks.common import Result, Row, Settings, main

ROOT = Path(__file__).resolve().parents[1]
NUMS_WORKERS = (1, 2, 4)
NODES = {"one node": ("4",), "two nodes": ("0", "4")}
CASES: dict[str, list[tuple[str, int]]] = {
    "one node": [
        *((name, count) for name in ("shmload", "ray.get", "waiting") for count in NUMS_WORKERS),
        *((name, 2) for name in ("Ray Data", "seed's way", "torch, local", "shmload, local")),
    ],
    "two nodes": [
        *((name, count) for name in ("shmload", "ray.get") for count in NUMS_WORKERS),
        *((name, 2) for name in ("Ray Data", "seed's way")),
    ],
}
Found = dict[str, list[dict[str, float]]]  # what was measured, a round each, by case


@contextmanager
def cluster(nodes: str) -> Iterator[tuple[str, int]]:
    """Address and process of a running cluster."""
    command = [sys.executable, "-m", "benchmarks.cluster_host", *NODES[nodes]]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        try:
            address = host.stdout.readline().strip()
            if not address:
                raise SystemExit("the Ray cluster has not started: what it says stands above")
            yield address, host.pid
        finally:
            host.communicate()


def run(case: str, num_workers: int, seconds: float, address: str, host_pid: int) -> dict[str, float]:
    """One case in a fresh process."""
    given = [case, str(num_workers), str(seconds), address, str(host_pid)]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cluster_cases", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    values: dict[str, float] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return values


def in_turn(cases: dict[str, list[tuple[str, int]]], settings: Settings) -> Found:
    """Every case of every cluster, round after round."""
    found: Found = {}
    for number in range(settings.rounds):
        for nodes, wanted in cases.items():
            with cluster(nodes) as (address, host_pid):
                for case, num_workers in wanted[:: 1 if number % 2 == 0 else -1]:
                    values = run(case, num_workers, settings.seconds, address, host_pid)
                    found.setdefault(f"{case} x {num_workers}, {nodes}", []).append(values)
                    print(f"{case} x {num_workers}, {nodes}: {_words(values)}", file=sys.stderr)
    return found


def _words(values: dict[str, float]) -> str:
    return (
        f"{values['mb_per_s']:.0f} MB/s, {values['trainer_s_per_gb']:.3f} s/GB in the trainer, "
        f"{values['cpu_s_per_gb']:.2f} s/GB in all"
    )


def ratio(found: Found, metric: str, case: str, other: str) -> float:
    """The median of the ratios within rounds."""
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
    rows.append(
        Row("2 actors on one node: rate over the seed's way", seeds, "x", f"MB/s: {beside}", ">= 5x", seeds >= 5)
    )
    for nodes in NODES:
        for count in NUMS_WORKERS:
            mine, plain = (f"{name} x {count}, {nodes}" for name in ("shmload", "ray.get"))
            share = ratio(found, "mb_per_s", mine, plain)
            beside = f"{_words(middle(found, mine))}; ray.get {_words(middle(found, plain))}"
            rows.append(Row(f"{count} actors, {nodes}: rate over ray.get", share, "x", beside, ">= 0.8x", share >= 0.8))
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
    """Measures every case; nothing where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        print('left out: Ray is not installed (pip install "shmload[ray]")', file=sys.stderr)
        return Result([])
    found = in_turn(CASES, settings)
    measured: dict[str, Any] = {"cases": found}
    return Result(rows_of(found), measured)


if __name__ == "__main__":
    main("cluster", __doc__, measure)
