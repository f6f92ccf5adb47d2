"""The base of torch mode's iterators: torch's own iterator, with the progress and the record of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shmload._core.trainer import Order
from shmload.engine.delivery_log import DeliveryLog
from shmload.engine.iterator_lock import IteratorLock
from shmload.engine.outcome import NOTHING, Outcome
from shmload.modes.after_batch import after_batch
from shmload.modes.draw_origin import Origin, origin_of
from shmload.modes.epoch_metrics import EpochWatch, samples_counter
from shmload.modes.pass_context import PassContext
from shmload.modes.pass_progress import PassProgress
from shmload.modes.sampler_reader import SamplerReader
from shmload.modes.sampler_start import SamplerStart
from shmload.modes.torch_samplers import is_endless
from shmload.torch_names import BaseIterator, DatasetKind, profiler_enabled


class TorchPass(BaseIterator):
    """One pass, with or without workers. It derives from torch's iterator, and adds the progress of the pass."""

    progress: PassProgress
    iterator_lock: IteratorLock
    _received: Outcome | None = None  # of `_next_data`, until its batch is delivered, so that an interrupt loses nothing
    _recorder: DeliveryLog | None = None  # None while a resumed pass reads batches again without yielding them
    _count: Callable[[Order, Any], int] | None = None  # of an iterable dataset, whose batches may be shorter than their orders
    _watch: EpochWatch | None = None
    _after_batch: Callable[[Any], Any] | None = None  # None while batches are read again, like _recorder
    _pass: int  # its number, which its orders have as their epoch
    place: Origin | None = None  # after a resume: SamplerReader.place

    def _next_data(self) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        iterator_lock = self.iterator_lock
        try:
            with iterator_lock.lock:
                if iterator_lock.is_taken:
                    raise iterator_lock.nested_call_error()
                iterator_lock.is_taken = True
                try:
                    return self._taken()
                finally:
                    iterator_lock.is_taken = False
        except StopIteration:
            if self._watch is not None:
                self._watch.end(is_complete=True)
            raise

    def _taken(self) -> Any:
        """Return the next batch. Its order is complete last: after an interrupt before that, a state has the batch to come."""
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
        assert self._received is not None
        try:
            if self._recorder is not None:
                batch = self._recorded(batch, self._received.order, self._recorder)
        except Exception:
            self._complete(self._received)
            raise
        self._complete(self._received)
        return batch

    def _recorded(self, batch: Any, order: Order, recorder: DeliveryLog) -> Any:
        """Return the batch as the program receives it, after the records and the callbacks."""
        recorder.last = order
        if recorder.is_on:
            num_samples = None if self._count is None else self._count(order, batch)
            recorder.delivered(order, batch, valid=num_samples, epoch=self._pass, step=self._recorded_step(order))
        if self._watch is not None:
            self._watch.delivered(batch)
        if self._after_batch is not None:
            return after_batch(self._after_batch, batch, f"epoch {self._pass}, batch {self.progress.num_delivered}")
        return batch

    def _complete(self, received: Outcome) -> None:
        """Count a batch as delivered, or as lost to an error after it was read."""
        self._received, progress = None, self.progress
        self._count_order(received)
        progress.num_delivered += 1
        if not progress.is_always_current:
            progress.delivered()

    def _count_order(self, received: Outcome) -> None:
        """Record that an order is complete."""
        raise NotImplementedError

    def _begin_record(self, passes: PassContext) -> None:
        """Record, from now on, the batches that are yielded, because they reach the user."""
        log = self._recorder = passes.log
        self._after_batch = passes.config.after_batch
        log.num_passes = self._pass + 1
        if log.is_on:
            log.begins(passes.config, self._pass, self.progress.num_complete)
            self._count = samples_counter(passes.config) if passes.config.is_iterable else None
        if passes.watches.callbacks:
            self._watch = passes.watches.begin(passes.config, passes.builder, log, self._pass)

    def _reader_of_sampler(self, start: SamplerStart, generator: torch.Generator | None, **options: Any) -> SamplerReader:
        """Replace the sampler's iterator, which torch has just started, by a reader. `start` is what it was before."""
        if is_endless(self._index_sampler):  # the pass draws nothing more
            start.origin = origin_of(generator)
        reader = SamplerReader(
            self._index_sampler,
            generator,
            iterator=self._sampler_iter,
            start=start,
            auto_collation=self._auto_collation,
            keeps_places=True,
            **options,
        )
        self._sampler_iter: Any = reader
        return reader

    def _nothing_came(self, order: Order) -> None:
        """Record that a complete order has no batch to yield."""
        if self._recorder is not None and self._recorder.is_on:
            self._recorder.delivered(order, NOTHING, epoch=self._pass, step=self._recorded_step(order, num_before=1))

    def _recorded_step(self, order: Order, *, num_before: int = 0) -> int:
        """Return the step that is recorded of an order. With an iterable dataset a resumed pass numbers its orders differently.

        Args:
            order: the order.
            num_before: 1 if the order counts as complete already.
        """
        return self.progress.num_complete - num_before if self._dataset_kind == DatasetKind.Iterable else int(order.step)

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
