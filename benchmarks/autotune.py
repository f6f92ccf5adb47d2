"""Measure how close num_workers="auto" comes to the best fixed number, and check that its batches are the same.

Method: Three workloads in seed mode with batches of 8: samples that wait 10 ms with a training step of 10 ms (8 workers keep
up), samples of 0.5 ms with a step of 20 ms (one worker is more than enough), and samples that compute for some milliseconds
without a step. The step sleeps. The prefetch is "auto" for auto, and 2 for fixed worker pools.

Fixed worker pools of 1, 2, 4 and 8 (where samples compute: 1 and 2) and auto take turns, each in a fresh process, in an order
that alternates; auto may use up to 8 workers (SHMLOAD_MAX_WORKERS), or 2. Fixed worker pools are timed after a warm-up of 16
batches and a second. Auto is timed once it has changed nothing for five seconds and 80 batches: a change that is not urgent
must be confirmed, which takes eight windows of at least half a second and 8 batches. The timed part takes two seconds or more,
because workers that are equally fast deliver batches in bursts. Every batch of every run is hashed, including those during
changes.

How to read: A share of 1 is the rate of the best fixed worker pool of the same round. If the best worker pool is the largest
one allowed, auto can only lose, by its work in `next()`. The best of several pools is also the luckiest, so on a loaded machine
even equally good worker pools have shares of less than 1.

Predicted: 0.97 or more in all three, because the controller stops adding workers once the trainer waits for less than 4 % of
its time.

Result (2 cores, loaded by other work, medians of 3 rounds, auto settled after three seconds without a change): 0.984, 0.979 and
0.987 of the best fixed worker pool. Auto settled 6.4 s after the first batches when it grew from 1 worker to 8 (83 batches/s;
the worst fixed worker pool 10), and 1.4 s after them when it grew from 1 to 2 (34; 13). It changed nothing where one worker was
enough (47; 46). All batches were the same. With samples and steps of 5 ms, equally good worker pools had shares of 0.84 to 1.07
on the same machine. Auto's work in `next()` takes 48 ns per batch, and about 150 us per window of half a second, of which 130
us are spent on reading the amount of free memory.
"""

import multiprocessing
import os
import time
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from multiprocessing.connection import Connection
from statistics import median, median_low
from typing import Any, Literal

import numpy as np

from benchmarks.common import Result, Row, Settings, endless, in_order, main, repeated
from shmload import ShmLoader

BATCH = 8
LEAD, LEAD_S = 16, 1.0  # warm-up of a fixed worker pool: number of batches, and seconds
REST_S, REST_BATCHES = 5.0, 80  # auto is settled after both without a change: ten of its windows; confirming a change takes eight
MOST_S = 60.0  # auto is timed after this time even if it is still changing, which the row reports
LEAST_S = 2.0  # minimum duration of a timed part


@dataclass(frozen=True)
class Load:
    """A workload: seconds of waiting and rounds of computing per sample, and seconds per training step."""

    wait_s: float
    num_rounds: int
    step_s: float
    pools: tuple[int, ...]


LOADS = {
    "decode-bound, samples wait": Load(0.010, 0, 0.010, (1, 2, 4, 8)),
    "consumer-bound": Load(0.0005, 0, 0.020, (1, 2, 4, 8)),
    "decode-bound, samples compute": Load(0.0, 8, 0.0, (1, 2)),
}


