"""Measure the cost per index of a shuffled epoch, and the time to the first batch in its middle.

Method: Every row is measured in a process of its own. "per index" is the best of 7 timings: for shmload, of filling 65,536
indices; for numpy's Generator.permutation and torch.randperm, of the whole permutation, because they offer nothing else. "first
batch" is the time from creation to 1,024 indices from the middle of the epoch. "held" is the memory that remains in use. Peers
are skipped if their 8 n bytes exceed `--max-bytes`. "shmload" uses the fastest instruction set of the CPU; "shmload avx2" and
"shmload base" (plain x86-64, as before 2013) are the same code compiled for older instruction sets.

Result, 2 cores of a Xeon with AVX-512 at 2.6 GHz, numpy 2.4, torch 2.13 with 1 thread:

           n  method         per index   first batch         held
      65,536  shmload          0.14 ns      171.1 us    131,256 B
      65,536  shmload avx2     0.15 ns      169.3 us    131,256 B
      65,536  shmload base     0.14 ns      164.3 us    131,256 B
      65,536  numpy            7.75 ns      507.6 us    524,288 B
      65,536  torch            4.49 ns      294.2 us    524,288 B
        10^5  shmload          2.29 ns        2.8 us        184 B
        10^5  shmload avx2     3.20 ns        3.8 us        184 B
        10^5  shmload base     6.70 ns        7.6 us        184 B
        10^5  numpy            8.14 ns      814.4 us    800,000 B
        10^5  torch            3.24 ns      324.2 us    800,000 B
        10^6  shmload          2.19 ns        2.7 us        184 B
        10^6  shmload avx2     3.13 ns        3.8 us        184 B
        10^6  shmload base     6.49 ns        7.3 us        184 B
        10^6  numpy            9.01 ns     9007.0 us  8,000,000 B
        10^6  torch            6.17 ns     6173.0 us  8,000,000 B
        10^9  shmload          2.19 ns        2.7 us        184 B
        10^9  shmload avx2     3.05 ns        3.7 us        184 B
        10^9  shmload base     6.46 ns        7.3 us        184 B
       10^12  shmload          2.24 ns        2.8 us        184 B
       10^12  shmload avx2     3.05 ns        3.7 us        184 B
       10^12  shmload base     6.63 ns        7.5 us        184 B

How to read: The cost of an index does not depend on n, and seeking costs no more than the batch. The peers pay for the whole
epoch before its first batch, and their cost per index grows when the array outgrows the caches. 65,536 is the largest n with a
table: its first batch pays for the shuffle, about 3 ns per index, once per epoch.

    python benchmarks/permutation.py [--json] [--max-bytes N]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from shmload._core.permutation import ISAS, TABLE_MAX_N, KeyedPermutation

SIZES = [65_536, 10**5, 10**6, 10**9, 10**12]
METHODS = ["shmload", *(f"shmload {isa}" for isa in reversed(ISAS[:-1])), "numpy", "torch"]
NUM_INDICES = 65_536
BATCH_SIZE = 1024


def best_s(work: Callable[[], object]) -> float:
    """Returns the duration of the shortest of seven runs."""
    times = []
    for _ in range(7):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)


def measure_shmload(n: int, isa: str | None) -> dict[str, float]:
    """Measures shmload's order: filling, seeking, and its memory."""
    out = np.empty(min(n, NUM_INDICES), np.int64)
    order = KeyedPermutation(n, seed=1, epoch=0, isa=isa)
    order.fill(0, out)
    fill_s = best_s(lambda: order.fill(0, out))
    first_s = best_s(lambda: KeyedPermutation(n, seed=2, epoch=0, isa=isa).fill(n // 2, out[:BATCH_SIZE]))
    held_bytes = sys.getsizeof(order) + (2 * n if n <= TABLE_MAX_N else 0)
    return {"index_s": fill_s / len(out), "first_batch_s": first_s, "held_bytes": held_bytes}


def measure_peer(n: int, permute: Callable[[int], object]) -> dict[str, float]:
    """Measures a whole permutation, because its first batch is available only when it is complete."""
    whole_s = best_s(lambda: permute(n))
    return {"index_s": whole_s / n, "first_batch_s": whole_s, "held_bytes": 8 * n}


def measure(method: str, n: int) -> dict[str, float]:
    """Measures one row of the table."""
    if method.startswith("shmload"):
        return measure_shmload(n, method.partition(" ")[2] or None)
    if method == "numpy":
        return measure_peer(n, np.random.default_rng(1).permutation)
    import torch

    torch.set_num_threads(1)
    return measure_peer(n, torch.randperm)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text."""
    lines = [f"{'n':>8}  {'method':<13} {'per index':>10} {'first batch':>13} {'held':>12}"]
    for row in rows:
        index_ns, first_us = row["index_s"] * 1e9, row["first_batch_s"] * 1e6
        size = f"{row['n']:,}" if row["n"] == 65_536 else f"10^{len(str(row['n'])) - 1}"
        lines.append(f"{size:>8}  {row['method']:<13} {index_ns:>7.2f} ns {first_us:>10.1f} us {row['held_bytes']:>10,} B")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument("--max-bytes", type=int, default=1 << 30, help="largest array a peer may make; default: 1 GiB")
    parser.add_argument("--row", nargs=2, metavar=("METHOD", "N"), help="measure this row only, in this process")
    arguments = parser.parse_args()
    if arguments.row:
        method, n = arguments.row[0], int(arguments.row[1])
        print(json.dumps({"method": method, "n": n, **measure(method, n)}))
        return
    rows = []
    for n in SIZES:
        for method in METHODS:
            if method in ("numpy", "torch") and 8 * n > arguments.max_bytes:
                continue
            command = [sys.executable, __file__, "--row", method, str(n)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(json.dumps(rows) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
