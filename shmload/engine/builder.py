"""Make the engines of one loader: a new one each time the loader starts workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet, finalize

import torch

from shmload.batch.mapped_batch import mapped
from shmload.batch.sparse_tensors import parts_of
from shmload.device.cuda import CudaDevice, current_cuda, open_device
from shmload.device.sending import NUM_SENT
from shmload.engine.backend_choice import BackendChoice
from shmload.engine.bad_samples import BadSamples
from shmload.engine.batch_source import BatchSource
from shmload.engine.config import LoaderConfig
from shmload.engine.holders import is_enabled
from shmload.engine.options import EngineOptions
from shmload.engine.restart_limit import RestartLimit
from shmload.engine.stage_record import StagePlaces
from shmload.engine.tuning.autotune import Autotuner, tuner_of
from shmload.engine.tuning.tuning_decision import Setting
from shmload.shm import reaper
from shmload.worker.job import Job

MANY_ROWS = 1 << 16  # smaller batch sizes are not compared with the dataset's length, because len() may cost more than the memory


def max_rows(config: LoaderConfig) -> int:
    """Return the rows of the largest batch expected; 0 if unknown.

    A `batch_size` above the number of samples, which programs pass to get all samples in one batch, reserves no memory for rows
    that do not exist.

    Args:
        config: arguments of the loader.
    """
    if not config.auto_collation:
        return 1
    num_rows = config.batch_size or 0
    if num_rows <= MANY_ROWS:
        return num_rows
    try:
        num_samples = len(config.dataset if config.sampler is None else config.sampler)
    except (TypeError, NotImplementedError):  # a stream, for example, has no length
        return num_rows
    return min(num_rows, num_samples)


class Make(Protocol):
    """A function that makes an engine, or a reader of another rank's ring. The arguments are those of `Engine`."""

    def __call__(
        self, job: Job, options: EngineOptions, bad_samples: BadSamples, *, records_holders: bool = False
    ) -> BatchSource: ...


class Tracing(Protocol):
    """A trace that records the events of engines, implemented in tracing/trace.py.

    Attributes:
        path: the file that the trace is written to.
    """

    path: Path

    def follow(self, engine: BatchSource, *, with_history: bool = True) -> None:
        """Also record this engine.

        Args:
            engine: the engine.
            with_history: also record the events so far.
        """


class EngineBuilder:
    """The maker of one loader's engines, which keeps track of them.

    Args:
        config: arguments of the loader when it was made.
        bad_samples: shared by all engines.
        kind: (config, builder) -> the function that makes the engine, and the `EngineOptions` for the placement of its workers.
        on_change: called with the current values of "auto" arguments whenever they change.

    Attributes:
        engines: engines that are still alive.
        last: the newest engine, closed or not; None before the first.
        tuner: changes the values of "auto" arguments; None if there are none.
        chosen: what `backend="auto"` has chosen; None before, and for any other backend.
        num_made: engines made so far.
        trace: records all engines, including later ones; None if there is no trace.
        stage_places: (stage, where it runs) of a pipeline, shown to readers of its rings.
    """

    def __init__(
        self,
        config: LoaderConfig,
        bad_samples: BadSamples,
        kind: Callable[[LoaderConfig, EngineBuilder], tuple[Make, dict[str, Any]]],
        on_change: Callable[[Setting], None],
    ) -> None:
        self.bad_samples = bad_samples
        self._restarts = RestartLimit(config)
        self._kind, self._on_change = kind, on_change
        self._device: tuple[Any, CudaDevice] | None = None  # the loader's argument, and the device that it named first
        self.engines: WeakSet[BatchSource] = WeakSet()
        self.last: BatchSource | None = None
        self.tuner: Autotuner | None = tuner_of(config, on_change)
        self.chosen: BackendChoice | None = None
        self.num_made = 0
        self.trace: Tracing | None = None
        self.stage_places: StagePlaces = ()
        self._reaper: finalize[..., Any] | None = None

    def make(self, config: LoaderConfig, *, base_seed: int, resume: Sequence[bytes] = (), **of_job: Any) -> BatchSource:
        """Make an engine.

        Args:
            config: arguments of the loader for this pass.
            base_seed: torch's base seed of the workers.
            resume: one pickled snapshot for each worker to continue from, or empty.
            of_job: fields of the `Job` that this pass replaces.
        """
        if self.tuner is not None and not self.tuner.still_matches(config):  # the program has set a number between passes
            self.tuner = tuner_of(config, self._on_change)
        device = self.device(config.device)
        if device is None and config.pin_memory and config.share is None:
            device = current_cuda()
        make, of_kind = self._kind(config, self)
        num_workers = config.total_workers
        size: dict[str, Any] = {"num_workers": num_workers, "num_ordered": (config.prefetch_factor or 0) * num_workers}
        if self.tuner is not None:
            size = self.tuner.engine_options()
        options = EngineOptions(
            **size,
            config=config,
            restarts=self._restarts,
            max_rows=max_rows(config),
            timeout_s=config.timeout,
            base_seed=base_seed,
            resume=resume,
            device=device,
            num_pending_copies=0 if device is None else NUM_SENT,
            num_sent=None if config.device is None else NUM_SENT,
            stage_places=self.stage_places,
            **of_kind,
        )
        job = dataclasses.replace(config.job(), **of_job)
        engine = make(job, options, self.bad_samples, records_holders=is_enabled())
        if not options.has_threads and (self._reaper is None or not self._reaper.alive):
            self._reaper = reaper.keep_for(self)  # it also runs between this pass and the next
        self.num_made += 1
        self.last = engine
        self.engines.add(engine)
        if self.trace is not None:
            self.trace.follow(engine)
        return engine

    def device(self, device: Any) -> CudaDevice | None:
        """Return the device to send batches to; None if they stay on the host.

        Args:
            device: the loader's argument. "cuda" means the device that was current when this was first called.
        """
        if device is None:
            return None
        if self._device is None or self._device[0] is not device:  # the program has set it between passes
            self._device = device, open_device(device)
        return self._device[1]

    def record_stream(self, device: Any, batch: Any, stream: Any) -> None:
        """Keep a batch until the work on a stream has finished; see `ShmLoader.record_stream`.

        Args:
            device: the loader's argument.
            batch: the batch, of any structure.
            stream: a stream of the device.
        """
        cuda = self.device(device)
        all_releases = [engine.releases for engine in self.engines if engine.releases is not None]

        def name(tensor: torch.Tensor) -> torch.Tensor:
            if cuda is not None:
                for part in parts_of(tensor):
                    cuda.keep_for(part, stream)
            elif tensor.device.type == "cpu":
                for releases, part in product(all_releases, parts_of(tensor)):
                    slot = releases.pins.slot_at(part.data_ptr())
                    if slot >= 0:
                        releases.name_stream(slot, stream)
            return tensor

        mapped(batch, name)

    def close(self) -> None:
        """Stop all workers. Iterators that are still referenced raise when asked for a batch."""
        for engine in list(self.engines):
            engine.close()
        if self._reaper is not None:
            self._reaper()
