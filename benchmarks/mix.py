"""What does a draw from a mixture cost, and how far do the drawn shares stray from the weights?

Method: every row is a process of its own; members of 500,000 samples with random weights (uniform to the fourth power, so that
the rarest is drawn seldom). "per draw" is the time for 2^19 positions in batches of 64, from the draw of the member to the index
in the concatenation, permutations included, over the positions; best of five. "strays" is the largest distance, over the first
2^19 prefixes and all members, between what was drawn and weight * n. "first batch" is the time from nothing to one batch at
position 10^6, its counters given; of the others to the middle of the 2^19.

The others: numpy draws members by Generator.choice, 8,192 at a time, and samples by a permutation that each member goes through;
torch's WeightedRandomSampler, iterated as its DataLoader does it, draws samples by their member's weight over its size, with
replacement; "interleave" is what Hugging Face's interleave_datasets does with probabilities: members by choice, 1,000 at a time,
and a Python loop that counts up in each.

Result, 2 cores of a Xeon with AVX-512 at 2.6 GHz, numpy 2.4, torch 2.13 with 1 thread:

    members  method           per draw    strays   first batch
          2  shmload           29.7 ns       0.5       0.24 ms
          2  numpy choice      43.9 ns       118      14.84 ms
          2  interleave       163.6 ns       120      27.87 ms
          2  torch sampler    395.0 ns       131     162.59 ms
         10  shmload           35.9 ns     0.944       0.41 ms
         10  numpy choice     230.7 ns       551      92.96 ms
         10  interleave       135.0 ns       423      34.30 ms
         10  torch sampler    681.8 ns       444     281.71 ms
         50  shmload           82.5 ns     0.990       1.31 ms
         50  numpy choice    1078.2 ns       464     614.38 ms
         50  interleave       130.1 ns       266      31.98 ms
         50  torch sampler   1114.5 ns       375     628.67 ms
        200  shmload          115.2 ns     0.997       4.11 ms
        200  numpy choice    4601.7 ns       249    2340.08 ms
        200  interleave       146.5 ns       203      37.28 ms
        200  torch sampler   1268.5 ns       233     574.84 ms

How to read it: the bound is 1 - 1/(2K - 2), 0.944 for 10 members and 0.997 for 200; chance strays by hundreds. numpy's rows hold
the permutations of whole members, which are most of it from 50 on; "interleave" does not shuffle at all. Measured while others
used the machine: alone, 10 members took 33 ns (15 the draw, 10 the index, 8 the batch).

    python benchmarks/mix.py [--json]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.schedule.mix_order import MixOrder
from shmload.schedule.shares import Shares

COUNT = 1 << 19
BATCH = 64
SIZE = 500_000
MIDDLE = 10**6
MEMBERS = [2, 10, 50, 200]
METHODS = ["shmload", "numpy choice", "interleave", "torch sampler"]


def weights_of(num_members: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).random(num_members) ** 4 + 1e-9


def order_of(num_members: int) -> MixOrder:
    shares = Shares.of([weights_of(num_members).tolist()])
    return MixOrder([SIZE] * num_members, shares, stop="repeat", shuffle=True)


def of_shmload(num_members: int) -> Iterator[Any]:
    order = order_of(num_members)
    return (order.take(at, at + BATCH, seed=1, epoch=0) for at in range(0, COUNT, BATCH))


def of_numpy(num_members: int) -> Iterator[Any]:
    rng, weights = np.random.default_rng(1), weights_of(num_members)
    orders = [rng.permutation(SIZE) for _ in range(num_members)]
    counters = np.zeros(num_members, np.int64)
    for _ in range(0, COUNT, 8192):
        members = rng.choice(num_members, size=8192, p=weights / weights.sum())
        indices = np.empty(8192, np.int64)
        for member in range(num_members):
            rows = np.flatnonzero(members == member)
            places = (counters[member] + np.arange(len(rows))) % SIZE
            indices[rows] = orders[member][places] + member * SIZE
            counters[member] += len(rows)
        yield from indices.reshape(-1, BATCH)


def of_interleave(num_members: int) -> Iterator[Any]:
    rng, weights = np.random.default_rng(1), weights_of(num_members)
    offsets = [0, *accumulate([SIZE] * num_members)]
    counters, batch = [0] * num_members, []
    for _ in range(0, COUNT, 1000):
        for member in rng.choice(num_members, size=1000, p=weights / weights.sum()).tolist():
            batch.append(offsets[member] + counters[member])
            counters[member] = (counters[member] + 1) % SIZE
            if len(batch) == BATCH:
                yield batch
                batch = []


def of_torch(num_members: int) -> Iterator[Any]:
    import torch
    from torch.utils.data import BatchSampler, WeightedRandomSampler

    torch.set_num_threads(1)
    # one weight a sample; torch.multinomial takes 2^24 of them at most
    each = min(SIZE, (1 << 24) // num_members)
    sampler = WeightedRandomSampler(torch.from_numpy(np.repeat(weights_of(num_members), each)), COUNT)
    return (
        np.array(batch) // each * SIZE + np.array(batch) % each
        for batch in BatchSampler(sampler, BATCH, drop_last=False)
    )


BATCHES: dict[str, Callable[[int], Iterator[Any]]] = {
    "shmload": of_shmload,
    "numpy choice": of_numpy,
    "interleave": of_interleave,
    "torch sampler": of_torch,
}


def best_s(work: Callable[[], object]) -> float:
    """The shortest of five runs."""
    times = []
    for _ in range(5):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)


def strays(method: str, num_members: int) -> float:
    """The largest distance between drawn and meant, a member at a time."""
    drawn = np.concatenate([np.asarray(batch) for batch in BATCHES[method](num_members)])[:COUNT] // SIZE % num_members
    share = weights_of(num_members) / weights_of(num_members).sum()
    meant = np.arange(1, len(drawn) + 1)
    return max(float(abs(np.cumsum(drawn == member) - meant * share[member]).max()) for member in range(num_members))


def measure(method: str, num_members: int) -> dict[str, float]:
    """One row of the table."""

    def read() -> None:
        for _ in BATCHES[method](num_members):
            pass

    row = {"draw_s": best_s(read) / COUNT, "strays": strays(method, num_members)}
    if method != "shmload":
        return {
            **row,
            "first_batch_s": best_s(lambda: next(islice(BATCHES[method](num_members), COUNT // BATCH // 2, None))),
        }
    counters = order_of(num_members).counters_at(MIDDLE, seed=1, epoch=0)

    def first_batch() -> None:
        order = order_of(num_members)
        order.go_on_at(MIDDLE, counters, epoch=0)
        order.take(MIDDLE, MIDDLE + BATCH, seed=1, epoch=0)

    return {**row, "first_batch_s": best_s(first_batch)}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'members':>7}  {'method':<14} {'per draw':>10} {'strays':>9} {'first batch':>13}"]
    lines += [
        f"{row['members']:>7}  {row['method']:<14} {row['draw_s'] * 1e9:>7.1f} ns {row['strays']:>9.3g} "
        f"{row['first_batch_s'] * 1e3:>10.2f} ms"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument("--row", nargs=2, metavar=("METHOD", "MEMBERS"), help="measure this row only, in this process")
    arguments = parser.parse_args()
    if arguments.row:
        method, num_members = arguments.row[0], int(arguments.row[1])
        print(json.dumps({"method": method, "members": num_members, **measure(method, num_members)}))
        return
    rows = []
    for num_members in MEMBERS:
        for method in METHODS:
            command = [sys.executable, __file__, "--row", method, str(num_members)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(json.dumps(rows) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
