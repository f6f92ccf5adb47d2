"""What a worker process is told at its start. Small: the dataset travels apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmload.worker.reader import PLAIN, ReadPlan


@dataclass(frozen=True)
class Job:
    """What the workers of one loader do, the same for all: read samples of `dataset`, make batches of them.

    `collate_fn` is None for the default collate. `seed` is None in torch mode. `drop_last` matters to iterable datasets alone,
    whose last batch only the worker sees; `shared_seed` to DataPipes. Where a worker stands travels with every
    `snapshot_every`-th batch; 0: never. How they are read is the `plan`'s word.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    auto_collation: bool
    seed: int | None
    seed_samples: bool
    is_iterable: bool = False
    drop_last: bool = False
    shared_seed: int | None = None
    snapshot_every: int = 0
    tolerates_bad_samples: bool = False
    plan: ReadPlan = PLAIN
    num_threads: int = 1


@dataclass(frozen=True)
class PeerRing:
    """The ring of another of the node's ranks, in which a worker may fill chunks when its own has none (visiting.py).

    Worker w of this worker pool has the record `first_record` + w there.
    """

    trainer_pid: int
    trainer_began: str
    control_path: str
    ready_bell: str
    grants_bell: str
    first_record: int


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
    pickled_job_path: str = ""  # the segment with the pickled job; empty: it came another way
    pickled_job_nbytes: int = 0
    stack_path: str = ""  # the segment it writes its Python stack to when asked to; empty: it cannot be asked
    neighbours: tuple[PeerRing, ...] = ()
    resume: bytes = b""  # the pickled snapshot that the worker goes on from; empty: it starts afresh
