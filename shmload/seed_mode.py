"""Seed mode: batch k of epoch e is a pure function of (seed, e, k).

`SeedStream` turns wanted batches into orders. It always orders ahead, across the end of an epoch too, so that workers never stand
still there; if what is wanted next is not what was ordered (a break, a resume, set_epoch, a second iterator), the orders are
abandoned and the schedule is asked again, which costs nothing: it has no state.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd import profiler
from torch.utils.data._utils.pin_memory import pin_memory

from shmload import faults
from shmload.autotune.tuner import Autotuner
from shmload.callers import users_frame
from shmload.device.choice import NUM_SENT, calls_of
from shmload.device.sending import sent_now
from shmload.engine import Engine
from shmload.inline import InlineReader
from shmload.observe.audit.header import header_of
from shmload.observe.epochs import EpochWatch, watched
from shmload.orders import NOTHING, Order
from shmload.schedule.batch_schedule import BatchSchedule
from shmload.schedule.keyed import KeyedOrder
from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.permutation import MAX_N
from shmload.schedule.schedule import Schedule
from shmload.schedule.state import make_state, resume
from shmload.seed_sampler import SampledOrder
from shmload.world import rank_and_world_size

if TYPE_CHECKING:
    from shmload.loader import ShmLoader


@dataclass
class Place:
    """The batch that comes next."""

    epoch: int
    step: int  # as the schedule counts: steps, or batches of all ranks where the order makes the batches


class SeedIterator:
    """One pass: from where the stream stands to the end of its epoch. Keeps its loader alive."""

    def __init__(self, loader: ShmLoader[Any], stream: SeedStream) -> None:
        self._loader = loader
        self._stream = stream
        self.place = stream.begin()
        self._watch = watched(loader, self.place.epoch)

    def __iter__(self) -> SeedIterator:
        return self

    def __next__(self) -> Any:
        while (batch := self.next_step()) is NOTHING:
            pass
        return batch

    def next_step(self) -> Any:
        """The next batch; NOTHING if every sample of it is skipped."""
        watch = self._watch
        if watch is not None:
            watch.asked()
        try:
            return self._stream.take(self.place, watch)
        except StopIteration:
            self._loader.recorder.ended(self.place.epoch, self._stream.step_number(self.place.step))
            if watch is not None:
                watch.end(is_complete=True)
            raise

    def __len__(self) -> int:
        return len(self._stream)

    def __del__(self) -> None:
        stream: SeedStream | None = getattr(self, "_stream", None)
        if stream is not None and sys is not None and not sys.is_finalizing():
            stream.leave(self.place)


class SeedStream:
    """The batches of one loader in seed mode, in any order they are asked for, ordered ahead in the order they usually are."""

    def __init__(self, loader: ShmLoader[Any]) -> None:
        self._loader_ref = weakref.ref(loader)  # a cycle would keep workers until the garbage collector comes by
        self._rank, self._world_size = 0, 1
        self._engine: Engine | None = None
        self._inline: InlineReader | None = None
        self._pid = os.getpid()
        self._next_epoch = 0
        self._first_step = 0  # of the next iteration: where a loaded state left off
        self._place: Place | None = None  # of the newest iterator
        self._num_ahead = 0  # batches that are ordered and not delivered, at most
        self._cursor = (0, 0)  # (epoch, step) to be ordered next
        self.valid: int | None = None
        self._schedule: Schedule | BatchSchedule | None = None
        self._num_steps: int | None = 0  # of every epoch; None where they may differ
        self._stride = 1  # from one step to the next
        self._behind: Callable[[int], int] = _next_step  # the step that follows one
        self._pins = False
        self._tuner: Autotuner | None = None  # of the engine's crew
        self._sampled = SampledOrder(loader._index_sampler, loader.seed or 0) if loader._has_own_order else None
        if self._sampled is None:
            self.schedule()

    @property
    def _loader(self) -> ShmLoader[Any]:
        loader = self._loader_ref()
        assert loader is not None, "an iterator keeps its loader alive"
        return loader

    # ------------------------------------------------------------ which samples

    def schedule(self) -> Schedule | BatchSchedule:
        """The schedule for the dataset's length and the ranks as they are now: both may have come up since the last pass."""
        loader = self._loader
        if (make := self._of_batches()) is not None:
            return self._schedule_of(make)
        ranks = rank_and_world_size(loader.rank, loader.world_size)
        order = self._keyed_order((loader.batch_size or 1) * ranks[1])
        n = len(loader.dataset) if order is None else order.n  # type: ignore[arg-type]  # map-style: the constructor has checked
        made_for = None if self._schedule is None else (self._schedule.n, getattr(self._schedule, "order", None))
        if made_for != (n, order) or ranks != (self._rank, self._world_size):
            self.close()  # what workers were sent is of another order, and their dataset perhaps an older one
            self._rank, self._world_size = ranks
            self._schedule = Schedule(
                n,
                batch_size=loader.batch_size or 1,
                seed=loader.seed or 0,
                shuffle=bool(loader.shuffle) and order is None,
                drop_last=loader.drop_last,
                uneven=loader.uneven,
                world_size=self._world_size,
                order=order,
            )
            self._num_steps = self._schedule.num_steps_of(self._rank)
        assert self._schedule is not None
        return self._schedule

    def _of_batches(self) -> Callable[..., BatchSchedule] | None:
        """What makes the schedule where an order makes the batches, or the dataset has another length in each epoch."""
        loader = self._loader
        if isinstance(loader.batch_sampler, KeyedBatches):
            return partial(loader.batch_sampler.schedule, uneven=loader.uneven)
        growing = getattr(loader.dataset, "epoch_schedule", None)
        uneven = "drop" if loader.drop_last else loader.uneven
        return growing and partial(
            growing, batch_size=loader.batch_size or 1, shuffle=bool(loader.shuffle), uneven=uneven
        )

    def _schedule_of(self, make: Callable[..., BatchSchedule]) -> BatchSchedule:
        """The schedule for epochs whose lengths may differ."""
        loader = self._loader
        ranks = rank_and_world_size(loader.rank, loader.world_size)
        if not isinstance(self._schedule, BatchSchedule) or ranks != (self._rank, self._world_size):
            self.close()
            self._rank, self._world_size = ranks
            self._schedule = make(seed=loader.seed or 0, world_size=self._world_size)
            self._num_steps, self._stride, self._behind = None, self._schedule.stride, self._schedule.behind
        return self._schedule

    def _keyed_order(self, global_batch: int) -> KeyedOrder | None:
        """What the samples are taken in if not in the plain order: the sampler, or what the dataset says for itself."""
        loader = self._loader
        if isinstance(loader.sampler, KeyedOrder):
            return loader.sampler
        of_dataset = getattr(loader.dataset, "keyed_order", None)
        return of_dataset and of_dataset(shuffle=bool(loader.shuffle), global_batch=global_batch)

    @property
    def num_steps(self) -> int:
        """Batches of the epoch that is being read, or comes next."""
        return -(-self._end_of(self._position()[0]) // self._stride)

    def __len__(self) -> int:
        order = getattr(self._schedule, "order", None)
        if isinstance(order, KeyedOrder) and order.is_endless:
            raise TypeError('a Mix with stop="repeat" never ends: this loader has no len()')
        return self.num_steps

    @property
    def first_step(self) -> int:
        """How many steps of the next pass's epoch lie behind where it begins."""
        return self.step_number(self._first_step)

    def step_number(self, step: int) -> int:
        """How a record of the epoch's steps counts them."""
        return self._schedule.number(step) if isinstance(self._schedule, BatchSchedule) else step

    def _end_of(self, epoch: int) -> int:
        """The first step that the epoch does not have."""
        if self._sampled is not None:
            return len(self._loader._index_sampler)
        if self._num_steps is not None:
            return self._num_steps
        assert isinstance(self._schedule, BatchSchedule)
        return self._schedule.end_of(epoch, self._rank)

    def _end_of_all(self, epoch: int) -> int:
        """The first step that no rank has: where ranks differ, one that has none left passes through the epoch all the same."""
        if isinstance(self._schedule, BatchSchedule):
            return self._schedule.end_of(epoch, rank=0)
        return self._end_of(epoch) if self._schedule is None else self._schedule.num_steps

    def _order(self, epoch: int, step: int) -> Order | None:
        """The order for a batch; None beyond the epoch's last."""
        if self._sampled is None:
            assert self._schedule is not None
            if step >= self._end_of(epoch):
                return None
            return Order(epoch, step, self._schedule.batch(epoch, step, self._rank))
        keys = self._sampled.keys(epoch, step)
        if keys is None:
            return None
        return Order(epoch, step, keys if self._loader._auto_collation else [keys])

    # ------------------------------------------------------------ delivery

    def begin(self) -> Place:
        """Starts a pass: the next epoch, from its start or from where a loaded state left off."""
        faults.hit("epoch_change")
        if self._sampled is None and isinstance(schedule := self.schedule(), BatchSchedule):
            schedule.begins(self._next_epoch)
        self._pins = _pins(self._loader)
        self._num_ahead = (self._loader.prefetch_factor or 1) * self._loader.num_workers
        if self._loader.device is not None:
            self._num_ahead += NUM_SENT
        self._place = Place(self._next_epoch, self._first_step)
        formula = self._schedule
        if isinstance(formula, BatchSchedule) and formula.stream is None:
            formula = None
        header = partial(header_of, self._loader, formula, self._rank)
        self._loader.recorder.begins(header, self._next_epoch, self.step_number(self._first_step))
        self._next_epoch, self._first_step = self._next_epoch + 1, 0
        if self._engine is not None:
            self._tell_length(self._engine)
        return self._place

    def leave(self, place: Place) -> None:
        """Hears that the newest pass goes no further than a place; ranks that share the ring must know if that is not its end."""
        engine = self._engine
        if engine is None or engine.shared_by == 1 or place is not self._place or self._pid != os.getpid():
            return
        if place.step < self._end_of(place.epoch):
            engine.leave_pass()

    def take(self, place: Place, watch: EpochWatch | None) -> Any:
        """The batch at a place, which moves on, also beyond one that failed; StopIteration beyond the epoch's last.

        The place moves last: an interrupt before that loses nothing, as the same batch is taken again.
        """
        epoch, step = place.epoch, place.step
        loader = self._loader
        if loader._is_closed:
            raise RuntimeError("this loader is closed: make a new one")
        if loader.num_workers == 0:
            return self._read_inline(place, watch)
        engine = self._usable_engine()
        front = engine.front
        if front is None or (front.epoch, front.step) != (epoch, step):
            if self._sampled is None and step >= self._end_of(epoch):
                raise StopIteration  # what is ordered ahead is the next pass's
            if front is not None:
                engine.abandon()
            self._cursor = (epoch, step)
            self._fill(engine)
            front = engine.front
            if front is None or (front.epoch, front.step) != (epoch, step):
                raise StopIteration
        try:
            _, batch, _ = engine.next()
        except Exception:
            if engine.front is not front:  # that batch is lost
                place.step = self._behind(place.step)
            raise
        self._delivered(front, batch)
        if self._tuner is not None:
            self._num_ahead = self._tuner.counted(engine)
        self._fill(engine)
        if watch is not None and batch is not NOTHING:
            watch.delivered(batch)
        if self._pins and engine.wants_pinned:
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]  # torch's own; leaves alone what is pinned
        place.step = self._behind(place.step)
        return batch

    def _delivered(self, order: Order, batch: Any) -> None:
        self.valid = self._num_valid(order)
        self._loader.recorder.delivered(order, batch, valid=self.valid, step=self.step_number(order.step))

    def _num_valid(self, order: Order) -> int:
        """Rows that are no padding: of a short batch these come first, also behind skipped ones."""
        if self._sampled is not None or self._behind(order.step) < self._end_of(order.epoch):
            return order.nrows
        if isinstance(schedule := self._schedule, BatchSchedule):
            num_valid = schedule.num_valid(order.epoch, order.step, self._rank)
        else:
            assert schedule is not None
            num_valid = schedule.num_valid(order.step, self._rank)
        return num_valid if order.origins is None else sum(row < num_valid for row, _ in order.origins)

    def substitute(self, order: Order, row: int, tries: int) -> int:
        """The index so many places behind a row's own in the epoch's order."""
        assert self._schedule is not None
        return self._schedule.index_after(order.epoch, order.step, self._rank, row, tries)

    def _fill(self, engine: Engine) -> None:
        """Orders ahead, into the next epoch if this one is all ordered."""
        while engine.num_queued < self._num_ahead:
            epoch, step = self._cursor
            order = self._order(epoch, step)
            if order is not None:
                self._cursor = (epoch, self._behind(step))
                engine.submit(order)
            elif self._sampled is not None or self._num_steps == 0 or step == 0 or self._is_far_ahead(epoch):
                return  # a sampler of the user's may depend on what happens before the next epoch
            else:
                self._cursor = (epoch + 1, 0)

    def _is_far_ahead(self, epoch: int) -> bool:
        """Whether the samples of what comes behind an epoch are not to be settled yet."""
        grows = isinstance(self._schedule, BatchSchedule) and self._schedule.grows
        return grows and self._place is not None and epoch > self._place.epoch

    def _usable_engine(self) -> Engine:
        if self._engine is None or self._pid != os.getpid():  # a forked child makes its own
            self._pid = os.getpid()
            self._engine = self._loader.make_engine(base_seed=_base_seed(self._loader.seed or 0))
            self._tuner = self._loader.tuner
            self._tell_length(self._engine)
        return self._engine

    def _tell_length(self, engine: Engine) -> None:
        try:
            num_steps = 0 if self._end_of(self._position()[0]) >= MAX_N else len(self)
        except Exception:  # a mixture that never ends, or a sampler of the user's that cannot say
            num_steps = 0  # it is for onlookers alone
        engine.begin_pass(num_steps, step_stride=self._stride)

    def _read_inline(self, place: Place, watch: EpochWatch | None) -> Any:
        if self._inline is None:
            self._inline = InlineReader(self._loader.make_job(), self._loader.bad_samples)
        order = self._order(place.epoch, place.step)
        if order is None:
            raise StopIteration
        try:
            if profiler._is_profiler_enabled:
                with profiler.record_function("shmload: read"):
                    batch = self._inline.read(order)
            else:
                batch = self._inline.read(order)
        except Exception:
            place.step = self._behind(place.step)
            raise
        self._delivered(order, batch)
        if watch is not None and batch is not NOTHING:
            watch.delivered(batch)
        if self._pins:
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]  # torch's own
        if batch is not NOTHING:
            batch = sent_now(batch, calls_of(self._loader.device, pin_memory=False))
        place.step = self._behind(place.step)
        return batch

    # ------------------------------------------------------------ position

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that epoch, from its start; or from the place just loaded, if that lies in it."""
        if self._place is None and epoch == self._next_epoch:
            return
        self._next_epoch, self._first_step, self._place = epoch, 0, None
        self._loader.recorder.resumed(epoch, 0, by="set_epoch")

    def state_dict(self) -> dict[str, Any]:
        """The state of the batch that comes next."""
        epoch, step = self._position()
        if self._sampled is not None:
            return self._sampled.state_dict(epoch, step)
        assert self._schedule is not None
        children = self._schedule.children(epoch) if isinstance(self._schedule, BatchSchedule) else None
        return dict(make_state(self._schedule, epoch=epoch, step=step, children=children))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next pass begin where the state was taken."""
        if self._sampled is not None:
            epoch, step = self._sampled.load_state_dict(state)
        else:
            schedule = self.schedule()
            epoch, step = resume(state, schedule)
            if isinstance(schedule, BatchSchedule):
                schedule.go_on_from(state.get("children", {}), epoch)
        if step and step >= self._end_of_all(epoch) > 0:
            epoch, step = epoch + 1, 0
        self._next_epoch, self._first_step, self._place = epoch, step, None
        self._loader.recorder.resumed(epoch, self.step_number(step))

    def _position(self) -> tuple[int, int]:
        """(epoch, step) of the batch that comes next."""
        if self._place is None:
            return self._next_epoch, self._first_step
        if self._place.step >= self._end_of(self._place.epoch):
            return self._place.epoch + 1, 0
        return self._place.epoch, self._place.step

    def close(self) -> None:
        """Ends the workers."""
        engine, self._engine = self._engine, None
        if engine is not None and self._pid == os.getpid():
            engine.close()
        if isinstance(self._schedule, BatchSchedule):
            self._schedule.ended()


def _next_step(step: int) -> int:
    return step + 1


def _pins(loader: ShmLoader[Any]) -> bool:
    """Whether batches are copied to pinned memory; a warning in torch's words where they cannot be."""
    if loader.pin_memory and not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.",
            stacklevel=users_frame()[1],
        )
        return False
    return bool(loader.pin_memory)


def _base_seed(seed: int) -> int:
    """What torch's worker seeds start from: workers' own streams in seed mode matter only to code outside samples."""
    return int(np.random.SeedSequence([seed & 0xFFFFFFFF, seed >> 32]).generate_state(1, np.uint64)[0] >> 1)
