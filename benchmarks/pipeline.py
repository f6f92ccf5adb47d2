"""Measure the cost of a pipeline compared with the loader that runs it, and the cost of single items.

Method: 2 forked workers, shuffled, a fresh process per case, in turn. Batches: ShmLoader in seed mode is compared with a
Conveyer of Permutation, DistributedBatchedMap and Collate over the same function, with photos of 3 x 224 x 224 uint8 that are
copied, in batches of 64, and with dicts of 64 numbers and a label, in batches of 256. Single items: the dicts without Collate
are compared with torch's DataLoader(batch_size=None).

How to read: Look at the ratios of medians. A pipeline does the loader's own work with one more Python call per item, and with a
position instead of a step, so any loss per batch is visible.

Predicted: batches at 0.95 to 1.0 of the loader's rate and 1.02 times its CPU per sample; single items at 8 times torch's rate.

Result (2 cores, other work on the machine): photos at 1.03 times the loader's rate and 0.94 times its CPU, dicts at 1.01 and
1.05; single items at 26.5 times torch's rate and 0.03 times its CPU, because cheap items are fetched up to 64 at a time, which
the prediction left out.
"""

from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain
from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Permutation
from shmload.tools.bench.contestants import Loader, LoaderOptions, keywords

BATCHES = {"photos": 64, "dicts": 256}


class Samples:
    """Photos, or dicts of 64 numbers and a label, from memory."""

    def __init__(self, kind: str, num_samples: int = 20_000) -> None:
        rng = np.random.default_rng(5)
        self.kind, self.num_samples = kind, num_samples
        self.rows = rng.integers(0, 255, (16, 3, 224, 224), np.uint8) if kind == "photos" else rng.random((4096, 64))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.rows[index % len(self.rows)].copy(), "label": index}


def conveyer(dataset: Samples, options: LoaderOptions) -> Loader:
    """Returns the pipeline. With a batch size of 1, it delivers single items."""
    stages: list[Any] = [
        Permutation(len(dataset), repeating=False),
        DistributedBatchedMap(dataset.__getitem__, options.num_workers),
    ]
    if options.batch_size > 1:
        stages.append(Collate(options.batch_size))
    return Conveyer(stages, multiprocessing_context=options.start_method)


def torch_items(dataset: Samples, options: LoaderOptions) -> Loader:
    """Returns torch's loader of single items."""
    given = {**keywords(options), "batch_size": None}
    loader: Loader = DataLoader(dataset, **given)  # type: ignore[arg-type]  # has a Dataset's methods
    return loader


def measure(settings: Settings) -> Result:
    """Measures batches against the loader's, and single items against torch's."""

    def job(loader: str, kind: str, batch_size: int) -> Any:
        return forked(
            settings,
            workload="pipeline",
            dataset="benchmarks.pipeline:Samples",
            arguments={"kind": kind},
            loader=loader,
            batch_size=batch_size,
        )

    cases = {f"loader, {kind}": job("shmload-seed", kind, size) for kind, size in BATCHES.items()}
    cases |= {f"pipeline, {kind}": job("benchmarks.pipeline:conveyer", kind, size) for kind, size in BATCHES.items()}
    cases["torch, items"] = job("benchmarks.pipeline:torch_items", "dicts", 1)
    cases["pipeline, items"] = job("benchmarks.pipeline:conveyer", "dicts", 1)
    measured = in_turn(cases, settings)

    def over(case: str, other: str, metric: str) -> float:
        return measured[case][metric].median / measured[other][metric].median

    rows = []
    for kind in BATCHES:
        rate = over(f"pipeline, {kind}", f"loader, {kind}", "samples_per_s")
        cpu = over(f"pipeline, {kind}", f"loader, {kind}", "cpu_us_per_sample")
        rows.append(Row(f"pipeline of {kind}: samples/s over ShmLoader's", rate, "x", f"CPU {cpu:.2f}x", ">= 0.9x", rate >= 0.9))
    rate = over("pipeline, items", "torch, items", "samples_per_s")
    cpu = over("pipeline, items", "torch, items", "cpu_us_per_sample")
    rows.append(Row("single items: items/s over torch's", rate, "x", f"CPU {cpu:.2f}x", ">= 3x", rate >= 3))
    return Result(rows, plain(measured))


if __name__ == "__main__":
    main("pipeline", __doc__, measure)
