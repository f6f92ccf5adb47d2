"""Measure the gain from changing one line for a plain Python dataset, (uint8 3x224x224, int) in batches of 64.

Method: The `python` workload of `shmload bench`: no protocol, 2 forked workers; loaders take turns in fresh processes, and
their bytes are compared. shmload is compared with torch's DataLoader, with and without workers, and with a thread pool in the
trainer.

How to read: Compare ratios within a round, medians over rounds. The limit is one core's copy of the bytes, which is printed
with the table. torch without workers differs between processes: it is about as fast as shmload in most runs, and several times
slower in others. The cause was not measured; one guess is the allocator, which may return the memory of each 10 MB batch.
"""

from dataclasses import asdict

from benchmarks.common import INLINE, THREADS, Result, Row, Settings, main, ratio, side_by_side


def measure(settings: Settings) -> Result:
    """Measures the workload and compares with torch."""
    found, report = side_by_side("python", ("shmload", "torch", INLINE, THREADS), settings)
    rate = ratio(found, "samples_per_s", "shmload", "torch")
    cpu = ratio(found, "cpu_us_per_sample", "shmload", "torch")
    inline, threads = (ratio(found, "samples_per_s", "shmload", name) for name in (INLINE, THREADS))
    rows = [
        Row("Python dataset, batch 64: samples/s over torch", rate, "x", f"over a thread pool {threads:.2f}x", ">= 2x", rate >= 2),
        Row("Python dataset, batch 64: samples/s over torch without workers", inline, "x", "", ">= 1x", inline >= 1),
        Row("Python dataset, batch 64: CPU per sample over torch", cpu, "x", "", "<= 0.5x", cpu <= 0.5),
    ]
    return Result(rows, {"limit": found.limit, "loaders": asdict(report)["workloads"][0]["loaders"]})


if __name__ == "__main__":
    main("python_dataset", __doc__, measure)
