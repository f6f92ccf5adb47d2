"""Seed mode: batch k of epoch e is a pure function of (seed, e, k).

`SeedStream` turns wanted batches into orders. It always orders ahead, across the end of an epoch too, so that workers never stand
still there; if what is wanted next is not what was ordered (a break, a resume, set_epoch, a second iterator), the orders are
abandoned and the schedule is asked again, which costs nothing: it has no state.

Seed mode's epochs: which samples a batch has, where an epoch ends, what a state says of it.

Three kinds of order stand behind one class: the schedule's formula; a schedule whose epochs may differ in length (an order that
makes the batches, a dataset that grows); and a sampler of the user's own, whose draws are kept.

Seed mode with a sampler of the user's: the sampler orders, the seed keys the randomness within samples.

Such an order has no formula, so a state says how the sampler came to it (torch_order.py) and is as large as that.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmload import faults
from shmload._core.trainer import Order
from shmload.device.sending import NUM_SENT, sent_now
from shmload.engine.autotune import Autotuner
from shmload.engine.batch_source import BatchSource
from shmload.engine.builder import EngineBuilder
from shmload.engine.config import LoaderConfig
from shmload.engine.delivery_log import DeliveryLog
from shmload.engine.outcome import NOTHING
from shmload.engine.turns import Turns
from shmload.errors import StateMismatch
from shmload.modes.passes import EpochWatch, EpochWatches, InlineReader, after_batch, next_of_dataset
from shmload.modes.torch_order import SamplerReader, not_once, state_before
from shmload.schedule import state as states
from shmload.schedule import state_checksum
from shmload.schedule.checks import whole_number
from shmload.schedule.keyed_batches import BatchSchedule, KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.permutation import MAX_N
from shmload.schedule.schedule import Schedule
from shmload.schedule.state import STATE_VERSION, make_state, resume
from shmload.schedule.state_codec import UsersOwn, opened, sealed
from shmload.torch_names import pin_memory
from shmload.worker.failure import no_end
from shmload.worker.sample_rng import kept_generators
from shmload.worker.torch_side import origin_of
from shmload.world import package_ability, rank_and_world_size, source_of_rank, users_frame

log = logging.getLogger("shmload")

MODE = "seed, with a sampler"


@dataclass
class _SamplerPass:
    """One pass over the sampler: its batches from step `first` on, of which some have been `given`, for orders ahead."""

    batches: SamplerReader
    first: int
    given: deque[Any]

    def keys(self, step: int) -> Any:
        """What the sampler says for that batch; None beyond the last."""
        if step - self.first < len(self.given):  # its order was abandoned
            return self.given[step - self.first]
        keys = not_once(next(self.batches, None))
        if keys is not None:
            self.given.append(keys)
        return keys

    def reached(self, step: int) -> None:
        """No batch before that step is asked for any more."""
        while self.given and self.first < step:
            self.given.popleft()
            self.first += 1
        self.batches.forget(step)


class SampledOrder:
    """The batches of a sampler or batch sampler, epoch by epoch. It is begun anew for each epoch and can only go forward."""

    def __init__(self, index_sampler: Any, seed: int) -> None:
        self._sampler = index_sampler
        self._identity = {"version": STATE_VERSION, "mode": MODE, "seed": seed}
        self._passes: dict[int, _SamplerPass] = {}  # by epoch
        self._loaded_at: tuple[int, int] | None = None  # the next pass goes on from there
        self._loaded: dict[str, Any] = {}  # where the sampler stood then

    def keys(self, epoch: int, step: int) -> Any:
        """What the sampler says for that batch; None beyond the epoch's last."""
        under_way = self._passes.get(epoch)
        if under_way is None or not under_way.first <= step <= under_way.first + len(under_way.given):
            under_way = self._passes[epoch] = _SamplerPass(self._from(epoch, step), step, deque())
        return under_way.keys(step)

    def reached(self, epoch: int, step: int) -> None:
        """No batch of the epoch before that step is asked for any more."""
        if epoch in self._passes:
            self._passes[epoch].reached(step)

    def keep(self, epochs: set[int]) -> None:
        """No batch of other epochs is asked for any more."""
        self._passes = {epoch: under_way for epoch, under_way in self._passes.items() if epoch in epochs}

    def _from(self, epoch: int, step: int) -> SamplerReader:
        origin, is_loaded = origin_of(None), self._loaded_at == (epoch, step)
        with kept_generators() if is_loaded else nullcontext():  # a sampler may draw when it is begun
            batches = SamplerReader(self._sampler, None, every=1, iterator=iter(self._sampler), origin=origin, seed_between=False)
        if is_loaded:
            if "own" in self._loaded and not self._loaded["taken"]:
                batches.start_after(self._loaded)  # it may be at the end of its last pass
            else:
                batches.resume(self._loaded)
            step -= batches.num_taken
        next(islice(batches, step, step), None)
        return batches

    def state_dict(self, epoch: int, step: int, *, is_begun: bool) -> dict[str, Any]:
        """The state before that batch, which is the next to be delivered.

        Args:
            is_begun: the pass that it is of has begun, if it is not the first.
        """
        if is_begun and epoch in self._passes:
            sampler = self._passes[epoch].batches.state(step)
        elif self._loaded_at == (epoch, step):
            sampler = self._loaded
        else:
            sampler = state_before(self._sampler, origin_of(None))
        if "own" in sampler:
            sampler = {**sampler, "own": UsersOwn(sampler["own"])}
        return state_checksum.with_checksum({**self._identity, "epoch": epoch, "step": step, "sampler": sealed(sampler)})

    def load_state_dict(self, state: Any, *, is_trusted: bool) -> tuple[int, int]:
        """Goes to where a state was taken: (epoch, step).

        Args:
            is_trusted: pickles in it may be opened.
        Raises:
            StateMismatch: it was taken of another kind of loader, or of another seed, or is damaged, or holds a pickle.
        """
        saved = state if isinstance(state, Mapping) else {}
        if differing := states.differences(saved, self._identity):
            what = "; ".join(differing)
            raise StateMismatch(f"the state belongs to another loader: {what}. Remedy: build the loader as it was at saving")
        state_checksum.check_checksum(saved)
        try:
            sampler = opened(saved["sampler"], is_trusted=is_trusted)
            is_place = all(type(saved[name]) is int and saved[name] >= 0 for name in ("epoch", "step"))
            if not is_place or type(sampler["taken"]) is not int or not ("own" in sampler or "origin" in sampler):
                raise ValueError(f"it has {sorted(sampler)} at {saved['epoch']!r}, {saved['step']!r}")
        except StateMismatch:
            raise
        except Exception as error:  # a pickle that is trusted may raise anything
            raise StateMismatch(f"the state cannot be read: {error!r}. Load what state_dict() returned") from error
        self._loaded_at, self._loaded, self._passes = (saved["epoch"], saved["step"]), sampler, {}
        return self._loaded_at


