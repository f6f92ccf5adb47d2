"""Which items a rank is given at a step: the pipeline's form of shmload's schedule.

A source is one row of keys, epoch after epoch. A step goes by its first position (schedule/schedule.py), which is also what
a state holds: the items that all ranks have had are those before it. If the source repeats, positions count on across the ends of
epochs, and for the loader that reads it all of it is one epoch; else they begin anew with each.

One state for a job whose ranks saved theirs at different steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import StateMismatch
from shmload.schedule.schedule import BatchSchedule, KeyedBatches, Uneven, stream_end, stream_positions
from shmload.schedule.state import CHECK, check_checksum

log = logging.getLogger("shmload")


def reconcile(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state to load on every rank, out of one from each of them.

    It is that of the rank which had come the least far: nothing is lost, and what other ranks have had beyond it comes again, which
    a warning counts. After equal steps all states are alike, and any of them will do.

    Args:
        states: of a Conveyer or a Join, in any order.
    Raises:
        StateMismatch: they are not of one pipeline; says what differs.
    """
    if not states:
        raise StateMismatch("reconcile needs the state of each rank; got none")
    first = _identity(states[0])
    for number, state in enumerate(states):
        if _identity(state) != first:
            raise StateMismatch(
                f"states 0 and {number} are of different pipelines: {first} and {_identity(state)}. Give the states of the ranks "
                "of one job"
            )
    for state in states:
        check_checksum(state)
    by_progress = sorted(states, key=_progress)
    (epoch, least), (last_epoch, most) = _progress(by_progress[0]), _progress(by_progress[-1])
    if (epoch, least) != (last_epoch, most):
        log.warning(
            "ranks had saved between position %d of epoch %d and position %d of epoch %d: all go on at the first, and what lies "
            "between comes again on the ranks that have had it",
            least,
            epoch,
            most,
            last_epoch,
        )
    return dict(by_progress[0])


def _identity(state: Any) -> Any:
    """What must be alike."""
    try:
        _progress(state)
        if state["mode"] == "join":
            return _marks(state["members"])
        return {name: value for name, value in state.items() if name not in ("epoch", "position", "counters", CHECK)}
    except (TypeError, ValueError, LookupError, AttributeError):
        raise StateMismatch(f"reconcile takes states of a Conveyer or a Join as state() returns them; got {state!r:.200}") from None


def _marks(entries: list[Any]) -> list[Any]:
    """Of a Join's entries, or a member's, what says whose they are: their text, at every depth."""
    return [_marks(entry) if isinstance(entry, list) else entry for entry in entries if isinstance(entry, list | str)]


def _progress(state: Mapping[str, Any]) -> tuple[int, int]:
    """(epoch, position), of a Join in draws."""
    if state["mode"] != "join":
        return int(state["epoch"]), int(state["position"])
    _, epoch, *members = state["members"]
    return epoch, sum(count for count, _ in members)


class Keys:
    """What is asked of a pipeline's first stage. Its positions number the items of all epochs, end to end.

    Attributes:
        n: items of an epoch.
        identity: which order it is; a state saved under another is refused.
        members: what keys are made of, for who reads them: n of a plain source, the list of its members' of a Join.
        num_counters: what a resume needs besides the position.
    """

    n: int
    seed: int
    repeating: bool
    identity: str
    members: Any
    num_counters = 0

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """The keys at positions [start, stop)."""
        raise NotImplementedError

    def item(self, key: int) -> Any:
        """What a key stands for."""
        return key % self.n

    def name(self, key: int) -> str:
        """What a key stands for, for people."""
        return "item {1} of epoch {0}".format(*divmod(key, self.n))

    def counters_at(self, position: int) -> list[int]:
        """What a resume there needs besides the position."""
        return []

    def go_on_at(self, position: int, counters: Sequence[int]) -> None:
        """Takes over what `counters_at` gave; StateMismatch if it cannot have."""
        if counters:
            raise StateMismatch(f"a {type(self).__name__} has no counters; the state has {counters!r:.200}")


