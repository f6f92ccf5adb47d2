"""Measure the cost of a sample whose `__getitem__` returns small tensors, and how much of it is the dataset's own.

Method: 2 forked workers; loaders take turns in fresh processes, and differ only in their class: torch's DataLoader, torch mode,
seed mode, and seed mode with `seed_samples=False`, which does not reseed for each sample. Samples are (a row of a tensor of 64
float32, an int), where the int comes from a tensor or a list of labels, and ten tensors of 8 float32, made by indexing ten
matrices. CPU is that of all processes. `dataset alone` reads the same samples in a bare loop, in one process, and does not
deliver them.

How to read: torch takes a microsecond or two to index a tensor. That cost is the dataset's, and no loader can avoid it. It
limits both figures, most of all for ten tensors per sample.

Result (2 cores, nothing else on the machine, 3 rounds), with samples/s over torch's in parentheses:
| CPU us per sample | torch | torch mode | seed mode | without reseeding | dataset alone |
|---|---|---|---|---|---|
| row and label, batch 1,024 | 3.82 | 2.01 (2.43 x) | 2.36 (2.12 x) | 1.96 (2.54 x) | 1.55 |
| row and label, batch 4,096 | 4.29 | 1.92 (2.33 x) | 2.31 (1.97 x) | 1.96 (2.31 x) | 1.59 |
| row and label of a list, batch 1,024 | 3.44 | 1.19 (3.59 x) | 1.62 (2.72 x) | 1.31 (3.37 x) | 0.80 |
| ten tensors, batch 1,024 | 21.2 | 7.39 (3.25 x) | 7.88 (3.10 x) | 7.42 (3.30 x) | 6.64 |
If the label comes from a tensor, the aim of 3 x is missed: two cores that did nothing but read that dataset would have 3.3 x
torch's rate. In seed mode, 0.35 us were spent on reseeding three generators. Since then, one native call reads and writes the
samples of a chunk. Two thirds of the reseeding (0.2 us) compute states, and a third copies 7.5 KB of them. On a day when
everything took 1.4 times as long (2 rounds), for a row and a label of a list: torch 4.83, torch mode 1.92 (3.48 x), seed mode
2.49 (2.82 x), without reseeding 1.89 (3.70 x), dataset alone 1.17.
"""

from typing import Any

import torch

from benchmarks.common import Result, Row, Settings, cpu_us, forked, in_turn, main, plain
from shmload import ShmLoader
from shmload.tools.bench.contestants import Loader, LoaderOptions, keywords

LOADERS = {
    "torch": "torch",
    "torch mode": "shmload",
    "seed mode": "shmload-seed",
    "seed mode, seed_samples=False": "benchmarks.small_tensors:unseeded",
    "dataset alone": "benchmarks.samples:Alone",
}
OURS = [name for name in LOADERS if "mode" in name]
CASES = {  # dataset, batch size, aim of the rate over torch's
    "row of 64 and label, batch 1,024": ("Labelled", 1024, ">= 3x"),
    "row of 64 and label, batch 4,096": ("Labelled", 4096, ">= 3x"),
    "row of 64 and label of a list, batch 1,024": ("Listed", 1024, ">= 3x"),
    "ten tensors of 8, batch 1,024": ("TenTensors", 1024, "> 1x"),
}


class Labelled:
    """Samples of a row of a tensor, and an int."""

    def __init__(self) -> None:
        self.rows, self.labels = torch.rand(1 << 17, 64), torch.arange(1 << 17)  # type: torch.Tensor, Any

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.rows[index], int(self.labels[index])


class Listed(Labelled):
    """The same samples, with labels that are already ints."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = self.labels.tolist()


class TenTensors:
    """Samples of ten tensors, each a row of a different matrix."""

    def __init__(self) -> None:
        self.matrices = [torch.rand(1 << 15, 8) for _ in range(10)]

    def __len__(self) -> int:
        return len(self.matrices[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(matrix[index] for matrix in self.matrices)


def unseeded(dataset: Any, options: LoaderOptions) -> Loader:
    """Returns a ShmLoader in seed mode that does not reseed, for datasets that draw no random numbers."""
    return ShmLoader(dataset, **keywords(options), seed=options.seed, seed_samples=False)


unseeded.keeps_order = False  # type: ignore[attr-defined]  # an optional attribute of factories


def measure(settings: Settings) -> Result:
    """Measures every dataset with every loader."""
    rows, measured = [], {}
    for case, (dataset, batch_size, aim) in CASES.items():
        jobs = {
            name: forked(
                settings, workload=case, dataset=f"benchmarks.small_tensors:{dataset}", loader=loader, batch_size=batch_size
            )
            for name, loader in LOADERS.items()
        }
        found = in_turn(jobs, settings)
        cost, beside = cpu_us(found)
        rate = {name: each["samples_per_s"].median for name, each in found.items()}
        for name in OURS:
            faster, share = rate[name] / rate["torch"], cost[name] / cost["torch"]
            rates = f"{rate[name]:,.0f} samples/s, torch {rate['torch']:,.0f}"
            rows.append(Row(f"{case}, {name}: samples/s over torch", faster, "x", rates, aim, faster >= float(aim.strip(">= x"))))
            rows.append(Row(f"{case}, {name}: CPU a sample over torch's", share, "x", f"us: {beside}", "<= 0.5x", share <= 0.5))
        measured[case] = plain(found)
    return Result(rows, {"cases": measured})


if __name__ == "__main__":
    main("small_tensors", __doc__, measure)
