"""Measure what `share="node"` saves if two ranks read the same photos, and what it gains if they read different samples.

Method: The `photos` workload of `shmload bench` (JPEG, 500x375 to 224, batches of 64). Two forked ranks read the same batches,
either each with one worker of its own, or with `share="node"` and one worker for both; in turn, the same number of batches each
time. CPU is that of the ranks after the first batches, and of all workers over their whole life. The ranks only read one number
of each batch. Tiny rows measure the hand-off alone, because almost nothing is decoded.

Then two ranks with two workers each run in lockstep, as with an all-reduce. Each reads its own part of the data, and samples of
rank 1 take four times as long. A sample is a sleep (1 ms, 4 ms), as if it waited for a disk, so that two cores are enough for
four workers.

How to read: Photos are nearly all decoding, so half of the CPU can be saved. Rows cost almost nothing to read, so little is
saved, and the pages of a batch are renewed at each lease to keep a rank's writes private.

Without help, two workers need 4 units per sample; with help, four workers need 5. This gives at most 1.6x the steps.

Predicted: photos 0.5x the CPU; tiny rows 1x; unequal ranks 1.5x the steps.

Result (2 cores, a load of 7 from other work; the ratio of the sums is the median of three rounds):
| CPU us per batch | rank 0 | rank 1 | workers | sharing over not sharing |
|---|---|---|---|---|
| photos, not sharing | 1133 | 1142 | 144879 | |
| photos, sharing | 951 | 872 | 70453 | 0.49 |
| tiny rows, not sharing | 27 | 25 | 92 | |
| tiny rows, sharing | 37 | 34 | 49 | 0.83 |

Unequal ranks (a load of 8; medians of three rounds): 14.3 steps per second without help, 21.3 with help, 1.49x; helpers filled
243 parts of batches.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import secrets
from collections.abc import Callable, Mapping
from statistics import median
from time import monotonic, sleep
from typing import Any

import numpy as np

from benchmarks.common import Result, Row, Settings, in_order, main
from shmload import ShmLoader
from shmload.formats import ArrayDataset
from shmload.tools.bench.photos import Photos, photo_files

NUM_RANKS, NUM_WARM = 2, 8
NUM_UNEQUAL, UNEQUAL_BATCH = 88, 32


def cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def rank(number: int, run: str, dataset: Any, num_batches: int, share: str | None, sender: Any) -> None:
    """Measures the CPU per batch of one rank and of its workers. The workers' CPU is read after they have ended."""
    os.environ.update(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(NUM_RANKS), TORCHELASTIC_RUN_ID=run)
    loader = ShmLoader(
        dataset, 64, shuffle=True, seed=1, num_workers=1, rank=0, world_size=1, share=share, multiprocessing_context="fork"
    )
    batches = iter(loader)
    for _ in range(NUM_WARM):
        next(batches)
    mine = cpu_s(resource.RUSAGE_SELF)
    for _ in range(num_batches - NUM_WARM):
        int(next(batches)["label"][0])
    mine = (cpu_s(resource.RUSAGE_SELF) - mine) / (num_batches - NUM_WARM)
    workers = loader.stats()["samples"] / 64 if share is None or number == 0 else 0
    loader.close()
    theirs = cpu_s(resource.RUSAGE_CHILDREN) / workers if workers else 0.0
    sender.send((mine, theirs))


