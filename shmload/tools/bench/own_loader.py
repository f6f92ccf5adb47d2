"""The user's own torch DataLoader, and a ShmLoader that is given the same arguments.

A DataLoader keeps every argument as a public attribute, and its order as a sampler or a batch sampler. Those are handed
on as they are, so both draw the same order from the same generator. `torch` is the user's object itself, unless a sweep
asks for another number of workers: then it is made anew in the same way.
"""

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from shmload.tools.named import BenchError, one_line, resolve

TAKEN = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
TAKEN_BY_NAME = ("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")


def make_torch_loader(spec: str, seed: int) -> DataLoader[Any]:
    """The DataLoader that `spec` names or returns. The global seed is set first, so that every process has the same order.

    Raises:
        BenchError: it raised, or it is no DataLoader.
    """
    torch.manual_seed(seed)
    made = resolve(spec, what="--torch-loader")
    if not isinstance(made, DataLoader):
        if not callable(made):
            raise BenchError(
                f"--torch-loader {spec}: needs a torch DataLoader or a function that returns one, given {type(made).__name__}"
            )
        try:
            made = made()
        except Exception as error:
            raise BenchError(
                f"--torch-loader {spec}: calling it without arguments raised {one_line(error)}; name a function that needs "
                "none and returns the DataLoader"
            ) from error
    if not isinstance(made, DataLoader):
        kind = type(made).__name__
        raise BenchError(f"--torch-loader {spec}: needs a function that returns a torch DataLoader, given {kind}")
    return made


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The keywords that make a loader with the same batches in the same order."""
    found = {name: getattr(loader, name) for name in (*TAKEN, *TAKEN_BY_NAME) if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        return {**found, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:  # each item of the sampler is read as it is
        return {**found, "batch_size": None, "sampler": loader.sampler}
    if type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None:
        return {**found, "batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    return {**found, "batch_sampler": loader.batch_sampler}


def with_setting(arguments: dict[str, Any], num_workers: int | None, prefetch_factor: int | None) -> dict[str, Any]:
    """The arguments with another crew; what torch refuses without workers is then left out."""
    changed = dict(arguments)
    if num_workers is not None:
        changed["num_workers"] = num_workers
    if prefetch_factor is not None:
        changed["prefetch_factor"] = prefetch_factor
    if changed["num_workers"] == 0:
        changed |= {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
    return changed


def contestant(
    name: str, own: DataLoader[Any], num_workers: int | None, prefetch_factor: int | None
) -> DataLoader[Any]:
    """`torch`: the user's loader as it is; `shmload`: a ShmLoader with its arguments."""
    arguments = with_setting(arguments_of(own), num_workers, prefetch_factor)
    if name == "shmload":
        made: DataLoader[Any] = resolve("shmload:ShmLoader", what="loader shmload")(own.dataset, **arguments)
        return made
    if num_workers is None and prefetch_factor is None:
        return own
    return DataLoader(own.dataset, **arguments)


def num_samples(loader: DataLoader[Any]) -> int | None:
    """Samples of an epoch, None where only reading tells."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    try:
        count = len(loader.sampler)  # type: ignore[arg-type]  # one without a length raises TypeError
    except TypeError:
        return None
    return count // loader.batch_size * loader.batch_size if loader.drop_last else count
