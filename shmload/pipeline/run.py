"""A pipeline under way: the loader that reads it, and the position.

The loader is in seed mode with the stream as its batch sampler, so order, ranks, crash replay and resume are the loader's. What is
added here is the position: it counts items that all ranks have had, also within what was fetched together.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from shmload.engine.orders import NOTHING
from shmload.loader import ShmLoader
from shmload.pipeline.fetch_batching import FetchBatching
from shmload.pipeline.items import ItemErrors, NamedErrors, Outcome, items_of
from shmload.pipeline.plan import Plan, check_travels
from shmload.pipeline.stream import Stream, StreamSchedule
from shmload.schedule.state import make_state


class Run:
    """Gives batches or items from a position on.

    Args:
        stages: that the plan was made of.
        options: of the loader.

    Attributes:
        position: items that all ranks have had: of this epoch, or of all if the source repeats.
        epoch: of a source that does not repeat.
    """

    def __init__(self, stages: Sequence[Any], plan: Plan, options: Mapping[str, Any]) -> None:
        self._stages, self._plan, self._options = stages, plan, options
        self._rank = plan.partition.rank
        self._stream = Stream(plan.source, None if plan.collate is None else plan.collate.batch_size)
        self.schedule: StreamSchedule = self._stream.schedule(
            seed=plan.source.seed, uneven=plan.uneven, world_size=plan.partition.n_ranks
        )
        self.position = self.epoch = 0
        self.loader: ShmLoader[Any] | None = None
        self._iterator: Any = None
        self._errors = ItemErrors(plan.source.name)
        self._fetched: deque[Outcome] = deque()  # items that came together and have not been asked for
        self._fetch_batching = FetchBatching(plan.pool)
        self._next_of_loader = (0, 0)  # where its next pass begins by itself
        self._has_moved = False  # to a place that a state says, where nothing was asked for yet

    def move(self, epoch: int, position: int) -> None:
        """Goes on there."""
        self._go(epoch, position)
        self._next_of_loader = (-1, 0)
        self._has_moved = True

    def begin_next_epoch(self) -> None:
        """Goes to the start of the next epoch."""
        self._go(self.epoch + 1, 0)

    def _go(self, epoch: int, position: int) -> None:
        self.epoch, self.position, self._iterator = epoch, position, None
        self._has_moved = False
        self._stream.epoch = epoch
        self._fetched.clear()
        self._errors.of_step.clear()

    @property
    def is_ended(self) -> bool:
        """Whether there is nothing more in this epoch for this rank."""
        return self.position >= self.schedule.end_of(self.epoch, self._rank)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more in this epoch for any rank; they may leave a rest out."""
        return self.position >= self.schedule.end_of(self.epoch, rank=0)

    @property
    def must_begin_anew(self) -> bool:
        """Whether a new iteration is the next epoch's. A state may stand where only other ranks have something left: then not."""
        return self.is_ended and (self.is_over or not self._has_moved)

    def end(self) -> None:
        """Says that the epoch has ended for this rank, which may be before it does for others: it is told so to its user."""
        self.position = max(self.position, self.schedule.end_of(self.epoch, rank=0))

    def close(self) -> None:
        """Ends the workers."""
        self._iterator = None
        if self.loader is not None:
            self.loader.close()

    # ------------------------------------------------------------ what comes next

    def next_batch(self) -> Any:
        """The next batch; StopIteration at the end of the epoch. One that fails is lost: the position is then behind it."""
        iterator = self._running()
        try:
            batch = next(iterator)
        except StopIteration:
            self.end()
            raise
        except BaseException:
            self.position = iterator.place.step
            raise
        self.position = iterator.place.step
        return batch

    def next_item(self) -> Any:
        """The next item; raises what befell it, and is then behind it."""
        while not self._fetched:
            self._fetch()
        item, error = self._fetched.popleft()
        self.position += self.schedule.stride
        if error is not None:
            raise error
        return item

    def _fetch(self) -> None:
        iterator, first = self._running(), self.position
        items: Any = NOTHING
        lost: Exception | None = None
        try:
            items = iterator.next_step()
        except Exception as error:
            lost = error
        except BaseException:
            self.move(self.epoch, first)
            raise
        if iterator.place.step == first and lost is not None:  # the loader itself has failed
            raise lost
        items = [] if items is NOTHING else items
        outcomes = list(items_of(self.schedule, self._rank, first, items, self._errors.of_step.pop(first, {}), lost))
        num_lost = 0 if lost is None else sum(error is lost for _, error in outcomes)
        if num_lost > 1:  # one that cannot travel fails all that came with it: they are fetched anew, one by one
            del outcomes[-num_lost:]
            self._iterator, self._stream.rounds = None, 1
        elif self.loader is not None:
            self._stream.rounds = self._fetch_batching.after_fetch(self.loader) or self._stream.rounds
        self._fetched.extend(outcomes)

    def _running(self) -> Any:
        """The loader's pass, begun at the position if it is not under way."""
        if self._iterator is None:
            if self.loader is None:
                self.loader = self._make_loader()
            if self._next_of_loader != (self.epoch, self.position):  # an audit must not take each start for a resume
                self.loader.load_state_dict(dict(make_state(self.schedule, epoch=self.epoch, step=self.position)))
            self._iterator = iter(self.loader)
            self._next_of_loader = (self.epoch + 1, 0)
        return self._iterator

    def _make_loader(self) -> ShmLoader[Any]:
        plan, pool = self._plan, self._plan.pool
        options: dict[str, Any] = {"on_error": "skip"} if plan.collate is None else {}
        if pool.num_workers:
            options["prefetch_factor"] = pool.prefetch_factor(self._stream.batch_size or 1)
            options["sample_timeout_s"] = pool.timeout_s
        loader: ShmLoader[Any] = ShmLoader(
            plan.program,
            batch_sampler=self._stream,
            num_workers=pool.num_workers,
            collate_fn=list if plan.collate is None else None,
            seed=plan.source.seed,
            rank=self._rank,
            world_size=plan.partition.n_ranks,
            uneven=plan.uneven,
            ragged="list" if plan.collate is None else plan.collate.ragged,
            **{**options, **self._options},
        )
        if pool.num_workers:
            context = loader.multiprocessing_context or multiprocessing
            if (method := context.get_start_method()) != "fork":
                check_travels(self._stages, method)
        if plan.collate is None:
            loader._builder.bad_samples = self._errors
        else:
            next_index = loader._builder.bad_samples.next_index
            loader._builder.bad_samples = NamedErrors(loader.on_error, loader.max_bad, next_index, plan.source.name)
        return loader
