"""Measure the trainer's CPU per batch, per field and per GiB.

Method: The CPU time of the whole consuming process is measured over the timed part, without the consumer's own reading of the
batch; 2 forked workers, a fresh process per case. Fields: batches of 64 rows with 1, 4, 16 and 64 fields of 64 float32; the
cost per field is the slope of the least-squares line. Bytes: batches of 16 records of 1 MiB; torch with its default collate
(tensors) and with one that leaves numpy arrays. `stop-watch` delivers one resident batch repeatedly, which shows the cost of
the measurement itself.

How to read: The figure must not depend on the workers' speed, so compare microseconds per batch, not rates. The limit is the
stop-watch's own line.

Result (2 cores, 2 workers): 14.3 us per batch (torch 582, stop-watch 1.0), 0.73 us per field (torch 111); 0.0036 s per GiB, 39x
below torch with tensors and 355x below torch with numpy. Before a usual batch took only two native calls: 23.9 us, and 0.0075 s
per GiB. With the workers stopped, and their claims filled by the trainer's own process, `next()` took 6.4 us before and 3.4
after (first quartile). The rest is sleeping, waking up, and running code that is in no cache.
"""

import numpy as np

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain

NUM_FIELDS = (1, 4, 16, 64)
LOADERS = {"shmload": "shmload", "torch": "torch", "stop-watch": "benchmarks.datasets:Resident"}


def measure(settings: Settings) -> Result:
    """Measures the cost of fields and of bytes."""
    cases = {
        f"{name}, {count} fields": forked(
            settings,
            workload="fields",
            dataset="benchmarks.datasets:Fields",
            arguments={"num_fields": count},
            loader=loader,
            batch_size=64,
        )
        for name, loader in LOADERS.items()
        for count in NUM_FIELDS
    }
    for name, loader, collate in (
        ("shmload, 16 MiB", "shmload", None),
        ("torch tensors, 16 MiB", "torch", None),
        ("torch numpy, 16 MiB", "torch", "benchmarks.datasets:as_numpy"),
    ):
        cases[name] = forked(
            settings, workload="blocks", dataset="benchmarks.datasets:Blocks", loader=loader, batch_size=16, collate=collate
        )
    found = in_turn(cases, settings)
    lines = {
        name: np.polyfit(NUM_FIELDS, [found[f"{name}, {count} fields"]["trainer_us_per_batch"].median for count in NUM_FIELDS], 1)
        for name in LOADERS
    }
    one = {name: found[f"{name}, 1 fields"]["trainer_us_per_batch"].median for name in LOADERS}
    slope = {name: float(line[0]) for name, line in lines.items()}
    per_gib = {name: found[f"{name}, 16 MiB"]["trainer_s_per_gib"].median for name in ("shmload", "torch tensors", "torch numpy")}
    watch = f"torch {one['torch']:.0f}, stop-watch {one['stop-watch']:.1f}"
    tensors, arrays = (per_gib[name] / per_gib["shmload"] for name in ("torch tensors", "torch numpy"))
    mine = f"{per_gib['shmload']:.4f} s/GiB"
    rows = [
        Row("trainer CPU per batch, one field", one["shmload"], "us", watch, "<= 15 us", one["shmload"] <= 15),
        Row(
            "trainer CPU per further field",
            slope["shmload"],
            "us",
            f"torch {slope['torch']:.0f}, stop-watch {slope['stop-watch']:.1f}",
            "<= 2 us",
            slope["shmload"] <= 2,
        ),
        Row(
            "trainer CPU per GiB, 16 MiB batches, below torch with tensors",
            tensors,
            "x",
            f"{mine} and {per_gib['torch tensors']:.2f}",
            ">= 20x",
            tensors >= 20,
        ),
        Row(
            "trainer CPU per GiB, 16 MiB batches, below torch with numpy",
            arrays,
            "x",
            f"{mine} and {per_gib['torch numpy']:.2f}",
            ">= 100x",
            arrays >= 100,
        ),
    ]
    return Result(rows, {"cases": plain(found), "us_per_field": slope})


if __name__ == "__main__":
    main("trainer_cpu", __doc__, measure)
