"""Grain: a MapDataset whose elements are batches in torch's order, read ahead by worker processes.

Every pipeline starts new workers, which takes seconds, so one pipeline has several epochs. Without workers, it reads ahead in a
thread of the trainer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
import torch

from benchmarks.contestants.common import BatchReader, Continued, TorchOrder
from shmload.tools.bench.contestants import Loader, LoaderOptions

NUM_EPOCHS = 16  # epochs of one pipeline


def open_loader(dataset: Any, options: LoaderOptions) -> Loader:
    return Batches(dataset, options)


class InOrder:
    """Maps the number of a batch to the batch: a random-access source for Grain, which sends arrays through shared memory."""

    def __init__(self, dataset: Any, orders: Sequence[Any]) -> None:
        self.read_batch, self.orders = BatchReader(dataset), orders

    def __len__(self) -> int:
        return len(self.orders)

    def __getitem__(self, number: int) -> Any:
        batch = self.read_batch(self.orders[number].tolist())
        return torch.utils._pytree.tree_map(torch.Tensor.numpy, batch)


class Batches(Continued):
    """Pipelines of several epochs, one after another."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.dataset, self.options = dataset, options
        self.orders = TorchOrder(dataset, options)
        super().__init__(len(self.orders))

    def open(self) -> Iterator[Any]:
        while True:
            orders = [np.array(indices) for _ in range(NUM_EPOCHS) for indices in self.orders.epoch()]
            yield from self.pipeline(InOrder(self.dataset, orders))

    def pipeline(self, source: InOrder) -> Iterator[Any]:
        workers, ahead = self.options.num_workers, self.options.prefetch_factor or 2
        reading = grain.MapDataset.source(source).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead))
        if workers:
            several = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
            reading = reading.mp_prefetch(several)
        iterator = iter(reading)
        try:
            for batch in iterator:
                yield torch.utils._pytree.tree_map(torch.from_numpy, batch)
        finally:
            if hasattr(iterator, "close"):
                iterator.close()
