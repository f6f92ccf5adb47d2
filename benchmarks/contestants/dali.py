"""NVIDIA DALI without a GPU: batches in torch's order from a parallel external source, whose processes use the dataset's functions.

Each batch is copied once on its way to torch, as by DALI's own iterator.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.contestants.common import BatchReader, Continued, TorchOrder
from shmload.tools.bench.contestants import Loader, LoaderOptions

NUM_EPOCHS = 16  # epochs of one pipeline, which gets their order when it is created


def open_loader(dataset: Any, options: LoaderOptions) -> Loader:
    return Batches(dataset, options)


class InOrder:
    """Maps the number of a batch to its arrays. DALI's processes call it."""

    def __init__(self, dataset: Any, orders: list[Any]) -> None:
        self.read_batch, self.orders = BatchReader(dataset), orders

    def __call__(self, info: Any) -> tuple[Any, ...]:
        if info.iteration >= len(self.orders):
            raise StopIteration
        leaves, _ = tree_flatten(self.read_batch(self.orders[info.iteration].tolist()))
        return tuple(leaf.numpy() for leaf in leaves)


class Batches(Continued):
    """Pipelines of several epochs, one after another."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.dataset, self.options = dataset, options
        self.orders = TorchOrder(dataset, options)
        leaves, self.tree = tree_flatten(BatchReader(dataset)([0]))
        self.num_leaves = len(leaves)
        super().__init__(len(self.orders))

    def open(self) -> Iterator[Any]:
        while True:
            orders = [np.array(indices) for _ in range(NUM_EPOCHS) for indices in self.orders.epoch()]
            pipeline = self.pipeline(InOrder(self.dataset, orders))
            for _ in orders:
                yield tree_unflatten([torch.from_numpy(copied(each)) for each in pipeline.run()], self.tree)

    def pipeline(self, source: InOrder) -> Any:
        options = self.options
        workers, ahead = max(1, options.num_workers), options.prefetch_factor or 2

        @pipeline_def(  # type: ignore[untyped-decorator]  # of DALI
            batch_size=options.batch_size,
            num_threads=1,
            device_id=None,
            prefetch_queue_depth=2,
            py_num_workers=workers,
            py_start_method="fork" if options.start_method in (None, "fork") else "spawn",
        )
        def graph() -> Any:
            outputs = fn.external_source(
                source,
                num_outputs=self.num_leaves,
                batch=True,
                batch_info=True,
                parallel=True,
                prefetch_queue_depth=workers * ahead,
            )
            return tuple(outputs)

        pipeline = graph()
        pipeline.start_py_workers()
        pipeline.build()
        return pipeline


def copied(samples: Any) -> Any:
    return np.array(samples.as_tensor())
