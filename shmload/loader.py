"""ShmLoader: torch's DataLoader with a ring of shared memory in place of its queues.

Two characters over one engine. Without `seed` everything a program can observe is torch's: `torch_mode.py`. With it the
deterministic schedule rules: `seed_mode.py`. This file holds the arguments, their checks, and what both share.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from typing_extensions import TypeVar  # torch's own requirement

from shmload.audit.recorder import Recorder
from shmload.batch.ragged import AS_TORCH_OR_LIST
from shmload.engine.argument_checks import check_arguments
from shmload.engine.autotune import AutoNumber, Setting, first_numbers, is_auto
from shmload.engine.bad_samples import BadSamples, OnError
from shmload.engine.builder import EngineBuilder, Make
from shmload.engine.config import LoaderConfig
from shmload.engine.engine import Engine
from shmload.engine.holders import Holder
from shmload.metrics import EpochCallback
from shmload.modes.passes import EpochWatches, shown
from shmload.modes.seed_mode import SeedStream
from shmload.modes.torch_mode import TorchPasses
from shmload.schedule.checks import own_int
from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.reader import DecodesBatches, DecodesSamples, Samples
from shmload.world import package_ability, rank_and_world_size, source_of_rank

if TYPE_CHECKING:
    from rich.console import Console

    from shmload.engine.trace import Trace

T = TypeVar("T", covariant=True, default=Any)  # of datasets that only decode into rows nothing is known


class ShmLoader(DataLoader[T]):
    """torch's DataLoader, whose workers decode into shared memory that the yielded tensors alias.

    Takes torch's arguments by name and position. A yielded tensor lies in a slot of the ring and is the user's for as long as any
    alias of it lives; writing into it is fine. When a program holds almost the whole ring, further batches are copied out.

    Args:
        dataset: map-style, or in torch mode iterable. With a `schema` and `read_into(index, out)` or `read_batch_into(indices,
            out)` it decodes straight into the batch.
        batch_size: samples of a batch; in seed mode of one rank's. None: samples come as they are, one by one.
        shuffle: a random order, anew in each epoch. None means False.
        sampler, batch_sampler: torch mode: as torch's. Seed mode: shmload's own (KeyedOrder, KeyedBatches) are sharded over ranks,
            and resumed in O(1); any other orders for this rank alone, and the seed only keys the randomness.
        num_workers: processes that read, of each rank. 0: the trainer reads, into private memory; there is no ring. "auto": in seed
            mode the worker pool grows and shrinks while it runs, and batches are the same whatever it does; in torch mode, where
            what workers draw depends on their number, that is taken from this host's processors once: give a number for the same
            draws on other hosts. docs/autotune.md says more.
        collate_fn: makes a batch of a list of samples, in a worker; then nothing is decoded in place. None: torch's rules, straight
            into the batch.
        pin_memory, pin_memory_device: with CUDA and workers the ring itself is pinned, and batches lie in it as ever: a slot is
            used again when copies on the stream that was current at its batch's end are done; name others by `record_stream`. Else,
            as in torch, copies are pinned. docs/gpu.md says what is safe.
        drop_last: leave out an epoch's last samples that make no whole batch (in seed mode: no whole global batch).
        timeout: seconds to wait for a batch before RuntimeError; 0: as long as it takes. Of one sample: `sample_timeout_s`.
        worker_init_fn: called in each worker with its number, after its generators are seeded.
        multiprocessing_context: how workers start: "fork", "spawn", "forkserver" or a context. None: Python's default.
        generator: torch mode: draws the order and the workers' base seed, in place of torch's global one. Not with `seed`.
        prefetch_factor: batches ordered ahead for each worker, 2 by default, or "auto"; with `num_workers` it sets the ring's size.
        persistent_workers: torch mode: keep the workers when a pass ends. In seed mode they always stay.
        in_order: torch mode: False yields batches as they are ready. Seed mode keeps the order.
        seed: None: torch mode, order and randomness are exactly torch's. An int: seed mode, batch k of epoch e is a pure function
            of (seed, e, k), for any number of workers, after any crash or resume.
        seed_samples: seed mode: reseed random, numpy and torch before every sample from (seed, epoch, index), and the generators
            that the dataset or `collate_fn` keeps, each from a key of its own; those that cannot be are named. Default True.
        rank, world_size: seed mode without a foreign sampler: which slice of each global batch, or batch of each step, is this
            rank's. Default: torch.distributed's, else RANK and WORLD_SIZE, else 0 of 1.
        uneven: seed mode, the last global batch without drop_last: "pad" repeats samples from the epoch's start so that ranks get
            equal batches (`loader.valid` says how many rows are real), "drop" drops it, "exact" gives what is left. So too a last
            step with fewer batches than ranks.
        ring_bytes: the most memory the ring may take; a larger one is RingTooSmall. None: what `prefetch_factor` needs.
        max_restarts: workers that may be replaced after dying. None: any number in seed mode, none in torch mode.
        on_error: what a sample that cannot be read means. "raise": its error; "skip": a shorter batch; "substitute": the next index
            of the same permutation (without one, the next of the dataset) in its place. Counted and listed in `stats()`.
        max_bad: more bad samples than this raise SampleError. None: any number may be bad.
        sample_timeout_s: seconds one sample may take; then its worker is ended and replaced, and the sample is bad by
            SampleTimeout, which says where the worker was. Samples that the dataset reads several at once may take so long all
            together, and are read one by one then. Needs workers and a map-style dataset.
        ragged: how fields are delivered whose rows differ in shape: "list", "pad" (a `Padded`), "nested" (`torch.nested`, jagged),
            "jagged" (a `Jagged`), or a mapping field name -> one of these. Fields are ragged that the dataset's schema or the
            mapping says are; under a bare mode other than "list" every array of one or more dimensions; under "list" those that
            differ. It also makes batches of samples that torch's collate refuses (None, dataclasses, objects). In torch mode,
            unless it is given, these are refused as torch does. docs/samples.md shows each.
        snapshot_every_n_steps: torch mode: how often workers and samplers are asked where they stand; a resume reads what came
            since again. 0 or None: never. In seed mode a position needs no snapshot.
        threads_per_worker: samples that each worker reads at once, for datasets that wait for a disk or a network or give up the
            GIL. The dataset must allow it. The global generators cannot be reseeded per sample then: draw from sample_rng().
            Readers of whole batches and of ragged fields in place take one thread.
        trust_state: a state may hold pickles, which can run any code when they are loaded. They are in it only where a dataset,
            iterator or sampler of yours has a state of other things than numbers, text, bytes, arrays, tensors and containers of
            these. False: such a state is a StateMismatch.
        backend: "process": workers are processes of this machine. "ray": they are actors on the nodes of a Ray cluster that this
            machine belongs to, which needs the extra `shmload[ray]`; batches are the same. An actor that dies is replaced in seed
            mode. It needs a fixed `num_workers`; `sample_timeout_s` needs a seed.
            The numpy arrays of 1 MiB and more in a dataset lie there once for a node's actors, in Ray's store, and are read-only.
        num_local_workers: with backend="ray", processes of this machine that read beside the `num_workers` actors, into the same
            ring. For torch mode and `get_worker_info()` all of them together are the workers, the actors first.
        address: of the cluster's head, with backend="ray"; None: "auto", the cluster that runs on this machine.
        connect_timeout_s: with backend="ray", seconds that the cluster may take to answer. Once it has answered, it is asked again
            before a break is an error.
        ship_timeout_s: with backend="ray", seconds that it may take then until an actor has found a CPU and has the dataset, in
            torch mode each of them. None: as long as it takes. What is waited for is said.
        actor_options: with backend="ray", what actors ask of the cluster, as Ray's `.options` takes it: `{"num_cpus": 1}` and more.
            With a `scheduling_strategy` Ray places them; else they stand near a `RayDataset`'s blocks, or are spread by CPUs.
        share: "node": the ranks of this node that are given the same `rank` and `world_size`, as those of a tensor- or pipeline-
            parallel group are, read one ring, filled by one worker pool of `num_workers`; each sample is decoded once. Where no two
            ranks are given the same, as in data parallelism, each has ring and worker pool of its own, and idle workers help the
            ranks whose trainers wait. Seed mode only; batches are the same without it. docs/launch.md says when to use it, and
            what it asks of a program.
        device: "cuda", "cuda:1" or such a torch.device: batches' tensors arrive there, copied from the pinned ring on a stream of
            their own, two batches ahead; the stream that is current in `next()` waits for them. What is no tensor stays as it is.
            Not with `audit`.
        after_batch: a function of a batch, called in the trainer with each one when it has been delivered, with `device` on the
            device; the loop is given what it returns. For what is dearer to move than to make: `shmload.formats.Normalise` has
            images travel as bytes, a quarter of float32. Where it raises, that batch is lost and the next `next()` goes on.
        audit: a folder where every rank records what it was delivered, batch by batch: `shmload verify` proves from it that each
            sample came exactly once. docs/audit.md says how, and what it costs.
    Raises:
        ValueError, TypeError: as torch's DataLoader, and for arguments that do not go together.
    Cost: about 14 us of the trainer's CPU a batch and 0.7 us a field (benchmarks/trainer_cpu.py); memory for
        `prefetch_factor * num_workers + 2` batches.
    Thread/process safety: tensors may live and die in any thread. In a forked child a new iteration has workers of its own, and one
        that runs is refused.
    Example:
        >>> from shmload import ShmLoader
        >>> with ShmLoader([(x, -x) for x in range(6)], batch_size=3, shuffle=True, seed=7) as loader:
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
        ragged: str | Mapping[str, str] = AS_TORCH_OR_LIST,
        backend: str = "process",
        num_local_workers: int = 0,
        address: str | None = None,
        connect_timeout_s: float = 60.0,
        ship_timeout_s: float | None = 600.0,
        actor_options: Mapping[str, Any] | None = None,
        share: str | None = None,
        device: Any = None,
        after_batch: Callable[[Any], Any] | None = None,
        audit: str | os.PathLike[str] | None = None,
        snapshot_every_n_steps: int | None = 1,
        threads_per_worker: int = 1,
        trust_state: bool = False,
    ) -> None:
        seed, rank, world_size = map(own_int, (seed, rank, world_size))
        threads_per_worker, num_local_workers = map(own_int, (threads_per_worker, num_local_workers))
        dataset = _by_number(dataset, seed, rank, world_size)
        check_arguments(dict(locals()))
        first_workers, first_prefetch = first_numbers(num_workers, prefetch_factor, is_torch_mode=seed is None)
        self.backend, self.address, self.num_local_workers, self.share = backend, address, num_local_workers, share
        self.connect_timeout_s, self.ship_timeout_s, self.actor_options = connect_timeout_s, ship_timeout_s, actor_options
        super().__init__(
            dataset,  # type: ignore[arg-type]  # torch reads more than it names
            batch_size,
            None if package_ability(dataset, "epoch_schedule") else shuffle,  # torch would ask for a length there is not yet
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
        self._has_own_order = not is_keyed and (sampler is not None or batch_sampler is not None)
        _ = self._config().plan  # says at once if ragged does not go with the dataset
        self._recorder = Recorder(audit, has_indices=not isinstance(dataset, IterableDataset))
        if self.seed_samples and (own := OwnGenerators(dataset, collate_fn).unreachable):
            warnings.warn(
                f"seed_samples cannot key these generators that the dataset keeps: {', '.join(own)}. What they draw depends on "
                "the worker; draw from shmload.sample_rng() or the global generators instead, or give seed_samples=False",
                stacklevel=2,
            )
        self._set_up()

    def _set_up(self) -> None:
        """What a copy of a loader has of its own."""
        config, me = self._config(), weakref.ref(self)  # with no cycle workers end as soon as nobody has the loader
        self._is_closed = False
        bad_samples = BadSamples(self.on_error, self.max_bad)
        self._builder = EngineBuilder(config, bad_samples, _kind_of_engine, lambda setting: _set_numbers(me(), setting))
        self._watches = EpochWatches()
        kind = TorchPasses if self.seed is None else SeedStream
        self._passes: TorchPasses | SeedStream = kind(config, self._builder, self._recorder, self._watches)
        passes = weakref.ref(self._passes)
        bad_samples.next_index = lambda *place: passes().substitute(*place)  # type: ignore[union-attr]  # who reads has them

    def _config(self) -> LoaderConfig:
        """The arguments as they are now: some may be set between passes."""
        given = {name: getattr(self, name) for name in _ARGUMENTS}
        return LoaderConfig(
            **given, index_sampler=self._index_sampler, auto_collation=self._auto_collation, has_own_order=self._has_own_order
        )

    @property
    def shuffle(self) -> bool | None:
        """As it was given. Not in `vars(loader)`: who builds a loader again of these adds a sampler, which shuffle excludes."""
        return self._shuffle

    # ------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        if self._is_closed:
            raise RuntimeError("this loader is closed: make a new one")
        self._passes.config = self._config()
        if isinstance(self._passes, SeedStream):
            return self._get_iterator()  # type: ignore[no-any-return]  # what a subclass has made of it, as in torch
        return super().__iter__()

    def _get_iterator(self) -> Any:
        if isinstance(self._passes, SeedStream):
            return self._passes.iterator()
        if self.num_workers:
            self.check_worker_number_rationality()
        return self._passes.iterator(self)

    def __len__(self) -> int:
        if isinstance(self._passes, SeedStream) and not self._has_own_order:
            return len(self._passes)
        return super().__len__()

    # ------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, between two batches. Legal at any time; later iteration does not change it.

        Flat and JSON-able, with the same keys always. Seed mode: under 1 KiB, and good for all ranks, of which there may be another
        number. Torch mode: under 16 KiB, apart from the own states of a stateful dataset, iterator or sampler, which are part
        of it; each rank has its own. What is ordered ahead does not count: the place is behind the batch yielded last.

        Returns:
            a new dict, which the loader does not keep.
        """
        return self._passes.state_dict(self._config)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken: the next iteration yields the rest of that epoch.

        Seed mode: no consumed sample is read, and the world size may be another one if the global batch is the same. Torch mode:
        torch's order, the workers' seeds and their random streams go on; the trainer's own generators are left alone.

        Args:
            state: what `state_dict()` gave, or that through JSON. No code is run by it, unless `trust_state` allows pickles.
        Raises:
            StateMismatch: the state belongs to another loader, is damaged, or needs `trust_state`; says which. Nothing is changed
                then.
        """
        self._passes.config = self._config()
        self._passes.load_state_dict(state)
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # ours, of persistent workers

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`. Seldom needed: in seed mode each iteration is the next epoch by itself.

        In torch mode it is passed on to the sampler, if that has a set_epoch (a DistributedSampler).

        Args:
            epoch: from 0 on; in seed mode an integer up to 2^62.
        Raises:
            ValueError: it is below 0, or beyond 2^62 in seed mode.
            TypeError: seed mode: it is no integer.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is at least 0; got {epoch}")
        self._passes.set_epoch(epoch)

    # ------------------------------------------------------------ looking at it

    @property
    def first_step(self) -> int:
        """The step that the next iteration begins with: 0, or where a loaded state left off.

        A bar over a resumed loader begins there: `tqdm(loader, initial=loader.first_step)`.
        """
        return self._passes.first_step

    @property
    def valid(self) -> int | None:
        """Seed mode: how many rows of the batch just yielded are real and not padding; None before the first."""
        return self._passes.valid

    @property
    def last_indices(self) -> NDArray[np.int64] | list[Any] | None:
        """Which samples the batch just yielded is made of, row by row; None before the first, and for an iterable dataset.

        An int64 array, or the list of keys as the sampler gave it; after skipped and substituted samples. It is the loader's own:
        copy it before changing it. With batch_size=None a list of one key.
        """
        return self._recorder.last_indices

    # ------------------------------------------------------------ looking at it

    def stats(self) -> dict[str, Any]:
        """What `shmload top` shows of this loader, over the life of the ring last used; docs/top.md names every key with its unit.

        These are: `batches`, `samples`, `nbytes` delivered and their rates a second; `epoch`, `step`, `num_steps`; `slots` by
        state; `orders` under way; `time`: in how many per cent of it the trainer waited, the workers waited, nobody did, and
        workers started; `limit`, `waits_for`, `is_hung`; `workers`, one record each, with its process, sample and busy share;
        `memory`; counts of restarts, foreign objects, copies. Absent before the first iteration and with num_workers=0. Always
        there: `num_bad_samples` and `bad_samples`, a list of `epoch`, `step`, `index`, `error`, over the life of the loader; and
        `num_irregular`, how many image files were read although they break a rule of their format. With
        "auto" for a number, `autotune` says what is set, what holds the pipeline back, and what was changed and why.

        Cost: about 0.1 ms with a few workers; the files of their processes under /proc are read.
        """
        builder = self._builder
        found: dict[str, Any] = {"num_bad_samples": builder.bad_samples.count, "bad_samples": list(builder.bad_samples.listed)}
        if builder.tuner is not None:
            found["autotune"] = builder.tuner.stats()
        found["num_irregular"] = builder.bad_samples.num_irregular
        if builder.last is None:
            return found
        counters = builder.last.counters()
        found["num_irregular"] += counters.get("num_irregular", 0)
        return {**counters, **found}

    def holders(self) -> list[Holder]:
        """The batches whose slots are still held: which, how old, how large, and the line that took each. The oldest first.

        Returns:
            a list of `shmload.debug.Holder`.
        Raises:
            RuntimeError: nothing is noted of that, because `shmload.debug` was not enabled when the workers started.
        """
        watched = [engine.holders for engine in self._builder.engines if engine.holders is not None]
        if self._builder.engines and not watched:
            raise RuntimeError(
                "nobody has noted who takes this loader's batches: call shmload.debug.enable() before its workers start, or set "
                "SHMLOAD_DEBUG_BATCHES=1"
            )
        return sorted((holder for holders in watched for holder in holders.held()), key=lambda h: -h.age_s)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Records, in a `with` block, what trainer and workers do, and writes it for Perfetto at the block's end; docs/trace.md.

        Args:
            path: of the JSON file. It is written also if the block ends with an exception.
        Raises:
            ValueError: the loader has no workers.
            FileNotFoundError: the file's folder does not exist.
            RuntimeError: in the `with`: the loader is being traced already.
        """
        from shmload.engine.trace import Trace

        return Trace(self._builder, self.num_workers, path)

    def on_epoch_end(self, callback: EpochCallback) -> EpochCallback:
        """Has `callback` called with what each epoch was like (`shmload.metrics.EpochMetrics`), from the next pass on.

        A pass that is broken off is reported when its iterator is gone. A callback that fails is logged, and training goes on.

        Returns:
            the callback, so that this can decorate it.
        """
        self._watches.callbacks.append(callback)
        return callback

    def progress(self, description: str = "", *, console: Console | None = None) -> Iterator[T]:
        """Iterates like the loader itself, with a bar on stderr: batches, samples/s, share of waiting. No bar if it is piped.

        Args:
            description: what stands before the bar.
            console: rich's, to draw elsewhere.
        """
        try:
            total: int | None = len(self)
        except TypeError:  # it has none
            total = None
        done = self.first_step
        yield from shown(iter(self), total, done, self._recorder, description, console)

    def record_stream(self, batch: Any, stream: Any) -> None:
        """Has a batch's memory not be used again before what `stream` has been given, by the time the batch dies, is done.

        Needed where a batch of a pinned ring is copied, or a batch on the device is used, on a stream that is not the current one
        when the batch dies. What lies in no slot of this loader needs none of it, and is left alone.

        Args:
            batch: what the loader yielded, or any part of it.
            stream: a `torch.cuda.Stream`.
        """
        self._builder.record_stream(self.device, batch, stream)

    def __repr__(self) -> str:
        mode = "torch mode" if self.seed is None else f"seed {self.seed}"
        engine = self._builder.last
        ring = "no ring yet" if engine is None else f"{engine.num_slots} slots, {engine.layout or 'packed batches'}"
        workers = f"num_workers={self.num_workers}"
        if self.num_local_workers:
            workers += f", num_local_workers={self.num_local_workers}"
        return (
            f"ShmLoader({type(self.dataset).__name__}, batch_size={self.batch_size}, {workers}, {mode}{self._rank_text()}, "
            f"read by {self._config().plan.path}, {ring})"
        )

    def _rank_text(self) -> str:
        """Describe which part of the samples this rank reads, if the loader divides them."""
        if self.seed is None or self._has_own_order:
            return ""
        try:
            rank, world_size = rank_and_world_size(self.rank, self.world_size)
        except ValueError:  # iterating raises it
            return ""
        source = "" if self.rank is not None else f" (from {source_of_rank()})"
        return f", rank {rank} of {world_size}{source}" if world_size > 1 else ""

    def check_worker_number_rationality(self) -> None:
        """Warns, as torch does, of more workers than there are cores; actors have the cluster's, a shared pool all ranks'."""
        if self.backend != "ray" and self.share is None:
            super().check_worker_number_rationality()

    # ------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the arguments and the position; workers and batches stay here."""
        state = self.__dict__.copy()
        passes = state.pop("_passes")
        for name in ("_builder", "_watches", "_is_closed"):
            del state[name]
        state["_recorder"] = copy.copy(self._recorder)
        state["position"] = passes.state_of_copy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("position")
        self.__dict__.update(state)
        self._set_up()
        self._passes.go_on_as_copy(position)

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """Ends the workers and frees the ring's name; batches still held stay valid. A closed loader cannot be iterated again."""
        if sys is None or sys.is_finalizing():  # by a generator that outlives the program: what runs at exit has ended all
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


_OF_TORCH = ("index_sampler", "auto_collation", "has_own_order")  # of a LoaderConfig, no arguments
_ARGUMENTS = tuple(field.name for field in fields(LoaderConfig) if field.name not in _OF_TORCH)


def _by_number(dataset: Any, seed: int | None, *ranks: int | None) -> Any:
    """Return the dataset to read. Seed mode reads by index, so for a package iterable this is its view of items by number.

    Raises:
        ValueError: the dataset was made for another rank; its items by number are those of all ranks.
    """
    if seed is None or not isinstance(dataset, IterableDataset) or (keyed_items := package_ability(dataset, "keyed_items")) is None:
        return dataset
    own = package_ability(dataset, "given_rank")
    if own is not None and own != rank_and_world_size(*ranks):
        raise ValueError(
            f"the dataset is for rank {own[0]} of {own[1]}, and in seed mode the loader divides the samples: give it "
            f"rank={own[0]}, world_size={own[1]}, too"
        )
    return keyed_items()


def _kind_of_engine(config: LoaderConfig, builder: EngineBuilder) -> tuple[Make, dict[str, Any]]:
    """What makes the engines that the arguments ask for, and options of theirs: where workers run."""
    options: dict[str, Any] = {}
    if config.backend == "ray":
        from shmload.ray.actor_pool import OnCluster  # few loaders have a cluster

        options["backend"] = OnCluster(
            config.address or "auto",
            config.num_local_workers,
            config.connect_timeout_s,
            config.ship_timeout_s,
            dict(config.actor_options or {}),
        )
        options["num_far"] = config.num_workers
    if config.share is not None:
        from shmload.sharing.choice import shared_engine  # few loaders share

        return partial(shared_engine, config, builder), options
    return Engine, options


def _set_numbers(loader: ShmLoader[Any] | None, setting: Setting) -> None:
    """Lets the attributes be the numbers of now; one that was given stays as it was given."""
    if loader is not None and is_auto(loader.num_workers):
        loader.num_workers = AutoNumber(setting.num_workers)
    if loader is not None and is_auto(loader.prefetch_factor):
        loader.prefetch_factor = AutoNumber(setting.prefetch)
