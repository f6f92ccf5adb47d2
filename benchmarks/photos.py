"""Measure what remains of a loader's advantage when decoding is the work: JPEG photos of 500x375 to 224, batches of 64.

Method: The `photos` workload of `shmload bench`: simplejpeg and OpenCV, 2 forked workers; loaders take turns in fresh
processes, and their bytes are compared. torch reads with `__getitem__`, with `__getitems__` at its best, and without workers; a
thread pool in the trainer takes part, too.

How to read: Both use the same decoder, so the advantage can at most be the share of torch's CPU that is not decoding. The limit
is the rate of one core that decodes into a resident batch, times the number of cores that workers have.

Result (2 cores, 2 workers): 1.18x torch's photos/s at 0.84x its CPU per photo.
"""

from dataclasses import asdict

from benchmarks.common import GETITEMS, INLINE, THREADS, Result, Row, Settings, main, ratio, side_by_side


def measure(settings: Settings) -> Result:
    """Measures the workload. The aim is to be at least as fast as every other loader."""
    found, report = side_by_side("photos", ("shmload", "torch", GETITEMS, INLINE, THREADS), settings)
    rate = ratio(found, "samples_per_s", "shmload", "torch")
    cpu = ratio(found, "cpu_us_per_sample", "shmload", "torch")
    core = found.limit["fill_samples_per_s"]
    decode = f"{1e6 / core:.0f} us of decoding on one core"
    spent = found.loaders["shmload"].metrics["cpu_us_per_sample"].median
    rest = ", ".join(
        f"{name.rpartition(':')[2]} {ratio(found, 'samples_per_s', 'shmload', name):.2f}x" for name in (GETITEMS, THREADS)
    )
    rows = [
        Row("photos: photos/s over torch", rate, "x", f"over {rest}", "> 1x", rate > 1),
        Row("photos: CPU per photo over torch", cpu, "x", f"{spent:.0f} us, {decode}", "< 1x", cpu < 1),
    ]
    return Result(rows, {"limit": found.limit, "loaders": asdict(report)["workloads"][0]["loaders"]})


if __name__ == "__main__":
    main("photos", __doc__, measure)
