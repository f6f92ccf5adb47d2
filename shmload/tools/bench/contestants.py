"""The loaders that are compared.

A contestant is a name and a function that makes an iterable of batches from a dataset. All shuffle from the same seed in torch's
way, so that batches can be compared byte by byte. `module:factory` names a loader outside the table: the factory takes the dataset
and a LoaderOptions. A factory with `keeps_order = False` delivers in an order of its own, and its bytes are not compared.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from shmload.loader import ShmLoader
from shmload.tools.object_reference import resolve


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options that every contestant gets.

    Args:
        batch_size: samples of a batch.
        num_workers: worker processes; 0 reads in the trainer.
        seed: seed of the order.
        start_method: start method of the workers; None is Python's default.
        prefetch_factor: batches ordered ahead for each worker; None is torch's default.
        collate: list of samples -> batch; None is the loader's default.
        shuffle: False for an IterableDataset, which has its own order.
        scratch: an empty folder for this loader and dataset, kept until the benchmark ends: for files in a format of its own.
    """

    batch_size: int
    num_workers: int
    seed: int
    start_method: str | None = None
    prefetch_factor: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    scratch: Path | None = None
    shuffle: bool = True

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


Loader = Iterable[Any]
Factory = Callable[[Any, LoaderOptions], Loader]


def keywords(options: LoaderOptions) -> dict[str, Any]:
    """Return the arguments of a DataLoader, except those that set its order."""
    workers = options.num_workers
    return {
        "batch_size": options.batch_size,
        "shuffle": options.shuffle,
        "num_workers": workers,
        "collate_fn": options.collate,
        "multiprocessing_context": options.start_method if workers else None,
        "persistent_workers": workers > 0,
        "prefetch_factor": options.prefetch_factor if workers else None,
    }


def shmload(dataset: Any, options: LoaderOptions) -> Loader:
    """Return a ShmLoader in torch mode."""
    return ShmLoader(dataset, **keywords(options), generator=options.generator())


def threads(dataset: Any, options: LoaderOptions) -> Loader:
    """Return a ShmLoader in torch mode whose workers are threads. Without workers, it is the same as `shmload`."""
    arguments = keywords(options) | ({"backend": "thread", "multiprocessing_context": None} if options.num_workers else {})
    return ShmLoader(dataset, **arguments, generator=options.generator())


def seed_mode(dataset: Any, options: LoaderOptions) -> Loader:
    """Return a ShmLoader in seed mode, with its own order."""
    return ShmLoader(dataset, **keywords(options), seed=options.seed)


seed_mode.keeps_order = False  # type: ignore[attr-defined]  # a user's factory may set it, too


def torch_loader(dataset: Any, options: LoaderOptions) -> Loader:
    """Return torch's DataLoader, which reads sample by sample, as most people use it."""
    return DataLoader(dataset, **keywords(options), generator=options.generator())


CONTESTANTS: dict[str, Factory] = {"shmload": shmload, "shmload-threads": threads, "torch": torch_loader, "shmload-seed": seed_mode}


def factory(name: str) -> Factory:
    """Return the factory of a contestant: from the table, or as `module:factory`."""
    found: Factory = resolve(name, what="--loader") if ":" in name else CONTESTANTS[name]
    return found
