"""Measure the cost per index of each sampling order, and the padding that batches by length save.

Method: Every row is measured in a process of its own, with n = 10^6. "per index" is the time to read an epoch in batches of 64
(32 by length), including the order's own preparation, over its number of indices. "first batch" is the time from the start to
one batch in the middle of the epoch. torch's samplers are iterated as its DataLoader does it, and cannot start in the middle.
The figures are the best of three.

Padding: The lengths are log-normal (mean of the logarithm 4.5, deviation 0.8, at most 2,048: mean 124), in batches of 32
samples or of 4,096 tokens. "padding" is the share of padding in the batches' rows. "8 ranks" is what the busiest rank of a step
reads over the mean of all ranks, summed over the steps. It shows by how much the slowest rank makes a run longer.

Result, 2 cores of a Xeon with AVX-512 at 2.6 GHz, numpy 2.4, torch 2.13 with 1 thread:

    order                           per index   first batch
    shuffle                           13.0 ns        3.8 us
    BlockShuffle, blocks of 1,000     37.9 ns       56.9 us
    BlockShuffle, blocks of 64        43.5 ns       52.9 us
    Weighted                          21.8 ns        2.3 us
    Weighted, no replacement         166.6 ns   141183.7 us
    LengthBuckets of 32               73.4 ns    46135.5 us
    TokenBudget of 4,096              76.5 ns    48595.1 us
    torch, RandomSampler              96.8 ns    44811.2 us
    torch, WeightedRandomSampler     247.3 ns   233121.1 us
    torch, the same, no replacement  152.8 ns   137100.7 us

    batches                           padding   if shuffled   8 ranks
    LengthBuckets of 32                  7.9%         75.9%      1.41
    the same, group=1                    7.9%         75.9%      2.91
    the same, window=1000                1.0%         75.9%      1.06
    TokenBudget of 4,096                 1.9%         61.5%      1.03

How to read: A formula costs the same in the middle as at the start. What is computed per epoch (without replacement, by length)
is paid for once, by the first batch. In bulk, 65,536 at a time, BlockShuffle takes 5 to 12 ns and Weighted 7 to 12; the rest is
the 2 us that each batch costs. With a token budget, ranks have equal work. With batches of 32, groups of neighbors help, and
larger windows help more.

    python benchmarks/sampling.py [--json]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload import BlockShuffle, LengthBuckets, Permutation, TokenBudget, Weighted
from shmload.schedule.bucketed import Bucketed
from shmload.schedule.keyed_order import KeyedOrder

N = 10**6
BATCH = 64
RANKS = 8


def lengths() -> NDArray[np.int64]:
    return np.clip(np.random.default_rng(0).lognormal(4.5, 0.8, N), 1, 2048).astype(np.int64)


def weights() -> NDArray[np.float64]:
    return np.random.default_rng(0).random(N)


def of_torch(kind: str) -> Callable[[], Iterable[list[int]]]:
    """Returns a function that returns torch's batches of one epoch."""
    import torch
    from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

    torch.set_num_threads(1)
    given = torch.from_numpy(weights())
    samplers: dict[str, Callable[[], Any]] = {
        "RandomSampler": lambda: RandomSampler(range(N)),
        "WeightedRandomSampler": lambda: WeightedRandomSampler(given, N),
        "the same, no replacement": lambda: WeightedRandomSampler(given, N, replacement=False),
    }
    return lambda: BatchSampler(samplers[kind](), BATCH, drop_last=False)


def of_permutation() -> Callable[[int], Iterator[Any]]:
    def batches(start: int) -> Iterator[Any]:
        order = Permutation(N, seed=1)
        return (order.take(at, min(at + BATCH, N)) for at in range(start, N, BATCH))

    return batches


def of_order(order: KeyedOrder) -> Callable[[int], Iterator[Any]]:
    epochs = iter(range(10**6))

    def batches(start: int) -> Iterator[Any]:
        epoch = next(epochs)
        return (order.take(at, min(at + BATCH, N), seed=1, epoch=epoch) for at in range(start, N, BATCH))

    return batches


