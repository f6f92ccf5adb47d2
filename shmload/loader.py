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
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from shmload.arguments import as_keyed, check_arguments
from shmload.audit.recorder import Recorder
from shmload.batch.ragged import AS_TORCH_OR_LIST
from shmload.device.sending import Sender
from shmload.engine.autotune import Autotuner, first_numbers, is_auto, tuner_of
from shmload.engine.engine import Engine
from shmload.engine.orders import BadSamples, OnError, Order
from shmload.engine_making import EngineMaking
from shmload.modes.epoch_metrics import callbacks_of_environment
from shmload.modes.seed_mode import SeedIterator, SeedStream
from shmload.modes.torch_mode import TorchInlineIterator, TorchIterator
from shmload.modes.torch_state import Progress, TorchState, check_torch_state, fresh_state, packed_state
from shmload.observed import T
from shmload.schedule.schedule import KeyedBatches, KeyedOrder
from shmload.worker.generators import Origin, own_generators, replayed
from shmload.worker.sources import DecodesBatches, DecodesSamples, Samples
from shmload.world import ability_of

if TYPE_CHECKING:
    from shmload.modes.epoch_metrics import EpochWatch
    from shmload.tools.trace.session import Trace


class ShmLoader(EngineMaking[T]):
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
            mode the crew grows and shrinks while it runs, and batches are the same whatever it does; in torch mode, where what
            workers draw depends on their number, that is taken from this host's processors once: give a number for the same
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
        seed_samples: seed mode: reseed random, numpy and torch before every sample from (seed, epoch, index). Default True.
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
            SampleTimeout, which says where the worker was. Needs workers.
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
            iterator or sampler of yours tells a state of other things than numbers, text, bytes, arrays, tensors and containers of
            these. False: such a state is a StateMismatch.
        crew: "auto": workers are processes of this machine. "ray": they are actors on the nodes of a Ray cluster that this machine
            belongs to, which needs the extra `shmload[ray]`; batches are the same. An actor that dies is replaced in seed mode.
            num_workers="auto" is then the number of CPUs of the cluster's other nodes; `sample_timeout_s` needs a seed.
        num_local_workers: with crew="ray", processes of this machine that read beside the `num_workers` actors, into the same
            ring. For torch mode and `get_worker_info()` all of them together are the workers, the actors first.
        address: of the cluster's head, with crew="ray"; None: "auto", the cluster that runs on this machine.
        connect_timeout_s: with crew="ray", seconds that the cluster may take to answer. What is sent there then takes as long as it
            takes. Once it has answered, it is asked again before a break is an error.
        share: "node": the ranks of this node that are given the same `rank` and `world_size`, as those of a tensor- or pipeline-
            parallel group are, read one ring, filled by one crew of `num_workers`; each sample is decoded once. Where no two
            ranks are given the same, as in data parallelism, each has ring and crew of its own, and idle workers help the ranks
            whose batches are late. Seed mode only; batches are the same without it. docs/launch.md says when to use it, and what
            it asks of a program.
        device: "cuda", "cuda:1" or such a torch.device: batches' tensors arrive there, copied from the pinned ring on a stream of
            their own, two batches ahead; the stream that is current in `next()` waits for them. What is no tensor stays as it is. A
            `shmload.Device` says more: images normalised there, tensors at addresses that stay. Not with `audit`.
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
        crew: str = "auto",
        num_local_workers: int = 0,
        address: str | None = None,
        connect_timeout_s: float = 60.0,
        share: str | None = None,
        device: Any = None,
        audit: str | os.PathLike[str] | None = None,
        snapshot_every_n_steps: int | None = 1,
        threads_per_worker: int = 1,
        trust_state: bool = False,
    ) -> None:
        dataset = as_keyed(dataset, seed)
        check_arguments(dict(locals()))
        self.crew, self.address, self.num_local_workers, self.share = crew, address, num_local_workers, share
        self.connect_timeout_s = connect_timeout_s
        self._num_rings = 0
        if crew == "ray" and is_auto(num_workers):
            from shmload.ray.cluster import num_actors  # few loaders have a cluster

            num_workers = num_actors(address or "auto")
        first_workers, first_prefetch = first_numbers(num_workers, prefetch_factor, is_torch_mode=seed is None)
        super().__init__(
            dataset,  # type: ignore[arg-type]  # torch reads more than it names
            batch_size,
            None if ability_of(dataset, "epoch_schedule") else shuffle,  # torch would ask for a length there is not yet
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
        self._shuffle = shuffle
        self.on_error: OnError = on_error
        self.max_bad = max_bad
        self.device = device
        self._sender: Sender | None = None
        self.ragged, self.seed = ragged, seed
        _ = self._read_plan  # says at once if ragged does not go with the dataset
        self.sample_timeout_s = sample_timeout_s
        self.snapshot_every_n_steps = snapshot_every_n_steps or 0
        self.trust_state = trust_state
        self._bad_samples = BadSamples(on_error, max_bad, self._substitute)
        self._progress: Progress | None = None  # of the newest pass, in torch mode
        self._loaded: TorchState | None = None  # what the next pass goes on from
        self.threads_per_worker = threads_per_worker
        can_reseed = seed is not None and threads_per_worker == 1
        self.seed_samples = can_reseed if seed_samples is None else seed_samples
        self.rank, self.world_size = rank, world_size
        self.uneven = uneven
        self.ring_bytes = ring_bytes
        self.max_restarts = max_restarts
        is_keyed = seed is not None and (isinstance(sampler, KeyedOrder) or isinstance(batch_sampler, KeyedBatches))
        self._has_own_order = not is_keyed and (sampler is not None or batch_sampler is not None)
        self.audit = audit
        self._recorder = Recorder(audit, has_indices=not isinstance(dataset, IterableDataset))
        self._is_closed = False
        self._last_engine: Engine | None = None
        self._trace: Trace | None = None
        self._watch: weakref.ref[EpochWatch] | None = None
        self._epoch_callbacks = callbacks_of_environment()
        self._engines: WeakSet[Engine] = WeakSet()
        self._stream: SeedStream | None = None
        self._tuner: Autotuner | None = tuner_of(self)
        if self.seed_samples and (own := own_generators(dataset)):
            warnings.warn(
                f"seed_samples cannot reseed the generators that the dataset keeps: {', '.join(own)}. What they draw depends on "
                "the worker; draw from shmload.sample_rng() or the global generators instead, or give seed_samples=False",
                stacklevel=2,
            )
        if seed is not None:
            self._stream = SeedStream(self)

    @property
    def shuffle(self) -> bool | None:
        """As it was given. Not in `vars(loader)`: who builds a loader again of these adds a sampler, which shuffle excludes."""
        return self._shuffle

    # ------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator class
        if self._is_closed:
            raise RuntimeError("this loader is closed: make a new one")
        if self._stream is not None:
            return SeedIterator(self, self._stream)
        return super().__iter__()

    def _get_iterator(self) -> Any:
        state, self._loaded = self._loaded, None
        if self.num_workers:
            self.check_worker_number_rationality()
        kind = TorchIterator if self.num_workers else TorchInlineIterator
        if state is None or not state["is_finished"] or "origin" not in state["sampler"]:
            return kind(self, state)
        origin = Origin.loads(state["sampler"]["origin"])
        if self.generator is not None and origin.own is not None:
            self.generator.set_state(origin.own)
        if origin.is_now():  # as where a program restores its generators itself: then they move on, as they did
            return kind(self, state)
        with replayed(origin, self.generator):
            return kind(self, state)

    def __len__(self) -> int:
        if self._stream is not None and not self._has_own_order:
            return len(self._stream)
        return super().__len__()

    def _substitute(self, order: Order, row: int, tries: int) -> Any:
        """The index that takes a bad sample's place at a try."""
        if self._stream is not None and not self._has_own_order:
            return self._stream.epochs.substitute(order, row, tries)
        ordered = order.indices[row]
        if not isinstance(ordered, int | np.integer):
            raise TypeError(f'on_error="substitute" needs integer indices: the sampler gave {ordered!r}. Use "skip"')
        return (int(ordered) + 1) % len(self.dataset)  # type: ignore[arg-type]  # map-style

    # ------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, between two batches. Legal at any time; later iteration does not change it.

        Flat and JSON-able, with the same keys always. Seed mode: under 1 KiB, and good for all ranks, of which there may be another
        number. Torch mode: under 16 KiB, apart from the own states of a stateful dataset, iterator or sampler, which are part
        of it; each rank has its own. What is ordered ahead does not count: the place is behind the batch yielded last.

        Returns:
            a new dict, which the loader does not keep.
        """
        if self._stream is not None:
            return self._stream.state_dict()
        if self._loaded is not None:
            return packed_state(self._loaded)
        if self._progress is None or self._progress.is_finished:
            state = fresh_state(self, self._progress)
        else:
            state = self._progress.state()
        return packed_state({**state, "passes": self._recorder.num_passes})

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
        if self._stream is not None:
            self._stream.load_state_dict(state, is_trusted=self.trust_state)
            return
        # torchdata's loader gives {} for nothing
        self._loaded = None if state == {} else check_torch_state(state, self)
        iterator, self._iterator = self._iterator, None
        self._progress = None
        if self._loaded is not None and "passes" in self._loaded:
            is_finished = self._loaded["is_finished"]
            self._recorder.num_passes = self._loaded["passes"] - (not is_finished)
            self._recorder.resumed(self._recorder.num_passes, 0 if is_finished else self._loaded["position"])
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # ours, of persistent workers

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch `epoch`. Seldom needed: in seed mode each iteration is the next epoch by itself.

        In torch mode it is passed on to the sampler, if that has a set_epoch (a DistributedSampler).

        Args:
            epoch: from 0 on.
        Raises:
            ValueError: it is below 0.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is at least 0; got {epoch}")
        if self._stream is not None:
            self._stream.set_epoch(epoch)
            return
        for sampler in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # type: ignore[union-attr]  # it has one
                return

    def __repr__(self) -> str:
        mode = "torch mode" if self.seed is None else f"seed {self.seed}"
        engine = self._last_engine
        ring = "no ring yet" if engine is None else f"{engine.num_slots} slots, {engine.layout or 'packed batches'}"
        workers = f"num_workers={self.num_workers}"
        if self.num_local_workers:
            workers += f", num_local_workers={self.num_local_workers}"
        return (
            f"ShmLoader({type(self.dataset).__name__}, batch_size={self.batch_size}, {workers}, {mode}, "
            f"read by {self._read_plan.path}, {ring})"
        )

    def check_worker_number_rationality(self) -> None:
        """Warns, as torch does, of more workers than there are cores; actors have the cluster's, a shared crew all ranks'."""
        if self.crew != "ray" and self.share is None:
            super().check_worker_number_rationality()

    # ------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the arguments and the position; workers and batches stay here."""
        state = self.__dict__.copy()
        stream: SeedStream | None = state.pop("_stream")
        for name in (
            "_engines",
            "_last_engine",
            "_progress",
            "_trace",
            "_watch",
            "_epoch_callbacks",
            "_tuner",
            "_sender",
        ):
            del state[name]
        state["_recorder"] = copy.copy(self._recorder)
        if stream is not None:
            state["position"] = stream.state_dict()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("position", None)
        self.__dict__.update(state)
        self._engines, self._last_engine, self._progress, self._sender = WeakSet(), None, None, None
        self._trace, self._watch, self._epoch_callbacks = None, None, callbacks_of_environment()
        self._tuner = tuner_of(self)
        self._stream = None if self.seed is None else SeedStream(self)
        if self._stream is not None and position is not None:
            self._stream.load_state_dict(position, is_trusted=True)  # of a copy, or of a pickle that was opened anyway

    # ------------------------------------------------------------ ends

    def close(self) -> None:
        """Ends the workers and frees the ring's name; batches still held stay valid. A closed loader cannot be iterated again."""
        self._is_closed = True
        if self._watch is not None and (watch := self._watch()) is not None:
            watch.end(is_complete=False)
        if self._stream is not None:
            self._stream.close()
        self._iterator = None
        for engine in list(self._engines):  # an iterator that someone still holds says that the loader is closed
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # an iterator that someone holds works on without its loader, as torch's does
        stream: SeedStream | None = getattr(self, "_stream", None)
        if stream is not None and sys is not None and not sys.is_finalizing():  # as in torch_mode.py
            stream.close()
