"""Loaders that use torch or a thread pool differently from a plain DataLoader with workers. All of them keep torch's order."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from benchmarks.contestants.common import BatchReader, TorchOrder, fills_batches
from shmload import ShmLoader
from shmload.tools.bench.contestants import Loader, LoaderOptions, keywords, torch_loader
from shmload.tools.bench.core_limit import filler


def torch_inline(dataset: Any, options: LoaderOptions) -> Loader:
    """Returns a DataLoader without workers."""
    return torch_loader(dataset, replace(options, num_workers=0))


def torch_getitems(dataset: Any, options: LoaderOptions) -> Loader:
    """Returns a DataLoader at its best: a worker reads a batch in one call into tensors, which it sends without a copy."""
    if not (fills_batches(dataset) and options.collate is None):
        raise ValueError("loader torch_getitems: needs a dataset with a schema and read_into or read_batch_into")
    settings = {**keywords(options), "collate_fn": unchanged}
    loader: DataLoader[Any] = DataLoader(WholeBatches(dataset), **settings, generator=options.generator())
    return loader


class WholeBatches(Dataset[Any]):
    """Calls a dataset's `read_into` or `read_batch_into` from torch's `__getitems__`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.fill = dataset, filler(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        schema = self.dataset.schema
        batch = {name: empty((len(indices), *shape), np.dtype(dtype)) for name, (dtype, shape) in schema.items()}
        self.fill(indices, {name: tensor.numpy() for name, tensor in batch.items()})
        return batch


def unchanged(batch: Any) -> Any:
    return batch


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
    """Returns an uninitialized tensor, which is in shared memory in a torch worker, like those of torch's collate."""
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    if get_worker_info() is None:
        return torch.empty(shape, dtype=kind)
    torch_storage: Any = torch.UntypedStorage  # `_new_shared` has no type annotation in torch
    storage = torch_storage._new_shared(int(np.prod(shape)) * dtype.itemsize)
    flat: torch.Tensor = torch.empty(0, dtype=kind).set_(storage)
    return flat.view(shape)


def thread_workers(dataset: Any, options: LoaderOptions) -> ShmLoader[Any]:
    """Returns a ShmLoader in torch mode whose workers are threads."""
    arguments = {**keywords(options), "multiprocessing_context": None}
    return ShmLoader(dataset, **arguments, generator=options.generator(), backend="thread")


class Threads:
    """A thread pool in the trainer, in which each task fills one batch. It shows what is possible without a library."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.read_batch, self.options = BatchReader(dataset, options.collate), options
        self.pool = ThreadPoolExecutor(max(1, options.num_workers))
        self.orders = TorchOrder(dataset, options)

    def __iter__(self) -> Iterator[Any]:
        ahead: deque[Future[Any]] = deque()
        for indices in self.orders.epoch():
            ahead.append(self.pool.submit(self.read_batch, indices))
            if len(ahead) > (self.options.prefetch_factor or 2) * max(1, self.options.num_workers):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
