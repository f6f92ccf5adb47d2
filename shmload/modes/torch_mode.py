"""Torch mode: the order, randomness and pace of torch's DataLoader, over the engine.

The iterators derive from torch's own base, so that generators are used in torch's sequence: the sampler's iterator first, then
the workers' base seed, then one index per batch, `prefetch_factor * num_workers` ahead and one more for each batch delivered.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import cycle
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from shmload import faults
from shmload._core.trainer import Order
from shmload.device.sending import sent_now
from shmload.engine.builder import EngineBuilder
from shmload.engine.config import LoaderConfig
from shmload.engine.delivery_log import DeliveryLog
from shmload.engine.engine import Engine
from shmload.engine.outcome import NOTHING
from shmload.engine.turns import Turns
from shmload.errors import WorkerDied
from shmload.modes.after_batch import after_batch
from shmload.modes.continuation import Continuation, restored
from shmload.modes.default_collate import collated
from shmload.modes.epoch_metrics import EpochWatch, EpochWatches
from shmload.modes.inline_reader import InlineReader
from shmload.modes.pass_progress import PassProgress, fresh_state
from shmload.modes.sampler_reader import SamplerReader, reusable_keys
from shmload.modes.substitute import next_of_dataset
from shmload.modes.torch_samplers import is_endless, is_torchs_own
from shmload.modes.torch_state import DATASET, TorchState, check_torch_state, has_own_states, order_kind, packed_state
from shmload.shm import pickling
from shmload.torch_names import (
    BaseIterator,
    DatasetKind,
    SingleProcessIterator,
    pin_memory,
    profiler_enabled,
    sharding_worker_init_fn,
)
from shmload.worker.iterable_pass import RestartingIterator, with_shared_seed
from shmload.worker.note import NO_NEWS, Note
from shmload.worker.sample_rng import generators_kept
from shmload.worker.snapshot import load_own_states
from shmload.worker.torch_side import GENERATORS, Origin, origin_of

log = logging.getLogger("shmload")


class TorchPasses:
    """The state of a loader between passes: the newest pass's progress, and the state from which the next continues.

    Attributes:
        config: the loader's arguments for the newest pass, set by the loader.
        progress: the progress of the newest pass. It outlives the iterator, because a loop that was left can be resumed.
    """

    valid = None  # because no row is padding

    def __init__(self, config: LoaderConfig, builder: EngineBuilder, log: DeliveryLog, watches: EpochWatches) -> None:
        self.config, self.builder, self.log, self.watches = config, builder, log, watches
        self.progress: PassProgress | None = None
        self._loaded: TorchState | None = None  # the state from which the next pass continues
        self.generators = Continuation()
        self.is_over = False  # whether a dataset's state, loaded into this process, was saved at the end of a pass through it

    @property
    def first_step(self) -> int:
        """Return the step that the next pass begins with: 0, or the position of a loaded state."""
        return 0 if self._loaded is None or self._loaded["is_finished"] else int(self._loaded["position"])

    def iterator(self, loader: DataLoader[Any]) -> _Iterator:
        """Begin the next pass.

        Args:
            loader: the object that torch's iterators see as their loader.
        """
        state, self._loaded = self._loaded, None
        config, generator = self.config, self.config.generator
        kind = TorchIterator if config.num_workers else TorchInlineIterator
        if state is None:
            with self.generators.drawing(generator) as is_early:
                return kind(loader, self, is_early=is_early)
        if not config.num_workers and not state["num_workers"]:
            snapshot = (state["workers"] or [{}])[0]
            load_own_states(config.dataset, snapshot)
            self.is_over = "is_over" in snapshot
        if not state["is_finished"]:
            return self._resumed(kind, loader, state)
        self.generators.forget()
        if "origin" not in state["sampler"]:
            return kind(loader, self, state)
        origin = Origin.loads(state["sampler"]["origin"])
        if generator is not None and origin.own is not None:
            generator.set_state(origin.own)
        with self.generators.drawing_from(origin) as is_early:
            return kind(loader, self, state, is_early=is_early)

    def _resumed(self, kind: type[TorchIterator | TorchInlineIterator], loader: DataLoader[Any], state: TorchState) -> _Iterator:
        """Return the rest of a pass. Generators that the program has restored itself are used as they are.

        This is only possible if both runs have workers, or neither has. Otherwise a sampler draws its order at another time than in
        the saved run.
        """
        marks = state.get("generators", {})
        is_same_kind = bool(self.config.num_workers) == bool(state["num_workers"])
        found = restored(marks) if is_same_kind else set()
        iterator = kind(loader, self, state, is_early=not marks or found != marks.keys())
        found |= restored(marks) if is_same_kind else set()  # an iterator of a dataset restores them when it loads its state
        self.generators.forget()
        moved = [name for name in GENERATORS if name in marks and name not in found]
        if iterator.place is not None and moved:
            self.generators.keep(origin_of(None).replaced(iterator.place, moved))
        return iterator

    def state_dict(self, now: Callable[[], LoaderConfig]) -> dict[str, Any]:
        """Return the state of the newest pass, or the state before the next one if that has ended.

        Args:
            now: returns the loader's arguments. It is called only between passes, because a state may be wanted with every batch.
        """
        if self._loaded is not None:
            return packed_state(self._loaded)
        if self.progress is None or self.progress.is_finished:
            config = now()
            state = fresh_state(config, self.progress, self.generators.place(config.generator))
        else:
            state = self.progress.state()
            state["generators"] = self.generators.marks(is_torch_enough=is_torchs_own(self.config.index_sampler))
        return packed_state({**state, "passes": self.log.num_passes})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where the state was taken.

        Args:
            state: a result of `state_dict`.
        Raises:
            StateMismatch: the state belongs to another loader or is damaged.
        """
        # torchdata's loader returns {} if there is no state
        self._loaded = None if state == {} else check_torch_state(state, self.config)
        self.progress = None
        if self._loaded is not None and "passes" in self._loaded:
            is_finished = self._loaded["is_finished"]
            self.log.num_passes = self._loaded["passes"] - (not is_finished)
            num_complete = sum(self._loaded["counts"]) if "counts" in self._loaded else self._loaded["done"]
            beyond = () if is_finished else self._loaded["beyond"]
            self.log.resumed(self.log.num_passes, 0 if is_finished else num_complete, beyond=beyond)

    def state_of_copy(self) -> TorchState | None:
        """Return the state from which a copy of the loader continues."""
        return self._loaded

    def go_on_as_copy(self, state: TorchState | None) -> None:
        """Continue at the position of the loader that this one was copied from."""
        self._loaded = state

    def set_epoch(self, epoch: int) -> None:
        """Call the sampler's `set_epoch`, if it has one."""
        batches: Any = self.config.batch_sampler
        for sampler in (batches, getattr(batches, "sampler", None), self.config.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # type: ignore[union-attr]  # it has one
                return

    def substitute(self, order: Order, row: int, tries: int) -> Any:
        """Return the index that replaces a bad sample at the given try."""
        return next_of_dataset(self.config, order, row)

    def close(self) -> None:
        """Do nothing, because each iterator ends its own workers."""


class _Iterator(BaseIterator):
    """Base of passes with and without workers: torch's iterator, plus its progress."""

    progress: PassProgress
    turns: Turns
    _order: Order  # of the batch that `_next_data` returns
    _recorder: DeliveryLog | None = None  # None while a resumed pass reads batches again without yielding them
    _watch: EpochWatch | None = None
    _after_batch: Callable[[Any], Any] | None = None  # likewise
    _pass = 0
    place: Origin | None = None  # after a resume: SamplerReader.place

    def _next_data(self) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        turns = self.turns
        try:
            with turns.lock:
                if turns.is_taken:
                    raise turns.nested_call_error()
                turns.is_taken = True
                try:
                    return self._taken()
                finally:
                    turns.is_taken = False
        except StopIteration:
            if self._watch is not None:
                self._watch.end(is_complete=True)
            raise

    def _taken(self) -> Any:
        watch = self._watch
        if watch is not None:
            watch.asked()
        try:
            if profiler_enabled() or self._dataset_kind == DatasetKind.Iterable:
                batch = super().__next__()  # counts samples of iterable datasets, annotates profiles: 5 us
            else:
                batch = self._next_data()
                self._num_yielded += 1
        except StopIteration:
            self.progress.is_finished = True
            if self._recorder is not None and self._recorder.is_on:
                self._recorder.ended(self._pass, self.progress.num_complete)
            raise
        progress = self.progress
        progress.num_delivered += 1
        if not progress.is_always_current:
            progress.delivered()
        recorder = self._recorder
        if recorder is not None:
            recorder.last = self._order
            if recorder.is_on:
                recorder.delivered(self._order, batch, epoch=self._pass, step=self._recorded_step(self._order))
        if watch is not None:
            watch.delivered(batch)
        if self._after_batch is not None:
            batch = after_batch(self._after_batch, batch, f"epoch {self._pass}, batch {progress.num_delivered - 1}")
        return batch

    def _begin_record(self, passes: TorchPasses) -> None:
        """Record, from now on, the batches that are yielded, because they reach the user."""
        log = self._recorder = passes.log
        self._after_batch = passes.config.after_batch
        self._pass, log.num_passes = log.num_passes, log.num_passes + 1
        if log.is_on:
            log.begins(passes.config, self._pass, self.progress.num_complete)
        if passes.watches.callbacks:
            self._watch = passes.watches.begin(passes.config, passes.builder, log, self._pass)

    def _reader_of_sampler(self, origin: Origin, generator: torch.Generator | None, **options: Any) -> SamplerReader:
        """Replace the sampler's iterator, which torch has just started, by a reader. `origin` is the generators' states before."""
        if is_endless(self._index_sampler):  # the pass draws nothing more
            origin = origin_of(generator)
        reader = SamplerReader(
            self._index_sampler, generator, iterator=self._sampler_iter, origin=origin, keeps_places=True, **options
        )
        self._sampler_iter: Any = reader
        return reader

    def _nothing_came(self, order: Order) -> None:
        """Record that an order has no batch to yield."""
        if self._recorder is not None and self._recorder.is_on:
            self._recorder.delivered(order, NOTHING, epoch=self._pass, step=self._recorded_step(order))

    def _recorded_step(self, order: Order) -> int:
        """Return the step of the order just completed. With an iterable dataset a resumed pass numbers its orders differently."""
        return self.progress.num_complete - 1 if self._dataset_kind == DatasetKind.Iterable else int(order.step)

    def _read_again_to(self, done: int) -> None:
        """Read batches after the last snapshot again, without yielding them, up to this order."""
        progress = self.progress
        with progress.reading_again():
            while (first := progress.done.first) < done:
                try:
                    next(self)
                except Exception:
                    if progress.done.first == first:  # otherwise the saved run lost this batch as well
                        raise


class TorchIterator(_Iterator):
    """One pass (or, with persistent workers, all passes) of a loader with workers.

    Args:
        loader: the object that torch's iterators see as their loader.
        passes: the loader's passes.
        state: the state of an earlier pass, from which this one continues.
        is_early: take the first batch from the sampler at once.
    """

    def __init__(
        self, loader: DataLoader[Any], passes: TorchPasses, state: TorchState | None = None, *, is_early: bool = False
    ) -> None:
        self._engine: Engine | None = None
        self._passes, config = passes, passes.config
        self.turns = Turns()
        if state is None or state["base_seed"] is None:
            super().__init__(loader)
        else:
            generator = config.generator
            own = None if generator is None else generator.get_state()
            with generators_kept():
                super().__init__(loader)
            if generator is not None and own is not None:
                generator.set_state(own)
            self._base_seed, self._shared_seed = state["base_seed"], state["shared_seed"]
            if self._shared_seed is not None:
                self._dataset = with_shared_seed(self._dataset, self._shared_seed)
        self._num_workers = config.total_workers  # torch has only local workers
        self._epoch = -1
        self._in_order = config.in_order
        self._every = config.snapshot_every_n_steps
        self._generator = config.generator
        self._profile_name = (
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"  # the name that users look for in profiles
        )
        self._prefetch_factor: int = config.prefetch_factor  # type: ignore[assignment]  # None raises TypeError as in torch
        if self._prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        init_fn = self._worker_init_fn = config.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            init_fn = functools.partial(sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        engine = passes.builder.make(
            config,
            base_seed=int(self._base_seed),
            resume=resume_bytes(state, config.total_workers),
            dataset=self._dataset,
            worker_init_fn=init_fn,
            shared_seed=self._shared_seed,
        )
        assert isinstance(engine, Engine)  # only seed mode shares rings
        self._engine, engine.turns = engine, self.turns
        self._tuner = passes.builder.tuner
        self._reset(loader, first_iter=True, state=state)

    @property
    def _workers(self) -> list[Any]:
        return [] if self._engine is None else self._engine.pool.processes

    @property
    def _shutdown(self) -> bool:
        return self._engine is None

    @faults.at("epoch_change")
    def _reset(self, loader: DataLoader[Any], first_iter: bool = False, state: TorchState | None = None) -> None:
        with self.turns.lock:
            if self.turns.is_taken:
                raise self.turns.nested_call_error()
            with nullcontext() if first_iter else self._passes.generators.drawing(self._generator):
                self._begin_pass(loader, first_iter, state)

    def _begin_pass(self, loader: DataLoader[Any], first_iter: bool, state: TorchState | None) -> None:
        engine = self._engine
        assert engine is not None
        if not first_iter:
            self._finish(engine)
        is_resumed = state is not None and not state["is_finished"]
        with generators_kept() if is_resumed else nullcontext():  # a sampler may draw when it is begun
            origin = origin_of(self._generator)
            super()._reset(loader, first_iter)
            reader = self._reader_of_sampler(origin, self._generator, every=self._every, seed_between=False)
        self._epoch += 1
        self._num_sent = 0
        self._num_active = [0] * self._num_workers  # pending orders by worker, or -1 if its iterator has ended
        self._turns: Iterator[int] = cycle(range(self._num_workers))
        state = _put_at(reader, state, is_early=True)  # batches are ordered at once
        self.place = reader.place
        if state is not None and (first := fast_forward(state)):
            log.warning("%s", first)
        self._batches = reader.batches()
        self._takes_turns = self._in_order  # as long as no iterator has ended
        self._is_given = self._auto_collation and not reader.is_sliced
        last = None if first_iter else self.progress
        passes = self._passes
        self.progress = passes.progress = PassProgress(passes.config, reader, int(self._base_seed), self._shared_seed)
        if last is not None:
            self.progress.follows(last)
        if state is not None:
            self.progress.resumed(state)
            self._num_yielded = self.progress.num_delivered
            self._num_sent = state["sampler"]["taken"]
            is_same = state["num_workers"] == self._num_workers
            for _ in range(state["last_worker"] + 1 if is_same else state["snapshot"] % self._num_workers):
                next(self._turns)
        if state is not None and self._dataset_kind == DatasetKind.Iterable:
            counted = [0] * self._num_workers if fast_forward(state) else state["counted"]
            self._read_again([now - then for now, then in zip(state["counts"], counted, strict=True)])
        for _ in range(self._prefetch_factor * self._num_workers - engine.num_queued):
            self._order_next(engine)
        if state is not None and self._dataset_kind != DatasetKind.Iterable:
            self._read_again_to(state["done"])
        self._begin_record(passes)
        engine.begin_pass(passes.config.num_steps, epoch_base=self._pass - self._epoch)

    def _finish(self, engine: Engine) -> None:
        """Wait for all orders and drop their batches, because torch's workers also finish the work that they were sent."""
        while engine.num_queued:
            outcome = engine.next()
            self.progress.noted(outcome.order.worker, outcome.note)

    def _lost(self, engine: Engine, order: Order, note: Note | None, error: BaseException) -> None:
        """Count a batch that an error has replaced, and continue ordering as torch does."""
        if isinstance(error, WorkerDied) and self._passes.config.ray is not None:  # its actor is not replaced
            engine.close_after_death(functools.partial(WorkerDied, str(error)))
            return
        self.progress.last_worker = order.worker
        self._num_active[order.worker] -= 1
        self.progress.noted(order.worker, note)
        self.progress.ended(order.step, order.worker)
        self._go_on_ordering(engine)

    def _read_again(self, num_left: list[int]) -> None:
        """Let each worker read `num_left` batches of an iterable dataset again, without yielding them."""
        engine, num_to_send = self._engine, list(num_left)
        assert engine is not None
        while any(num_left):
            for worker in range(self._num_workers):
                if num_to_send[worker] and engine.num_queued < self._prefetch_factor * self._num_workers:
                    num_to_send[worker] -= 1
                    self._send(engine, next(self._batches), worker)
            order, _, note, _ = engine.next()  # errors are ignored, because they were raised in the first reading
            num_left[order.worker] -= 1
            self._num_active[order.worker] -= 1
            self.progress.noted(order.worker, note)
            self.progress.done.add(order.step)

    def _order_next(self, engine: Engine) -> None:
        try:
            index = next(self._batches)
            while self._num_sent in self.progress.done:  # a resumed pass skips the orders that were complete
                self._num_sent += 1
                index = next(self._batches)
        except StopIteration:
            return
        worker = next(self._turns) if self._takes_turns else self._next_worker()
        if worker >= 0:
            self._send(engine, index, worker)

    def _send(self, engine: Engine, index: Any, worker: int) -> None:
        index = reusable_keys(index)
        if self._dataset_kind == DatasetKind.Iterable:
            index = [self._shared_seed or 0] * len(index) if self._auto_collation else self._shared_seed or 0
        keys = index if self._auto_collation else [index]
        engine.submit(Order(self._epoch, self._num_sent, keys, worker, is_given=self._is_given))
        self._num_active[worker] += 1
        self._num_sent += 1

    def _go_on_ordering(self, engine: Engine) -> None:
        """Order one batch for the batch just received, or more or fewer if autotuning has changed the number ahead."""
        tuner = self._tuner
        if tuner is None:
            self._order_next(engine)
            return
        num_ahead = tuner.count_batch(engine)
        self._prefetch_factor = num_ahead // self._num_workers
        for _ in range(num_ahead - engine.num_queued):
            self._order_next(engine)

    def _next_worker(self) -> int:
        """Return the next worker in turn whose iterator has not ended and, unless in_order, that has less than its share; or -1."""
        num_left = self._num_workers - self._num_active.count(-1)
        share = self._prefetch_factor * self._num_workers // max(num_left, 1)
        for _ in range(self._num_workers):
            worker = next(self._turns)
            if self._num_active[worker] >= 0 and (self._in_order or self._num_active[worker] < share):
                return worker
        return -1

    def _next_data(self) -> Any:
        while True:
            engine = self._engine
            if engine is None or engine.num_queued == 0:
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise StopIteration
            order, batch, note, error = engine.next(in_order=self._in_order)
            if error is not None:
                try:
                    self._lost(engine, order, note, error)
                    raise error
                finally:
                    del error  # its traceback holds this frame
            progress = self.progress
            progress.last_worker = order.worker
            if note is not NO_NEWS or not progress.is_always_current:
                progress.noted(order.worker, note)
            if note is not NO_NEWS and note is not None and note.has_ended:
                self._num_active[order.worker] = -1
                self._takes_turns = False
                progress.done.add(order.step)
            else:
                progress.ended(order.step, order.worker)
                if self._num_active[order.worker] > 0:  # otherwise this order was sent before the iterator's end
                    self._num_active[order.worker] -= 1
            self._go_on_ordering(engine)
            if batch is not NOTHING:
                self._order = order
                if self._pin_memory and engine.wants_pinned:
                    return pin_memory(batch, self._pin_memory_device)
                return batch
            self._nothing_came(order)

    def _shutdown_workers(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # at exit, modules are cleared before the last objects
            self._shutdown_workers()


class TorchInlineIterator(_Iterator, SingleProcessIterator):
    """One pass without workers, read by torch's fetcher, or by InlineReader if samples decode in place or may be bad.

    Args:
        loader: the object that torch's iterators see as their loader.
        passes: the loader's passes.
        state: the state of an earlier pass, from which this one continues.
        is_early: take the first batch from the sampler at once.
    """

    def __init__(
        self, loader: DataLoader[Any], passes: TorchPasses, state: TorchState | None = None, *, is_early: bool = False
    ) -> None:
        config = passes.config
        origin = origin_of(config.generator)
        self.turns = Turns()
        self._calls = passes.builder.device(config.device)
        resumed = ((state or {}).get("workers") or [{}])[0]
        is_resumed = state is not None and not state["is_finished"]
        with generators_kept() if is_resumed else nullcontext():
            super().__init__(loader)
            reader = self._reader_of_sampler(origin, config.generator, every=1, seed_between=True)
        job = config.job()
        self._bad_samples = passes.builder.bad_samples
        self._reader = InlineReader(job, self._bad_samples) if config.reads_inline else None
        if job.plan.ragged is not None and job.collate_fn is None and self._auto_collation:
            self._dataset_fetcher.collate_fn = functools.partial(collated, ragged=job.plan.ragged)
        self._profile_name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        state = _put_at(reader, state, is_early=is_early)
        if state is None and is_early:
            reader.take_first()
        self.place = reader.place
        if passes.is_over and "iterator" not in resumed and self._dataset_kind == DatasetKind.Iterable:
            self._dataset_fetcher.dataset_iter = RestartingIterator(config.dataset)
        passes.is_over = state is not None and "has_ended" in resumed
        if state is not None:
            self._base_seed = state["base_seed"]
        self.progress = passes.progress = PassProgress(config, reader, int(self._base_seed), self._shared_seed)
        self.progress.fetcher = self._dataset_fetcher
        if state is not None:
            self._go_on(state, resumed)
        self._begin_record(passes)

    def _go_on(self, state: TorchState, resumed: dict[str, Any]) -> None:
        self.progress.resumed(state)
        self._num_yielded = self.progress.num_delivered
        if first := fast_forward(state):
            log.warning("%s", first)
            self._read_again(sum(state["counts"]))
            return
        if "iterator" in resumed:
            self._dataset_fetcher.dataset_iter.load_state_dict(resumed["iterator"])
        if "has_ended" in resumed:
            self._dataset_fetcher.ended = True
        if self._dataset_kind == DatasetKind.Iterable:
            self._read_again(sum(state["counts"]) - sum(state["counted"]))
        else:
            self._read_again_to(state["done"])

    def _read_again(self, num_batches: int) -> None:
        """Read `num_batches` batches of an iterable dataset again, without yielding them."""
        with self.progress.reading_again():
            for _ in range(num_batches):
                with suppress(Exception):  # the saved run lost it as well
                    next(self)

    def _next_index(self) -> Any:
        keys = next(self._sampler_iter)
        while self._sampler_iter.num_taken - 1 in self.progress.done:  # of a resumed pass
            keys = next(self._sampler_iter)
        self.progress.ended(self._sampler_iter.num_taken - 1, 0)
        keys = reusable_keys(keys)
        if self._reader is None:
            self._order = Order(0, self._sampler_iter.num_taken - 1, keys if self._auto_collation else [keys])
        return keys.tolist() if self._sampler_iter.is_sliced else keys

    def _next_data(self) -> Any:
        if self._reader is None:
            with self._bad_samples.counting_irregular():
                batch = SingleProcessIterator._next_data(self)
            return sent_now(batch, self._calls)
        while True:
            keys = self._next_index()
            step = self._sampler_iter.num_taken - 1
            order = Order(0, step, keys if self._auto_collation else [keys])
            batch = self._reader.read(order)
            if batch is not NOTHING:
                self._order = order
                return sent_now(batch, self._calls)
            self._nothing_came(order)


def _put_at(reader: SamplerReader, state: TorchState | None, *, is_early: bool) -> TorchState | None:
    """Move a sampler to where a state was taken. Return the state if it was taken within a pass.

    Args:
        is_early: let a sampler that draws when its first batch is taken draw now.
    """
    if state is None:
        return None
    if state["is_finished"]:
        reader.start_after(state["sampler"])
        return None
    taken = state["sampler"]["taken"]
    reader.resume(state["sampler"], max(state.get("ahead", taken) - taken, int(is_early)))
    return state


def resume_bytes(state: TorchState | None, num_workers: int) -> list[bytes]:
    """Return the workers' pickled snapshots from which they continue, or [] if there are none or they cannot be used."""
    if state is None:
        return []
    if state["num_workers"] != num_workers and any(state["workers"]):
        log.warning(
            "the state was saved with %d workers and is resumed with %d: the order continues, the workers' random streams do not",
            state["num_workers"],
            num_workers,
        )
    if state["num_workers"] != num_workers or (fast_forward(state) and state["version"] < 2):
        return []
    return [pickling.dumps(snapshot) if snapshot else b"" for snapshot in state["workers"]]


def fast_forward(state: TorchState) -> str:
    """Return why the pass must be read again up to the state, or an empty string if that is not needed."""
    is_iterable = order_kind(state["sampler"]) == DATASET
    if not is_iterable or has_own_states(state["workers"]) or not state["position"] or state["is_finished"]:
        return ""
    return (
        f"neither the iterable dataset nor its iterator has state_dict and load_state_dict: the first {state['position']} batches "
        "are read again to reach the position of the state. Give one of them the two methods"
    )
