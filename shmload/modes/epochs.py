"""The epochs of a loader in seed mode: the samples of each batch, the end of each epoch, and the state in between.

One class covers three kinds of epochs: those of the schedule's formula; those of a schedule whose epochs may differ in length (a
`KeyedBatches`, or a dataset that grows); and those of the user's own sampler, whose draws are kept. An order is here, as in the
engine, the `Order` of one batch; a `KeyedOrder` is the sequence of samples of an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.trainer import Order
from shmload.engine.config import LoaderConfig
from shmload.introspect.abilities import package_ability
from shmload.modes.sampled_epochs import SampledEpochs
from shmload.processes.ranks import rank_and_world_size, source_of_rank
from shmload.schedule.keyed_batches import BatchSchedule, KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder
from shmload.schedule.permutation import MAX_N
from shmload.schedule.schedule import Schedule
from shmload.schedule.state import make_state, resume

log = logging.getLogger("shmload")


MAX_BLOCK, MAX_BLOCK_STEPS = 4096, 64  # indices and batches that are computed together, in less than 0.1 ms

_NO_BLOCK = (-1, 0, np.empty((0, 0), np.int64))


class Epochs:
    """The epochs of one loader, for the current length of its dataset and the current ranks.

    A step identifies one batch of each rank. Steps are 0, 1, 2, ..., unless a `KeyedBatches` makes the batches: then a step is the
    number of its first batch over all ranks, or in a pipeline of its first item, and successive steps differ by `stride`.

    Args:
        config: the loader's arguments at construction; each pass has its own.

    Attributes:
        rank: this process's rank in the schedule.
        num_steps: number of steps of every epoch; None if epochs may differ.
        next_step: returns the step after a step.
        stride: the difference of two successive steps.
        is_uniform: whether every epoch has the same steps, numbered one by one.
        grows: whether the samples of an epoch must not be fixed before the previous epoch has been read.
        sampled: the draws of the user's sampler, or None if there is a schedule.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self._config = config
        self.rank, self._world_size = 0, 1
        self._schedule: Schedule | BatchSchedule | None = None
        self.num_steps: int | None = 0
        self._order_of_dataset: str | None = None  # identity of the order in which a dataset numbers its items
        self._block = _NO_BLOCK  # epoch, first step and indices of batches that are asked for next
        self.stride, self.is_uniform, self.grows = 1, True, False
        self.next_step: Callable[[int], int] = lambda step: step + 1
        self.sampled = None
        if config.has_users_sampler:
            self.sampled = SampledEpochs(config)
        self.refresh(config)

    # ------------------------------------------------------------ the schedule

    def refresh(self, config: LoaderConfig) -> bool:
        """Make the schedule for the current length of the dataset and the current ranks, which may have changed.

        Args:
            config: the loader's arguments for the next pass.

        Returns:
            whether the schedule has changed. Orders that were sent to workers are then invalid, and their dataset may be outdated.
        """
        self._config = config
        if self.sampled is not None:
            self.sampled.config = config
            return False
        self._order_of_dataset = package_ability(config.dataset, "order_identity")
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
                schedule = growing(
                    **{**common, **of_samples, "rank": ranks[0], "uneven": "drop" if config.drop_last else config.uneven}
                )
        else:
            sequence = self._keyed_order((config.batch_size or 1) * ranks[1])
            n = len(config.dataset) if sequence is None else sequence.n
            if made is not None and is_same and (made.n, made.order) == (n, sequence):
                return False
            of_samples["shuffle"] = bool(config.shuffle) and sequence is None
            schedule = Schedule(n, **common, **of_samples, drop_last=config.drop_last, order=sequence)
            num_steps = schedule.num_steps_of(ranks[0])
        self.rank, self._world_size = ranks
        self._schedule, self.num_steps, self._block, self.grows = schedule, num_steps, _NO_BLOCK, schedule.grows
        self.stride, self.next_step, self.is_uniform = schedule.stride, schedule.next_step, num_steps is not None
        return True

    def _keyed_order(self, global_batch: int) -> KeyedOrder | None:
        """Return the sequence of samples that the sampler or the dataset defines; None if neither does."""
        config = self._config
        if isinstance(config.sampler, KeyedOrder):
            return config.sampler
        of_dataset: Callable[..., KeyedOrder] | None = package_ability(config.dataset, "keyed_order")
        return of_dataset and of_dataset(shuffle=bool(config.shuffle), global_batch=global_batch)

    def begins(self, epoch: int) -> None:
        """Tell the schedule that a pass over an epoch begins."""
        if self._schedule is not None:
            self._schedule.begins(epoch)

    def ended(self) -> None:
        """Tell the schedule that no epoch of it is read any more."""
        if self._schedule is not None:
            self._schedule.ended()

    @property
    def formula(self) -> Schedule | BatchSchedule | None:
        """Return the schedule if `shmload verify` can recompute it from the header of an audit (audit/recorder.py), else None."""
        schedule = self._schedule
        return None if isinstance(schedule, BatchSchedule) and schedule.stream is None else schedule

    # ------------------------------------------------------------ where an epoch ends

    @property
    def is_endless(self) -> bool:
        """Return whether epochs are infinite."""
        sequence = getattr(self._schedule, "order", None)
        return isinstance(sequence, KeyedOrder) and sequence.is_endless

    @property
    def num_samples(self) -> int | None:
        """Return the number of samples that all ranks read in an epoch, without padding; None if it is unknown or may change."""
        return self._schedule.n if isinstance(self._schedule, Schedule) else None

    def end_of(self, epoch: int) -> int:
        """Return the step after the epoch's last."""
        if self.sampled is not None:
            return len(self._config.index_sampler)
        if self.num_steps is not None:
            return self.num_steps
        assert self._schedule is not None
        return self._schedule.end_of(epoch, self.rank)

    def end_of_all(self, epoch: int) -> int:
        """Return the step after the last one of any rank. A rank with fewer steps still goes through the whole epoch."""
        if self._schedule is not None:
            return self._schedule.end_of(epoch, rank=0)
        try:
            return self.end_of(epoch)
        except (TypeError, NotImplementedError):  # the user's sampler has no length
            return MAX_N

    def step_number(self, step: int) -> int:
        """Return the number of a step, counted one by one from the start of the epoch."""
        return step if self.is_uniform or self._schedule is None else self._schedule.number(step)

    # ------------------------------------------------------------ batches

    def order(self, epoch: int, step: int) -> Order | None:
        """Return the order for a batch, or None after the epoch's last batch."""
        if self.sampled is not None:
            return self.sampled.order(epoch, step)
        if step >= (self.end_of(epoch) if self.num_steps is None else self.num_steps):
            return None
        return Order(epoch, step, self._indices(epoch, step))

    def _indices(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return the indices of one batch. Several batches are computed together, because a pass asks for them in sequence."""
        of_epoch, first, block = self._block
        number = (step - first) // self.stride
        if of_epoch == epoch and 0 <= number < len(block) and first + number * self.stride == step:
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
        """Return the number of rows that are not padding. They come first in a batch, also if some samples were skipped."""
        if self.num_steps is not None and order.step + 1 < self.num_steps:  # most batches
            return order.nrows
        schedule = self._schedule
        if schedule is None or (not self.grows and self.next_step(order.step) < self.end_of(order.epoch)):
            return order.nrows
        if isinstance(schedule, BatchSchedule):
            num_valid = schedule.num_valid(order.epoch, order.step, self.rank)
        else:
            num_valid = schedule.num_valid(order.step, self.rank)
        return num_valid if order.origins is None else sum(row < num_valid for row, _ in order.origins)

    def substitute(self, order: Order, row: int, tries: int) -> int:
        """Return the index that comes `tries` places after a row's own in the epoch's sequence of samples."""
        assert self._schedule is not None
        return self._schedule.index_after(order.epoch, order.step, self.rank, row, tries)

    # ------------------------------------------------------------ states

    def state_dict(self, epoch: int, step: int, *, is_begun: bool) -> dict[str, Any]:
        """Return the state before the next batch.

        Args:
            epoch, step: position of that batch.
            is_begun: whether its pass has begun. Only the user's samplers need this.
        """
        if self.sampled is not None:
            return self.sampled.state_dict(epoch, step, is_begun=is_begun)
        assert self._schedule is not None
        children = self._schedule.children(epoch)
        return dict(make_state(self._schedule, epoch=epoch, step=step, children=children, dataset=self._order_of_dataset))

    def load_state_dict(self, state: dict[str, Any], *, is_trusted: bool) -> tuple[int, int]:
        """Load a state. Return its (epoch, step), or the start of the next epoch if it was taken at the end of one.

        Args:
            state: what `state_dict` returned.
            is_trusted: whether pickles in it may be opened.
        """
        if self.sampled is not None:
            epoch, step = self.sampled.load_state_dict(state, is_trusted=is_trusted)
        else:
            assert self._schedule is not None
            epoch, step = resume(state, self._schedule, self._order_of_dataset)
            self._schedule.go_on_from(state.get("children", {}), epoch)
        if step and step >= self.end_of_all(epoch) > 0:
            return epoch + 1, 0
        return epoch, step
