"""Measure the time to the first batch, and the pause at the end of an epoch.

Method: First batch: 64 samples that take 10 ms each to arrive, 4 forked workers; the time from before the loader is created to
its first batch, in seed mode, where several workers fill one batch. End of an epoch: photos with epochs of 8 batches of 64, 2
persistent workers, for at least 4 seconds; the median wait of the `next()` calls in which an epoch ends, compared with the
median of all waits.

How to read: 64 x 10 ms are 640 ms of waiting. Four workers need 160 ms; the rest is start-up. torch gives a batch to one
worker. At the end of an epoch, the limit is an ordinary wait, because the orders of the next epoch should already have been
submitted.

Result (2 cores): first batch 0.259 s, torch 0.69 s; wait at the end of an epoch 29.8 ms, torch 70.9 ms.
"""

from benchmarks.common import Result, Row, Settings, in_turn, main, plain
from shmload.tools.bench.bench_job import BenchJob

LOADERS = {"shmload": "shmload-seed", "torch": "torch"}


def measure(settings: Settings) -> Result:
    """Measures the first batch and the end of an epoch."""
    cases = {}
    for name, loader in LOADERS.items():
        cases[f"{name}, first batch"] = BenchJob(
            workload="slow",
            dataset="benchmarks.datasets:Slow",
            loader=loader,
            batch_size=64,
            num_workers=4,
            start_method="fork",
            seconds=0.01,
            warmup_s=0.0,
        )
        cases[f"{name}, epoch end"] = BenchJob(
            workload="short photos",
            dataset="benchmarks.datasets:short_photos",
            loader=loader,
            batch_size=64,
            num_workers=2,
            seconds=max(4.0, 2 * settings.seconds),  # enough for several epochs
        )
    found = in_turn(cases, settings)
    first_s = {name: found[f"{name}, first batch"]["first_batch_ms"].median / 1e3 for name in LOADERS}
    end_ms = {name: found[f"{name}, epoch end"]["boundary_ms"].median for name in LOADERS}
    wait_ms = {name: found[f"{name}, epoch end"]["wait_p50_ms"].median for name in LOADERS}
    bound_ms = max(2 * wait_ms["shmload"], 1.0)
    beside = ", ".join(f"{name}'s median wait {wait_ms[name]:.1f} ms" for name in LOADERS)
    rows = [
        Row(
            "first batch of 64 x 10 ms, 4 forked workers, seed mode",
            first_s["shmload"],
            "s",
            f"torch {first_s['torch']:.2f} s",
            "<= 0.30 s",
            first_s["shmload"] <= 0.30,
        ),
        Row(
            "wait at an epoch's end, photos",
            end_ms["shmload"],
            "ms",
            f"torch {end_ms['torch']:.1f} ms; {beside}",
            f"<= {bound_ms:.1f} ms",
            end_ms["shmload"] <= bound_ms,
        ),
    ]
    return Result(rows, {"cases": plain(found)})


if __name__ == "__main__":
    main("first_batch", __doc__, measure)
