"""Measure what worker threads cost and save compared with worker processes.

Method: Workloads of `shmload bench`, 2 workers; loaders take turns in fresh processes, and their bytes are compared. Photos,
records and rows decode without the GIL; the Python dataset holds it. A thread pool in the trainer without a library, and torch,
are measured, too.

How to read: The figures are ratios of threads over processes, within a round. Threads save the CPU of the processes' own loops
and page faults; memory is the peak PSS of all processes. A dataset in Python cannot gain from threads, because only one thread
at a time runs Python code.

Predicted: photos, records and rows within 5 % of processes in samples/s; the Python dataset slower; memory at most 0.6.
"""

from dataclasses import asdict
from typing import Any

from benchmarks.common import THREADS, Result, Row, Settings, main, ratio, side_by_side

THREAD_WORKERS = "benchmarks.contestants.ways:thread_workers"
WORKLOADS = {"photos": True, "records": True, "rows": True, "python": False}  # whether they decode without the GIL


def measure(settings: Settings) -> Result:
    """Measures each workload."""
    rows: list[Row] = []
    measured: dict[str, Any] = {}
    for workload, is_native in WORKLOADS.items():
        found, report = side_by_side(workload, (THREAD_WORKERS, "shmload", THREADS, "torch"), settings)
        measured[workload] = asdict(report)["workloads"][0]["loaders"]

        def over(metric: str, other: str = "shmload", found: Any = found) -> float:
            return ratio(found, metric, THREAD_WORKERS, other)

        rate, cpu, first, memory = map(over, ("samples_per_s", "cpu_us_per_sample", "first_batch_ms", "peak_pss_mb"))
        others = ", ".join(f"{name.rpartition(':')[2]} {over('samples_per_s', name):.2f}x" for name in (THREADS, "torch"))
        wanted = ">= 0.95x" if is_native else "> 0x"
        rows += [
            Row(f"{workload}: samples/s of threads over processes", rate, "x", f"over {others}", wanted, rate >= 0.95 * is_native),
            Row(f"{workload}: CPU per sample of threads over processes", cpu, "x", "", "< 1x", cpu < 1),
            Row(f"{workload}: first batch of threads over processes", first, "x", "", "< 1x", first < 1),
            Row(f"{workload}: memory of threads over processes", memory, "x", "", "< 1x", memory < 1),
        ]
    return Result(rows, measured)


if __name__ == "__main__":
    main("thread_workers", __doc__, measure)
