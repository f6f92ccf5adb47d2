"""The messages between the agent and its actors."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload.worker.job import WorkerLink


@dataclass(frozen=True)
class ActorSetting:
    """The settings of a new actor: its worker's link, and the capacities of the trainer's ring, which its own ring also gets."""

    link: WorkerLink
    paths: Sequence[str]  # the trainer's sys.path
    text_capacity: int
    layout_capacity: int
    sample_timeout_s: float | None = None
    byte: int = 0  # the byte of the control segment that the actor locks (`life_lock.py`)


class Slot(NamedTuple):
    """A batch's slot in the trainer's ring. An actor that can map it decodes there."""

    number: int
    path: str  # the path of its segment
    offset: int  # in the segment
    nbytes: int
    layout: bytes  # the ring's layout, as bytes


class Task(NamedTuple):
    """One claim: rows `first` to `end` of an order."""

    epoch: int
    step: int
    first: int
    end: int
    nrows: int  # number of rows of the whole order
    order: bytes  # the whole order, encoded as in the ring
    is_pickled: bool
    is_packed: bool
    slot: Slot | None = None  # the batch's slot, for direct writes; if None, the actor sends its rows back
    is_suspect: bool = False  # an actor died while reading it, so its samples are read one by one to find the cause

    def key(self, row: int) -> Any:
        """Return the dataset's key for a row, counted in the whole batch."""
        if self.is_pickled:
            return list(pickle.loads(self.order))[row]  # pickled by the trainer
        return int.from_bytes(self.order[8 * row : 8 * row + 8], sys.byteorder, signed=True)


NOTHING = np.empty(0, np.uint8)


class Reply(NamedTuple):
    """The result of a task.

    Attributes:
        own: DONE or ERROR.
        payload: rows of the batch, dense field by field, or a packed batch; empty if there is none or it is already in the slot.
        row_nbytes: the size of one row of each field if the result consists of rows; None if it is a packed batch or there is none.
        layout: the actor's own layout as bytes; b"" if its samples do not have one shape, None if it is not known yet.
        note: the worker's snapshot, and whether its iterator has ended; None if no note is due.
        error: the dumped `Failure`, for ERROR.
        num_foreign, num_irregular: counters of the chunk, as in `WorkerRing.finish`.
        place: the actor's node, by Ray's id, and its pid there; None if no actor has answered.
        num_written: bytes of rows that the actor has written into the slot.
    """

    own: int
    payload: NDArray[np.uint8] = NOTHING
    row_nbytes: tuple[int, ...] | None = None
    layout: bytes | None = None
    note: tuple[bytes, bool] | None = None
    error: bytes = b""
    num_foreign: int = 0
    num_irregular: int = 0
    place: tuple[str, int] | None = None
    num_written: int = 0


class ActorStarted(NamedTuple):
    """An actor's message that it has started and loaded the dataset."""

    place: tuple[str, int]  # as in `Reply`
    host: str
    versions: dict[str, str]  # by name; "" if not installed