class Samples:
    """Samples that take a given time and contain their index."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.block = np.random.default_rng(3).bytes(1 << 18)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.load.wait_s:
            time.sleep(self.load.wait_s)
        for _ in range(self.load.num_rounds):
            blake2b(self.block).digest()
        return {"x": np.full(64, index), "noise": np.random.random(4)}


@dataclass
class Run:
    """The result of one configuration."""

    rate: float  # batches per second
    num_workers: int
    prefetch: int
    settled_s: float  # from the first batch to the last change
    is_settled: bool
    reasons: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class Trainer:
    """Takes batch after batch, epoch after epoch, and hashes them."""

    def __init__(self, loader: ShmLoader[Any], step_s: float) -> None:
        self._batches = endless(loader)
        self._step_s = step_s
        self.digests: list[bytes] = []

    def step(self) -> None:
        batch = next(self._batches)
        told = blake2b(batch["x"].numpy(), digest_size=8)
        told.update(batch["noise"].numpy())
        self.digests.append(told.digest())
        del batch
        if self._step_s:
            time.sleep(self._step_s)


def run(load: Load, pool: int | Literal["auto"], seconds: float) -> Run:
    """Runs one configuration; called in its own process."""
    os.environ["SHMLOAD_MAX_WORKERS"] = str(max(load.pools))
    with ShmLoader(
        Samples(load),
        batch_size=BATCH,
        shuffle=True,
        seed=5,
        num_workers=pool,
        prefetch_factor="auto" if pool == "auto" else 2,
        multiprocessing_context="fork",
    ) as loader:
        trainer = Trainer(loader, load.step_s)
        trainer.step()
        settled_s, is_settled = train_until_settled(trainer, loader) if pool == "auto" else (train_a_while(trainer), True)
        num_steps, took = repeated(trainer.step, max(seconds, LEAST_S))
        said = loader.stats().get("autotune", {"decisions": []})
        reasons = [decision["reason"] for decision in said["decisions"]]
        rate, num_workers, prefetch = num_steps / took, int(loader.num_workers), int(loader.prefetch_factor or 0)
        return Run(rate, num_workers, prefetch, settled_s, is_settled, reasons, trainer.digests)


def train_a_while(trainer: Trainer) -> float:
    """Trains until a fixed worker pool is warm. Returns 0, the time of its last change."""
    began = time.perf_counter()
    while len(trainer.digests) < LEAD or time.perf_counter() - began < LEAD_S:
        trainer.step()
    return 0.0


def train_until_settled(trainer: Trainer, loader: ShmLoader[Any]) -> tuple[float, bool]:
    """Trains until auto has changed nothing for a while.

    Returns:
        the seconds from the first batch to the last change, and whether auto has settled since then.
    """
    began = changed = time.perf_counter()
    newest, num_rested = [], 0
    while (now := time.perf_counter()) - changed < REST_S or num_rested < REST_BATCHES:
        if now - began >= MOST_S:
            return changed - began, False
        trainer.step()
        num_rested += 1
        if (found := loader.stats()["autotune"]["decisions"][-1:]) != newest:
            newest, num_rested, changed = found, 0, time.perf_counter()
    return changed - began, True


def alone(load: Load, pool: int | Literal["auto"], seconds: float) -> Run:
    """Calls `run` in its own process, forked from this one, which has no loader."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(its, load, pool, seconds))
    process.start()
    its.close()
    try:
        found: Run = mine.recv()
    except EOFError:
        raise SystemExit(f"the run with num_workers={pool!r} ended without a result") from None
    process.join()
    return found


def _send(to: Connection, load: Load, pool: int | Literal["auto"], seconds: float) -> None:
    to.send(run(load, pool, seconds))


def measure(settings: Settings) -> Result:
    """Measures the three workloads."""
    rows, measured = [], {}
    for name, load in LOADS.items():
        rounds = [in_turn(load, number, settings.seconds) for number in range(settings.rounds)]
        check_same_batches(name, [each for found in rounds for each in found.values()])
        shares = [found["auto"].rate / best_rate(found) for found in rounds]
        middle = rounds[shares.index(median_low(shares))]
        best = max(load.pools, key=lambda pool: middle[pool].rate)
        auto = middle["auto"]
        settled = f"last change after {auto.settled_s:.1f} s" if auto.is_settled else f"still changing after {MOST_S:.0f} s"
        beside = (
            f"auto {auto.rate:.0f} batches/s with {auto.num_workers} x {auto.prefetch}, {settled}; "
            f"best fixed {middle[best].rate:.0f} with {best}, worst {min(middle[each].rate for each in load.pools):.0f}"
        )
        rows.append(
            Row(f"autotune, {name}: share of the best worker pool", median(shares), "", beside, ">= 0.95", median(shares) >= 0.95)
        )
        measured[name] = [
            {str(pool): {k: v for k, v in asdict(each).items() if k != "digests"} for pool, each in found.items()}
            for found in rounds
        ]
    return Result(rows, {"cases": measured})


def in_turn(load: Load, number: int, seconds: float) -> dict[Any, Run]:
    """Runs all configurations of a workload in one round, in an order that alternates."""
    return {pool: alone(load, pool, seconds) for pool in in_order([*load.pools, "auto"], number)}


def best_rate(found: dict[Any, Run]) -> float:
    """Returns the rate of the best fixed worker pool."""
    return max(each.rate for pool, each in found.items() if pool != "auto")


def check_same_batches(name: str, runs: list[Run]) -> None:
    """Compares every run's batches with those of the longest run."""
    longest = max((each.digests for each in runs), key=len)
    for each in runs:
        if each.digests != longest[: len(each.digests)]:
            raise SystemExit(f"{name}: a batch differs with {each.num_workers} workers")


if __name__ == "__main__":
    main("autotune", __doc__, measure)
