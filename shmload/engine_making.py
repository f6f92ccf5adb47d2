"""What a loader tells its workers, and the engine that it reads through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert

from shmload.batch.deliver import mapped, parts_of
from shmload.debug import WatchedEngine, is_enabled
from shmload.device.sending import NUM_SENT, Sender, calls_of, sender_of
from shmload.engine.autotune import tuner_of
from shmload.engine.engine import Engine
from shmload.engine.feed import FeedingEngine, WatchedFeedingEngine
from shmload.engine.orders import BadSamples, OnError
from shmload.engine.parts import EngineOptions
from shmload.observed import ObservedLoader, T
from shmload.worker.reader import ReadPlan, plan_of
from shmload.worker.spec import Job

if TYPE_CHECKING:
    from shmload.loader import ShmLoader


class EngineMaking(ObservedLoader[T]):
    """The part of ShmLoader that makes engines of its arguments."""

    device: Any
    share: Any
    crew: Any
    address: str | None
    num_local_workers: int
    connect_timeout_s: float
    ragged: str | Mapping[str, str]
    seed_samples: bool
    snapshot_every_n_steps: int
    ring_bytes: int | None
    max_restarts: int | None
    sample_timeout_s: float | None
    rank: int | None
    world_size: int | None
    on_error: OnError
    threads_per_worker: int
    _sender: Sender | None
    _num_rings: int

    @property
    def crew_size(self) -> int:
        """How many workers there are, of whatever kind."""
        return self.num_workers + self.num_local_workers

    @property
    def _read_plan(self) -> ReadPlan:
        """How batches are read; made anew when someone asks, as collate_fn may be set between passes."""
        return plan_of(
            self.dataset,
            collate_fn=self.custom_collate_fn,
            auto_collation=self._auto_collation,
            ragged=self.ragged,
            is_torch_mode=self.seed is None,
        )

    @property
    def snapshot_every(self) -> int:
        """After how many batches workers say where they stand; 0: never. Out of order nothing else tells the place."""
        if self.seed is not None:
            return 0
        return self.snapshot_every_n_steps if self.in_order else min(self.snapshot_every_n_steps, 1)

    @property
    def custom_collate_fn(self) -> Callable[[Any], Any] | None:
        """The user's collate_fn; None where torch's default is meant."""
        default = default_collate if self._auto_collation else default_convert
        return None if self.collate_fn is default else self.collate_fn

    def make_job(self) -> Job:
        """What workers are told to do."""
        return Job(
            dataset=self.dataset,
            collate_fn=self.custom_collate_fn,
            worker_init_fn=self.worker_init_fn,
            auto_collation=self._auto_collation,
            seed=self.seed,
            seed_samples=self.seed_samples,
            is_iterable=isinstance(self.dataset, IterableDataset),
            drop_last=bool(self.drop_last),
            snapshot_every=self.snapshot_every,
            tolerates_bad_samples=self.on_error != "raise",
            plan=self._read_plan,
            num_threads=self.threads_per_worker,
        )

    def make_engine(self, *, base_seed: int, resume: Sequence[bytes] = (), **of_job: Any) -> Engine:
        """A ring and a crew for this loader.

        Args:
            resume: one pickled snapshot for each worker to go on from, or none at all.
            of_job: what the job has of the pass, not of the loader.
        """
        loader = cast("ShmLoader[Any]", self)
        if self._tuner is not None and not self._tuner.is_of(loader):  # they may be set between passes
            self._tuner = tuner_of(loader)
        known = self.batch_size if self._auto_collation else 1
        sender = self.sender()  # both must mean the same device where "cuda" is whichever is current
        calls = calls_of(None, pin_memory=self.pin_memory and self.share is None) if sender is None else sender.calls
        engine = self._kind_of_engine()(
            dataclasses.replace(self.make_job(), **of_job),
            EngineOptions(
                **(self._tuner.engine_options() if self._tuner is not None else self._fixed_size()),
                max_rows=known or 0,
                is_static=self.seed is None,
                ring_bytes=self.ring_bytes,
                timeout_s=self.timeout,
                max_restarts=self.max_restarts,
                multiprocessing_context=self.multiprocessing_context,
                base_seed=base_seed,
                resume=resume,
                sample_timeout_s=self.sample_timeout_s,
                rank=self.rank,
                world_size=self.world_size,
                calls=calls,
                num_cooling=0 if calls is None else NUM_SENT,
                num_sent=None if self.device is None else NUM_SENT,
                sender=sender,
                **self._backend(),
            ),
            self._bad_samples,
        )
        self._num_rings += 1
        self._last_engine = engine
        self._engines.add(engine)
        if self._trace is not None:
            self._trace.follow(engine)
        return engine

    def _kind_of_engine(self) -> Callable[[Job, EngineOptions, BadSamples], Engine]:
        if self.share is not None:
            from shmload.sharing.choice import shared_engine  # few loaders share

            return partial(shared_engine, cast("ShmLoader[Any]", self))
        if self.device is not None:
            return WatchedFeedingEngine if is_enabled() else FeedingEngine
        return WatchedEngine if is_enabled() else Engine

    def sender(self) -> Sender | None:
        """What sends batches to the device, in all passes, as their buffers are the same; None: they stay on the host."""
        if self.device is None:
            return None
        if self._sender is None or self._sender.device is not self.device:  # it may be set between passes
            self._sender = sender_of(self.device)
        return self._sender

    def record_stream(self, batch: Any, stream: Any) -> None:
        """Has a batch's memory not be used again before what `stream` has been given, by the time the batch dies, is done.

        Needed where a batch of a pinned ring is copied, or a batch on the device is used, on a stream that is not the current one
        when the batch dies. What lies in no slot of this loader needs none of it, and is left alone.

        Args:
            batch: what the loader yielded, or any part of it.
            stream: a `torch.cuda.Stream`.
        """
        sender = self.sender()
        all_releases = [engine.releases for engine in self._engines if engine.releases is not None]
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

    def _backend(self) -> dict[str, Any]:
        """Where workers run."""
        if self.crew != "ray":
            return {}
        from shmload.ray.crew import OnCluster  # few loaders have a cluster

        cluster = OnCluster(self.address or "auto", self.num_local_workers, self.connect_timeout_s)
        return {"backend": cluster, "num_far": self.num_workers}

    def _fixed_size(self) -> dict[str, Any]:
        return {"num_workers": self.crew_size, "num_ordered": (self.prefetch_factor or 0) * self.crew_size}

    @property
    def reads_inline(self) -> bool:
        """Whether, without workers, the dataset is read by our reader and not by torch's."""
        plan = self._read_plan
        if plan.is_in_place or self._bad_samples.are_tolerated:
            return True
        if isinstance(self.dataset, IterableDataset) or not self._auto_collation:
            return False
        # torch's would take what a wrapper passes on
        return hasattr(self.dataset, "__getitems__") and not plan.has_getitems
