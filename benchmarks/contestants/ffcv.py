"""FFCV: reads a file of its own, which the operating system caches, in its own order with threads of its compiled pipelines.

numba compiles what is done with the samples, so FFCV cannot run a workload's own decoder. Arrays are stored as they are
delivered.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import NDArrayField
from ffcv.fields.decoders import NDArrayDecoder
from ffcv.loader import Loader as FFCVLoader
from ffcv.loader import OrderOption
from ffcv.transforms import ToTensor
from ffcv.writer import DatasetWriter
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.contestants.common import written
from shmload.tools.bench.contestants import Loader, LoaderOptions

FILE = "samples.beton"


class Arrays:
    """A dataset's samples as tuples of arrays; numbers are arrays with one element."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        leaves, _ = tree_flatten(self.dataset[index])
        return tuple(np.atleast_1d(np.asarray(leaf)) for leaf in leaves)


def write(dataset: Any, folder: Path) -> None:
    samples = Arrays(dataset)
    fields = {f"leaf{i}": NDArrayField(leaf.dtype, leaf.shape) for i, leaf in enumerate(samples[0])}
    DatasetWriter(str(folder / FILE), fields, num_workers=1).from_indexed_dataset(samples)


def open_loader(dataset: Any, options: LoaderOptions) -> Loader:
    if type(dataset).__name__ == "Photos":
        raise ValueError("FFCV decodes and crops by functions of its own, which numba compiles: the bytes would be others")
    return Batches(dataset, options)


open_loader.keeps_order = False  # its bytes are not compared


class Batches:
    """FFCV's loader, with batches in the same form as those of the other loaders."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        folder = written(options, functools.partial(write, dataset))
        leaves, self.tree = tree_flatten(dataset[0])
        self.are_numbers = [np.ndim(leaf) == 0 for leaf in leaves]
        self.loader = FFCVLoader(
            str(folder / FILE),
            batch_size=options.batch_size,
            num_workers=max(1, options.num_workers),
            order=OrderOption.RANDOM,
            seed=options.seed,
            os_cache=True,
            drop_last=False,
            batches_ahead=options.prefetch_factor or 3,
            pipelines={f"leaf{i}": [NDArrayDecoder(), ToTensor()] for i in range(len(leaves))},
        )

    def __iter__(self) -> Iterator[Any]:
        for leaves in self.loader:
            shaped = (leaf.squeeze(1) if is_number else leaf for leaf, is_number in zip(leaves, self.are_numbers, strict=True))
            yield tree_unflatten(list(shaped), self.tree)
