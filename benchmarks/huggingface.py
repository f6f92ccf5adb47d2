"""Measure the CPU time per sample of a Hugging Face dataset, over all processes.

Method: Tables in torch's format, shuffled, batches of 64, 2 forked workers, a fresh process per case: 1,024 float32; 512 tokens
(int64); 100 to 1,000 tokens, delivered concatenated with offsets (with torch, by a collate function that does the same); a text
of 200 characters and a label. "Direct" is shmload reading the arrow buffers. "Plain" is shmload over the same dataset wrapped
in a class that hides its table. "torch" is torch's DataLoader. The figures are CPU microseconds of all processes per sample,
without the consumer's own reading.

How to read: A busy machine affects CPU time less than rates. In the plain way and with torch, the formatter of `datasets` makes
an array and a tensor from every value of a column. The direct way pays for one copy of the bytes, from memory that is not in a
cache.

Predicted: direct 2, 2, 3 and 1 us; torch 25, 25, 35 and 20 us; plain a little less than torch.

Result (2 cores, 2 workers, other work on the machine; one round):
| CPU us per sample | direct | plain | torch | torch / direct |
|---|---|---|---|---|
| floats | 1.9 | 13.5 | 31.8 | 16x |
| tokens | 2.0 | 13.7 | 32.1 | 16x |
| ragged tokens | 4.5 | 21.3 | 37.6 | 8.4x |
| text | 3.0 | 17.1 | 30.1 | 10x |

A ragged row costs 1.5 us more than predicted, because of a view for each row. A text costs 2 us more, because the trainer makes
a str from it.
"""

from typing import Any

import datasets
import numpy as np
import torch

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain
from benchmarks.samples import shmload_jagged
from shmload.tools.bench.contestants import Loader, LoaderOptions

TABLES = ("floats", "tokens", "ragged tokens", "text")


def table(name: str, num_samples: int = 20_000) -> datasets.Dataset:
    """Makes one of the tables."""
    rng = np.random.default_rng(11)
    if name == "floats":
        columns: dict[str, Any] = {"x": rng.random((num_samples, 1024), np.float32)}
    elif name == "tokens":
        columns = {"x": rng.integers(0, 50_000, (num_samples, 512))}
    elif name == "ragged tokens":
        columns = {"x": [rng.integers(0, 50_000, n) for n in rng.integers(100, 1001, num_samples)]}
    else:
        letters = rng.integers(97, 123, (num_samples, 200), np.uint8)
        columns = {"x": [row.tobytes().decode() for row in letters], "label": rng.integers(0, 9, num_samples)}
    return datasets.Dataset.from_dict(columns).with_format("torch")


class Hidden:
    """A class, as users write it, that wraps the dataset and has the methods that loaders call."""

    def __init__(self, name: str) -> None:
        self.dataset = table(name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset.__getitems__(indices)


def end_to_end(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collates samples by concatenating their tokens, and adds the end of each row."""
    rows = [sample["x"] for sample in samples]
    return {"x": torch.cat(rows), "ends": torch.tensor([len(row) for row in rows]).cumsum(0)}


def jagged(dataset: Any, options: LoaderOptions) -> Loader:
    """Returns a ShmLoader that delivers ragged fields concatenated."""
    return shmload_jagged(dataset, options)


def measure(settings: Settings) -> Result:
    """Measures every table in each way."""
    cases = {}
    for name in TABLES:
        is_ragged = name == "ragged tokens"
        ours = "benchmarks.huggingface:jagged" if is_ragged else "shmload"
        for way, dataset, loader in (("direct", "table", ours), ("plain", "Hidden", ours), ("torch", "table", "torch")):
            cases[f"{name}, {way}"] = forked(
                settings,
                workload=name,
                dataset=f"benchmarks.huggingface:{dataset}",
                arguments={"name": name},
                loader=loader,
                collate="benchmarks.huggingface:end_to_end" if is_ragged and way == "torch" else None,
                batch_size=64,
            )
    found = in_turn(cases, settings)
    cpu = {name: metrics["cpu_us_per_sample"].median for name, metrics in found.items()}
    rows = []
    for name in TABLES:
        direct, plain_way, torchs = (cpu[f"{name}, {way}"] for way in ("direct", "plain", "torch"))
        beside = f"{direct:.1f} us; the plain way {plain_way:.1f}, torch {torchs:.1f}"
        got = torchs / direct
        rows.append(Row(f"Hugging Face, {name}: torch's CPU per sample over ours", got, "x", beside, ">= 5x", got >= 5))
    return Result(rows, {"cases": plain(found)})


if __name__ == "__main__":
    main("huggingface", __doc__, measure)
