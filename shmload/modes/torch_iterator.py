"""The iterator of torch mode with workers: it orders batches from an engine at the pace of torch."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle
from typing import Any

from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from shmload import faults
from shmload._core.trainer import Order
from shmload.engine.engine import Engine
from shmload.engine.iterator_lock import IteratorLock
from shmload.engine.outcome import NOTHING, Outcome
from shmload.errors import WorkerDied
from shmload.modes.pass_context import PassContext
from shmload.modes.pass_progress import PassProgress
from shmload.modes.sampler_start import SamplerStart
from shmload.modes.torch_pass import TorchPass
from shmload.modes.torch_resume import fast_forward, resume_bytes, start_sampler
from shmload.modes.torch_state import TorchState
from shmload.torch_names import DatasetKind, pin_memory, sharding_worker_init_fn
from shmload.worker.iterable_pass import with_shared_seed
from shmload.worker.note import NO_NEWS, Note
from shmload.worker.sample_rng import generators_kept

log = logging.getLogger("shmload")


class TorchIterator(TorchPass):
    """One pass (or, with persistent workers, all passes) of a loader with workers.

    Args:
        loader: the object that torch's iterators see as their loader.
        passes: what the loader's passes share.
        state: the state of an earlier pass, from which this one continues.
        is_early: take the first batch from the sampler at once.
    """

    def __init__(
        self, loader: DataLoader[Any], passes: PassContext, state: TorchState | None = None, *, is_early: bool = False
    ) -> None:
        self._engine: Engine | None = None
        self._pid = os.getpid()
        self._passes, config = passes, passes.config
        self.iterator_lock = IteratorLock()
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
        self._in_order = config.in_order
        self._every = config.snapshot_every_n_steps
        self._generator = config.generator
        self._profile_name = (
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"  # the name that users look for in profiles
        )
        self._prefetch_factor: int = config.prefetch_factor  # type: ignore[assignment]  # None only without workers
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
        self._engine, engine.iterator_lock = engine, self.iterator_lock
        self._tuner = passes.builder.tuner
        self._reset(loader, first_iter=True, state=state)

    @property
    def is_of_parent(self) -> bool:
        """Return whether this process was forked after the workers started: they are its parent's and cannot be used here."""
        return self._pid != os.getpid()

    @property
    def _workers(self) -> list[Any]:
        return [] if self._engine is None else self._engine.pool.processes

    @property
    def _shutdown(self) -> bool:
        return self._engine is None

    @faults.at("epoch_change")
    def _reset(self, loader: DataLoader[Any], first_iter: bool = False, state: TorchState | None = None) -> None:
        with self.iterator_lock.lock:
            if self.iterator_lock.is_taken:
                raise self.iterator_lock.nested_call_error()
            with nullcontext() if first_iter else self._passes.generators.drawing(self._generator):
                self._begin_pass(loader, first_iter, state)

    def _begin_pass(self, loader: DataLoader[Any], first_iter: bool, state: TorchState | None) -> None:
        """Begin a pass, or continue that of a state, and order its first batches."""
        engine = self._engine
        assert engine is not None
        if not first_iter:
            self._finish(engine)
        is_resumed = state is not None and not state["is_finished"]
        with generators_kept() if is_resumed else nullcontext():  # a sampler may draw when it is begun
            start = SamplerStart(self._index_sampler, self._generator, is_resumed=is_resumed)
            super()._reset(loader, first_iter)
            reader = self._reader_of_sampler(start, self._generator, every=self._every, seed_between=False)
        self._pass = self._passes.log.num_passes
        self._received = None
        self._num_sent = 0
        self._unsent: Order | None = None  # the order that is being submitted
        self._num_active = [0] * self._num_workers  # pending orders by worker, or -1 if its iterator has ended
        self._worker_cycle: Iterator[int] = cycle(range(self._num_workers))
        state = start_sampler(reader, state, is_early=True)  # batches are ordered at once
        self.place = reader.place
        if state is not None and (why := fast_forward(state)):
            log.warning("%s", why)
        self._batches = reader.batches()
        self._is_round_robin = self._in_order  # as long as no iterator has ended
        self._is_samplers_object = self._auto_collation and not reader.is_sliced
        last = None if first_iter else self.progress
        passes = self._passes
        self.progress = passes.progress = PassProgress(
            passes.config, reader, int(self._base_seed), self._shared_seed, self._num_workers
        )
        if last is not None:
            self.progress.follows(last)
        if state is not None:
            self.progress.resumed(state)
            self._num_yielded = self.progress.num_delivered
            self._num_sent = state["sampler"]["taken"]
            is_same = state["num_workers"] == self._num_workers
            for _ in range(state["last_worker"] + 1 if is_same else state["snapshot"] % self._num_workers):
                next(self._worker_cycle)
        if state is not None and self._dataset_kind == DatasetKind.Iterable:
            counted = [0] * self._num_workers if fast_forward(state) else state["counted"]
            self._read_again([now - then for now, then in zip(state["counts"], counted, strict=True)])
        self._order_ahead(engine)
        if state is not None and self._dataset_kind != DatasetKind.Iterable:
            self._read_again_to(state["done"])
        self._begin_record(passes)
        engine.begin_pass(passes.config.num_steps)

    def _finish(self, engine: Engine) -> None:
        """Wait for all orders and drop their batches, because torch's workers also finish the work that they were sent."""
        while engine.num_queued:
            outcome = engine.next()
            self.progress.noted(outcome.order.worker, outcome.note)

    def _lost(self, engine: Engine, order: Order, note: Note | None, error: BaseException) -> None:
        """Count a batch that an error has replaced, and continue ordering as torch does. `note` is what its worker has sent."""
        if isinstance(error, WorkerDied) and self._passes.config.ray is not None:  # its actor is not replaced
            engine.close_after_death(functools.partial(WorkerDied, str(error)))
            return
        self.progress.last_worker = order.worker
        self._num_active[order.worker] -= 1
        self.progress.noted(order.worker, note)
        self.progress.completed(order.step, order.worker)
        self._go_on_ordering(engine)

    def _read_again(self, num_left: list[int]) -> None:
        """Let each worker read `num_left` batches of an iterable dataset again, without yielding them."""
        engine, num_to_send = self._engine, list(num_left)
        assert engine is not None
        while any(num_left):
            for worker in range(self._num_workers):
                if num_to_send[worker] and engine.num_queued < self._prefetch_factor * self._num_workers:
                    num_to_send[worker] -= 1
                    self._send(engine, self._order_of(next(self._batches), worker))
            order, _, note, _ = engine.next()  # errors are ignored, because they were raised in the first reading
            num_left[order.worker] -= 1
            self._num_active[order.worker] -= 1
            self.progress.noted(order.worker, note)
            self.progress.done.add(order.step)

    def _order_next(self, engine: Engine) -> None:
        if self._unsent is not None:  # an interrupt came while it was sent
            self._send(engine, self._unsent)
            return
        try:
            index = next(self._batches)
            while self._num_sent in self.progress.done:  # a resumed pass skips the orders that were complete
                self._num_sent += 1
                index = next(self._batches)
        except StopIteration:
            return
        worker = next(self._worker_cycle) if self._is_round_robin else self._next_worker()
        if worker >= 0:
            self._send(engine, self._order_of(index, worker))

    def _order_of(self, index: Any, worker: int) -> Order:
        """Return the order of what the sampler gave."""
        if self._dataset_kind == DatasetKind.Iterable:
            index = [self._shared_seed or 0] * len(index) if self._auto_collation else self._shared_seed or 0
        keys = index if self._auto_collation else [index]
        return Order(self._pass, self._num_sent, keys, worker, is_samplers_object=self._is_samplers_object)

    def _send(self, engine: Engine, order: Order) -> None:
        """Submit an order and count it. After an interrupt, `_order_next` continues here."""
        if order is not self._unsent or not engine.is_queued(order):
            self._unsent = order
            engine.submit(order)
        self._num_active[order.worker] += 1
        self._num_sent += 1
        self._unsent = None

    def _go_on_ordering(self, engine: Engine) -> None:
        """Order one batch for the batch just received, or more or fewer if autotuning has changed the number ahead."""
        tuner = self._tuner
        if tuner is None:
            self._order_next(engine)
            return
        num_ahead = tuner.count_batch(engine)
        self._prefetch_factor = num_ahead // self._num_workers
        self._order_ahead(engine)

    def _order_ahead(self, engine: Engine) -> None:
        """Order batches until the number ahead is ordered."""
        for _ in range(self._prefetch_factor * self._num_workers - engine.num_queued):
            self._order_next(engine)

    def _next_worker(self) -> int:
        """Return the next worker in turn whose iterator has not ended and, unless in_order, that has less than its share; or -1."""
        num_left = self._num_workers - self._num_active.count(-1)
        share = self._prefetch_factor * self._num_workers // max(num_left, 1)
        for _ in range(self._num_workers):
            worker = next(self._worker_cycle)
            if self._num_active[worker] >= 0 and (self._in_order or self._num_active[worker] < share):
                return worker
        return -1

    def _next_data(self) -> Any:
        """Return the next batch, as torch's method of this name does; raise StopIteration at the end of the pass."""
        engine = self._engine
        if self._received is not None and engine is not None:  # an interrupt came before it was delivered, and before an order
            self._order_ahead(engine)
        while self._received is None:
            if engine is None or engine.num_queued == 0:
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise StopIteration
            self._receive(engine)
        batch = self._received.batch
        if self._pin_memory and engine is not None and engine.needs_pin_memory:
            return pin_memory(batch, self._pin_memory_device)
        return batch

    def _receive(self, engine: Engine) -> None:
        """Receive the outcome of an order, and order the next batch. Raise the error if the batch is lost."""
        outcome = engine.next(in_order=self._in_order)
        order, batch, note, error = outcome
        if error is not None:
            try:
                self._lost(engine, order, note, error)
                raise error
            finally:
                del error, outcome  # its traceback holds this frame
        if batch is not NOTHING:
            self._received = outcome
        elif note is not None and note.has_ended:
            self._num_active[order.worker] = -1
            self._is_round_robin = False
            self.progress.last_worker = order.worker
            self.progress.noted(order.worker, note)
            self.progress.done.add(order.step)
        else:
            self._count_order(outcome)
        if self._num_active[order.worker] > 0:  # otherwise this order was sent before the iterator's end
            self._num_active[order.worker] -= 1
        try:
            self._go_on_ordering(engine)
        except Exception:  # the sampler's; as in torch, the batch is lost
            if self._received is not None:
                self._received = None
                self._count_order(outcome)
            raise
        if batch is NOTHING:
            self._nothing_came(order)

    def _count_order(self, received: Outcome) -> None:
        order, progress = received.order, self.progress
        progress.last_worker = order.worker
        if received.note is not NO_NEWS or not progress.is_always_current:
            progress.noted(order.worker, received.note)
        progress.completed(order.step, order.worker)

    def _shutdown_workers(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # at exit, modules are cleared before the last objects
            self._shutdown_workers()
