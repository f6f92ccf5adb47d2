"""Measure the time to start workers by fork, forkserver and spawn, and the private memory of each worker.

Method: 2 workers, batches of 16 from 256 rows; fresh processes in turn. The time is from before the loader is created to its
first batch: for the first loader of a process, and the median of the three after it. Memory is Private_Clean plus Private_Dirty
of the larger worker at the first batch of the last loader. Rows are a numpy array in seed mode, which workers read without
torch, or a TensorDataset in torch mode. The program is passed by `-c`, so workers have no `__main__` to import.

How to read: With forkserver and spawn, each of torch's workers imports what it needs, every time. With shmload, one process
imports it once, and workers are forks of that process.

Result (2 cores, much other load, one round). These figures should be measured again on an idle machine:
| first s, later s, MiB | seed mode | torch mode | torch |
|---|---|---|---|
| forkserver | 0.85, 0.078, 6.7 | 4.8, 0.19, 9.2 | 4.7, 4.9, 145 |
| spawn | 0.52, 0.074, 6.6 | 3.3, 0.12, 9.8 | 5.8, 6.3, 146 |
| fork | 0.14, 0.13, 6.1 | 0.17, 0.16, 7.9 | 0.12, 0.10, 8 |
"""

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.common import Result, Row, Settings, in_order, main

METHODS = ("fork", "forkserver", "spawn")
WAYS = {"shmload, seed mode, numpy": "seed", "shmload, torch mode": "torch mode", "torch": "torch"}
LATER_S, MOST_MIB = 0.1, 20

PROGRAM = """
import json, sys, time
import numpy as np
way, method = sys.argv[1:]

def private_mib(pid):
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) / 1024

def once():
    began = time.perf_counter()
    if way == "torch":
        loader = DataLoader(rows, 16, num_workers=2, multiprocessing_context=method)
        iterator = iter(loader)
        next(iterator)
        took = time.perf_counter() - began
        return took, max(private_mib(worker.pid) for worker in iterator._workers)
    with ShmLoader(rows, 16, num_workers=2, seed=1 if way == "seed" else None, multiprocessing_context=method) as loader:
        iterator = iter(loader)
        next(iterator)
        took = time.perf_counter() - began
        return took, max(private_mib(pid) for pid in loader._builder.last.pool.pids)

if __name__ == "__main__":
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from shmload import ShmLoader
    rows = np.zeros((256, 16)) if way == "seed" else TensorDataset(torch.zeros(256, 16))
    found = [once() for _ in range(4)]
    seconds, sizes = zip(*found)
    print(json.dumps({"first_s": seconds[0], "later_s": sorted(seconds[1:])[1], "private_mib": sizes[-1]}))
"""


def measured(way: str, method: str) -> dict[str, float]:
    """Runs the program in a fresh process, and returns what it measured."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, method],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(settings: Settings) -> Result:
    """Measures every program with every start method."""
    cases = [(name, method) for method in METHODS for name in WAYS]
    values: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(settings.rounds):
        for case in in_order(cases, number):
            values[case].append(measured(WAYS[case[0]], case[1]))
    found = {
        case: {metric: statistics.median(each[metric] for each in rounds) for metric in rounds[0]}
        for case, rounds in values.items()
    }
    rows = []
    for name, method in cases:
        if name == "torch" or method == "fork":
            continue
        got, forked, torchs = (found[case] for case in ((name, method), (name, "fork"), ("torch", method)))
        for what, metric, unit, most in (
            ("first batch of the first loader", "first_s", "s", torchs["first_s"]),
            ("first batch of a later one", "later_s", "s", LATER_S),
            ("a worker's own memory", "private_mib", "MiB", MOST_MIB),
        ):
            beside = f"by fork {forked[metric]:.3g}, torch {torchs[metric]:.3g}"
            rows.append(Row(f"{name}, {method}: {what}", got[metric], unit, beside, f"<= {most:.3g} {unit}", got[metric] <= most))
    plain: dict[str, Any] = {f"{name}, {method}": got for (name, method), got in found.items()}
    return Result(rows, {"cases": plain})


if __name__ == "__main__":
    main("start_methods", __doc__, measure)
