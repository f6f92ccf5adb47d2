"""Datasets and loaders that only the benchmarks need. Jobs refer to them as `benchmarks.datasets:name`."""

import time
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from shmload.tools.bench.contestants import LoaderOptions
from shmload.tools.bench.photos import Photos, photo_files
from shmload.tools.bench.workload import Field


class Fields:
    """Samples of `num_fields` fields of 64 float32 each, from memory."""

    def __init__(self, num_fields: int, num_samples: int = 100_000) -> None:
        self.schema: dict[str, Field] = {f"f{number}": ("float32", (64,)) for number in range(num_fields)}
        self.values = np.random.default_rng(5).random((4096, 64), np.float32)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict.fromkeys(self.schema, self.values[index % 4096])

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        rows = np.asarray(indices) % 4096
        for name in self.schema:
            np.take(self.values, rows, 0, out=out[name], mode="clip")


class Blocks:
    """Samples of 1 MiB of float32, from memory."""

    schema: dict[str, Field] = {"x": ("float32", (1 << 18,))}  # noqa: RUF012  # never changed

    def __init__(self, num_samples: int = 4096) -> None:
        self.blocks = np.random.default_rng(6).random((64, 1 << 18), np.float32)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.blocks[index % 64]}

    def read_into(self, index: int, out: MutableMapping[str, Any]) -> None:
        np.copyto(out["x"], self.blocks[index % 64])


def as_numpy(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collates samples into numpy arrays, which torch's workers pickle through a pipe."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class Slow:
    """Samples that each take 10 ms to arrive, as from a store; they wait and do not compute."""

    def __init__(self, seconds: float = 0.010, num_samples: int = 4096) -> None:
        self.seconds, self.num_samples = seconds, num_samples
        self.image = np.random.default_rng(7).integers(0, 256, (3, 64, 64), np.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        time.sleep(self.seconds)
        return self.image, index


def short_photos(num_samples: int = 512) -> Photos:
    """Returns a dataset of photos with short epochs."""
    return Photos(photo_files(), num_samples)


class Resident:
    """A substitute for a loader that delivers the same batch repeatedly, which shows the cost of the measurement itself."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.batch = {name: torch.ones(options.batch_size, 64) for name in dataset.schema}
        self.num_batches = len(dataset) // options.batch_size

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.num_batches):
            yield self.batch
