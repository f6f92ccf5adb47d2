"""Measure the gain from several threads in each worker if samples take 10 ms to arrive.

Method: Samples wait 10 ms, as if they came from a store; batches of 32, 2 forked workers. shmload with 1 and with 16 threads in
each worker is compared with torch with the same number of workers. Each case runs in a fresh process.

How to read: The limit is workers x threads / 10 ms, here 3,200 samples/s; without threads it is 200.

Predicted: 0.9 of the limit with threads, because the last samples of a batch wait for each other; 0.99 without.

Result (2 cores, 2 workers): 2,884 samples/s with 16 threads, which is 0.90 of the limit and 15.9 times torch's rate; 182
without.
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
