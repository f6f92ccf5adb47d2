"""Measure the CPU time per sample of reading WebDataset tar shards, with a 4 KiB .npy and a label per sample.

Method: 8 shards of 1,250 samples (1,024 random float32 and a label) in the page cache; batches of 64; 2 forked workers; loaders
take turns in fresh processes. shmload reads a TarDataset with a schema, shuffled over all samples. torch's DataLoader reads
webdataset's own pipeline, which decodes in order and collates in the workers; and, to show the loader's share, the same
TarDataset sample by sample.

How to read: The figures are CPU microseconds per sample over all processes, trainer and workers.

Predicted: webdataset 130 us (tarfile about 50 for two members, np.load 20, the rest its pipeline), shmload 2: two copies of 4
KiB, page faults, the engine's share of a batch.

Result (2 cores shared with other programs, 2 workers, 2 rounds): shmload 2.5 us, webdataset 139, torch's DataLoader over
TarDataset 76. webdataset costs 56x as much, and torch 31x.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Result, Row, Settings, cpu_us, in_turn, main, plain, ways
from shmload.formats import TarDataset, TarWriter
from shmload.tools.bench.contestants import LoaderOptions

NUM_SHARDS, PER_SHARD = 8, 1250
SCHEMA = {"npy": ("float32", (1024,)), "cls": "int64"}


@contextmanager
def shards() -> Iterator[str]:
    """Writes the shards, and yields their names as one pattern with braces."""
    rng = np.random.default_rng(11)
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        with TarWriter(Path(folder) / "%06d.tar", maxcount=PER_SHARD) as writer:
            for number in range(NUM_SHARDS * PER_SHARD):
                writer.write({"__key__": f"{number:08d}", "npy": rng.random(1024, np.float32), "cls": number % 1000})
        yield f"{folder}/{{000000..{NUM_SHARDS - 1:06d}}}.tar"


def in_place(urls: str) -> TarDataset:
    return TarDataset(urls, schema=SCHEMA)


def webdataset_loader(dataset: TarDataset, options: LoaderOptions) -> Any:
    """Returns webdataset's pipeline over the same shards, in torch's DataLoader."""
    import webdataset

    pipeline = webdataset.WebDataset(dataset.paths, shardshuffle=False).decode().to_tuple("npy", "cls")
    return torch.utils.data.DataLoader(
        pipeline.batched(options.batch_size, collation_fn=_collated),
        batch_size=None,
        num_workers=options.num_workers,
        multiprocessing_context=options.start_method,
        persistent_workers=True,
    )


def _collated(samples: list[Any]) -> dict[str, torch.Tensor]:
    arrays, labels = zip(*samples, strict=True)
    return {"npy": torch.from_numpy(np.stack(arrays)), "cls": torch.tensor(labels)}


def measure(settings: Settings) -> Result:
    """Measures the three loaders."""
    names = {"shmload": "shmload", "torch": "torch", "webdataset": "benchmarks.tar:webdataset_loader"}
    cases = {name: (loader, "in_place") for name, loader in names.items()}
    with shards() as urls:
        found = in_turn(ways("tar", cases, settings, 64, urls=urls), settings)
    cost, _ = cpu_us(found)
    rows = [
        Row(
            f"tar of 4 KiB npy + cls, CPU a sample: {name} over shmload",
            cost[name] / cost["shmload"],
            "x",
            f"{cost['shmload']:.2f} us, {name} {cost[name]:.1f}",
            f">= {aim}x",
            cost[name] / cost["shmload"] >= aim,
        )
        for name, aim in (("webdataset", 20), ("torch", 10))
    ]
    return Result(rows, {"cases": plain(found)})


if __name__ == "__main__":
    main("tar", __doc__, measure)
