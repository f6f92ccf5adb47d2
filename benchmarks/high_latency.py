"""What do several threads in each worker bring if samples take 10 ms to arrive?

Method: samples that wait 10 ms, as a store's do, batch 32, 2 forked workers; shmload with 1 and with 16 threads in each worker
and torch with as many workers; a fresh process per case.

How to read: the limit is workers x threads / 10 ms, here 3,200 samples/s; without threads 200.

Predicted: 0.9 of the limit with threads, as a batch's last samples wait for each other; 0.99 without.

Result (2 cores, 2 workers): 2,884 samples/s with 16 threads, 0.90 of the limit; 182 without: 15.9 times torch's.
"""

from typing import Any

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain
from shmload import ShmLoader
from shmload.tools.bench.contestants import Loader, LoaderOptions, keywords

NUM_THREADS = 16
LATENCY_S = 0.010


def with_threads(dataset: Any, options: LoaderOptions) -> Loader:
    """Returns a ShmLoader whose workers read 16 samples at once."""
    settings = {**keywords(options), "threads_per_worker": NUM_THREADS}
    made: Loader = ShmLoader(dataset, **settings, generator=options.generator())
    return made


LOADERS = {"with threads": "benchmarks.high_latency:with_threads", "without": "shmload", "torch": "torch"}


def measure(settings: Settings) -> Result:
    """Measures the three loaders."""
    found = in_turn(
        {
            name: forked(
                settings,
                workload="high latency",
                dataset="benchmarks.datasets:Slow",
                arguments={"seconds": LATENCY_S},
                loader=loader,
                batch_size=32,
            )
            for name, loader in LOADERS.items()
        },
        settings,
    )
    rate = {name: metrics["samples_per_s"].median for name, metrics in found.items()}
    gain, share = rate["with threads"] / rate["torch"], rate["with threads"] * LATENCY_S / (2 * NUM_THREADS)
    rows = [
        Row(
            "samples that take 10 ms, 16 threads in each of 2 workers: samples/s over torch",
            gain,
            "x",
            f"{rate['with threads']:.0f} samples/s, {share:.0%} of the limit; without threads {rate['without']:.0f}",
            ">= 8x",
            gain >= 8,
        )
    ]
    return Result(rows, {"cases": plain(found)})


if __name__ == "__main__":
    main("high_latency", __doc__, measure)
