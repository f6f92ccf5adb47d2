"""Makes the engines of one loader, one after the other, and knows those that there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

import torch

from shmload.batch.deliver import mapped, parts_of
from shmload.device.sending import NUM_SENT, Sender, calls_of, sender_of
from shmload.engine.autotune import Autotuner, tuner_of
from shmload.engine.config import LoaderConfig
from shmload.engine.controller import Setting
from shmload.engine.orders import BadSamples, BatchSource
from shmload.engine.parts import EngineOptions, Hook
from shmload.engine.watching import Holders, is_enabled
from shmload.worker.spec import Job

if TYPE_CHECKING:
    from shmload.engine.trace import Trace

Make: TypeAlias = Callable[[Job, EngineOptions, BadSamples, Sequence[Hook]], BatchSource]


class EngineBuilder:
    """Makes a ring and a crew for each time that a loader starts workers.

    Args:
        config: the loader's as it is made.
        bad_samples: where all engines count and replace them.
        kind: which engine a loader gets that asks for more than the plain one, and where its workers run: options of the engine.
        tell: told of the numbers that "auto" stands for, whenever they change.

    Attributes:
        engines: those that have not gone.
        last: the newest one.
        tuner: what changes the numbers while they are "auto"; None where nothing may change.
        num_made: engines so far.
        trace: what records the engines, also those still to come.
    """

    def __init__(
        self,
        config: LoaderConfig,
        bad_samples: BadSamples,
        kind: Callable[[LoaderConfig, EngineBuilder], tuple[Make, dict[str, Any]]],
        tell: Callable[[Setting], None],
    ) -> None:
        self.bad_samples = bad_samples
        self._kind, self._tell = kind, tell
        self._sender: Sender | None = None
        self.engines: WeakSet[BatchSource] = WeakSet()
        self.last: BatchSource | None = None
        self.tuner: Autotuner | None = tuner_of(config, tell)
        self.num_made = 0
        self.trace: Trace | None = None

    def make(self, config: LoaderConfig, *, base_seed: int, resume: Sequence[bytes] = (), **of_job: Any) -> BatchSource:
        """A ring and a crew.

        Args:
            resume: one pickled snapshot for each worker to go on from, or none at all.
            of_job: what the job has of the pass, not of the loader.
        """
        if self.tuner is not None and not self.tuner.is_of(config):  # they may be set between passes
            self.tuner = tuner_of(config, self._tell)
        known = config.batch_size if config.auto_collation else 1
        sender = self.sender(config)  # both must mean the same device where "cuda" is whichever is current
        calls = (
            calls_of(None, pin_memory=config.pin_memory and config.share is None) if sender is None else sender.calls
        )
        make, of_kind = self._kind(config, self)
        engine = make(
            dataclasses.replace(config.job(), **of_job),
            EngineOptions(
                **(self.tuner.engine_options() if self.tuner is not None else _fixed_size(config)),
                max_rows=known or 0,
                is_static=config.seed is None,
                ring_bytes=config.ring_bytes,
                timeout_s=config.timeout,
                max_restarts=config.max_restarts,
                multiprocessing_context=config.multiprocessing_context,
                base_seed=base_seed,
                resume=resume,
                sample_timeout_s=config.sample_timeout_s,
                rank=config.rank,
                world_size=config.world_size,
                calls=calls,
                num_cooling=0 if calls is None else NUM_SENT,
                num_sent=None if config.device is None else NUM_SENT,
                sender=sender,
                **of_kind,
            ),
            self.bad_samples,
            [Holders()] if is_enabled() else [],
        )
        self.num_made += 1
        self.last = engine
        self.engines.add(engine)
        if self.trace is not None:
            self.trace.follow(engine)
        return engine

    def sender(self, config: LoaderConfig) -> Sender | None:
        """What sends batches to the device, in all passes, as their buffers are the same; None: they stay on the host."""
        if config.device is None:
            return None
        if self._sender is None or self._sender.device is not config.device:  # it may be set between passes
            self._sender = sender_of(config.device)
        return self._sender

    def record_stream(self, config: LoaderConfig, batch: Any, stream: Any) -> None:
        """See ShmLoader.record_stream."""
        sender = self.sender(config)
        all_releases = [engine.releases for engine in self.engines if engine.releases is not None]
        named: set[tuple[int, int]] = set()

        def name(tensor: torch.Tensor) -> torch.Tensor:
            if sender is not None:
                sender.name_stream(tensor, stream)
            elif tensor.device.type == "cpu":
                for (number, releases), part in product(enumerate(all_releases), parts_of(tensor)):
                    slot = releases.pins.slot_at(part.data_ptr())
                    if slot >= 0 and (number, slot) not in named:
                        named.add((number, slot))
                        releases.name_stream(slot, stream)
            return tensor

        mapped(batch, name, lambda leaf: leaf)

    def close(self) -> None:
        """Ends all workers; an iterator that someone still holds says that the loader is closed."""
        for engine in list(self.engines):
            engine.close()


def _fixed_size(config: LoaderConfig) -> dict[str, Any]:
    return {"num_workers": config.crew_size, "num_ordered": (config.prefetch_factor or 0) * config.crew_size}
