"""The arguments of a loader, frozen for one pass.

torch lets programs set some attributes of a loader between passes, so `ShmLoader` makes a `LoaderConfig` of its attributes when a
pass begins. All parts of the loader (modes, builder, audit, autotune, ranks that share) get this value instead of the loader.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert

from shmload.engine.bad_samples import OnError
from shmload.engine.holders import is_enabled
from shmload.ray_options import Ray
from shmload.worker.job import Job
from shmload.worker.read_plan import ReadPlan, plan_of


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The arguments of a loader during one pass; `ShmLoader` documents each.

    Attributes:
        index_sampler: the sampler that torch made of shuffle, sampler and batch_sampler.
        auto_collation: whether samples are collated into batches, as torch decides it from batch_size and batch_sampler.
        has_users_sampler: whether, in seed mode, a sampler of the user's chooses the samples instead of the schedule.
    """

    dataset: Any
    batch_size: int | None
    shuffle: bool | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    seed: int | None
    seed_samples: bool
    rank: int | None
    world_size: int | None
    uneven: Literal["pad", "drop", "exact"]
    ring_bytes: int | None
    max_restarts: int | None
    on_error: OnError
    max_bad: int | None
    sample_timeout_s: float | None
    ragged: str | Mapping[str, str]
    snapshot_every_n_steps: int
    threads_per_worker: int
    trust_state: bool
    backend: Literal["process", "thread", "auto", "ray"] | Ray
    share: str | None
    device: Any
    after_batch: Callable[[Any], Any] | None
    audit: str | os.PathLike[str] | None
    index_sampler: Any
    auto_collation: bool
    has_users_sampler: bool

    @property
    def total_workers(self) -> int:
        """Return the number of workers: `num_workers`, and the local ones that a Ray backend adds."""
        return self.num_workers + (0 if self.ray is None else self.ray.num_local_workers)

    @property
    def ray(self) -> Ray | None:
        """Return the options of the Ray cluster that the workers run on; None if they are processes or threads of this machine."""
        if isinstance(self.backend, Ray):
            return self.backend
        return Ray() if self.backend == "ray" else None

    @property
    def is_iterable(self) -> bool:
        """Return whether the dataset is an IterableDataset."""
        return isinstance(self.dataset, IterableDataset)

    @cached_property
    def plan(self) -> ReadPlan:
        """Return how workers read the dataset; it is decided at the first access."""
        return plan_of(
            self.dataset,
            collate_fn=self.custom_collate_fn,
            auto_collation=self.auto_collation,
            ragged=self.ragged,
            is_torch=self.seed is None,
        )

    @property
    def snapshot_every(self) -> int:
        """Return the interval in batches at which workers report positions; 0 for never.

        With in_order=False, every batch carries a report, unless reports are turned off.
        """
        if self.seed is not None:
            return 0
        return self.snapshot_every_n_steps if self.in_order else min(self.snapshot_every_n_steps, 1)

    @property
    def custom_collate_fn(self) -> Callable[[Any], Any] | None:
        """Return the user's collate_fn; None if it is torch's default."""
        default = default_collate if self.auto_collation else default_convert
        return None if self.collate_fn is default else self.collate_fn

    @property
    def num_samples(self) -> int | None:
        """Return the length of the dataset now; None if it has none."""
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            return None

    @property
    def num_steps(self) -> int:
        """Return the number of batches of a pass in torch mode; 0 if unknown."""
        try:
            return 0 if self.is_iterable else len(self.index_sampler)
        except Exception:  # raised by the user's sampler, which may have no length
            return 0

    @property
    def has_fixed_length(self) -> bool:
        """Return whether every pass in torch mode has `num_steps` batches: a user's sampler may have no length, or change it."""
        samplers = self.index_sampler, getattr(self.index_sampler, "sampler", None)
        return all(type(each).__module__.startswith(("torch.utils.data.", "builtins")) for each in samplers)

    @property
    def reads_inline(self) -> bool:
        """Return whether a loader without workers reads the dataset with shmload's reader instead of torch's."""
        if self.plan.layout is not None or self.on_error != "raise":
            return True
        if self.is_iterable or not self.auto_collation:
            return False
        # torch's reader would call the `__getitems__` that a wrapper forwards
        return hasattr(self.dataset, "__getitems__") and not self.plan.has_getitems

    def job(self) -> Job:
        """Return the job of the workers."""
        every, is_kept = self.snapshot_every, self.persistent_workers and not self.is_iterable
        if is_kept and not self.has_fixed_length:
            every = min(every, 1)  # each batch may be the last one of a worker, whose state the next pass needs
        return Job(
            dataset=self.dataset,
            collate_fn=self.custom_collate_fn,
            worker_init_fn=self.worker_init_fn,
            auto_collation=self.auto_collation,
            seed=self.seed,
            seed_samples=self.seed_samples,
            is_iterable=self.is_iterable,
            drop_last=bool(self.drop_last),
            snapshot_every=every,
            num_steps=self.num_steps if self.persistent_workers and self.snapshot_every else 0,
            tolerates_bad_samples=self.on_error != "raise",
            plan=self.plan,
            num_threads=self.threads_per_worker,
            checks_all=is_enabled(),
        )