def in_ranks(target: Callable[..., None], *arguments: Any) -> list[Any]:
    """Runs target(number, run, *arguments, sender) in each forked rank, and returns what it sends."""
    fork, run = multiprocessing.get_context("fork"), secrets.token_hex(8)
    ends = [fork.Pipe(duplex=False) for _ in range(NUM_RANKS)]
    ranks = [fork.Process(target=target, args=(number, run, *arguments, ends[number][1])) for number in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    told = [receiver.recv() for receiver, _ in ends]
    for process in ranks:
        process.join()
    return told


def cost(dataset: Any, num_batches: int, share: str | None) -> tuple[float, float, float]:
    """Returns the CPU seconds per batch of rank 0, of rank 1, and of all workers."""
    told = in_ranks(rank, dataset, num_batches, share)
    return told[0][0], told[1][0], told[0][1] + told[1][1]


def rounds_of(dataset: Any, num_batches: int, rounds: int) -> Mapping[str, list[tuple[float, float, float]]]:
    found: dict[str, list[tuple[float, float, float]]] = {"alone": [], "node": []}
    for number in range(rounds):
        for name in in_order(found, number):
            found[name].append(cost(dataset, num_batches, None if name == "alone" else name))
    return found


def row(what: str, found: Mapping[str, list[tuple[float, float, float]]], aim: float) -> Row:
    ratio = median(sum(shared) / sum(alone) for shared, alone in zip(found["node"], found["alone"], strict=True))
    parts = [
        f"{name}: ranks {median(one[0] for one in each) * 1e6:.0f} and {median(one[1] for one in each) * 1e6:.0f} us, workers "
        f"{median(one[2] for one in each) * 1e6:.0f} us"
        for name, each in found.items()
    ]
    return Row(what, ratio, "x", "; ".join(parts), f"<= {aim}x", ratio <= aim)


class Unequal:
    """Samples that take some time; those of one rank take four times as long."""

    def __len__(self) -> int:
        return NUM_RANKS * UNEQUAL_BATCH * NUM_UNEQUAL

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        sleep(0.004 if index // UNEQUAL_BATCH % NUM_RANKS else 0.001)
        return np.full((16, 16), index, np.int64)


def unequal_rank(number: int, run: str, share: str | None, all_have: Any, sender: Any) -> None:
    """Measures the steps per second of ranks that wait for each other, and the parts of this rank's batches that helpers filled."""
    os.environ.update(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(NUM_RANKS), TORCHELASTIC_RUN_ID=run)
    loader = ShmLoader(
        Unequal(),
        UNEQUAL_BATCH,
        seed=1,
        num_workers=2,
        rank=number,
        world_size=NUM_RANKS,
        share=share,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    began = 0.0
    for step in range(NUM_UNEQUAL):
        if step == NUM_WARM:
            began = monotonic()
        next(batches)
        all_have.wait()
    rate = (NUM_UNEQUAL - NUM_WARM) / (monotonic() - began)
    sender.send((rate, loader.stats().get("num_chunks_by_helpers", 0)))
    all_have.wait()
    loader.close()


def unequal(share: str | None) -> tuple[float, int]:
    """Returns the steps per second, and the number of parts of batches that helpers filled."""
    told = in_ranks(unequal_rank, share, multiprocessing.get_context("fork").Barrier(NUM_RANKS))
    return min(rate for rate, _ in told), sum(parts for _, parts in told)


def unequal_pair(number: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """Measures without and with help, in an order that alternates."""
    found = {share: unequal(share) for share in in_order((None, "node"), number)}
    return found[None], found["node"]


def row_of_unequal(found: list[tuple[tuple[float, int], tuple[float, int]]]) -> Row:
    ratio = median(helped[0] / alone[0] for alone, helped in found)
    alone, helped = (median(pair[side][0] for pair in found) for side in range(2))
    parts = median(pair[1][1] for pair in found)
    beside = f"alone {alone:.1f}, helped {helped:.1f} steps a second; {parts:.0f} parts of batches by helpers"
    return Row("unequal ranks in lock-step: steps with help over without", ratio, "x", beside, ">= 1.3x", ratio >= 1.3)


def measure(settings: Settings) -> Result:
    """Measures all cases. The aim with photos is half of the CPU, plus a tenth of that for the rest of the work."""
    photos = Photos(photo_files(), num_samples=64 * 64)
    num_rows = 64 * 2000
    tiny = ArrayDataset({"x": np.random.default_rng(0).random((num_rows, 64), np.float32), "label": np.arange(num_rows)})
    of_photos = rounds_of(photos, 28, settings.rounds)
    of_rows = rounds_of(tiny, 1500, settings.rounds)
    of_unequal = [unequal_pair(number) for number in range(settings.rounds)]
    rows = [
        row("photos: CPU a batch of two ranks that share over two that do not", of_photos, 0.55),
        row("tiny rows: the same", of_rows, 1.25),
        row_of_unequal(of_unequal),
    ]
    return Result(rows, {"photos": of_photos, "tiny rows": of_rows, "unequal ranks": of_unequal})


if __name__ == "__main__":
    main("share", __doc__, measure)