class ItemStream(KeyedBatches):
    """The steps of one pipeline.

    Args:
        batch_size: items of a rank's batch; None: items come singly, and are only fetched together.
    """

    n, identity = 0, ""

    def __init__(self, source: Keys, batch_size: int | None) -> None:
        self.source, self.batch_size = source, batch_size
        self.n, self.identity = source.n, f"pipeline({source.identity})"
        self.rounds = 1  # of single items that are fetched together, from the next step that is ordered on
        self.rounds_at: dict[int, int] = {}  # of the steps that were ordered and not delivered, if more than one
        self.epoch = 0  # of a source that does not repeat: the one that is delivered

    def schedule(self, *, seed: int, uneven: Uneven, world_size: int) -> StreamSchedule:
        """Which of its items each rank is given."""
        return StreamSchedule(self, seed=seed, uneven=uneven, world_size=world_size)

    def num_batches(self, *, seed: int, epoch: int) -> int:
        """Of one rank alone, as an ordinary batch sampler."""
        return -(-self.n // (self.batch_size or 1))

    def batch(self, number: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
        size = self.batch_size or 1
        return self.source.take(number * size, min((number + 1) * size, self.n))


@dataclass(frozen=True)
class StreamSchedule(BatchSchedule):
    """Pure map (position, rank) -> keys."""

    order: Any  # a Stream

    @property
    def stride(self) -> int:
        """Items of one step over all ranks."""
        return int(self.order.batch_size or 1) * self.world_size

    @property
    def rows_per_rank(self) -> int | None:
        size: int | None = self.order.batch_size
        return size

    @property
    def is_endless(self) -> bool:
        return bool(self.order.source.repeating)

    @property
    def stream(self) -> dict[str, Any]:
        """For the header of an audit: what its keys and positions mean."""
        return {"members": self.order.source.members, "is_endless": self.is_endless}

    def number(self, step: int) -> int:
        """For a record of steps: their positions, which mean the same for every number of ranks."""
        return step

    def behind(self, step: int) -> int:
        """The step that follows one."""
        rounds: int = self.order.rounds_at.get(step, 1)
        return step + self.stride * rounds

    def end_of(self, epoch: int, rank: int) -> int:
        if not self.is_endless and epoch != self.order.epoch:
            return 0  # nothing is ordered ahead of a pipeline that may have come to its end
        return stream_end(None if self.is_endless else self.n, rank, uneven=self.uneven, stride=self.stride)

    def batch(self, epoch: int, step: int, rank: int = 0) -> NDArray[np.int64]:
        if self.order.rounds > 1:
            self.order.rounds_at[step] = self.order.rounds
        else:
            self.order.rounds_at.pop(step, None)
        return self._keys(epoch, self.positions(step, rank))

    def positions(self, step: int, rank: int) -> NDArray[np.int64]:
        """Of a rank's items at a step; at n and beyond, in a pipeline that does not repeat, stands padding."""
        return stream_positions(
            step,
            rank,
            n=None if self.is_endless else self.n,
            uneven=self.uneven,
            world_size=self.world_size,
            batch_size=self.order.batch_size,
            num_rounds=self.order.rounds_at.get(step, 1),
        )

    def position(self, step: int) -> int:
        """Items that all ranks have had before a step."""
        return step if self.is_endless else min(step, self.n)

    def num_valid(self, epoch: int, step: int, rank: int) -> int:
        positions = self.positions(step, rank)
        return len(positions) if self.is_endless else int((positions < self.n).sum())

    def counters(self, epoch: int, step: int) -> Any:
        """What a resume needs besides its position: of a Join, what each member has had."""
        return self.order.source.counters_at(self._at(epoch, self.position(step))) or None

    def index_after(self, epoch: int, step: int, rank: int, row: int, distance: int) -> int:
        """The key so many places behind that of a row."""
        return int(self._keys(epoch, self.positions(step, rank)[row : row + 1] + distance)[0])

    def _at(self, epoch: int, position: int) -> int:
        """The position as the source counts."""
        return position if self.is_endless else epoch * self.n + position

    def _keys(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(positions):
            return np.empty(0, np.int64)
        source: Keys = self.order.source
        if not self.is_endless:
            positions = positions % self.n + epoch * self.n
        first, last = int(positions.min()), int(positions.max())
        if last - first < 64 * len(positions):
            return source.take(first, last + 1)[positions - first]
        return np.concatenate([source.take(at, at + 1) for at in positions.tolist()])  # padding, far from the rest
