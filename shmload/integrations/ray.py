"""Prepare a ShmLoader for Ray Train, in place of `ray.train.torch.prepare_data_loader`.

`ray.train.torch.prepare_data_loader(loader)` builds a plain torch DataLoader from a loader's attributes, with a DistributedSampler,
and silently discards the loader that it was given, with its seed, its workers' backend and its state. `prepare` here keeps the
loader a ShmLoader, and does the same by the loader's own arguments:

    in seed mode                       `rank` and `world_size`: the loader divides the samples, for any number of workers
    in torch mode, or with a sampler   a DistributedSampler
    batches on the worker's GPU        `device`

Nothing is wrapped, so `state_dict()`, `stats()`, `valid` and `set_epoch()` are the loader's. Give its `state_dict()` to
`ray.train.report` together with the model. In seed mode, the state of any one worker resumes all workers, even if their
number has changed, as long as the global batch has not.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, TypeVar, cast

from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from shmload.formats.extras import with_extra
from shmload.integrations import changed, orders_itself, rebuilt
from shmload.loader import ShmLoader

try:
    import ray.train
    import ray.train.torch
except ModuleNotFoundError as error:
    raise with_extra(error, "ray") from error

_Loader = TypeVar("_Loader", bound=ShmLoader[Any])


def prepare(loader: _Loader, *, add_dist_sampler: bool = True, move_to_device: bool = True) -> _Loader:
    """Prepare a ShmLoader in a worker of Ray Train, as `ray.train.torch.prepare_data_loader` prepares a DataLoader.

    The result continues at the loader's position. Iterate only the result afterward, not the loader itself.

    Args:
        loader: the loader; it stays open. If it has no rank, it gets this worker's rank among all workers.
        add_dist_sampler: in torch mode, or if the loader has a sampler of yours, divide the samples by a DistributedSampler, unless
            the loader has one already. Call `set_epoch` before each epoch then, as with Ray's function. In seed mode, the loader
            always divides the samples itself.
        move_to_device: deliver batches on the worker's GPU, if it has one and the loader has no `device`.
    Returns:
        another loader of the same class.
    Raises:
        RuntimeError: this is not a worker of Ray Train.
        TypeError: `loader` is not a ShmLoader.
        ValueError: a sampler of yours would be discarded.
        StateMismatch: the loader is within an epoch that was divided among another number of ranks, or a sampler divides the
            samples and the loader has loaded a state.
    """
    if not isinstance(loader, ShmLoader):
        raise TypeError(f"prepare takes a ShmLoader; got {type(loader).__name__}, which ray.train.torch.prepare_data_loader takes")
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    if rank is None or world_size is None:
        raise RuntimeError(
            "this process is not a worker of a TorchTrainer, and Ray Train knows no rank for it: call prepare in its loop"
        )
    arguments: dict[str, Any] = {}
    if orders_itself(loader):
        if loader.rank is None:
            arguments = {"rank": rank, "world_size": world_size}
    elif world_size > 1 and add_dist_sampler and not _is_divided(loader):
        loader = _divided(loader, rank, world_size)
    if move_to_device and loader.device is None and (device := ray.train.torch.get_device()).type == "cuda":
        arguments["device"] = device
    return changed(loader, **arguments)


def _is_divided(loader: ShmLoader[Any]) -> bool:
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return isinstance(loader.dataset, IterableDataset) or any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _divided(loader: _Loader, rank: int, world_size: int) -> _Loader:
    """Return a loader that reads this worker's part of the samples."""
    has_batches_of_its_own = loader.batch_size is None and loader.batch_sampler is not None
    if has_batches_of_its_own or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        name = type(loader.batch_sampler if has_batches_of_its_own else loader.sampler).__name__
        raise ValueError(
            f"{name} gives the same samples to each of the {world_size} workers: Ray's own prepare_data_loader would throw "
            "it away. Give a DistributedSampler, or shmload's own samplers with a seed, which are divided; or "
            "add_dist_sampler=False if it divides by itself"
        )
    if getattr(loader.sampler, "replacement", False):
        raise ValueError("a RandomSampler with replacement is not divided over workers: give a seed, or a DistributedSampler")
    num_chosen, num_samples = len(cast(Sized, loader.sampler)), len(cast(Sized, loader.dataset))
    if num_chosen != num_samples:
        raise ValueError(
            f"the sampler chooses {num_chosen} of the dataset's {num_samples} samples, and the workers would read all: give a "
            "torch.utils.data.Subset, or a DistributedSampler"
        )
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = DistributedSampler(loader.dataset, world_size, rank, shuffle=shuffle)  # type: ignore[var-annotated]  # any samples
    return rebuilt(loader, sampler=sampler, batch_size=loader.batch_size, drop_last=loader.drop_last)
