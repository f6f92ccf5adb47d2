"""The loaders that are compared: name -> how to make an iterable of batches, from a dataset or from the user's own DataLoader.

All shuffle from the same seed in torch's own way, so that batches can be compared byte by byte. `module:factory` names a loader
that is not in the table: the factory takes the dataset and a LoaderOptions. A factory that has `keeps_order = False` delivers in an
order of its own; the samples of an epoch are then compared as a set.

A user's own torch DataLoader keeps every argument as a public attribute, and its order as a sampler or a batch sampler. A ShmLoader
is given those as they are, so both draw the same order from the same generator. `torch` is the user's object itself, unless a sweep
asks for another number of workers: then it is made anew in the same way.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from shmload.tools.named import BenchError, one_line, resolve


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What every contestant is told.

    Args:
        scratch: an empty folder of this loader and dataset, there until the benchmark ends: for files in a format of its own.
    """

    batch_size: int
    num_workers: int
    seed: int
    start_method: str | None = None
    prefetch_factor: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    scratch: Path | None = None

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


Loader = Iterable[Any]
Factory = Callable[[Any, LoaderOptions], Loader]


def keywords(options: LoaderOptions) -> dict[str, Any]:
    """What a DataLoader is told, its order left out."""
    workers = options.num_workers
    return {
        "batch_size": options.batch_size,
        "shuffle": True,
        "num_workers": workers,
        "collate_fn": options.collate,
        "multiprocessing_context": options.start_method if workers else None,
        "persistent_workers": workers > 0,
        "prefetch_factor": options.prefetch_factor if workers else None,
    }


def shm_loader(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    made: DataLoader[Any] = resolve("shmload:ShmLoader", what="loader shmload")(dataset, **arguments)
    return made


def shmload(dataset: Any, options: LoaderOptions) -> Loader:
    """ShmLoader in torch mode."""
    return shm_loader(dataset, **keywords(options), generator=options.generator())


class SeedMode:
    """ShmLoader in seed mode, in its own order."""

    keeps_order = False

    def __call__(self, dataset: Any, options: LoaderOptions) -> Loader:
        return shm_loader(dataset, **keywords(options), seed=options.seed)


def torch_loader(dataset: Any, options: LoaderOptions) -> Loader:
    """torch's DataLoader, a sample at a time: how most people use it."""
    return DataLoader(dataset, **keywords(options), generator=options.generator())


CONTESTANTS: dict[str, Factory] = {"shmload": shmload, "torch": torch_loader, "shmload-seed": SeedMode()}


def factory(name: str) -> Factory:
    """The factory of a contestant's name: in the table, or `module:factory`."""
    found: Factory = resolve(name, what="--loader") if ":" in name else CONTESTANTS[name]
    return found


TAKEN = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def users_loader(spec: str, seed: int) -> DataLoader[Any]:
    """The DataLoader that `spec` names or returns. The global seed is set first, so that every process has the same order.

    Raises:
        BenchError: it raised, or it is no DataLoader.
    """
    torch.manual_seed(seed)
    made = resolve(spec, what="--torch-loader")
    wanted = "a torch DataLoader or a function that returns one"
    if not isinstance(made, DataLoader) and callable(made):
        wanted = "a function that returns a torch DataLoader"
        try:
            made = made()
        except Exception as error:
            raise BenchError(
                f"--torch-loader {spec}: calling it without arguments raised {one_line(error)}; name a function that needs "
                "none and returns the DataLoader"
            ) from error
    if not isinstance(made, DataLoader):
        raise BenchError(f"--torch-loader {spec}: needs {wanted}, given {type(made).__name__}")
    return made


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The keywords that make a loader with the same batches in the same order."""
    found = {name: getattr(loader, name) for name in TAKEN if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        return {**found, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:  # each item of the sampler is read as it is
        return {**found, "batch_size": None, "sampler": loader.sampler}
    if type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None:
        return {**found, "batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    return {**found, "batch_sampler": loader.batch_sampler}


def like_users(name: str, own: DataLoader[Any], num_workers: int | None, prefetch: int | None) -> DataLoader[Any]:
    """`torch`: the user's loader as it is; `shmload`: a ShmLoader with its arguments. Both with another setting if one is given."""
    if name == "torch" and num_workers is None and prefetch is None:
        return own
    arguments = arguments_of(own)
    if num_workers is not None:
        arguments["num_workers"] = num_workers
    if prefetch is not None:
        arguments["prefetch_factor"] = prefetch
    if arguments["num_workers"] == 0:  # what torch refuses without workers
        arguments |= {
            "prefetch_factor": None,
            "persistent_workers": False,
            "multiprocessing_context": None,
            "timeout": 0,
        }
    return shm_loader(own.dataset, **arguments) if name == "shmload" else DataLoader(own.dataset, **arguments)


def num_samples(loader: DataLoader[Any]) -> int | None:
    """Samples of an epoch, None where only reading tells."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    try:
        count = len(loader.sampler)  # type: ignore[arg-type]  # one without a length raises TypeError
    except TypeError:
        return None
    return count // loader.batch_size * loader.batch_size if loader.drop_last else count
