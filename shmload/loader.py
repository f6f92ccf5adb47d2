"""`ShmLoader`: torch's DataLoader with a ring of shared memory in place of its queues.

Both modes use one engine: torch mode (`modes/torch_mode.py`) behaves exactly like torch in everything that a program can observe,
and seed mode (`modes/seed_mode.py`) follows the deterministic schedule. This module has the arguments, and the code that both modes
share.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from typing_extensions import TypeVar  # torch's own requirement

from shmload.audit.recorder import Recorder
from shmload.batch.ragged import AS_TORCH_OR_LIST, RaggedMode
from shmload.engine.argument_checks import check_arguments
from shmload.engine.argument_types import add_wrong_type
from shmload.engine.backend_choice import chosen_backend
from shmload.engine.bad_samples import BadSamples, OnError
from shmload.engine.builder import EngineBuilder, Make
from shmload.engine.config import LoaderConfig
from shmload.engine.engine import Engine
from shmload.engine.holders import Holder
from shmload.engine.tuning.auto_number import AutoNumber, is_auto
from shmload.engine.tuning.autotune import first_numbers
from shmload.engine.tuning.tuning_decision import Setting
from shmload.introspect.abilities import package_ability
from shmload.metrics import EpochCallback
from shmload.modes.epoch_metrics import EpochWatches, samples_counter
from shmload.modes.gil_share import measured_share
from shmload.modes.inline_reader import InlineReader
from shmload.modes.progress_bar import with_progress_bar
from shmload.modes.seed_mode import SeedStream
from shmload.modes.torch_mode import TorchPasses
from shmload.processes.ranks import rank_and_world_size, source_of_rank
from shmload.ray_options import Ray
from shmload.schedule.checks import own_int
from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder
from shmload.worker.dataset_types import DecodesBatches, DecodesSamples, Samples
from shmload.worker.own_generators import OwnGenerators, make_generator_of

if TYPE_CHECKING:
    from rich.console import Console

    from shmload.engine.tracing.trace import Trace

T = TypeVar("T", covariant=True, default=Any)  # Any: a dataset that decodes in place has no sample type


class ShmLoader(DataLoader[T]):
    """torch's DataLoader, whose workers decode into shared memory that the yielded tensors alias.

    Takes torch's arguments by name and position. A yielded tensor is in a slot of a ring in shared memory and belongs to the
    program as long as any alias of it lives; writing into it is allowed. If the program holds almost all slots, later batches are
    copied out of the ring. Without `seed`, order and randomness are exactly torch's (torch mode). With `seed`, batch k of epoch
    e is a pure function of (seed, e, k), for any number of workers and after any crash or resume (seed mode). The pages docs/*.md
    that are named below are in the repository, https://github.com/shmload/shmload.

    Args (data and order):
        dataset: a map-style dataset or, in torch mode, an iterable one. If it has a `schema` and `read_into(index, out)` or
            `read_batch_into(indices, out)`, it decodes directly into the batch; docs/own_format.md.
        batch_size: samples per batch, of this rank in seed mode. If None, yield samples one by one, without a batch dimension.
        shuffle: use a new random order in each epoch. None means False.
        sampler, batch_sampler: torch mode: as in torch. Seed mode: shmload's samplers (`Mix`, `Weighted`, ...) are divided among
            ranks and resumed in constant time; any other sampler decides what this rank reads, and the seed only keys the
            randomness.
        collate_fn: makes a batch of a list of samples, in a worker; the samples are then not decoded in place. None applies torch's
            rules, directly into the batch.
        drop_last: leave out the last samples of an epoch that do not fill a batch (in seed mode: a global batch).
        generator: torch mode only: draws the order and the workers' base seed, in place of torch's global generator.
        in_order: torch mode: if False, yield batches as they become ready. Seed mode always keeps the order.
        ragged: how to deliver fields whose rows differ in shape: "list", "pad" (a `Padded`), "nested" (`torch.nested`), "jagged" (a
            `Jagged`), or a mapping of field names to these. The ragged fields are those of the schema or the mapping; with a single
            mode other than "list", every array field; with "list", every field whose rows differ. With a single mode, Python's
            lists in fields are rows, too. Also makes batches of samples that torch's collate refuses (None, dataclasses, objects).
            By default, torch mode refuses them; seed mode takes them, and delivers arrays of different shapes as lists.
    Args (workers):
        num_workers: number of worker processes per rank. With 0, the trainer reads into private memory, without a ring. With
            "auto" in seed mode, the pool grows and shrinks while it runs, and the batches stay the same; in torch mode, a number
            is chosen once from this machine's CPUs, and the workers' random numbers depend on it; docs/bench.md.
        prefetch_factor: batches ordered ahead per worker; 2 by default, or "auto". With `num_workers` it sets the size of the ring.
        persistent_workers: keep the workers after a pass, with the dataset as it was when they started: what is set later is not
            seen. In seed mode they are also kept without it, and started again if an attribute was set since then; docs/switch.md.
        threads_per_worker: samples that each worker reads at once, for datasets that wait for disks or networks or release the GIL.
            The dataset must be thread-safe. With a seed, it must draw from `sample_rng()`: what it draws from global generators or
            its own depends on the threads' timing, which a worker logs as a warning. Readers of whole batches and of ragged fields
            in place use one thread.
        worker_init_fn: called in each worker with its number, after its generators are seeded.
        multiprocessing_context: how to start workers: "fork", "spawn", "forkserver" or a context. None is Python's default.
        backend: what the workers are; the batches are the same; docs/workers.md. "process": processes of this machine. "thread":
            threads of this process, which call the dataset at once. "auto": threads if this Python has no GIL, or if reading the
            first samples hardly holds it, which a child process measures when the first workers start, in 50 to 1000 ms; else
            processes. "ray", or a `shmload.Ray` with options: `num_workers` actors on the nodes of a Ray cluster, which needs the
            extra `shmload[ray]`. Arrays of 1 MiB and more in the dataset are then stored once per node and are read-only;
            docs/cluster.md.
        share: with "node", ranks of this node that have the same `rank` and `world_size`, as in tensor or pipeline parallelism,
            read one ring, filled by one worker pool; each sample is decoded once. If all ranks differ, each has its own ring, and
            idle workers help the ranks whose trainers wait. Seed mode only; batches are the same without it; docs/launch.md.
    Args (memory and devices):
        pin_memory, pin_memory_device: with CUDA and workers, the ring itself is pinned. A slot is then reused once the copies that
            were queued on the current stream when the batch died have finished; pass other streams to `record_stream`. Without
            workers, batches are copied to pinned memory, as in torch; docs/memory.md.
        device: "cuda", "cuda:1" or a torch.device: copy the batches' tensors there from the pinned ring, on a side stream, two
            batches ahead; the current stream in `next()` waits for them. Other leaves are unchanged. Not with `audit`.
        after_batch: a function called in the trainer with each batch before it is yielded (on the device, with `device`); its
            result is yielded instead. Use it for data that is cheaper to compute than to transfer: with
            `shmload.formats.Normalize`, images travel as bytes, a quarter of float32. If it raises, the batch is lost.
        ring_bytes: maximum size of the ring; RingTooSmall is raised if it needs more. None allows as much as `prefetch_factor`
            needs.
    Args (reproducibility and ranks):
        seed: None for torch mode; an int from 0 to 2**64 - 1 for seed mode.
        seed_samples: seed mode: reseed `random`, numpy and torch before every sample from (seed, epoch, index), and also the
            generators that the dataset or `collate_fn` own; a warning names those that cannot be reseeded. None means True with one
            thread per worker.
        rank, world_size: seed mode: the part of each global batch that this rank reads. Default: torch.distributed's, else RANK and
            WORLD_SIZE, else 0 of 1.
        uneven: seed mode, the last global batch without `drop_last`: "pad" repeats samples from the epoch's start so that all ranks
            get equal batches (`loader.valid` is the number of real rows), "drop" drops it, "exact" delivers the remaining samples.
        snapshot_every_n_steps: torch mode: interval at which workers and samplers report their states; a resume reads the batches
            after the last report again. 0 or None for never. Seed mode does not need it.
        trust_state: allow pickles in states, which can run any code when they are loaded. A state has pickles only if a dataset,
            iterator or sampler of yours has a state other than numbers, text, bytes, arrays, tensors and containers of these.
    Args (errors):
        timeout: seconds to wait for a batch before RuntimeError; 0 for no limit.
        sample_timeout_s: seconds that one sample may take. Its worker is then killed and replaced (a thread is left behind and
            replaced; docs/workers.md), and the sample is bad by SampleTimeout, which has the worker's stack. A dataset that reads
            several samples at once gets this time for all of them; they are read one by one afterwards. Needs workers and a
            map-style dataset; with "ray" also a seed.
        on_error: the policy for a sample that cannot be read. "raise" raises its error; "skip" makes a shorter batch; "substitute"
            reads the next index of the same permutation (without one, of the dataset). Bad samples are listed in `stats()`.
        max_bad: raise SampleError after more bad samples than this. None for no limit.
        max_restarts: number of dead workers that the loader may replace, over all its passes. None allows any number in seed mode,
            and 0 in torch mode.
    Args (observation):
        audit: a folder in which every rank records its deliveries; `shmload verify` proves from it that each sample was delivered
            exactly once; docs/resume.md.
    Raises:
        ValueError, TypeError: like torch's DataLoader, and for arguments that exclude each other or have no effect together.
    Cost: about 6 us of the trainer's CPU per batch and 0.5 us per further field (benchmarks/trainer_cpu.py); memory for
        `prefetch_factor * num_workers + 2` batches (at least 4), and 2 more if the ring is pinned.
    Thread/process safety: tensors may live and die in any thread. In a forked child, a new iteration starts its own workers. One
        that was running continues with workers of the child in seed mode, and raises an error in torch mode.
    Example:
        >>> from shmload import ShmLoader
        >>> pairs = [(x, -x) for x in range(6)]
        >>> with ShmLoader(pairs, batch_size=3, shuffle=True, seed=7) as loader:
        ...     len(list(loader))
        2
    """

    def __init__(
        self,
        dataset: Dataset[T] | Samples[T] | DecodesSamples | DecodesBatches,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | Literal["auto"] | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        seed_samples: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        ring_bytes: int | None = None,
        max_restarts: int | None = None,
        on_error: OnError = "raise",
        max_bad: int | None = None,
        sample_timeout_s: float | None = None,
        ragged: RaggedMode | Mapping[str, RaggedMode] = AS_TORCH_OR_LIST,
        backend: Literal["process", "thread", "auto", "ray"] | Ray = "process",
        share: Literal["node"] | None = None,
        device: Any = None,
        after_batch: Callable[[Any], Any] | None = None,
        audit: str | os.PathLike[str] | None = None,
        snapshot_every_n_steps: int | None = 1,
        threads_per_worker: int = 1,
        trust_state: bool = False,
    ) -> None:
        seed, rank, world_size = map(own_int, (seed, rank, world_size))
        threads_per_worker = own_int(threads_per_worker)
        dataset = _by_number(dataset, seed, uneven, rank, world_size)
        given = dict(locals())
        check_arguments(given)
        first_workers, first_prefetch = first_numbers(num_workers, prefetch_factor, is_torch_mode=seed is None)
        self.backend, self.share = backend, share
        try:
            super().__init__(
                dataset,  # type: ignore[arg-type]  # torch can read more than its annotation allows
                batch_size,
                None if package_ability(dataset, "epoch_schedule") else shuffle,  # to shuffle, torch would call the dataset's len()
                sampler,
                batch_sampler,
                first_workers,
                collate_fn,
                pin_memory,
                drop_last,
                timeout,
                worker_init_fn,
                multiprocessing_context,
                generator,
                prefetch_factor=first_prefetch,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
                in_order=in_order,
            )
        except (TypeError, ValueError) as error:
            add_wrong_type(error, given)
            raise
        can_reseed = seed is not None and threads_per_worker == 1
        self._shuffle, self.seed = shuffle, seed
        self.seed_samples = can_reseed if seed_samples is None else seed_samples
        self.rank, self.world_size = rank, world_size
        self.uneven: Literal["pad", "drop", "exact"] = uneven
        self.on_error: OnError = on_error
        self.max_bad, self.max_restarts, self.sample_timeout_s = max_bad, max_restarts, sample_timeout_s
        self.ring_bytes, self.device, self.ragged, self.audit = ring_bytes, device, ragged, audit
        self.after_batch = after_batch
        self.snapshot_every_n_steps = snapshot_every_n_steps or 0
        self.threads_per_worker = threads_per_worker
        self.trust_state = trust_state
        is_keyed = seed is not None and (isinstance(sampler, KeyedOrder) or isinstance(batch_sampler, KeyedBatches))
        self._has_users_sampler = not is_keyed and (sampler is not None or batch_sampler is not None)
        _ = self._config().plan  # raises at once if ragged does not fit the dataset
        self._recorder = Recorder(audit, has_indices=not isinstance(dataset, IterableDataset))
        if self.seed_samples:
            make_generator_of(collate_fn)
        if self.seed_samples and (own := OwnGenerators(dataset, collate_fn).unreachable):
            warnings.warn(
                f"seed_samples cannot key these generators that the dataset keeps: {', '.join(own)}. What they draw depends on "
                "the worker; draw from shmload.sample_rng() or the global generators instead, or give seed_samples=False",
                stacklevel=2,
            )
        self._set_up()

    def _set_up(self) -> None:
        """Make the parts that copies of a loader do not share."""
        config, me = self._config(), weakref.ref(self)  # without a cycle, workers end as soon as the loader is deleted
        self._is_closed = False
        bad_samples = BadSamples(self.on_error, self.max_bad)
        self._builder = EngineBuilder(config, bad_samples, _kind_of_engine, lambda setting: _set_numbers(me(), setting))
        self._watches = EpochWatches()
        kind = TorchPasses if self.seed is None else SeedStream
        self._passes: TorchPasses | SeedStream = kind(config, self._builder, self._recorder, self._watches)
        passes = weakref.ref(self._passes)
        bad_samples.next_index = lambda *place: passes().substitute(*place)  # type: ignore[union-attr]  # alive while anything reads

    def _config(self) -> LoaderConfig:
        """Return the current arguments; a program may set some of them between passes."""
        given = {name: getattr(self, name) for name in _ARGUMENTS}
        if self.num_workers and self.prefetch_factor is None:  # num_workers was 0 when the loader was made
            given["prefetch_factor"] = 2
        return LoaderConfig(
            **given,
            index_sampler=self._index_sampler,
            auto_collation=self._auto_collation,
            has_users_sampler=self._has_users_sampler,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. What torch allows may be set between passes; other arguments are fixed, because parts depend on them.

        Raises:
            ValueError: the argument is fixed.
        """
        if name in _FIXED and "_builder" in vars(self):
            raise ValueError(f"{name} cannot be set to {value!r} after the ShmLoader was made: make a new one with this {name}")
        super().__setattr__(name, value)

    @property
    def shuffle(self) -> bool | None:
        """Return the argument `shuffle`.

        It is not in `vars(loader)`, because programs rebuild loaders from those with a sampler, and torch refuses both together.
        """
        return self._shuffle

    # Iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        if self._is_closed:
            raise RuntimeError("this loader is closed: make a new one")
        self._passes.config = self._config()
        if isinstance(self._passes, SeedStream):
            self._check_batch_sampler()
            return self._get_iterator()  # type: ignore[no-any-return]  # a subclass may override it, as in torch
        if getattr(self._iterator, "is_of_parent", False):  # a forked child starts its own workers
            self._iterator = None
        return super().__iter__()

    def _check_batch_sampler(self) -> None:
        """Raise ValueError if the batch sampler that torch made was changed, because seed mode does not read it."""
        made = self.batch_sampler
        if self.batch_size is None or not isinstance(made, BatchSampler):
            return
        for name in ("batch_size", "drop_last"):
            if (now := getattr(made, name)) != (given := getattr(self, name)):
                raise ValueError(
                    f"batch_sampler.{name} was set to {now!r}, but with seed= the loader makes its batches with {name}={given!r}: "
                    f"make a new loader with {name}={now!r}"
                )

    def _get_iterator(self) -> Any:
        if isinstance(self._passes, SeedStream):
            return self._passes.iterator()
        if self.num_workers:
            self.check_worker_number_rationality()
        return self._passes.iterator(self)

    def __len__(self) -> int:
        if isinstance(self._passes, SeedStream) and not self._has_users_sampler:
            return len(self._passes)
        return super().__len__()

    # Position

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch; prefetched batches do not count. May be called at any time.

        The dict is flat, has always the same keys, and can be written as JSON. Seed mode: under 1 KiB, valid for every rank and for
        another number of ranks. Torch mode: under 18 KiB plus the states of a stateful dataset, iterator or sampler; each rank has
        its own.

        Returns:
            a new dict, which later iteration does not change.
        """
        return self._passes.state_dict(self._config)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position: the next iteration yields the rest of its epoch.

        Seed mode: no consumed sample is read again, and the world size may differ if the global batch is the same. Torch mode:
        torch's order, the workers' seeds and their random streams continue; the trainer's own generators are unchanged.

        Args:
            state: a result of `state_dict()`, also after a round trip through JSON. Loading runs no code unless `trust_state`
                allows pickles.
        Raises:
            StateMismatch: the state belongs to another loader, is damaged, or needs `trust_state`; the message names the reason.
                The loader is then unchanged.
        """
        self._passes.config = self._config()
        self._passes.load_state_dict(state)
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # shmload's iterator, of persistent workers

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. Rarely needed, because in seed mode each iteration is the next epoch.

        In torch mode, the number is passed to the sampler's `set_epoch`, if it has one (like a DistributedSampler).

        Args:
            epoch: at least 0; in seed mode at most 2**62.
        Raises:
            ValueError: `epoch` is out of range.
            TypeError: seed mode: `epoch` is not an integer.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        self._passes.set_epoch(epoch)

    @property
    def first_step(self) -> int:
        """Return the step at which the next iteration begins: 0, or the position of a loaded state.

        A progress bar of a resumed loader begins there: `tqdm(loader, initial=loader.first_step)`.
        """
        return self._passes.first_step

    @property
    def valid(self) -> int | None:
        """Return the number of rows of the last batch that are not padding, in seed mode; None before the first batch."""
        return self._passes.valid

    @property
    def last_indices(self) -> NDArray[np.int64] | list[Any] | None:
        """Return the indices of the samples in the last batch, row by row; None before the first batch and for an iterable dataset.

        An int64 array, or the sampler's list of keys if they are not all integers, after skipping and substitution; of one key with
        batch_size=None. It may not be a copy, so do not change it.
        """
        return self._recorder.last_indices

    # Observation

    def stats(self) -> dict[str, Any]:
        """Return the report of `shmload top` on this loader, counted since its newest ring was made; docs/top.md lists every key.

        Always present: `num_bad_samples`, `bad_samples` (a list of `epoch`, `step`, `index`, `error`) and `num_irregular` (image
        files that were read although they break a rule of their format), counted since the loader was made; `bottleneck`, which is
        "unknown" without workers. With workers, after the first iteration began: `batches`, `samples`, `nbytes` delivered and their
        rates per second; `epoch`, `step`, `num_steps`; `slots` by state; `orders` in flight; `time`: percentages in which the
        trainer waited, the workers waited, neither waited, and workers started; `waits_for`, `is_hung`; `workers`, a record for
        each with its process, sample and busy share; `memory`; counts of restarts, foreign objects and copies. With "auto" for a
        number, `autotune` has the current numbers, the bottleneck, and every change with its reason. With `backend="auto"`,
        `backend` has the choice, its reason, and the share of the time for which decoding holds the GIL.

        Cost: about 0.1 ms with a few workers; reads the files of their processes under /proc.
        """
        builder = self._builder
        found: dict[str, Any] = {"num_bad_samples": builder.bad_samples.count, "bad_samples": list(builder.bad_samples.listed)}
        if builder.tuner is not None:
            found["autotune"] = builder.tuner.stats()
        if builder.chosen is not None:
            found["backend"] = asdict(builder.chosen)
        found["num_irregular"] = builder.bad_samples.num_irregular
        if builder.last is None:
            return {**found, "bottleneck": "unknown", "remedy": None}
        counters = builder.last.counters()
        found["num_irregular"] += counters.get("num_irregular", 0)
        return {**counters, **found}

    def holders(self) -> list[Holder]:
        """Return the batches that still hold slots, the oldest first, with the line of the program that took each.

        Returns:
            a list of `shmload.debug.Holder`.
        Raises:
            RuntimeError: `shmload.debug` was not enabled when the workers started.
        """
        watched = [engine.holders for engine in self._builder.engines if engine.holders is not None]
        if self._builder.engines and not watched:
            raise RuntimeError(
                "this loader does not record which code takes its batches: call shmload.debug.enable() before its workers start, "
                "or set SHMLOAD_DEBUG_BATCHES=1"
            )
        return sorted((holder for holders in watched for holder in holders.held()), key=lambda h: -h.age_s)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Return a context manager that records trainer and workers, and writes a file for Perfetto at its end; docs/top.md.

        Args:
            path: JSON file to write. It is also written if the block ends with an exception.
        Raises:
            ValueError: the loader has no workers.
            FileNotFoundError: the folder of `path` does not exist.
            RuntimeError: on entering: the loader is already being traced.
        """
        from shmload.engine.tracing.trace import Trace

        return Trace(self._builder, self.num_workers, path)

    def on_epoch_end(self, callback: EpochCallback) -> EpochCallback:
        """Call `callback` with a `shmload.metrics.EpochMetrics` after each epoch, from the next pass on.

        An unfinished pass is reported when its iterator is deleted. An exception of a callback is logged, and training continues.

        Args:
            callback: a function of the metrics.
        Returns:
            the callback, so that this method can be used as a decorator.
        """
        self._watches.callbacks.append(callback)
        return callback

    def progress(self, description: str = "", *, console: Console | None = None) -> Iterator[Any]:
        """Yield the batches and show a progress bar on stderr with batches, samples/s and share of waiting, if it is a terminal.

        Args:
            description: text before the bar.
            console: a rich Console to draw on instead of stderr.
        """
        try:
            total: int | None = len(self)
        except TypeError:  # an iterable dataset may have no length
            total = None
        done = self.first_step
        count = samples_counter(self._config(), is_final=True)
        yield from with_progress_bar(iter(self), total, done, self._recorder, description, console, count)

    def record_stream(self, batch: Any, stream: Any) -> None:
        """Keep the memory of a batch until the work that is queued on `stream` when the batch dies has finished.

        Needed if a batch of a pinned ring is copied, or a batch on the device is used, on a stream other than the one that is
        current when the batch dies. Tensors outside this loader's slots are ignored.

        Args:
            batch: a batch of this loader, or any part of one.
            stream: a `torch.cuda.Stream`.
        """
        self._builder.record_stream(self.device, batch, stream)

    def __repr__(self) -> str:
        mode = "torch mode" if self.seed is None else f"seed {self.seed}"
        engine = self._builder.last
        ring = "no ring yet" if engine is None else f"{engine.num_slots} slots, {engine.layout or 'variable batches'}"
        workers = f"num_workers={self.num_workers}"
        if isinstance(self.backend, Ray) and self.backend.num_local_workers:
            workers += f" + {self.backend.num_local_workers} local"
        if self.backend == "auto":
            workers += f", backend={self._builder.chosen or 'auto'}"
        elif self.backend != "process":
            workers += f", backend={self.backend!r}"
        return (
            f"ShmLoader({type(self.dataset).__name__}, batch_size={self.batch_size}, {workers}, {mode}{self._rank_text()}, "
            f"read by {self._config().plan.path}, {ring})"
        )

    def _rank_text(self) -> str:
        """Return the part of `repr` that names the rank, if the loader divides the samples; otherwise an empty text."""
        if self.seed is None or self._has_users_sampler:
            return ""
        try:
            rank, world_size = rank_and_world_size(self.rank, self.world_size)
        except ValueError:  # iterating will raise it
            return ""
        source = "" if self.rank is not None else f" (from {source_of_rank()})"
        return f", rank {rank} of {world_size}{source}" if world_size > 1 else ""

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as torch does; not if ranks that have other cores share them."""
        if self.backend == "process" and self.share is None:
            super().check_worker_number_rationality()

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: the arguments and the position, without workers and batches."""
        state = self.__dict__.copy()
        passes = state.pop("_passes")
        for name in ("_builder", "_watches", "_is_closed"):
            del state[name]
        state["_iterator"] = None  # of persistent workers
        state["_recorder"] = copy.copy(self._recorder)
        state["position"] = passes.state_of_copy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("position")
        self.__dict__.update(state)
        self._set_up()
        self._passes.go_on_as_copy(position)

    # End

    def close(self) -> None:
        """Stop the workers and release the ring; batches still held stay valid. A closed loader cannot be iterated again."""
        if sys is None or sys.is_finalizing():  # called by a generator that outlives the program; atexit has closed everything
            return
        self._is_closed = True
        self._watches.close()
        self._passes.close()
        self._iterator = None
        self._builder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_DERIVED = ("index_sampler", "auto_collation", "has_users_sampler")  # fields of a LoaderConfig that are not arguments
_ARGUMENTS = tuple(field.name for field in fields(LoaderConfig) if field.name not in _DERIVED)
# Arguments besides torch's that may not be set later; rank, world_size, device, after_batch and trust_state may.
_FIXED = {
    "shuffle",
    "seed",
    "seed_samples",
    "uneven",
    "ring_bytes",
    "max_restarts",
    "on_error",
    "max_bad",
    "sample_timeout_s",
    "ragged",
    "snapshot_every_n_steps",
    "threads_per_worker",
    "backend",
    "share",
    "audit",
}


def _by_number(dataset: Any, seed: int | None, uneven: str, *ranks: int | None) -> Any:
    """Return the dataset to read. Seed mode reads by index, so for shmload's iterables this is their view of items by number.

    Raises:
        ValueError: the dataset was made for another rank, or another `uneven`; its items by number are those of all ranks.
    """
    if seed is None or not isinstance(dataset, IterableDataset) or (keyed_items := package_ability(dataset, "keyed_items")) is None:
        return dataset
    own = package_ability(dataset, "given_rank")
    if own is not None and own != rank_and_world_size(*ranks):
        raise ValueError(
            f"the dataset is for rank {own[0]} of {own[1]}, and in seed mode the loader divides the samples: also give the loader "
            f"rank={own[0]}, world_size={own[1]}"
        )
    own_uneven = package_ability(dataset, "given_uneven")
    if own_uneven is not None and own_uneven != uneven:
        raise ValueError(
            f"the dataset has uneven={own_uneven!r}, and in seed mode the loader divides the samples, by uneven={uneven!r}: give "
            f"the loader uneven={own_uneven!r}, too"
        )
    return keyed_items()


def _kind_of_engine(config: LoaderConfig, builder: EngineBuilder) -> tuple[Make, dict[str, Any]]:
    """Return the function that makes this loader's engines, and the engine options for the placement of its workers."""
    options: dict[str, Any] = {}
    backend: Any = config.backend
    if backend == "auto":
        if builder.chosen is None:
            builder.chosen = chosen_backend(config, measured_share)
        backend = builder.chosen.backend
    if backend == "thread":
        from shmload.worker.thread_pool import thread_pool  # changes functions of random, numpy and torch

        options |= {"backend": thread_pool, "has_threads": True}
    if config.ray is not None:
        from shmload.ray.ray_backend import RayBackend  # few loaders have a cluster

        options["backend"] = RayBackend(config.ray)
        options["num_ray_workers"] = config.num_workers
    if config.share is not None:
        from shmload.sharing.choice import shared_engine  # few loaders share

        return partial(shared_engine, config, builder), options
    return Engine, options


def _set_numbers(loader: ShmLoader[Any] | None, setting: Setting) -> None:
    """Set the attributes of "auto" arguments to the current numbers."""
    if loader is not None and is_auto(loader.num_workers):
        loader.num_workers = AutoNumber(setting.num_workers)
    if loader is not None and is_auto(loader.prefetch_factor):
        loader.prefetch_factor = AutoNumber(setting.prefetch)


def configure_for_pipeline(
    loader: ShmLoader[Any], stage_places: Iterable[tuple[str, str]], bad_samples: Callable[[BadSamples], BadSamples] | None = None
) -> None:
    """Configure the loader that runs a pipeline.

    Args:
        loader: the loader, before its first pass.
        stage_places: (name, where it runs) of each stage, for displays.
        bad_samples: takes the loader's policy for bad samples, and returns the one to use instead.
    """
    builder = loader._builder
    builder.stage_places = tuple(stage_places)
    if bad_samples is not None:
        builder.bad_samples = bad_samples(builder.bad_samples)


def inline_reader_of(loader: ShmLoader[Any]) -> InlineReader:
    """Return a reader of a loader's batches, in this process and in any order; for `shmload verify`."""
    return InlineReader(loader._config().job(), loader._builder.bad_samples)
