"""What a worker process is told at its start. Small: the dataset travels apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """What the workers of one loader do, the same for all: read samples of `dataset`, make batches of them.

    `collate_fn` is None for the default collate. `seed` is None in torch mode. `layout_text` is the layout of a dataset that
    declares a schema, else empty.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    auto_collation: bool
    seed: int | None
    seed_samples: bool


@dataclass(frozen=True)
class Post:
    """One worker's place: which worker of how many, the memory and bells it shares with the trainer."""

    worker_id: int
    num_workers: int
    trainer_pid: int
    control_path: str
    control_nbytes: int
    ready_bell: str
    orders_bell: str
    grants_bell: str
    base_seed: int
    affinity: tuple[int, ...]
    parcel_path: str
    parcel_nbytes: int
