"""Seed mode's epochs: which samples a batch has, where an epoch ends, what a state says of it.

Three kinds of order stand behind one class: the schedule's formula; a schedule whose epochs may differ in length (an order that
makes the batches, a dataset that grows); and a sampler of the user's own, whose draws are kept.

Seed mode with a sampler of the user's: the sampler orders, the seed keys the randomness within samples.

Such an order has no formula, so a state says how the sampler came to it (torch_order.py) and is as large as that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.trainer import Order
from shmload.errors import StateMismatch
from shmload.modes.torch_order import SamplerReader, is_torchs_own, own_state
from shmload.schedule.codec import UsersOwn, opened, sealed
from shmload.schedule.schedule import BatchSchedule, KeyedBatches, KeyedOrder, Schedule
from shmload.schedule.state import STATE_VERSION, check_checksum, make_state, resume, with_checksum
from shmload.worker.generators import origin_of
from shmload.worker.sample_rng import kept_generators
from shmload.world import ability_of, rank_and_world_size

if TYPE_CHECKING:
    from shmload.engine.builder import LoaderConfig

MODE = "seed, with a sampler"


class SampledOrder:
    """The batches of a sampler or batch sampler, epoch by epoch. It is begun anew for each epoch and can only go forward."""

    def __init__(self, index_sampler: Any, seed: int) -> None:
        self._sampler = index_sampler
        self._seed = seed
        self._now: tuple[int, int, SamplerReader] | None = None  # epoch, next step, the batches from there
        self._loaded: dict[str, Any] = {}  # the state that the next pass goes on from

    def keys(self, epoch: int, step: int) -> Any:
        """What the sampler says for that batch; None beyond the epoch's last."""
        if self._now is None or self._now[:2] != (epoch, step):
            batches = self._from(epoch, step)
        else:
            batches = self._now[2]
        keys = next(batches, None)
        self._now = (epoch, step + (keys is not None), batches)  # asked for its end again, it must not begin anew
        return keys

    def _is_loaded(self, epoch: int, step: int) -> bool:
        return bool(self._loaded) and (self._loaded["epoch"], self._loaded["step"]) == (epoch, step)

    def _from(self, epoch: int, step: int) -> SamplerReader:
        origin, is_loaded = origin_of(None), self._is_loaded(epoch, step)
        with kept_generators() if is_loaded else nullcontext():  # a sampler may draw when it is begun
            batches = SamplerReader(
                self._sampler, None, every=1, iterator=iter(self._sampler), origin=origin, is_seed_between=False
            )
        if is_loaded:
            told = self._loaded["sampler"]
            if "own" in told and not told["taken"]:
                batches.start_after(told)  # it may be at the end of its last pass
            else:
                batches.resume(told)
            step -= batches.num_taken
        next(islice(batches, step, step), None)
        return batches

    def state_dict(self, epoch: int, step: int) -> dict[str, Any]:
        """The state before that batch, which is the next to be delivered."""
        if self._now is not None and self._now[0] == epoch:
            sampler = self._now[2].state(step)
        elif self._is_loaded(epoch, step):
            sampler = self._loaded["sampler"]
        else:
            origin = origin_of(None).dumps(is_torchs_own(self._sampler))
            sampler = {"taken": 0, "origin": origin, "seed_between": False}
            if (own := own_state(self._sampler)) is not None:
                sampler["own"] = own
        return with_checksum(
            {
                "version": STATE_VERSION,
                "mode": MODE,
                "seed": self._seed,
                "epoch": epoch,
                "step": step,
                "sampler": sealed({**sampler, "own": UsersOwn(sampler["own"])} if "own" in sampler else sampler),
            }
        )

    def load_state_dict(self, state: Any, *, is_trusted: bool) -> tuple[int, int]:
        """Goes to where a state was taken: (epoch, step).

        Args:
            is_trusted: pickles in it may be opened.
        Raises:
            StateMismatch: it was taken of another kind of loader, or of another seed, or is damaged, or holds a pickle.
        """
        saved = state if isinstance(state, Mapping) else {}
        identity = {"version": STATE_VERSION, "mode": MODE, "seed": self._seed}
        differing = [
            f"{name}: saved {saved.get(name)!r}, now {now!r}"
            for name, now in identity.items()
            if saved.get(name) != now
        ]
        if differing:
            raise StateMismatch(
                f"the state belongs to another loader: {'; '.join(differing)}. Remedy: build the loader as it was at saving"
            )
        check_checksum(saved)
        try:
            sampler = opened(saved["sampler"], is_trusted=is_trusted)
            is_place = all(type(saved[name]) is int and saved[name] >= 0 for name in ("epoch", "step"))
            if not is_place or type(sampler["taken"]) is not int or not ("own" in sampler or "origin" in sampler):
                raise ValueError(f"it has {sorted(sampler)} at {saved['epoch']!r}, {saved['step']!r}")
        except StateMismatch:
            raise
        except Exception as error:  # a pickle that is trusted may raise anything
            raise StateMismatch(f"the state cannot be read: {error!r}. Load what state_dict() returned") from error
        self._loaded, self._now = {**saved, "sampler": sampler}, None
        return saved["epoch"], saved["step"]


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
        sampled: the draws of a sampler of the user's; None: there is a schedule.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self._config = config
        self.rank, self._world_size = 0, 1
        self._schedule: Schedule | BatchSchedule | None = None
        self._num_steps: int | None = 0  # of every epoch; None where they may differ
        self._block = _NO_BLOCK  # epoch, first step and indices of batches that are asked for next
        self.stride, self.is_uniform = 1, True
        self.behind: Callable[[int], int] = _next_step
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
        if (make := self._of_batches()) is not None:
            return self._refresh_batches(make)
        ranks = rank_and_world_size(config.rank, config.world_size)
        order = self._keyed_order((config.batch_size or 1) * ranks[1])
        n = len(config.dataset) if order is None else order.n
        made_for = None if self._schedule is None else (self._schedule.n, getattr(self._schedule, "order", None))
        if made_for == (n, order) and ranks == (self.rank, self._world_size):
            return False
        self.rank, self._world_size = ranks
        self._schedule = Schedule(
            n,
            batch_size=config.batch_size or 1,
            seed=config.seed or 0,
            shuffle=bool(config.shuffle) and order is None,
            drop_last=config.drop_last,
            uneven=config.uneven,
            world_size=self._world_size,
            order=order,
        )
        self._num_steps = self._schedule.num_steps_of(self.rank)
        self._block = _NO_BLOCK
        return True

    def _of_batches(self) -> Callable[..., BatchSchedule] | None:
        """What makes the schedule where an order makes the batches, or the dataset has another length in each epoch."""
        config = self._config
        if isinstance(config.batch_sampler, KeyedBatches):
            return partial(config.batch_sampler.schedule, uneven=config.uneven)
        growing = ability_of(config.dataset, "epoch_schedule")
        uneven = "drop" if config.drop_last else config.uneven
        return growing and partial(
            growing, batch_size=config.batch_size or 1, shuffle=bool(config.shuffle), uneven=uneven
        )

    def _refresh_batches(self, make: Callable[..., BatchSchedule]) -> bool:
        """The same for epochs whose lengths may differ."""
        config = self._config
        ranks = rank_and_world_size(config.rank, config.world_size)
        if isinstance(self._schedule, BatchSchedule) and ranks == (self.rank, self._world_size):
            return False
        self.ended()
        self.rank, self._world_size = ranks
        self._schedule = make(seed=config.seed or 0, world_size=self._world_size)
        self._num_steps, self.stride, self.behind = None, self._schedule.stride, self._schedule.behind
        self.is_uniform = False
        return True

    def _keyed_order(self, global_batch: int) -> KeyedOrder | None:
        """What the samples are taken in if not in the plain order: the sampler, or what the dataset says for itself."""
        config = self._config
        if isinstance(config.sampler, KeyedOrder):
            return config.sampler
        of_dataset: Callable[..., KeyedOrder] | None = ability_of(config.dataset, "keyed_order")
        return of_dataset and of_dataset(shuffle=bool(config.shuffle), global_batch=global_batch)

    def begins(self, epoch: int) -> None:
        """A pass over an epoch begins."""
        if isinstance(self._schedule, BatchSchedule):
            self._schedule.begins(epoch)

    def ended(self) -> None:
        """Nothing that was ordered ahead is wanted any more."""
        if isinstance(self._schedule, BatchSchedule):
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

    @property
    def has_no_steps(self) -> bool:
        """Whether every epoch is empty."""
        return self._num_steps == 0

    @property
    def grows(self) -> bool:
        """Whether the samples of an epoch are not to be settled before the one before it has been read."""
        return isinstance(self._schedule, BatchSchedule) and self._schedule.grows

    def end_of(self, epoch: int) -> int:
        """The first step that the epoch does not have."""
        if self.sampled is not None:
            return len(self._config.index_sampler)
        if self._num_steps is not None:
            return self._num_steps
        assert isinstance(self._schedule, BatchSchedule)
        return self._schedule.end_of(epoch, self.rank)

    def end_of_all(self, epoch: int) -> int:
        """The first step that no rank has: where ranks differ, one that has none left passes through the epoch all the same."""
        if isinstance(self._schedule, BatchSchedule):
            return self._schedule.end_of(epoch, rank=0)
        return self.end_of(epoch) if self._schedule is None else self._schedule.num_steps

    def step_number(self, step: int) -> int:
        """How a record of the epoch's steps counts them."""
        return self._schedule.number(step) if isinstance(self._schedule, BatchSchedule) else step

    # ------------------------------------------------------------ batches

    def order(self, epoch: int, step: int) -> Order | None:
        """The order for a batch; None beyond the epoch's last."""
        if self.sampled is None:
            assert self._schedule is not None
            if step >= (self.end_of(epoch) if self._num_steps is None else self._num_steps):
                return None
            return Order(epoch, step, self._indices(epoch, step))
        keys = self.sampled.keys(epoch, step)
        if keys is None:
            return None
        return Order(epoch, step, keys if self._config.auto_collation else [keys])

    def _indices(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Of one batch, out of a block of several: the orders of a pass are asked for one after the other."""
        of_epoch, first, block = self._block
        if of_epoch == epoch and 0 <= step - first < len(block):
            row: NDArray[np.int64] = block[step - first]
            return row
        schedule = self._schedule
        assert schedule is not None
        if isinstance(schedule, Schedule):
            block = schedule.batches(epoch, step, self.rank, min(MAX_BLOCK // schedule.batch_size, MAX_BLOCK_STEPS))
            if len(block):
                self._block = epoch, step, block
                return self._indices(epoch, step)
        return schedule.batch(epoch, step, self.rank)

    def num_valid(self, order: Order) -> int:
        """Rows that are no padding: of a short batch these come first, also behind skipped ones."""
        if self._num_steps is not None and order.step + 1 < self._num_steps:  # most batches
            return order.nrows
        if self.sampled is not None or self.behind(order.step) < self.end_of(order.epoch):
            return order.nrows
        if isinstance(schedule := self._schedule, BatchSchedule):
            num_valid = schedule.num_valid(order.epoch, order.step, self.rank)
        else:
            assert schedule is not None
            num_valid = schedule.num_valid(order.step, self.rank)
        return num_valid if order.origins is None else sum(row < num_valid for row, _ in order.origins)

    def substitute(self, order: Order, row: int, tries: int) -> int:
        """The index so many places behind a row's own in the epoch's order."""
        assert self._schedule is not None
        return self._schedule.index_after(order.epoch, order.step, self.rank, row, tries)

    # ------------------------------------------------------------ states

    def state_dict(self, epoch: int, step: int) -> dict[str, Any]:
        """The state of a batch that comes next."""
        if self.sampled is not None:
            return self.sampled.state_dict(epoch, step)
        assert self._schedule is not None
        children = self._schedule.children(epoch) if isinstance(self._schedule, BatchSchedule) else None
        return dict(make_state(self._schedule, epoch=epoch, step=step, children=children))

    def load_state_dict(self, state: dict[str, Any], *, is_trusted: bool) -> tuple[int, int]:
        """(epoch, step) where a state was taken, or of the epoch behind it if that was its end."""
        if self.sampled is not None:
            epoch, step = self.sampled.load_state_dict(state, is_trusted=is_trusted)
        else:
            schedule = self._schedule
            assert schedule is not None
            epoch, step = resume(state, schedule)
            if isinstance(schedule, BatchSchedule):
                schedule.go_on_from(state.get("children", {}), epoch)
        if step and step >= self.end_of_all(epoch) > 0:
            return epoch + 1, 0
        return epoch, step


def _next_step(step: int) -> int:
    return step + 1