MAX_BLOCK, MAX_BLOCK_STEPS = 4096, 64  # indices, and batches, that are worked out together, in less than 0.1 ms
_NO_BLOCK = (-1, 0, np.empty((0, 0), np.int64))


class Epochs:
    """The epochs of one loader, for its dataset's length and its ranks as they are now.

    A step is what the schedule counts: steps, or batches of all ranks where an order makes the batches.

    Args:
        config: the loader's, as it is made; a pass brings its own.

    Attributes:
        rank: of this process, as the schedule counts.
        behind: the step that follows one.
        stride: from one step to the next.
        is_uniform: every epoch has the same steps, numbered one by one.
        grows: the samples of an epoch are not to be settled before the one before it has been read.
        sampled: the draws of a sampler of the user's; None: there is a schedule.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self._config = config
        self.rank, self._world_size = 0, 1
        self._schedule: Schedule | BatchSchedule | None = None
        self.num_steps: int | None = 0  # of every epoch; None where they may differ
        self._block = _NO_BLOCK  # epoch, first step and indices of batches that are asked for next
        self.stride, self.is_uniform, self.grows = 1, True, False
        self.behind: Callable[[int], int] = lambda step: step + 1
        self.sampled = SampledOrder(config.index_sampler, config.seed or 0) if config.has_own_order else None
        self.refresh(config)

    # ------------------------------------------------------------ the schedule

    def refresh(self, config: LoaderConfig) -> bool:
        """Makes the schedule for the dataset's length and the ranks as they are now: both may have come up since the last pass.

        Returns:
            whether it is another one: what workers were sent is of another order then, and their dataset perhaps an older one.
        """
        self._config = config
        if self.sampled is not None:
            return False
        ranks = rank_and_world_size(config.rank, config.world_size)
        made, is_same = self._schedule, ranks == (self.rank, self._world_size)
        if config.rank is None and ranks[1] > 1 and not is_same:
            log.info(
                "this ShmLoader reads the part of rank %d of %d, according to %s; give rank=0, world_size=1 to read all samples",
                *ranks,
                source_of_rank(),
            )
        common: dict[str, Any] = {"seed": config.seed or 0, "world_size": ranks[1], "uneven": config.uneven}
        of_samples: dict[str, Any] = {"batch_size": config.batch_size or 1, "shuffle": bool(config.shuffle)}
        growing = package_ability(config.dataset, "epoch_schedule")
        schedule: Schedule | BatchSchedule
        num_steps = None
        if isinstance(config.batch_sampler, KeyedBatches) or growing:  # its epochs may differ in length
            if made is not None and is_same:
                return False
            self.ended()
            if isinstance(config.batch_sampler, KeyedBatches):
                schedule = config.batch_sampler.schedule(**common)
            else:
                schedule = growing(**{**common, **of_samples, "uneven": "drop" if config.drop_last else config.uneven})
        else:
            order = self._keyed_order((config.batch_size or 1) * ranks[1])
            n = len(config.dataset) if order is None else order.n
            if made is not None and is_same and (made.n, made.order) == (n, order):
                return False
            of_samples["shuffle"] = bool(config.shuffle) and order is None
            schedule = Schedule(n, **common, **of_samples, drop_last=config.drop_last, order=order)
            num_steps = schedule.num_steps_of(ranks[0])
        self.rank, self._world_size = ranks
        self._schedule, self.num_steps, self._block, self.grows = schedule, num_steps, _NO_BLOCK, schedule.grows
        self.stride, self.behind, self.is_uniform = schedule.stride, schedule.behind, num_steps is not None
        return True

    def _keyed_order(self, global_batch: int) -> KeyedOrder | None:
        """What the samples are taken in if not in the plain order: the sampler, or what the dataset says for itself."""
        config = self._config
        if isinstance(config.sampler, KeyedOrder):
            return config.sampler
        of_dataset: Callable[..., KeyedOrder] | None = package_ability(config.dataset, "keyed_order")
        return of_dataset and of_dataset(shuffle=bool(config.shuffle), global_batch=global_batch)

    def begins(self, epoch: int) -> None:
        """A pass over an epoch begins."""
        if self._schedule is not None:
            self._schedule.begins(epoch)

    def ended(self) -> None:
        """Nothing that was ordered ahead is wanted any more."""
        if self._schedule is not None:
            self._schedule.ended()

    @property
    def formula(self) -> Schedule | BatchSchedule | None:
        """The schedule, where others can compute it from what its header says."""
        schedule = self._schedule
        return None if isinstance(schedule, BatchSchedule) and schedule.stream is None else schedule

    # ------------------------------------------------------------ where an epoch ends

    @property
    def is_endless(self) -> bool:
        """Whether an epoch has no end."""
        order = getattr(self._schedule, "order", None)
        return isinstance(order, KeyedOrder) and order.is_endless

    def end_of(self, epoch: int) -> int:
        """The first step that the epoch does not have."""
        if self.sampled is not None:
            return len(self._config.index_sampler)
        if self.num_steps is not None:
            return self.num_steps
        assert self._schedule is not None
        return self._schedule.end_of(epoch, self.rank)

    def end_of_all(self, epoch: int) -> int:
        """The first step that no rank has: where ranks differ, one that has none left passes through the epoch all the same."""
        if self._schedule is not None:
            return self._schedule.end_of(epoch, rank=0)
        try:
            return self.end_of(epoch)
        except (TypeError, NotImplementedError):  # a sampler of the user's that does not say
            return MAX_N

    def step_number(self, step: int) -> int:
        """How a record of the epoch's steps counts them."""
        return step if self.is_uniform or self._schedule is None else self._schedule.number(step)

    # ------------------------------------------------------------ batches

    def order(self, epoch: int, step: int) -> Order | None:
        """The order for a batch; None beyond the epoch's last."""
        if self.sampled is None:
            if step >= (self.end_of(epoch) if self.num_steps is None else self.num_steps):
                return None
            return Order(epoch, step, self._indices(epoch, step))
        keys = self.sampled.keys(epoch, step)
        if keys is None:
            return None
        return Order(epoch, step, keys if self._config.auto_collation else [keys])

    def _indices(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Of one batch, out of a block of several: the orders of a pass are asked for one after the other."""
        of_epoch, first, block = self._block
        number, between = divmod(step - first, self.stride)
        if of_epoch == epoch and not between and 0 <= number < len(block):
            row: NDArray[np.int64] = block[number]
            return row
        schedule = self._schedule
        assert schedule is not None
        num_rows = schedule.batch_size if isinstance(schedule, Schedule) else schedule.rows_per_rank
        if num_rows is not None:
            block = schedule.batches(epoch, step, self.rank, min(MAX_BLOCK // num_rows, MAX_BLOCK_STEPS))
            if len(block):
                self._block = epoch, step, block
                return self._indices(epoch, step)
        return schedule.batch(epoch, step, self.rank)

    def num_valid(self, order: Order) -> int:
        """Rows that are no padding: of a short batch these come first, also behind skipped ones."""
        if self.num_steps is not None and order.step + 1 < self.num_steps:  # most batches
            return order.nrows
        schedule = self._schedule
        if schedule is None or self.behind(order.step) < self.end_of(order.epoch):
            return order.nrows
        if isinstance(schedule, BatchSchedule):
            num_valid = schedule.num_valid(order.epoch, order.step, self.rank)
        else:
            num_valid = schedule.num_valid(order.step, self.rank)
        return num_valid if order.origins is None else sum(row < num_valid for row, _ in order.origins)

    def substitute(self, order: Order, row: int, tries: int) -> int:
        """The index so many places behind a row's own in the epoch's order."""
        assert self._schedule is not None
        return self._schedule.index_after(order.epoch, order.step, self.rank, row, tries)

    # ------------------------------------------------------------ states

    def state_dict(self, epoch: int, step: int, *, is_begun: bool) -> dict[str, Any]:
        """The state of a batch that comes next; whether a pass has begun is for samplers of the user's."""
        if self.sampled is not None:
            return self.sampled.state_dict(epoch, step, is_begun=is_begun)
        assert self._schedule is not None
        return dict(make_state(self._schedule, epoch=epoch, step=step, children=self._schedule.children(epoch)))

    def load_state_dict(self, state: dict[str, Any], *, is_trusted: bool) -> tuple[int, int]:
        """(epoch, step) where a state was taken, or of the epoch behind it if that was its end."""
        if self.sampled is not None:
            epoch, step = self.sampled.load_state_dict(state, is_trusted=is_trusted)
        else:
            assert self._schedule is not None
            epoch, step = resume(state, self._schedule)
            self._schedule.go_on_from(state.get("children", {}), epoch)
        if step and step >= self.end_of_all(epoch) > 0:
            return epoch + 1, 0
        return epoch, step


END = object()  # what a stream gives beyond an epoch's last batch: a StopIteration that comes out of it is the user's


@dataclass
class BatchPlace:
    """The batch that comes next."""

    epoch: int
    step: int  # as the schedule counts: steps, or batches of all ranks where the order makes the batches
    # this rank's pass has ended, perhaps before the others': the last step may have no row for it
    is_over: bool = False


class SeedIterator:
    """One pass: from where the stream stands to the end of its epoch."""

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
        """The next batch; NOTHING if every sample of it is skipped."""
        watch, turns, step = self._watch, self._stream.turns, self.place.step
        try:
            with turns.lock:
                if turns.is_taken:
                    raise turns.refusal()
                turns.is_taken = True
                try:
                    if watch is not None:
                        watch.asked()
                    batch = self._stream.take(self.place, watch)
                    if batch is END and not self.place.is_over:  # only one of several threads records the end
                        self.place.is_over = True
                        self._stream.log.ended(self.place.epoch, self._stream.epochs.step_number(self.place.step))
                finally:
                    turns.is_taken = False
        except StopIteration as error:
            number = self._stream.epochs.step_number(step)
            who = f"the dataset, collate_fn or sampler (epoch {self.place.epoch}, batch {number})"
            raise no_end(error, who) from error
        if batch is END:
            if watch is not None:
                watch.end(is_complete=True)
            raise StopIteration
        return batch

    def __len__(self) -> int:
        return len(self._stream)

    def __del__(self) -> None:
        place: BatchPlace | None = getattr(self, "place", None)  # none where the pass could not begin
        if place is not None and sys is not None and not sys.is_finalizing():
            self._stream.leave(place)


class SeedStream:
    """The batches of one loader in seed mode, in any order they are asked for, ordered ahead in the order they usually are.

    The loader and each of its passes hold it; its workers end when the last of them is gone.

    Attributes:
        config: the loader's for the newest pass, which the loader sets.
        valid: rows of the batch just yielded that are no padding.
    """

    def __init__(self, config: LoaderConfig, builder: EngineBuilder, log: DeliveryLog, watches: EpochWatches) -> None:
        self.config = config
        self._builder, self.log, self._watches = builder, log, watches
        self._is_closed = False
        self._engine: BatchSource | None = None
        self._inline: InlineReader | None = None
        self._pid = os.getpid()
        self._next_epoch = 0
        self._first_step = 0  # of the next iteration: where a loaded state left off
        self._place: BatchPlace | None = None  # of the newest iterator
        self._places: list[weakref.ref[BatchPlace]] = []  # of all that somebody has
        self._num_ahead = 0  # batches that are ordered and not delivered, at most
        self._cursor = (0, 0)  # (epoch, step) to be ordered next
        self.valid: int | None = None
        self._pins = False
        self._tuner: Autotuner | None = None  # of the engine's worker pool
        self.turns = Turns()  # of all passes: they are of one engine
        self.epochs = Epochs(config)
        self._functions = config.collate_fn, config.worker_init_fn  # of those who read; a program may set others between passes

    def __len__(self) -> int:
        """Batches of the epoch that is being read, or comes next."""
        if self.epochs.is_endless:
            raise TypeError('a Mix with stop="repeat" never ends: this loader has no len()')
        return -(-self.epochs.end_of(self._position()[0]) // self.epochs.stride)

    @property
    def first_step(self) -> int:
        """How many steps of the next pass's epoch lie behind where it begins."""
        return self.epochs.step_number(self._first_step)

    # ------------------------------------------------------------ delivery

    def iterator(self) -> SeedIterator:
        """The next pass."""
        return SeedIterator(self)

    @faults.at("epoch_change")
    def begin(self) -> tuple[BatchPlace, EpochWatch | None]:
        """Starts a pass: the next epoch, from its start or from where a loaded state left off."""
        with self.turns.lock:
            place = self._begun()
        watches = self._watches
        return place, watches.begin(self.config, self._builder, self.log, place.epoch) if watches.callbacks else None

    def _begun(self) -> BatchPlace:
        config = self.config
        self._refresh()
        self.epochs.begins(self._next_epoch)
        self._pins = _pins(config)
        self._num_ahead = (config.prefetch_factor or 1) * config.total_workers
        if config.device is not None:
            self._num_ahead += NUM_SENT
        self._place = BatchPlace(self._next_epoch, self._first_step)
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
        """Hears that the newest pass goes no further than a place; ranks that share the ring must know if that is not its end."""
        engine = self._engine
        if engine is None or engine.shared_by == 1 or place is not self._place or self._pid != os.getpid():
            return
        if place.step < self.epochs.end_of(place.epoch):
            engine.leave_pass()

    def take(self, place: BatchPlace, watch: EpochWatch | None) -> Any:
        """The batch at a place, which moves on, also beyond one that failed; END beyond the epoch's last.

        The place moves last: an interrupt before that loses nothing, as the same batch is taken again.
        """
        epoch, step = place.epoch, place.step
        if self._is_closed:
            raise RuntimeError("this loader is closed: make a new one")
        if self.epochs.sampled is not None:
            self.epochs.sampled.reached(epoch, step)
        engine: BatchSource | None = None
        if self.config.num_workers == 0:
            if self._inline is None:  # here: what making it raises loses no batch
                self._inline = InlineReader(self.config.job(), self._builder.bad_samples)
            reader = self._inline
            front = self.epochs.order(epoch, step)
        else:
            engine = self._engine
            if engine is None or self._pid != os.getpid():  # a forked child makes its own
                engine = self._made_engine()
            front = engine.front
            if front is None or (front.epoch, front.step) != (epoch, step):
                front = self._ordered_anew(engine, epoch, step)
        if front is None:
            return END
        if engine is None:
            try:
                batch = reader.read(front)
            except Exception:  # the batch is lost
                place.step = self.epochs.behind(place.step)
                raise
        else:
            _, batch, _, error = engine.next()
            if error is not None:
                place.step = self.epochs.behind(place.step)
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame
        self.valid = self.epochs.num_valid(front)
        if batch is not NOTHING:
            self.log.last = front
        if self.log.is_on:
            self.log.delivered(front, batch, valid=self.valid, step=self.epochs.step_number(step))
        if engine is not None:
            if self._tuner is not None:
                self._num_ahead = self._tuner.counted(engine)
            self._fill(engine)
        if batch is not NOTHING:
            if watch is not None:
                watch.delivered(batch)
            if self._pins and (engine is None or engine.wants_pinned):
                batch = pin_memory(batch)  # torch's own; leaves alone what is pinned
            if engine is None:
                batch = sent_now(batch, self._builder.device(self.config.device))
        behind = step + 1 if self.epochs.is_uniform else self.epochs.behind(step)
        if self.config.after_batch is not None and batch is not NOTHING:
            try:
                batch = after_batch(self.config.after_batch, batch, f"epoch {epoch}, batch {self.epochs.step_number(step)}")
            except Exception:
                place.step = behind
                raise
        place.step = behind
        return batch

    def _ordered_anew(self, engine: BatchSource, epoch: int, step: int) -> Order | None:
        """Orders from a batch on that was not the next to come; None beyond the epoch's last."""
        if self.epochs.sampled is None and step >= self.epochs.end_of(epoch):
            return None  # what is ordered ahead is the next pass's
        if engine.front is not None:
            engine.abandon()
        self._cursor = (epoch, step)
        self._fill(engine)
        front = engine.front
        return front if front is not None and (front.epoch, front.step) == (epoch, step) else None

    def _fill(self, engine: BatchSource) -> None:
        """Orders ahead, into the next epoch if this one is all ordered."""
        num_missing = self._num_ahead - engine.num_queued
        while num_missing > 0:
            epoch, step = self._cursor
            order = self.epochs.order(epoch, step)
            if order is not None:
                self._cursor = (epoch, step + 1 if self.epochs.is_uniform else self.epochs.behind(step))
                engine.submit(order)
                num_missing -= 1
            elif self.epochs.sampled is not None or self.epochs.num_steps == 0 or step == 0:
                return  # a sampler of the user's may depend on what happens before the next epoch
            elif self.epochs.grows and self._place is not None and epoch > self._place.epoch:
                return  # the samples of what comes behind that epoch are not to be settled yet
            else:
                self._cursor = (epoch + 1, 0)

    def _made_engine(self) -> BatchSource:
        self._pid = os.getpid()
        engine = self._builder.make(self.config, base_seed=_base_seed(self.config.seed or 0))
        self._engine, engine.turns = engine, self.turns
        self._tuner = self._builder.tuner
        self._publish_length(engine)
        return engine

    def _publish_length(self, engine: BatchSource) -> None:
        try:
            num_steps = 0 if self.epochs.end_of(self._position()[0]) >= MAX_N else len(self)
        except Exception:  # a mixture that never ends, or a sampler of the user's that cannot say
            num_steps = 0  # it is for stats readers alone
        engine.begin_pass(num_steps, step_stride=self.epochs.stride)

    # ------------------------------------------------------------ position

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that epoch, from its start; or from the place just loaded, if that lies in it."""
        epoch = whole_number("epoch", epoch, at_least=0, remedy="epochs are counted from 0")
        if self._place is None and epoch == self._next_epoch:
            return
        self._next_epoch, self._first_step, self._place = epoch, 0, None
        self.log.resumed(epoch, 0, by="set_epoch")

    def state_dict(self, now: Callable[[], LoaderConfig] | None = None) -> dict[str, Any]:
        """The state of the batch that comes next; the schedule says all of it."""
        return self.epochs.state_dict(*self._position(), is_begun=self._place is not None)

    def load_state_dict(self, state: dict[str, Any], *, is_trusted: bool | None = None) -> None:
        """Makes the next pass begin where the state was taken.

        Args:
            is_trusted: None: as the loader says.
        """
        self._refresh()
        trust = self.config.trust_state if is_trusted is None else is_trusted
        epoch, step = self.epochs.load_state_dict(state, is_trusted=trust)
        self._next_epoch, self._first_step, self._place = epoch, step, None
        if self.epochs.grows:
            self._end_workers()  # their dataset may be of another run
        elif self.epochs.sampled is not None and self._engine is not None and self._pid == os.getpid():
            self._engine.abandon()  # what is ordered is of another draw, also where it has the same place
        self.log.resumed(epoch, self.epochs.step_number(step))

    def state_of_copy(self) -> dict[str, Any]:
        """What a copy of the loader goes on from."""
        return self.state_dict()

    def go_on_as_copy(self, state: dict[str, Any]) -> None:
        """Stands where the loader stood of which this one's is a copy."""
        self.load_state_dict(state, is_trusted=True)  # of a copy, or of a pickle that was opened anyway

    def _position(self) -> tuple[int, int]:
        """(epoch, step) of the batch that comes next, of any rank: a last step that has no row for this one is still to come."""
        place = self._place
        if place is None:
            return self._next_epoch, self._first_step
        if place.is_over or place.step >= self.epochs.end_of_all(place.epoch):
            return place.epoch + 1, 0
        return place.epoch, place.step

    def _refresh(self) -> None:
        before, functions = self._functions, (self.config.collate_fn, self.config.worker_init_fn)
        is_other = any(one is not other for one, other in zip(functions, before, strict=True))
        if self.epochs.refresh(self.config) or is_other:
            self._end_workers()
        if is_other:
            self._functions, self._inline = functions, None

    def _end_workers(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and self._pid == os.getpid():
            engine.close()

    def substitute(self, order: Order, row: int, tries: int) -> Any:
        """The index that takes a bad sample's place at a try."""
        if self.config.has_own_order:
            return next_of_dataset(self.config, order, row)
        return self.epochs.substitute(order, row, tries)

    def close(self) -> None:
        """Ends the workers, for good."""
        self._is_closed = True
        self._end_workers()
        self.epochs.ended()

    def __del__(self) -> None:
        if hasattr(self, "epochs") and sys is not None and not sys.is_finalizing():  # as in torch_mode.py
            self.close()


def _pins(config: LoaderConfig) -> bool:
    """Whether batches are copied to pinned memory; a warning in torch's words where they cannot be."""
    if config.pin_memory and not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.",
            stacklevel=users_frame()[1],
        )
        return False
    return bool(config.pin_memory)


def _base_seed(seed: int) -> int:
    """What torch's worker seeds start from: workers' own streams in seed mode matter only to code outside samples."""
    return int(np.random.SeedSequence([seed & 0xFFFFFFFF, seed >> 32]).generate_state(1, np.uint64)[0]) >> 1
