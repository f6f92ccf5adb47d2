"""What remains of a loader's advantage when decoding is the work: JPEG photos of 500x375 to 224, batch 64?

Method: the `photos` workload of `shmload bench`: simplejpeg and OpenCV, 2 forked workers, loaders in turn in fresh
processes, the bytes compared. torch by `__getitem__` and at its best, without workers; a thread pool in the trainer.

How to read: both use the same decoder, so the advantage can at most be the share of torch's CPU that is not decoding. The limit
is one core that decodes into a resident batch, times the cores that workers have.

Result (2 cores, 2 workers): 1.18x torch's photos/s at 0.84x its CPU a photo.
"""

from dataclasses import asdict

from benchmarks.common import GETITEMS, INLINE, THREADS, Result, Row, Settings, main, ratio, side_by_side


def measure(settings: Settings) -> Result:
    """Measures the workload; the aim is to be no slower than any other."""
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
