"""PipelineEngine: the base of all engines that run a Plan, with position and state.

A `PipelinePlace` is a position in a pipeline's items, (epoch, position), and everything else that the engine needs to continue
there. A state is a place, the identity of the schedule, and a checksum.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from shmload.errors import StateMismatch
from shmload.pipeline.item_schedule import StreamSchedule
from shmload.pipeline.plan import Plan
from shmload.schedule.state import check_state, compare_state, make_state
from shmload.schedule.state_checksum import with_checksum
from shmload.worker.sample_rng import NoSampleError
from shmload.worker.stage_engine import apply_functions

_NO_SAMPLE = (
    "a Map after Collate runs in the trainer, on a batch, where sample_rng() and sample_info() have no sample: draw in a Map "
    "before Collate, or in a BatchMap"
)


class PipelinePlace(NamedTuple):
    """A position in a pipeline from which any number of ranks can continue.

    Attributes:
        epoch: the epoch; 0 if the source repeats.
        position: number of items of this epoch that all ranks have consumed, or of all epochs if the source repeats. For pipelines
            that expand blocks, it counts blocks instead of items.
        counters: what the engine needs besides the position, or None.
        children: saved states of Scans and of a Stream's iterable.
    """

    epoch: int
    position: int
    counters: list[int] | None = None
    children: Mapping[str, str] = {}


class PipelineEngine(ABC):
    """Runs a Plan from any place.

    Args:
        plan: the plan to run.
        schedule: maps each step to its keys; it also identifies the pipeline in states.

    Attributes:
        epoch: the current epoch; 0 if the source repeats.
        is_endless: whether the source repeats.
    """

    def __init__(self, plan: Plan, schedule: StreamSchedule) -> None:
        self.plan, self.schedule = plan, schedule
        self.is_endless = plan.source.repeating
        self.epoch = 0

    def pull(self) -> Any:
        """Return the next batch, or the next item if nothing collates; raise StopIteration at the end of the epoch."""
        if self.is_ended:
            self.end()
            raise StopIteration
        if not self.plan.trainer_batch_stages:
            return self.advance()
        begin = self.place_now()
        batch = self.advance()
        try:
            return apply_functions(self.plan.trainer_batch_stages, batch, self.where)
        except NoSampleError as error:
            error.args = (_NO_SAMPLE,)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: the batch is made again, because functions may have changed it
                self.go(begin())
            raise

    @abstractmethod
    def advance(self) -> Any:
        """Return the next item, or the next batch before the functions of batches; raise StopIteration at the end of the epoch.

        If it raises any other exception, that item or batch is lost, and the next call continues after it.
        """

    @abstractmethod
    def where(self, _: int = 0) -> str:
        """Name the last batch, for error messages."""

    @property
    @abstractmethod
    def valid(self) -> int | None:
        """Return the number of rows of the last batch that are not padding; 1 or 0 for a single item, None before the first one."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Return the number of batches or items of this rank in the epoch.

        Raises:
            TypeError: it is not known before the items are read.
        """

    @property
    @abstractmethod
    def is_ended(self) -> bool:
        """Return whether nothing is left for this rank until the next epoch begins."""

    @abstractmethod
    def end(self) -> None:
        """Record that the epoch has ended for this rank, which may happen before it ends for others."""

    @abstractmethod
    def begin_pass(self) -> None:
        """Prepare an iteration: begin the next epoch if this one has been consumed."""

    def begin_next_epoch(self) -> None:
        """Go to the start of the next epoch of a pipeline that does not repeat."""
        self.restart(self.epoch + 1)

    @abstractmethod
    def restart(self, epoch: int) -> None:
        """Go to the start of an epoch."""

    # ------------------------------------------------------------ position

    @property
    def place(self) -> PipelinePlace:
        """Return the current place; at the end of an epoch, its position is the number of items."""
        return self.place_now()()

    @abstractmethod
    def place_now(self) -> Callable[[], PipelinePlace]:
        """Return a function that returns the current place, also later. It is cheap; to save what Scans carry is not."""

    @abstractmethod
    def go(self, place: PipelinePlace) -> None:
        """Continue at a place that a state describes."""

    @abstractmethod
    def check(self, place: PipelinePlace) -> None:
        """Check a place that comes from a state.

        Raises:
            StateMismatch: this pipeline has no such place.
        """

    def state(self) -> dict[str, Any]:
        """Return the state, the same on all ranks after equal steps."""
        place = self.place
        state = dict(make_state(self.schedule, epoch=place.epoch, step=place.position))
        if self.is_endless:
            state["epoch"], state["position"] = divmod(place.position, self.schedule.n)
        if place.counters is not None:
            state["counters"] = place.counters
        if place.children:
            state["children"] = place.children
        return with_checksum(state)

    def place_of(self, state: Mapping[str, Any]) -> PipelinePlace:
        """Return the place at which a state was taken.

        Raises:
            StateMismatch: the state belongs to another pipeline, or is damaged.
        """
        checked = check_state(state)
        compare_state(checked, self.schedule)
        place = PipelinePlace(checked["epoch"], checked["position"], checked.get("counters"), checked.get("children", {}))
        self.check(place)
        return place._replace(epoch=0, position=place.epoch * self.schedule.n + place.position) if self.is_endless else place

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; raise StateMismatch if it belongs to another pipeline."""
        self.go(self.place_of(state))

    def entry(self) -> list[Any]:
        """Return a compact state for the state of a Join: mark of the pipeline, epoch, position, and counters if it has any."""
        state = self.state()
        entry = [_mark(state), state["epoch"], state["position"]]
        return [*entry, state["counters"]] if "counters" in state else entry

    def entering(self, entry: Any, where: str) -> Callable[[], None]:
        """Return a function that continues where `entry` was taken.

        Raises:
            StateMismatch: it belongs to another pipeline.
        """
        state = self.state()
        if not isinstance(entry, list) or entry[:1] != [_mark(state)] or len(entry) != len(self.entry()):
            raise StateMismatch(f"the state belongs to another pipeline{where}; this one is {state['order']}")
        state |= zip(("epoch", "position", "counters"), entry[1:], strict=False)
        return partial(self.go, self.place_of(with_checksum(state)))

    # ------------------------------------------------------------ workers

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the statistics of the loader that runs the pipeline; empty before the first item."""

    @abstractmethod
    def close(self) -> None:
        """End the workers."""


def _mark(state: dict[str, Any]) -> str:
    names = ("seed", "n", "uneven", "order")
    return f"{zlib.crc32(repr([state[name] for name in names]).encode()):08x}"
