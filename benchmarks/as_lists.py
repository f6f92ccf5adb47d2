"""Measure the cost of batches that are lists of samples, which `collate_fn=list` returns.

Programs for detection and text often collate by themselves, or deliver the samples unchanged. Such a batch has no tensor to
map: its structure, numbers, text and small arrays must be built in the trainer.

Method: Batches of 64 samples, 2 forked workers, torch mode; each case runs in a fresh process, in turn. The samples are a dict
of numbers and text; a tuple of a date and a number, which needs pickle; a dict of an array of 8 numbers and a number; and a
dict of an array of objects and a number. The figures are the CPU time of the consuming process per batch, and batches/s.

How to read: Look at the ratios to torch, which pickles the list.

Predicted: 0.3 to 0.5 of torch's trainer CPU, because one C function builds what torch unpickles, without a queue's locks and
pipes; up to 1 for objects, which both must pickle.

Result (2 cores, 2 workers, beside other programs at load 10, so the rates mean little), in the order of the samples above:
torch's trainer CPU over shmload's 2.4, 2.0, 2.3 and 0.9; samples/s over torch's 0.6, 0.9, 1.2 and 0.5.

Before one function in C split and joined these batches, a trial program with 1 worker and the same kinds of samples measured
2.0 to 4.1 times torch's trainer CPU and 0.17 to 0.49 of its batches/s.
"""

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain

KINDS = ("numbers and text", "dates", "arrays", "objects")


def measure(settings: Settings) -> Result:
    """Measures each kind of sample with shmload and torch."""
    found = in_turn(
        {
            f"{loader}, {kind}": forked(
                settings,
                workload=kind,
                dataset="benchmarks.samples:Listed",
                arguments={"kind": kind},
                loader=loader,
                collate="builtins:list",
                batch_size=64,
            )
            for kind in KINDS
            for loader in ("shmload", "torch")
        },
        settings,
    )
    rows = []
    for kind in KINDS:
        mine, torchs = (found[f"{name}, {kind}"] for name in ("shmload", "torch"))
        mine_us, torch_us = (case["trainer_us_per_batch"].median for case in (mine, torchs))
        ratio = torch_us / mine_us
        rows.append(Row(f"trainer CPU, lists of {kind}: torch over shmload", ratio, "x", f"{mine_us:.0f} us", ">= 1x", ratio >= 1))
        rate = mine["samples_per_s"].median / torchs["samples_per_s"].median
        rows.append(Row(f"samples/s, lists of {kind}: shmload over torch", rate, "x", "-", ">= 1x", rate >= 1))
    return Result(rows, {"cases": plain(found)})


if __name__ == "__main__":
    main("as_lists", __doc__, measure)