def of_lengths(order: Bucketed) -> Callable[[int], Iterator[Any]]:
    epochs = iter(range(10**6))

    def batches(start: int) -> Iterator[Any]:
        epoch = next(epochs)
        count = order.num_batches(seed=1, epoch=epoch)
        return (order.batch(number, seed=1, epoch=epoch) for number in range(start * count // N, count))

    return batches


OURS: dict[str, Callable[[], Callable[[int], Iterator[Any]]]] = {
    "shuffle": of_permutation,
    "BlockShuffle, blocks of 1,000": lambda: of_order(BlockShuffle(N, block_size=1000)),
    "BlockShuffle, blocks of 64": lambda: of_order(BlockShuffle(N, block_size=64)),
    "Weighted": lambda: of_order(Weighted(weights())),
    "Weighted, no replacement": lambda: of_order(Weighted(weights(), replacement=False)),
    "LengthBuckets of 32": lambda: of_lengths(LengthBuckets(lengths(), batch_size=32)),
    "TokenBudget of 4,096": lambda: of_lengths(TokenBudget(lengths(), max_tokens=4096)),
}
TORCHS = ["RandomSampler", "WeightedRandomSampler", "the same, no replacement"]
BY_LENGTH: dict[str, Callable[[], Bucketed]] = {
    "LengthBuckets of 32": lambda: LengthBuckets(lengths(), batch_size=32),
    "the same, group=1": lambda: LengthBuckets(lengths(), batch_size=32, group=1),
    "the same, window=1000": lambda: LengthBuckets(lengths(), batch_size=32, window=1000),
    "TokenBudget of 4,096": lambda: TokenBudget(lengths(), max_tokens=4096),
}


def best_s(work: Callable[[], object]) -> float:
    """Returns the duration of the shortest of three runs."""
    times = []
    for _ in range(3):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)


def measure(method: str) -> dict[str, float]:
    """Measures one row of the first table."""
    if method in TORCHS:
        of_epoch = of_torch(method)

        def batches(start: int) -> Iterator[Any]:
            return islice(iter(of_epoch()), start // BATCH, None)
    else:
        batches = OURS[method]()

    def read() -> None:
        for _ in batches(0):
            pass

    return {"index_s": best_s(read) / N, "first_batch_s": best_s(lambda: next(batches(N // 2)))}


def waste(method: str) -> dict[str, float]:
    """Measures one row of the second table."""
    order, length = BY_LENGTH[method](), lengths()
    share, shuffled = order.padding(seed=1)
    count = order.num_batches(seed=1, epoch=0) // RANKS * RANKS
    batches = (order.batch(number, seed=1, epoch=0) for number in range(count))
    costs = np.array([length[batch].max() * len(batch) for batch in batches]).reshape(-1, RANKS)
    return {"padding": share, "shuffled": shuffled, "ranks": costs.max(axis=1).sum() / costs.mean(axis=1).sum()}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text."""
    lines = [f"{'order':<30} {'per index':>10} {'first batch':>13}"]
    for row in rows:
        if "index_s" in row:
            name = f"torch, {row['method']}" if row["method"] in TORCHS else row["method"]
            lines.append(f"{name:<30} {row['index_s'] * 1e9:>7.1f} ns {row['first_batch_s'] * 1e6:>10.1f} us")
    lines += ["", f"{'batches':<30} {'padding':>10} {'if shuffled':>13} {'8 ranks':>9}"]
    for row in rows:
        if "padding" in row:
            lines.append(f"{row['method']:<30} {row['padding']:>10.1%} {row['shuffled']:>13.1%} {row['ranks']:>9.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument("--row", nargs=2, metavar=("TABLE", "METHOD"), help="measure this row only, in this process")
    arguments = parser.parse_args()
    if arguments.row:
        kind, method = arguments.row
        print(json.dumps({"method": method, **(measure if kind == "cost" else waste)(method)}))
        return
    rows = []
    for kind, methods in (("cost", [*OURS, *TORCHS]), ("waste", [*BY_LENGTH])):
        for method in methods:
            command = [sys.executable, __file__, "--row", kind, method]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(json.dumps(rows) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
