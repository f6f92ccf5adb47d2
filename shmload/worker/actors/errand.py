"""What travels between the agent and an actor: the claim as an errand, and what came of it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload.worker.spec import Post


@dataclass(frozen=True)
class Setting:
    """What an actor is made with: its post, and the sizes of the real ring's areas, so that what fits the actor's fits it."""

    post: Post
    paths: Sequence[str]  # the trainer's sys.path
    text_capacity: int
    layout_capacity: int
    sample_timeout_s: float | None = None


class Errand(NamedTuple):
    """One claim: rows `first` to `end` of an order."""

    epoch: int
    step: int
    first: int
    end: int
    nrows: int  # of the whole order
    order: bytes  # the whole order's, as it stands in the ring
    is_pickled: bool
    is_packed: bool

    def key(self, row: int) -> Any:
        """What the order asks for in a row of the whole batch."""
        if self.is_pickled:
            return list(pickle.loads(self.order))[row]  # the trainer's own
        return int.from_bytes(self.order[8 * row : 8 * row + 8], sys.byteorder, signed=True)


class Outcome(NamedTuple):
    """What an actor has made of an errand.

    `own` is DONE or ERROR. `row_nbytes` has the bytes of one row for each field where the payload holds rows, and is None where it
    holds a packed batch (or, empty, nothing). `layout` is the text of the actor's own layout, b"" if its samples have no fixed
    rows, None if it does not know yet. `note` is a worker's snapshot and whether its iterator has ended. `place` is the actor's:
    Ray's id of its node, and its pid there; None: no actor has answered.
    """

    own: int
    payload: NDArray[np.uint8]
    row_nbytes: tuple[int, ...] | None
    layout: bytes | None
    note: tuple[bytes, bool] | None
    error: bytes
    num_foreign: int
    place: tuple[str, int] | None = None
