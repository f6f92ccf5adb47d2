"""What does a batch of strings cost the trainer?

Method: batches of 256 strings of 20, 200 and 2,000 characters, shuffled, 2 forked workers, torch mode, a fresh process a
case; the CPU clock of the consuming process per batch.

How to read: the ratio. torch pickles the list through a pipe; a packed column is decoded from the slot.

Predicted: torch 200 us a batch at 20 characters (its queue 60-90, unpickling 256 strings 15, a pipe's wake-ups), shmload 25:
the engine's 18 and 256 strings at 25 ns.

Result (2 cores, 2 workers), trainer CPU us a batch; over three runs the ratios were 4.6 to 4.9, 4.7 to 5.0 and 5.8 to 6.0. About
20 us of ours are the engine's own, 3.6 making 256 strings; the rest (freeing them, sleeping, waking) was not measured apart:
| characters | shmload | torch | ratio |
|---|---|---|---|
| 20 | 36 | 174 | 4.8 |
| 200 | 42 | 199 | 4.7 |
| 2,000 | 110 | 654 | 5.9 |
"""

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain

LENGTHS = (20, 200, 2000)


def measure(settings: Settings) -> Result:
    """Measures short and long strings."""
    found = in_turn(
        {
            f"{loader}, {length}": forked(
                settings,
                workload="text",
                dataset="benchmarks.samples:Texts",
                arguments={"length": length},
                loader=loader,
                batch_size=256,
            )
            for length in LENGTHS
            for loader in ("shmload", "torch")
        },
        settings,
    )
    rows = []
    for length in LENGTHS:
        mine, torchs = (found[f"{name}, {length}"]["trainer_us_per_batch"].median for name in ("shmload", "torch"))
        rows.append(
            Row(
                f"trainer CPU, 256 strings of {length}: torch over shmload",
                torchs / mine,
                "x",
                f"{mine:.0f} us, torch {torchs:.0f}",
                ">= 5x",
                torchs / mine >= 5,
            )
        )
    return Result(rows, {"cases": plain(found)})


if __name__ == "__main__":
    main("text", __doc__, measure)
