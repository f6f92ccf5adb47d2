"""Seed mode: batch k of epoch e is a pure function of (seed, e, k).

`SeedStream` turns wanted batches into orders. It always orders ahead, also across the end of an epoch, so that workers are never
idle there. If the batch that is wanted next is not the one that was ordered (after a break, a resume, `set_epoch`, a second
iterator), the orders are abandoned and the schedule is asked again. This costs nothing because the schedule has no state.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmload import faults
from shmload._core.trainer import Order
from shmload.device.sending import NUM_SENT, sent_now
from shmload.engine.batch_source import BatchSource
from shmload.engine.builder import EngineBuilder
from shmload.engine.config import LoaderConfig
from shmload.engine.delivery_log import DeliveryLog
from shmload.engine.iterator_lock import IteratorLock
from shmload.engine.outcome import NOTHING
from shmload.engine.tuning.auto_number import is_auto
from shmload.engine.tuning.autotune import Autotuner
from shmload.introspect.attribute_values import attribute_values
from shmload.introspect.users_frame import users_frame
from shmload.modes.after_batch import after_batch
from shmload.modes.epoch_metrics import EpochWatch, EpochWatches
from shmload.modes.epochs import Epochs
from shmload.modes.inline_reader import InlineReader
from shmload.modes.substitute import next_of_dataset
from shmload.schedule.checks import whole_number
from shmload.schedule.permutation import MAX_N
from shmload.torch_names import pin_memory
from shmload.worker.failure import stop_iteration_error

EPOCH_END = object()  # returned by `take` after an epoch's last batch, so that a StopIteration from `take` can only be the user's


@dataclass
class BatchPlace:
    """The position of the next batch."""

    epoch: int
    step: int  # as Epochs counts them
    # whether this rank's pass has ended, perhaps before the others', because the last step may have no row for it
    is_over: bool = False


class SeedIterator:
    """One pass, from the current position of the stream to the end of its epoch."""

    def __init__(self, stream: SeedStream) -> None:
        self._stream = stream
        self.place, self._watch = stream.begin()

    def __iter__(self) -> SeedIterator:
        return self

    def __next__(self) -> Any:
        while (batch := self.next_step()) is NOTHING:
            pass
        return batch

    def next_step(self) -> Any:
        """Return the next batch, or NOTHING if all its samples are skipped."""
        watch, iterator_lock, step = self._watch, self._stream.iterator_lock, self.place.step
        try:
            with iterator_lock.lock:
                if iterator_lock.is_taken:
                    raise iterator_lock.nested_call_error()
                iterator_lock.is_taken = True
                try:
                    if watch is not None:
                        watch.asked()
                    batch = self._stream.take(self.place, watch)
                    if batch is EPOCH_END and not self.place.is_over:  # only one of several threads records the end
                        self.place.is_over = True
                        self._stream.log.ended(self.place.epoch, self._stream.epochs.step_number(self.place.step))
                finally:
                    iterator_lock.is_taken = False
        except StopIteration as error:
            number = self._stream.epochs.step_number(step)
            source = f"the dataset, collate_fn or sampler (epoch {self.place.epoch}, batch {number})"
            raise stop_iteration_error(error, source) from error
        if batch is EPOCH_END:
            if watch is not None:
                watch.end(is_complete=True)
            raise StopIteration
        return batch

    def __len__(self) -> int:
        return len(self._stream)

    def __del__(self) -> None:
        place: BatchPlace | None = getattr(self, "place", None)  # missing if the pass could not begin
        if place is not None and sys is not None and not sys.is_finalizing():
            self._stream.leave(place)


class SeedStream:
    """The batches of one loader in seed mode. Any batch can be requested; batches are ordered ahead in the usual sequence.

    The loader and each of its passes refer to it, and its workers end when the last of them is deleted.

    Args:
        config: the loader's arguments at construction.
        builder: makes the engines.
        log: records the deliveries.
        watches: time the passes.

    Attributes:
        config: the loader's arguments for the newest pass, set by the loader.
        valid: number of rows of the batch just yielded that are not padding.
    """

    def __init__(self, config: LoaderConfig, builder: EngineBuilder, log: DeliveryLog, watches: EpochWatches) -> None:
        self.config = config
        self._builder, self.log, self._watches = builder, log, watches
        self._is_closed = False
        self._engine: BatchSource | None = None
        self._inline: InlineReader | None = None
        self._pid = os.getpid()
        self._next_epoch = 0
        self._first_step = 0  # of the next pass; not 0 after a state was loaded
        self._place: BatchPlace | None = None  # of the newest iterator
        self._places: list[weakref.ref[BatchPlace]] = []  # of all iterators that exist
        self._num_ahead = 0  # maximum number of batches ordered and not delivered
        self._cursor = (0, 0)  # (epoch, step) to be ordered next
        self.valid: int | None = None
        self._pins = False
        self._tuner: Autotuner | None = None  # of the engine's worker pool
        self.iterator_lock = IteratorLock()  # shared by all passes, because they use one engine
        self.epochs = Epochs(config)
        self._settings = _settings_of(config)  # of the workers; a program may set others between passes
        self._attributes: list[Any] = []  # of what the readers use, when they were made

    def __len__(self) -> int:
        """Return the number of batches of the current or next epoch."""
        if self.epochs.is_endless:
            raise TypeError('a Mix with stop="repeat" never ends: this loader has no len()')
        return -(-self.epochs.end_of(self._position()[0]) // self.epochs.stride)

    @property
    def first_step(self) -> int:
        """Return the number of steps of its epoch that the next pass leaves out because a state was loaded."""
        return self.epochs.step_number(self._first_step)

    # ------------------------------------------------------------ delivery

    def iterator(self) -> SeedIterator:
        """Begin the next pass."""
        return SeedIterator(self)

    @faults.at("epoch_change")
    def begin(self) -> tuple[BatchPlace, EpochWatch | None]:
        """Begin a pass over the next epoch, from its start or from the loaded position."""
        with self.iterator_lock.lock:
            place = self._begun()
        watches = self._watches
        return place, watches.begin(self.config, self._builder, self.log, place.epoch) if watches.callbacks else None

    def _begun(self) -> BatchPlace:
        """Begin the next pass, and return its place."""
        config = self.config
        self._refresh()
        self.epochs.begins(self._next_epoch)
        self._pins = _pins(config)
        self._num_ahead = (config.prefetch_factor or 1) * config.total_workers
        if config.device is not None:
            self._num_ahead += NUM_SENT
        self._place = BatchPlace(self._next_epoch, self._first_step)
        self._builder.bad_samples.step_stride = self.epochs.stride
        if (sampled := self.epochs.sampled) is not None:
            self._places = [ref for ref in [*self._places, weakref.ref(self._place)] if ref() is not None]
            sampled.keep({place.epoch for ref in self._places if (place := ref()) is not None})
        if self.log.is_on:
            step = self.epochs.step_number(self._first_step)
            self.log.begins(config, self._next_epoch, step, schedule=self.epochs.formula, rank=self.epochs.rank)
        self._next_epoch, self._first_step = self._next_epoch + 1, 0
        if self._engine is not None:
            self._publish_length(self._engine)
        return self._place

    def leave(self, place: BatchPlace) -> None:
        """Record that a pass stops at a place. Ranks that share the ring must know if that is before the pass's end."""
        engine = self._engine
        if engine is None or engine.shared_by == 1 or place is not self._place or self._pid != os.getpid():
            return
        if place.step < self.epochs.end_of(place.epoch):
            engine.leave_pass()

    def take(self, place: BatchPlace, watch: EpochWatch | None) -> Any:
        """Return the batch at a place and advance the place, also past a failed batch; EPOCH_END after the epoch's last batch.

        The place is advanced last. An interrupt before that loses nothing because the same batch is taken again.
        """
        epoch, step = place.epoch, place.step
        if self._is_closed:
            raise RuntimeError("this loader is closed: make a new one")
        if self.epochs.sampled is not None:
            self.epochs.sampled.reached(epoch, step)
        engine = self._current_engine() if self.config.num_workers else None
        order = self._order_at(epoch, step, engine)
        if order is None:
            return EPOCH_END
        next_step = step + 1 if self.epochs.is_uniform else self.epochs.next_step(step)
        batch, error = self._read(order, engine)
        if error is not None:  # the batch is lost
            place.step = next_step
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        if engine is not None:
            if self._tuner is not None:
                self._num_ahead = self._tuner.count_batch(engine)
            self._fill(engine)
        self.valid = self.epochs.num_valid(order)
        sent = batch if batch is NOTHING else self._delivered(order, batch, engine, watch)
        if self.log.is_on:  # after everything that may fail, because the same batch is then taken and recorded again
            self.log.delivered(order, batch, valid=self.valid, step=self.epochs.step_number(step))
        if self.config.after_batch is not None and batch is not NOTHING:
            try:
                sent = after_batch(self.config.after_batch, sent, f"epoch {epoch}, batch {self.epochs.step_number(step)}")
            except Exception:
                place.step = next_step
                raise
        place.step = next_step
        return sent

    def _current_engine(self) -> BatchSource:
        engine = self._engine
        if engine is None or self._pid != os.getpid():  # a forked child starts its own workers
            engine = self._made_engine()
        return engine

    def _order_at(self, epoch: int, step: int, engine: BatchSource | None) -> Order | None:
        """Return the order of a batch; None after the epoch's last batch."""
        if engine is None:
            if self._inline is None:  # made here, so that an error while making it loses no batch
                self._attributes = _attributes_of(self.config)
                self._inline = InlineReader(self.config.job(), self._builder.bad_samples)
                self._inline.batch_of = self.epochs.step_number
            return self.epochs.order(epoch, step)
        front = engine.front
        if front is None or (front.epoch, front.step) != (epoch, step):
            front = self._order_from(engine, epoch, step)
        return front

    def _read(self, order: Order, engine: BatchSource | None) -> tuple[Any, BaseException | None]:
        """Read the ordered batch, or receive it from the workers. Return it and None; or None and its error if it is lost."""
        if engine is not None:
            _, batch, _, error = engine.next()
            return batch, error
        assert self._inline is not None
        try:
            return self._inline.read(order), None
        except Exception as lost:
            return None, lost

    def _delivered(self, order: Order, batch: Any, engine: BatchSource | None, watch: EpochWatch | None) -> Any:
        """Return a batch as the program receives it: in pinned memory or on its device, if it is not yet."""
        self.log.last = order
        if watch is not None:
            watch.delivered(batch)
        if self._pins and (engine is None or engine.needs_pin_memory):
            batch = pin_memory(batch)  # torch's function; pinned tensors stay as they are
        return sent_now(batch, self._builder.device(self.config.device)) if engine is None else batch

    def _order_from(self, engine: BatchSource, epoch: int, step: int) -> Order | None:
        """Drop the orders and order from this batch on. Return its order, or None after the epoch's last batch."""
        if self.epochs.sampled is None and step >= self.epochs.end_of(epoch):
            return None  # the orders ahead belong to the next pass
        if engine.front is not None:
            engine.abandon()
        self._cursor = (epoch, step)
        self._fill(engine)
        front = engine.front
        return front if front is not None and (front.epoch, front.step) == (epoch, step) else None

    def _fill(self, engine: BatchSource) -> None:
        """Order batches ahead, also of the next epoch if all of this one are ordered."""
        num_missing = self._num_ahead - engine.num_queued
        while num_missing > 0:
            epoch, step = self._cursor
            order = self.epochs.order(epoch, step)
            if order is not None:
                self._cursor = (epoch, step + 1 if self.epochs.is_uniform else self.epochs.next_step(step))
                engine.submit(order)
                num_missing -= 1
            elif self.epochs.sampled is not None or self.epochs.num_steps == 0 or step == 0:
                return  # the user's sampler may depend on what happens before the next epoch
            elif self.epochs.grows and self._place is not None and epoch > self._place.epoch:
                return  # the samples of the epochs after that one must not be fixed yet
            else:
                self._cursor = (epoch + 1, 0)

    def _made_engine(self) -> BatchSource:
        self._pid = os.getpid()
        self._attributes = _attributes_of(self.config)
        engine = self._builder.make(self.config, base_seed=_base_seed(self.config.seed or 0))
        self._engine, engine.iterator_lock = engine, self.iterator_lock
        self._tuner = self._builder.tuner
        self._publish_length(engine)
        return engine

    def _publish_length(self, engine: BatchSource) -> None:
        try:
            num_steps = 0 if self.epochs.end_of(self._position()[0]) >= MAX_N else len(self)
        except Exception:  # an infinite mixture, or a sampler without a length
            num_steps = 0  # only readers of statistics use it
        engine.begin_pass(num_steps, step_stride=self.epochs.stride)

    # ------------------------------------------------------------ position

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass read this epoch, from its start or from the position just loaded if that is in this epoch."""
        epoch = whole_number("epoch", epoch, at_least=0, remedy="epochs are counted from 0")
        if self._place is None and epoch == self._next_epoch:
            return
        self._next_epoch, self._first_step, self._place = epoch, 0, None
        self.log.resumed(epoch, 0, by="set_epoch")

    def state_dict(self, now: Callable[[], LoaderConfig] | None = None) -> dict[str, Any]:
        """Return the state before the next batch.

        Args:
            now: unused; torch mode needs it.
        """
        return self.epochs.state_dict(*self._position(), is_begun=self._place is not None)

    def load_state_dict(self, state: dict[str, Any], *, is_trusted: bool | None = None) -> None:
        """Let the next pass begin where the state was taken.

        Args:
            state: a result of `state_dict`.
            is_trusted: whether pickles in it may be opened; by default as the loader's `trust_state`.
        """
        self._refresh()
        trust = self.config.trust_state if is_trusted is None else is_trusted
        epoch, step = self.epochs.load_state_dict(state, is_trusted=trust)
        self._next_epoch, self._first_step, self._place = epoch, step, None
        if self.epochs.grows:
            self._end_workers()  # their dataset may belong to another run
        elif self.epochs.sampled is not None and self._engine is not None and self._pid == os.getpid():
            self._engine.abandon()  # what is ordered is another draw, even if its position is the same
        self.log.resumed(epoch, self.epochs.step_number(step))

    def state_of_copy(self) -> dict[str, Any]:
        """Return the state from which a copy of the loader continues."""
        return self.state_dict()

    def go_on_as_copy(self, state: dict[str, Any]) -> None:
        """Continue at the position of the loader that this one was copied from."""
        self.load_state_dict(state, is_trusted=True)  # trusted: it comes from a copy, or from a pickle that was already opened

    def _position(self) -> tuple[int, int]:
        """Return (epoch, step) of the next batch of any rank. A last step without a row for this rank still counts as pending."""
        place = self._place
        if place is None:
            return self._next_epoch, self._first_step
        if place.is_over or place.step >= self.epochs.end_of_all(place.epoch):
            return place.epoch + 1, 0
        return place.epoch, place.step

    def _refresh(self) -> None:
        before, settings = self._settings, _settings_of(self.config)
        is_other = any(one is not other for one, other in zip(settings, before, strict=True))
        is_outdated = self._has_other_attributes()
        if self.epochs.refresh(self.config) or is_other or is_outdated:
            self._end_workers()
        if is_other or is_outdated:
            self._settings, self._inline = settings, None

    def _has_other_attributes(self) -> bool:
        """Return whether the readers' dataset or functions are outdated because the program has set an attribute.

        The trainer's own reader uses the program's objects, but has looked up what they contain: decoders, the members of a
        Subset, random generators. `persistent_workers` keeps workers, as in torch. So do ranks that share workers, because they
        would have to end them at once.
        """
        engine = self._engine
        if engine is None:
            return self._inline is not None and _attributes_of(self.config) != self._attributes
        if engine.shared_by > 1 or self.config.persistent_workers:
            return False
        return _attributes_of(self.config) != self._attributes

    def _end_workers(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and self._pid == os.getpid():
            engine.close()

    def substitute(self, order: Order, row: int, tries: int) -> Any:
        """Return the index that replaces a bad sample at the given try."""
        if self.config.has_users_sampler:
            return next_of_dataset(self.config, order, row)
        return self.epochs.substitute(order, row, tries)

    def close(self) -> None:
        """End the workers permanently."""
        self._is_closed = True
        self._end_workers()
        self.epochs.ended()

    def __del__(self) -> None:
        # at exit, modules are cleared before the last objects
        if hasattr(self, "epochs") and sys is not None and not sys.is_finalizing():
            self.close()


def _pins(config: LoaderConfig) -> bool:
    """Return whether batches are copied to pinned memory. Warn as torch does if they cannot be."""
    if config.pin_memory and not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.",
            stacklevel=users_frame()[1],
        )
        return False
    return bool(config.pin_memory)


def _settings_of(config: LoaderConfig) -> tuple[Any, ...]:
    """Return the arguments that workers keep over passes and that a program may set. "auto" numbers change while workers run."""
    numbers = [None if is_auto(number) else number for number in (config.num_workers, config.prefetch_factor)]
    others = (config.collate_fn, config.worker_init_fn, config.multiprocessing_context, config.timeout)
    return (*numbers, *others, config.pin_memory, config.device)


def _attributes_of(config: LoaderConfig) -> list[Any]:
    return attribute_values(config.dataset, config.collate_fn, config.worker_init_fn)


def _base_seed(seed: int) -> int:
    """Return the base of the workers' seeds, which in seed mode matter only to code outside samples."""
    return int(np.random.SeedSequence([seed & 0xFFFFFFFF, seed >> 32]).generate_state(1, np.uint64)[0]) >> 1
