"""Decoding on a Ray cluster, with the spellings of the loader it takes the place of.

`DpexDataLoader` is torch's loader with two arguments more. With `distribute_mode=True` its workers are actors on the nodes of the
Ray cluster that this machine belongs to; otherwise they are processes of this machine. Batches are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.utils.data import Dataset, Sampler

from shmload.loader import ShmLoader

__all__ = ["DpexDataLoader"]

T = TypeVar("T")


class DpexDataLoader(ShmLoader[T]):
    """`ShmLoader` in torch mode, by the names and positions that programs for Dpex use.

    Args:
        dataset: as ShmLoader's; it travels to the nodes by pickle, once for each.
        distribute_mode: decode on the cluster. Without workers there is nothing to distribute: the trainer reads.
        head_address: of the cluster's head; "auto": the cluster that runs on this machine.
        num_workers: actors, or processes of this machine; 0: the trainer reads.
        batch_size, shuffle, sampler, batch_sampler, collate_fn, pin_memory, drop_last: as torch's DataLoader.
        timeout, worker_init_fn, multiprocessing_context, generator: as torch's DataLoader.
        prefetch_factor: as torch's DataLoader; without workers 2 means nothing.
    Raises:
        ImportError: `distribute_mode` without Ray.
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
            prefetch_factor = None  # torch refuses a number without workers, even Dpex's own default
        is_distributed = bool(distribute_mode) and num_workers > 0
        backend, address = ("ray", head_address) if is_distributed else ("process", None)
        actor_options = {"num_cpus": 0} if is_distributed else None  # as many as the program asks for, whatever else runs there
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__", "is_distributed")}
        self.distribute_mode, self.head_address = given.pop("distribute_mode"), given.pop("head_address")
        super().__init__(**given)
