"""Measure the cost of the local cache, and the hit rate of its eviction.

Method: One process with a folder in memory; the CPU time of its thread is measured, without the disk's own time (ext4 takes 1-2
ms on this machine to remove a file). `lease` is BudgetedFolder.lease and its release, for one file of 10,000 after another.
`open` is Cache.open of a cached object, and its release. `publish` reserves 1 KiB, writes nothing, and publishes, in a full
folder of 10,000 files, so that each call evicts the oldest file. For comparison, the same is measured while another user has
leased 8,000 files, and a listing of the folder, which the ledger makes unnecessary, is timed. The figures are medians.

Eviction: 400 shards of one size, shuffled differently for each of two epochs, are divided among 4 ranks, which advance at the
same pace and share one folder with room for half of the shards. The figure is the share of openings that find their shard in
the cache: with the schedule announced, with nothing announced (least recently used), and with the best possible eviction
(Belady's algorithm over the ranks' openings in their order).

How to read: Nothing is cached yet in the first epoch, so the best possible share is a quarter: half of the second epoch.

Predicted: lease 10 us, open 25 us, publish 0.15 ms, listing 25 ms. Hits: announced 25 %, the same as Belady's; least recently
used 7.7 % (x (1 - y) > 1/2 for 15 % of the second epoch's openings, where x is a shard's position in the first epoch and y its
position in the second).

Result (2 cores, busy with other work): lease 12.3 us, 10,000 at once 3.4 ms; open 21.2 us; publish 0.080 ms, with 8,000 leases
0.128; a listing 42 ms. Hits: announced 25.0 %, Belady's 25.0 %, 40 steps announced 19.3 %, least recently used 7.9 %.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import thread_time

from benchmarks.common import Result, Row, Settings, main
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.cache import Cache

NUM_FILES, KIB = 10_000, 1 << 10
NUM_SHARDS, NUM_RANKS = 400, 4


@contextmanager
def folder_in_memory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="cache-bench-", dir="/dev/shm")
    try:
        yield path
    finally:
        shutil.rmtree(path)


def publish(folder: BudgetedFolder, name: str) -> None:
    with folder.reserve(KIB) as reservation:
        reservation.publish(name)


def seconds(times: int, do: Callable[[int], object]) -> float:
    """Returns the CPU seconds per call, which are also its duration because no call waits."""
    begin = thread_time()
    for number in range(times):
        do(number)
    return (thread_time() - begin) / times


def costs(rounds: int) -> dict[str, float]:
    """Returns the seconds of each operation."""
    found: dict[str, list[float]] = {}
    with folder_in_memory() as path:
        folder = BudgetedFolder(path, NUM_FILES * KIB)
        for number in range(NUM_FILES):
            publish(folder, f"{number:05}")
        for each in range(rounds):
            names = [kept.name for kept in folder.files()]
            found.setdefault("lease", []).append(seconds(NUM_FILES, lambda i, names=names: folder.lease(names[i]).release()))
            found.setdefault("lease all", []).append(seconds(5, lambda i: folder.lease_many().release()))
            found.setdefault("publish", []).append(seconds(1000, lambda i, each=each: publish(folder, f"a-{each}-{i}")))
            with BudgetedFolder(path, NUM_FILES * KIB).lease_many(names[2000:]):
                found.setdefault("publish, leased", []).append(seconds(500, lambda i, each=each: publish(folder, f"b-{each}-{i}")))
            found.setdefault("listing", []).append(seconds(1, lambda i: folder.refresh()))
    with folder_in_memory() as path:
        cache = Cache(path, NUM_FILES * KIB)
        cache.open("s3://bucket/shard.tar", KIB, fill, etag="1").release()
        for _ in range(rounds):
            found.setdefault("open", []).append(
                seconds(5000, lambda i: cache.open("s3://bucket/shard.tar", KIB, fill, etag="1").release())
            )
    return {what: median(each) for what, each in found.items()}


def fill(fd: int) -> None:
    os.pwrite(fd, b"x", 0)


def schedules(seed: int) -> list[list[str]]:
    """Returns the shards that each rank opens over two epochs, in order."""
    rng, order = random.Random(seed), list(range(NUM_SHARDS))
    ranks: list[list[str]] = [[] for _ in range(NUM_RANKS)]
    for _ in range(2):
        rng.shuffle(order)
        for place, shard in enumerate(order):
            ranks[place % NUM_RANKS].append(str(shard))
    return ranks


def found_by_cache(ranks: list[list[str]], horizon: int) -> float:
    """Returns the share of hits if all ranks repeatedly announce the next `horizon` steps, as readers of one dataset do."""
    with folder_in_memory() as path:
        caches = [Cache(path, NUM_SHARDS * KIB // 2, durable=False) for _ in ranks]
        for step in range(len(ranks[0])):
            coming = [key for keys in zip(*(keys[step : step + horizon] for keys in ranks), strict=True) for key in keys]
            for cache in caches:
                cache.expect(coming)
            for cache, keys in zip(caches, ranks, strict=True):
                cache.open(keys[step], KIB, fill, etag="1").release()
        hits = sum(cache.statistics().num_hits for cache in caches)
    return hits / sum(map(len, ranks))


def best_possible(ranks: list[list[str]]) -> float:
    """Returns the share of hits of Belady's algorithm, which knows when each shard is needed next."""
    opened = [keys[step] for step in range(len(ranks[0])) for keys in ranks]
    after: dict[str, list[int]] = {}
    for place, key in enumerate(opened):
        after.setdefault(key, []).append(place)
    cached: set[str] = set()
    hits = 0
    for key in opened:
        after[key].pop(0)
        hits += key in cached
        if key not in cached and len(cached) == NUM_SHARDS // 2:
            cached.remove(max(cached, key=lambda each: after[each][0] if after[each] else len(opened)))
        cached.add(key)
    return hits / len(opened)


def measure(settings: Settings) -> Result:
    cost = costs(settings.rounds)
    ranks = schedules(seed=1)
    announced, short, recent = (found_by_cache(ranks, horizon) for horizon in (2 * NUM_SHARDS, 40, 0))
    best = best_possible(ranks)
    us, ms = 1e6, 1e3
    listed = f"8,000 leased by another: {cost['publish, leased'] * ms:.3g}; a listing: {cost['listing'] * ms:.3g}"
    shares = f"Belady {100 * best:.3g}, 40 steps announced {100 * short:.3g}, least recently used {100 * recent:.3g}"
    lease, opening, publishing = cost["lease"] * us, cost["open"] * us, cost["publish"] * ms
    at_once = f"all {NUM_FILES} at once {cost['lease all'] * ms:.3g} ms"
    rows = [
        Row("lease and release a cached file", lease, "us", at_once, "< 30", lease < 30),
        Row("open an object that is there", opening, "us", "", "< 30", opening < 30),
        Row(f"reserve and publish among {NUM_FILES} files", publishing, "ms", listed, "< 3", publishing < 3),
        Row("openings that found their shard", 100 * announced, "%", shares, ">= 0.95 Belady", announced >= 0.95 * best),
    ]
    return Result(rows, {"seconds": cost, "found": {"announced": announced, "short": short, "recent": recent, "best": best}})


if __name__ == "__main__":
    main("cache", __doc__, measure)
