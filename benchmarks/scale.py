"""Measure the order, a resume, the plan of shards and the metadata with 4,096 ranks, 10^11 samples and a million shards.

Method: No such job runs here. Instead, one process runs the product's own code for each role, and for one of several equal
roles. A rank is a ShmLoader with world_size=4096 over a dataset of its indices. Every rank in turn computes one step of the
order. The plan is that of a dataset whose manifest names a million shards of 100,000 samples. The shards do not exist, because
they are not read.

    order       one step of all ranks, at three places of the epoch: no index occurs twice, and their positions (by the inverse
                permutation) are those of the step; then the same step by a quarter and by twice as many ranks
    resume      the first batch of the last rank, fresh and at nine tenths of the epoch
    metadata    the manifest: its size, the time to open it, the memory of a process, and of a forked worker that plans with it
    plan        a seek in the order of shards; with 512 nodes, the number of shards of each node over an equal share

How to read: The figures are bounds, not rates. The manifest grows with the number of shards, and is read once, when the dataset
is created. The index grows with the number of samples, by 70 bytes each, and a node has only that of its own shards. Nothing
grows with the number of ranks.

Predicted: 1 ms per step for a rank of a plain order, 1.0 for a resume, 0.5 GB for a million shards.

Result (2 cores, other work on the machine): 2 us, 0.87, 280 MiB; 5 MiB more in a worker, and 222 when each access to the next
windows still made a list of all windows of the epoch. docs/remote.md has the rest, and explains what limits it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Result, Row, Settings, main
from benchmarks.resume import NUM_STARTS, Numbers, best
from shmload import ShmLoader
from shmload.remote import RemoteDataset
from shmload.schedule.node_shuffle import NodeShuffle
from shmload.schedule.permutation import Permutation
from shmload.schedule.schedule import Schedule
from shmload.schedule.state_checksum import with_checksum

RANKS, BATCH, NODES = 4096, 32, 512
SHARDS, PER_SHARD = 10**6, 10**5
GENERATION = "0123456789abcdef"


def num_samples() -> int:
    return SHARDS * PER_SHARD


def order(rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Checks that a step of all ranks is complete, and measures a rank's cost for its part."""
    n, stride = num_samples(), RANKS * BATCH
    schedule = Schedule(n, batch_size=BATCH, seed=7, shuffle=True, world_size=RANKS)
    whole = Permutation(n, seed=7, epoch=3)
    for step in (0, schedule.num_steps // 2, n // stride - 1):
        of_all = np.concatenate([schedule.batch(3, step, rank) for rank in range(RANKS)])
        places = whole.inverse(of_all)
        if sorted(places.tolist()) != list(range(step * stride, (step + 1) * stride)):
            raise ValueError(f"step {step} is not what its positions are")
        for ranks in (RANKS // 4, RANKS * 2):
            other = Schedule(n, batch_size=stride // ranks, seed=7, shuffle=True, world_size=ranks)
            if not np.array_equal(np.concatenate([other.batch(3, step, rank) for rank in range(ranks)]), of_all):
                raise ValueError(f"step {step} is another one with {ranks} ranks")
    count = 2000
    steps = np.random.default_rng(0).integers(0, schedule.num_steps, count).tolist()

    def one() -> float:
        began = time.perf_counter()
        for step in steps:
            schedule.batch(3, step, RANKS - 1)
        return (time.perf_counter() - began) / count * 1e6

    us = best(one, rounds)
    beside = f"{RANKS} ranks, {n:.0e} samples, any step; exactly once, the same on a quarter and twice the ranks"
    return [Row("a rank's part of a step", us, "us", beside, "<= 100 us", us <= 100)], {"step_us": us}


def first_batch_s(state: dict[str, Any] | None) -> tuple[float, dict[str, Any]]:
    """Returns the time to the last rank's first batch, and the loader's state after it."""
    began = time.perf_counter()
    options: dict[str, Any] = {"shuffle": True, "seed": 7, "num_workers": 1, "rank": RANKS - 1, "world_size": RANKS}
    with ShmLoader(Numbers(num_samples()), BATCH, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - began, loader.state_dict()


def resume(rounds: int) -> tuple[list[Row], dict[str, Any]]:
    _, state = first_batch_s(None)
    late = with_checksum({**state, "position": num_samples() * 9 // 10 // (RANKS * BATCH) * RANKS * BATCH})
    pairs = [(first_batch_s(None)[0], first_batch_s(late)[0]) for _ in range(max(rounds, NUM_STARTS))]
    fresh, resumed = map(min, zip(*pairs, strict=True))
    ratio, nbytes = resumed / fresh, len(json.dumps(late))
    beside = f"{resumed * 1e3:.0f} ms and {fresh * 1e3:.0f} ms; the state has {nbytes} bytes"
    return [Row("resume at nine tenths of an epoch over a fresh start", ratio, "x", beside, "<= 1.2x", ratio <= 1.2)], {
        "resume": ratio,
        "state_nbytes": nbytes,
    }


def write_manifest(folder: Path) -> int:
    """Writes a manifest of shards that do not exist. Returns its size."""

    def entry(number: int) -> dict[str, Any]:
        name, digest = f"{GENERATION}/shard-{number:07d}.tar", f"{number:08x}"
        index = {"name": f"{name}.index", "nbytes": 70 * PER_SHARD, "crc32c": digest}
        return {"name": name, "nbytes": 10**8, "num_samples": PER_SHARD, "crc32c": digest, "index": index}

    shards = [entry(number) for number in range(SHARDS)]
    whole = {"format": "shmload-shards", "version": 1, "generation": GENERATION, "seed": 0, "extensions": ["cls", "jpg"]}
    sums = {"num_samples": num_samples(), "nbytes": SHARDS * 10**8, "shards": shards}
    return (folder / "manifest.json").write_text(json.dumps({**whole, **sums}))


def private_mib() -> float:
    """Returns the private memory of this process, in MiB."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private")) / 1024


def plan(folder: str, results: Any) -> None:
    """Opens the dataset, plans with it, and sends the costs; runs in a process of its own."""
    before, began = private_mib(), time.perf_counter()
    view = RemoteDataset.from_urls(folder).indexed()
    n, opened_s = len(view), time.perf_counter() - began
    shuffled = view.block_shuffle()
    shuffled.take(0, BATCH, seed=7, epoch=0)
    memory = private_mib() - before
    places = np.random.default_rng(0).integers(0, n - BATCH, 200).tolist()
    began = time.perf_counter()
    for place in places:
        shuffled.take(place, place + BATCH, seed=7, epoch=0)
    seek_us = (time.perf_counter() - began) / len(places) * 1e6
    reading, writing = os.pipe()
    if os.fork() == 0:
        of_worker = private_mib()
        for place in places:
            for index in shuffled.take(place, place + BATCH, seed=7, epoch=0).tolist():
                view._source.enter(shuffled, view._source.place(index)[0], 7, 0)
        os.write(writing, b"%f" % (private_mib() - of_worker))
        os._exit(0)
    worker = float(os.read(reading, 64))
    os.wait()
    results.put({"opened_s": opened_s, "mib": memory, "seek_us": seek_us, "worker_mib": worker, "n": n})


def metadata() -> tuple[list[Row], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        nbytes = write_manifest(Path(folder))
        context = get_context("spawn")
        results = context.SimpleQueue()
        process = context.Process(target=plan, args=(folder, results))
        process.start()
        found = results.get()
        process.join()
    if found["n"] != num_samples():
        raise ValueError(f"{found['n']} samples")
    per_shard = found["mib"] * 2**20 / SHARDS
    beside = f"{found['mib']:.0f} MiB for {SHARDS:,}; opened in {found['opened_s']:.0f} s, once; manifest {nbytes / 2**20:.0f} MiB"
    worker = found["worker_mib"]
    return [
        Row("memory of a process a shard", per_shard, "B", beside, "<= 500 B", per_shard <= 500),
        Row(
            "memory of a forked worker's own, planning with all shards",
            worker,
            "MiB",
            "after 200 windows",
            "<= 100 MiB",
            worker <= 100,
        ),
        Row("a seek in the order of shards", found["seek_us"], "us", f"{BATCH} samples", "<= 1000 us", found["seek_us"] <= 1000),
    ], {**found, "manifest_nbytes": nbytes}


def nodes() -> tuple[list[Row], dict[str, Any]]:
    """Determines which shards each node needs over all epochs."""
    sizes = np.full(SHARDS, PER_SHARD)
    began = time.perf_counter()
    order = NodeShuffle(sizes, nodes=NODES, global_batch=RANKS * BATCH)
    shares = order._shares_of(7)
    took = time.perf_counter() - began
    counts = [len(np.unique(share.shards)) for share in shares]
    if len(np.unique(np.concatenate([share.shards for share in shares]))) != SHARDS:
        raise ValueError("a shard is no node's")
    most = max(counts) / (SHARDS / NODES)
    beside = f"{max(counts):,} of {SHARDS:,}; all nodes together {sum(counts):,}; planned in {took * 1e3:.0f} ms"
    return [Row(f"shards that a node of {NODES} fetches, over an equal share", most, "x", beside, "<= 1.01x", most <= 1.01)], {
        "most": most,
        "plan_s": took,
    }


def measure(settings: Settings) -> Result:
    """Measures the order, a resume, the metadata and the plan of the nodes."""
    rows, measured = [], {}
    for asked in (order(settings.rounds), resume(settings.rounds), metadata(), nodes()):
        rows += asked[0]
        measured |= asked[1]
    return Result(rows, measured)


if __name__ == "__main__":
    main("scale", __doc__, measure)
