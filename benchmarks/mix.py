"""Measure the cost of drawing an index from a mixture.

Method: One process makes 2,000,000 draws in batches of 64 and of 8,192 from shuffled members of ten million samples with random
weights; the figures are nanoseconds per index. They are compared with numpy's choice of a member and with torch's
WeightedRandomSampler over the members. These draw only the member and not the sample, and match the weights only on average.
The figures are medians of the rounds.

How to read: The plain shuffle's permutation takes about 10 ns in batches of 64. The rest is finding the member, and sorting by
member.

Predicted: 32 ns with 10 members in bulk: 17 to find the earliest deadline, 3 to sort, 10 to permute, 2 to put the indices in
place; 8 more in batches of 64, for the call. (Comparing deadlines with branches alone took 47, because they are unpredictable.)

Result (2 cores): 29.8 ns with 10 members in bulk and 38 in batches of 64; 73 and 79 with 50 members; 102 and 114 with 200.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch.utils.data import WeightedRandomSampler

from benchmarks.common import Result, Row, Settings, in_order, main
from shmload.schedule.mix_order import MixOrder

NUM_DRAWS = 2_000_000


def draws(num_members: int, batch_size: int) -> Callable[[], None]:
    """Returns a function that makes all draws, batch after batch."""
    order = MixOrder([10**7] * num_members, {0: weights_of(num_members)}, stop="repeat", shuffle=True)

    def run() -> None:
        for start in range(0, NUM_DRAWS, batch_size):
            order.take(start, start + batch_size, seed=1, epoch=0)

    return run


def weights_of(num_members: int) -> list[float]:
    weights: list[float] = np.random.default_rng(num_members).random(num_members).tolist()
    return weights


def numpys(num_members: int) -> Callable[[], None]:
    weights = np.array(weights_of(num_members))
    rng = np.random.default_rng(0)

    def run() -> None:
        for _ in range(0, NUM_DRAWS, 64):
            rng.choice(num_members, 64, p=weights / weights.sum())

    return run


def torchs(num_members: int) -> Callable[[], None]:
    def run() -> None:
        for _ in WeightedRandomSampler(torch.tensor(weights_of(num_members)), NUM_DRAWS):  # type: ignore[arg-type]  # takes tensors
            pass

    return run


def measure(settings: Settings) -> Result:
    """Measures the mixture and the alternatives."""
    cases = {f"{k} members, {b}": (lambda k=k, b=b: draws(k, b)) for k in (10, 50, 200) for b in (64, 8192)}
    cases |= {"numpy's choice, 64": lambda: numpys(10), "WeightedRandomSampler": lambda: torchs(10)}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(settings.rounds):
        for name in in_order(cases, number):
            run = cases[name]()
            began = perf_counter()
            run()
            found[name].append((perf_counter() - began) / NUM_DRAWS * 1e9)
    ns = {name: median(each) for name, each in found.items()}
    got = ns["10 members, 8192"]
    beside = ", ".join(f"{name}: {ns[name]:.0f}" for name in cases if name != "10 members, 8192")
    return Result([Row("a draw of a mixture of 10", got, "ns", beside, "<= 50 ns", got <= 50)], {"ns": found})


if __name__ == "__main__":
    main("mix", __doc__, measure)
