"""The loaders that are compared: one table, name -> how to make an iterable of batches from a dataset.

All shuffle from the same seed in torch's own way, so that the batches can be compared byte by byte. `module:factory`
names a loader that is not in the table; the factory takes the dataset and a LoaderOptions.
"""

import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from shmload.tools.bench.peers import PEERS
from shmload.tools.named import BenchError, resolve


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What every contestant is told."""

    batch_size: int
    num_workers: int
    seed: int
    shuffle: bool = True
    start_method: str | None = None
    prefetch_factor: int | None = None
    peer_folder: str | None = None  # where a peer's own files are
    collate: Callable[[list[Any]], Any] | None = None

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


Loader = Iterable[Any]
Factory = Callable[[Any, LoaderOptions], Loader]


def keywords(options: LoaderOptions, num_workers: int) -> dict[str, Any]:
    return {
        "batch_size": options.batch_size,
        "shuffle": options.shuffle,
        "num_workers": num_workers,
        "collate_fn": options.collate,
        "multiprocessing_context": options.start_method if num_workers else None,
        "persistent_workers": num_workers > 0,
        "prefetch_factor": options.prefetch_factor if num_workers else None,
    }


def shmload(dataset: Any, options: LoaderOptions) -> Loader:
    loader: Loader = resolve("shmload:ShmLoader", what="loader shmload")(
        dataset, **keywords(options, options.num_workers), generator=options.generator()
    )
    return loader


def shmload_seed(dataset: Any, options: LoaderOptions) -> Loader:
    loader: Loader = resolve("shmload:ShmLoader", what="loader shmload-seed")(
        dataset, **keywords(options, options.num_workers), seed=options.seed
    )
    return loader


def torch_workers(dataset: Any, options: LoaderOptions) -> Loader:
    return DataLoader(dataset, **keywords(options, options.num_workers), generator=options.generator())


def torch_inline(dataset: Any, options: LoaderOptions) -> Loader:
    return DataLoader(dataset, **keywords(options, 0), generator=options.generator())


def torch_getitems(dataset: Any, options: LoaderOptions) -> Loader:
    """DataLoader at its best: a batch is fetched at once into tensors that a worker hands over without a copy."""
    if not (fills_batches(dataset) and options.collate is None):
        raise BenchError("loader torch-getitems: needs a dataset with a schema and read_into or read_batch_into")
    settings = {**keywords(options, options.num_workers), "collate_fn": unchanged}
    loader: DataLoader[Any] = DataLoader(WholeBatches(dataset), **settings, generator=options.generator())
    return loader


class WholeBatches(Dataset[Any]):
    """A dataset's `read_into` or `read_batch_into` behind torch's `__getitems__`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        return filled_batch(self.dataset, indices)


def unchanged(batch: Any) -> Any:
    return batch


class TorchOrder:
    """The indices of torch's batches, epoch after epoch, for loaders that can be told what to read."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.loader: DataLoader[Any] = DataLoader(dataset, **keywords(options, 0), generator=options.generator())
        self.keeps_workers, self.has_begun = options.num_workers > 0, False

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self) -> Iterator[list[int]]:
        # DataLoader draws a base seed from its generator before an epoch's order, once only if its workers persist. So must
        # we for the same order.
        if not (self.keeps_workers and self.has_begun):
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        self.has_begun = True
        yield from self.loader.batch_sampler or ()

    def endless(self) -> Iterator[list[int]]:
        while True:
            yield from self.epoch()


class Threads:
    """A thread pool in the trainer, each task filling one batch: what can be had with no library at all."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.dataset, self.options = dataset, options
        self.pool = ThreadPoolExecutor(max(1, options.num_workers))
        self.orders = TorchOrder(dataset, options)

    def batch(self, indices: Sequence[int]) -> Any:
        return read_batch(self.dataset, indices, self.options.collate)

    def __iter__(self) -> Iterator[Any]:
        ahead: deque[Future[Any]] = deque()
        for indices in self.orders.epoch():
            ahead.append(self.pool.submit(self.batch, indices))
            if len(ahead) > (self.options.prefetch_factor or 2) * max(1, self.options.num_workers):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def fills_batches(dataset: Any) -> bool:
    names = ("read_batch_into", "read_into")
    return getattr(dataset, "schema", None) is not None and any(getattr(dataset, name, None) for name in names)


def read_batch(dataset: Any, indices: Sequence[int], collate: Callable[[list[Any]], Any] | None = None) -> Any:
    """A batch read in this thread in the best way the dataset has."""
    if fills_batches(dataset) and collate is None:
        return filled_batch(dataset, indices)
    return (collate or default_collate)([dataset[index] for index in indices])


def filled_batch(dataset: Any, indices: Sequence[int]) -> dict[str, torch.Tensor]:
    """A batch of the dataset's schema, filled in place by its own protocol."""
    batch = {name: empty((len(indices), *shape), np.dtype(dtype)) for name, (dtype, shape) in dataset.schema.items()}
    fill(dataset, indices, {name: tensor.numpy() for name, tensor in batch.items()})
    return batch


def fill(dataset: Any, indices: Sequence[int], out: dict[str, Any]) -> None:
    """Fills rows 0..len(indices) of the arrays in `out`."""
    if getattr(dataset, "read_batch_into", None):
        dataset.read_batch_into(indices, out)
        return
    for row, index in enumerate(indices):
        dataset.read_into(index, RowView(out, row))


class RowView(dict[str, Any]):
    """Row `row` of every array: reading gives a writable view, assigning writes through."""

    def __init__(self, out: dict[str, Any], row: int) -> None:
        super().__init__((name, array[row, ...]) for name, array in out.items())

    def __setitem__(self, name: str, value: Any) -> None:
        self[name][...] = value


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
    """An uninitialised tensor; within a torch worker in shared memory, as its own collate makes them."""
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    if get_worker_info() is None:
        return torch.empty(shape, dtype=kind)
    torch_storage: Any = torch.UntypedStorage  # its shared memory is untyped in torch
    storage = torch_storage._new_shared(int(np.prod(shape)) * dtype.itemsize)
    flat: torch.Tensor = torch.empty(0, dtype=kind).set_(storage)
    return flat.view(shape)


def open_peer(name: str) -> Factory:
    found: Factory = importlib.import_module(PEERS[name].module).open_loader
    return found


CONTESTANTS: dict[str, Factory] = {
    "shmload": shmload,
    "torch": torch_workers,
    "torch-getitems": torch_getitems,
    "torch-0": torch_inline,
    "threads": Threads,
    "shmload-seed": shmload_seed,
}


def factory(name: str) -> Factory:
    """The factory of a contestant's name.

    Raises:
        BenchError: the name is neither in the table nor a `module:factory` that can be imported.
    """
    if ":" in name:
        return resolve(name, what="--loader")  # type: ignore[no-any-return]  # the user's own
    if name in PEERS:
        return open_peer(name)
    if name not in CONTESTANTS:
        raise BenchError(f"--loader: needs one of {', '.join(CONTESTANTS)} or module:factory, given {name!r}")
    return CONTESTANTS[name]
