"""The size and placement of one engine, which the builder derives from the loader's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shmload.device.cuda import CudaDevice
from shmload.engine.config import LoaderConfig
from shmload.engine.restart_limit import RestartLimit
from shmload.engine.stage_record import StagePlaces
from shmload.worker.pool import Backend, process_pool


@dataclass(frozen=True)
class EngineOptions:
    """Size and placement of one engine.

    Attributes:
        config: arguments of the loader.
        restarts: how many dead workers may still be replaced, over all engines of the loader.
        num_workers: largest number of workers.
        num_ordered: largest number of batches in flight.
        max_rows: rows of the largest batch expected; 0 if unknown.
        timeout_s: seconds that `next` waits for a batch; 0 for no limit.
        base_seed: torch's base seed of the workers.
        resume: one snapshot for each worker to continue from, or empty.
        first_workers, first_ordered: initial number of workers and of batches in flight, which may change later; 0 for the largest
            numbers, which then stay.
        device: the device that the ring is pinned for; None if it is not pinned.
        num_pending_copies: additional slots for batches whose copies to the device are in flight.
        num_sent: number of batches copied to the device ahead of their turn; None if batches stay on the host.
        num_ranks: ranks of this node that read the ring.
        num_helpers: workers of other ranks that may fill chunks of the ring.
        affinity: CPUs of the workers; empty for those of the trainer.
        backend: starts the workers.
        has_threads: the workers are threads of the trainer.
        num_ray_workers: number of workers that are Ray actors, on any machine; they have the first numbers.
        stage_places: (stage, its place) for each stage of a pipeline, shown to readers of the ring.
    """

    config: LoaderConfig
    restarts: RestartLimit
    num_workers: int
    num_ordered: int
    max_rows: int
    timeout_s: float
    base_seed: int
    resume: Sequence[bytes] = ()
    first_workers: int = 0
    first_ordered: int = 0
    device: CudaDevice | None = None
    num_pending_copies: int = 0
    num_sent: int | None = None
    num_ranks: int = 1
    num_helpers: int = 0
    affinity: tuple[int, ...] = ()
    backend: Backend = process_pool
    has_threads: bool = False
    num_ray_workers: int = 0
    stage_places: StagePlaces = ()
