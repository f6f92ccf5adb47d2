"""Measure how many tiny rows are read per second with `read_batch_into`: 64 float32 and a label, shuffled, batches of 1,024.

Method: The `rows` workload of `shmload bench`: 2 forked workers; loaders take turns in fresh processes, and their bytes are
compared. torch reads with `__getitem__`, with `__getitems__` at its best (the whole batch into a shared tensor), and without
workers; a thread pool in the trainer takes part, too.

How to read: Compare ratios within a round, medians over rounds. The limit is one core that gathers rows into a resident batch.

Result (2 cores, 2 workers): 12.7x torch's rows/s with __getitems__, 19.7x with __getitem__.
"""

from dataclasses import asdict

from benchmarks.common import GETITEMS, INLINE, THREADS, Result, Row, Settings, main, ratio, side_by_side


def measure(settings: Settings) -> Result:
    """Measures the workload and compares with both ways of torch."""
    found, report = side_by_side("rows", ("shmload", "torch", GETITEMS, INLINE, THREADS), settings)
    items, item = (ratio(found, "samples_per_s", "shmload", name) for name in (GETITEMS, "torch"))
    rate = found.loaders["shmload"].metrics["samples_per_s"].median
    share = rate / found.limit["fill_samples_per_s"]
    rest = ", ".join(
        f"{name.rpartition(':')[2]} {ratio(found, 'samples_per_s', 'shmload', name):.2f}x" for name in (INLINE, THREADS)
    )
    limit = f"{rate / 1e6:.2f} M rows/s, {share:.0%} of one core's gather"
    rows = [
        Row("tiny rows: rows/s over torch with __getitems__", items, "x", limit, ">= 8x", items >= 8),
        Row("tiny rows: rows/s over torch with __getitem__", item, "x", f"over {rest}", ">= 25x", item >= 25),
    ]
    return Result(rows, {"limit": found.limit, "loaders": asdict(report)["workloads"][0]["loaders"]})


if __name__ == "__main__":
    main("tiny_rows", __doc__, measure)
