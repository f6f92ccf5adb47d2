"""Build loaders with the arguments of a DataLoader that the user has built.

A torch DataLoader keeps every argument as a public attribute, and its order as a sampler or a batch sampler. A ShmLoader gets the
same objects, so both draw the same order from the same generator. `torch` is the user's object itself, unless a sweep asks for
another number of workers or prefetch factor: then it is rebuilt in the same way.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate, default_convert

from shmload.loader import ShmLoader
from shmload.tools.object_reference import UsageError, one_line, resolve

TAKEN = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def users_loader(spec: str, seed: int) -> DataLoader[Any]:
    """Return the DataLoader that `spec` names or returns. The global seed is set first, so every process has the same order.

    Raises:
        UsageError: it raised, or the result is not a DataLoader.
    """
    torch.manual_seed(seed)
    made = resolve(spec, what="--torch-loader")
    wanted = "a torch DataLoader or a function that returns one"
    if not isinstance(made, DataLoader) and callable(made):
        wanted = "a function that returns a torch DataLoader"
        try:
            made = made()
        except Exception as error:
            raise UsageError(
                f"--torch-loader {spec}: calling it without arguments raised {one_line(error)}; name a function that needs "
                "none and returns the DataLoader"
            ) from error
    if not isinstance(made, DataLoader):
        raise UsageError(f"--torch-loader {spec}: needs {wanted}, given {type(made).__name__}")
    return made


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the keywords that make a loader with the same batches in the same order."""
    found = {name: getattr(loader, name) for name in TAKEN if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        return {**found, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:  # each item of the sampler is read as it is
        return {**found, "batch_size": None, "sampler": loader.sampler}
    if type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None:
        return {**found, "batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    return {**found, "batch_sampler": loader.batch_sampler}


def like_users(name: str, own: DataLoader[Any], num_workers: int | None, prefetch: int | None) -> DataLoader[Any]:
    """Return a loader with the arguments of the user's: torch's for the name "torch", a ShmLoader for the others.

    Args:
        name: "torch", "shmload" or "shmload-threads".
        own: the user's loader, which is returned itself for "torch" if no setting is given.
        num_workers, prefetch: settings to use in place of its own; None keeps its own.
    """
    if name == "torch" and num_workers is None and prefetch is None:
        return own
    arguments = arguments_of(own)
    if num_workers is not None:
        arguments["num_workers"] = num_workers
    if prefetch is not None:
        arguments["prefetch_factor"] = prefetch
    if arguments["num_workers"] == 0:  # torch refuses these without workers
        arguments |= {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
    elif name == "shmload-threads":
        arguments |= {"backend": "thread", "multiprocessing_context": None}
    return (DataLoader if name == "torch" else ShmLoader)(own.dataset, **arguments)


def key_batches(loader: DataLoader[Any]) -> Iterator[list[Any]] | None:
    """Return the keys of the loader's batches, pass after pass; None for an iterable dataset.

    Raises:
        ValueError: when a batch is taken, a pass of the sampler is empty.
    """
    return None if isinstance(loader.dataset, IterableDataset) else _passes_of(loader)


def _passes_of(loader: DataLoader[Any]) -> Iterator[list[Any]]:
    while True:
        batches: Iterable[Any] = loader.batch_sampler or ([key] for key in loader.sampler)
        is_empty = True
        for keys in batches:
            is_empty = False
            yield list(keys)
        if is_empty:
            raise ValueError("the loader's sampler yields nothing: give one that has samples in each pass")


def users_collate(loader: DataLoader[Any]) -> Callable[[list[Any]], Any] | None:
    """Return the function that makes the loader's batches of lists of samples; None if it is torch's own."""
    if loader.collate_fn in (default_collate, default_convert):
        return None
    if loader.batch_sampler is not None or isinstance(loader.dataset, IterableDataset):
        return loader.collate_fn
    return lambda samples: loader.collate_fn(samples[0])  # without batches, it gets each sample alone


def num_samples(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples of an epoch; None if it is unknown before they are read."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    try:
        count = len(loader.sampler)  # type: ignore[arg-type]  # one without a length raises TypeError
    except TypeError:
        return None
    return count // loader.batch_size * loader.batch_size if loader.drop_last else count
