"""Measure the trainer's CPU per batch of strings.

Method: Batches of 256 strings of 20, 200 and 2,000 characters, shuffled, 2 forked workers, torch mode, a fresh process per
case. The figure is the CPU time of the consuming process per batch.

How to read: Look at the ratio. torch pickles the list through a pipe, whereas shmload decodes a packed column from the slot.

Predicted: torch 200 us per batch at 20 characters (its queue 60-90, unpickling 256 strings 15, a pipe's wake-ups), shmload 25:
the engine's 18, and 256 strings at 25 ns.

Result (2 cores, 2 workers), trainer CPU us per batch; in two runs the ratios were 5.1 and 5.2, 5.3 and 5.3, 5.6 and 6.4. Before
a usual batch took only two native calls, and torch's permutation was drawn without its spinning threads, shmload's figures were
the same and torch's were 174, 199 and 654: 4.8, 4.7 and 5.9. Creating 256 strings takes about 3.6 us of shmload's; the rest was
not measured separately:
| characters | shmload | torch | ratio |
|---|---|---|---|
| 20 | 35 | 185 | 5.2 |
| 200 | 38 | 200 | 5.3 |
| 2,000 | 102 | 652 | 6.4 |
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
