"""SPDL: its pipeline with a thread per worker, each of which makes a batch with the dataset's own functions."""

from collections.abc import Iterator
from typing import Any

from spdl.pipeline import PipelineBuilder

from benchmarks.contestants.common import BatchReader, Continued, TorchOrder
from shmload.tools.bench.contestants import Loader, LoaderOptions


def open_loader(dataset: Any, options: LoaderOptions) -> Loader:
    return Batches(dataset, options)


class Batches(Continued):
    """A pipeline whose source is torch's order."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.dataset, self.options = dataset, options
        self.orders = TorchOrder(dataset, options)
        super().__init__(len(self.orders))

    def open(self) -> Iterator[Any]:
        threads = max(1, self.options.num_workers)
        builder = PipelineBuilder().add_source(self.orders.endless())
        builder.pipe(BatchReader(self.dataset), concurrency=threads, output_order="input")
        builder.add_sink(threads * (self.options.prefetch_factor or 2))
        pipeline = builder.build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()
