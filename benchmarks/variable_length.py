"""Measure the CPU time per variable-length sample, over all processes.

Method: Dicts of three float32 arrays of 100 to 2,000 values and a string (W5 of benchmarks/peers.py, from memory), shuffled,
batches of 64, 2 forked workers, a fresh process per case. shmload in torch mode is measured with ragged="jagged" (concatenated
values and offsets), from samples and from read_into with out.reserve, and with the other ways of delivery. torch is measured
with a collate function that concatenates, too ("end to end"), and with one that makes lists of tensors. A thread pool in the
trainer takes part, too. The figures are CPU microseconds of all processes per sample, without the consumer's own reading.

How to read: A busy machine affects CPU time less than rates. No loader can avoid the cost of the dataset alone.

Predicted: 10 us: the dataset's own 6, two copies of 12.6 kB 1.5, the collation 1.5, the trainer 0.5.

Result (2 cores, 2 workers, other work on the machine), CPU us per sample:
| shmload jagged | in place | list | pad | nested | torch end to end | torch lists | threads | dataset alone |
|---|---|---|---|---|---|---|---|---|
| 11.4 | 10.6 | 13.4 | 16.6 | 19.1 | 65.8 | 686 | 8.9 | 3.8 |
"""

from benchmarks.common import THREADS, Result, Row, Settings, forked, in_turn, main, plain

CASES = {
    "shmload jagged": ("Dicts", "benchmarks.samples:shmload_jagged", None),
    "shmload jagged in place": ("DictsInPlace", "benchmarks.samples:shmload_jagged", None),
    "shmload list": ("Dicts", "benchmarks.samples:shmload_list", None),
    "shmload pad": ("Dicts", "benchmarks.samples:shmload_pad", None),
    "shmload nested": ("Dicts", "benchmarks.samples:shmload_nested", None),
    "torch end to end": ("Dicts", "torch", "benchmarks.samples:end_to_end"),
    "torch lists": ("Dicts", "torch", "benchmarks.samples:as_lists"),
    "threads": ("Dicts", THREADS, "benchmarks.samples:end_to_end"),
    "dataset alone": ("Dicts", "benchmarks.samples:Alone", None),
}


def measure(settings: Settings) -> Result:
    """Measures every way of delivery."""
    found = in_turn(
        {
            name: forked(
                settings,
                workload="variable-length dicts",
                dataset=f"benchmarks.samples:{dataset}",
                loader=loader,
                collate=collate,
                batch_size=64,
            )
            for name, (dataset, loader, collate) in CASES.items()
        },
        settings,
    )
    cpu = {name: metrics["cpu_us_per_sample"].median for name, metrics in found.items()}
    beside = ", ".join(f"{name} {cpu[name]:.1f}" for name in CASES if name != "shmload jagged")
    got = cpu["shmload jagged"]
    rows = [
        Row("variable-length dicts: CPU per sample", got, "us", beside, "<= 12 us", got <= 12),
        Row(
            "variable-length dicts: CPU, torch with lists over shmload with lists",
            cpu["torch lists"] / cpu["shmload list"],
            "x",
            f"{cpu['shmload list']:.1f} us",
            ">= 10x",
            cpu["torch lists"] / cpu["shmload list"] >= 10,
        ),
    ]
    return Result(rows, {"cases": plain(found)})


if __name__ == "__main__":
    main("variable_length", __doc__, measure)
