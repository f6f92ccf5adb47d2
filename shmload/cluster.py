"""Decode on a Ray cluster, with the argument names of Dpex.

`DpexDataLoader` is torch's loader with two more arguments. With `distribute_mode=True` its workers are actors on the nodes of the
Ray cluster that this machine belongs to; otherwise they are processes on this machine. The batches are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.utils.data import Dataset, Sampler

from shmload.loader import ShmLoader
from shmload.ray_options import Ray

__all__ = ["DpexDataLoader"]

T = TypeVar("T")


class DpexDataLoader(ShmLoader[T]):
    """`ShmLoader` in torch mode, with the argument names and positions of Dpex.

    Args:
        dataset: as in ShmLoader; it is pickled and sent to each node once.
        distribute_mode: decode on the cluster. With num_workers=0 the trainer reads and this has no effect.
        head_address: address of the cluster's head; "auto" means the cluster that runs on this machine.
        num_workers: number of actors, or of processes on this machine. With 0, the trainer reads.
        batch_size, shuffle, sampler, batch_sampler, collate_fn, pin_memory, drop_last: as torch's DataLoader.
        timeout, worker_init_fn, multiprocessing_context, generator: as torch's DataLoader.
        prefetch_factor: as torch's DataLoader; the default has no effect without workers.
    Raises:
        ImportError: `distribute_mode=True` and Ray is not installed.
    Example:
        >>> from shmload.cluster import DpexDataLoader
        >>> [batch.tolist() for batch in DpexDataLoader([1, 2, 3], batch_size=2)]
        [[1, 2], [3]]
    """

    def __init__(
        self,
        dataset: Dataset[T],
        distribute_mode: bool | None = False,
        head_address: str = "auto",
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = 2,
    ) -> None:
        if num_workers == 0 and prefetch_factor == 2:
            prefetch_factor = None  # torch refuses it without workers, even Dpex's default
        is_distributed = bool(distribute_mode) and num_workers > 0
        backend: Any = "process"
        if is_distributed:
            backend = Ray(address=head_address, actor_options={"num_cpus": 0})  # start all actors even if other work uses the CPUs
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__", "is_distributed")}
        self.distribute_mode, self.head_address = given.pop("distribute_mode"), given.pop("head_address")
        super().__init__(**given)
