"""What the loader asks of the engine, and what it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shmload._core.trainer import ANYONE
from shmload.worker.notes import Note


@dataclass(eq=False, slots=True)
class Order:
    """One batch to be made: which, of which samples, and (in torch mode) by which worker. `slot` is -1 until published.

    An iterable dataset's order has as many indices as samples are wanted, each of them the pass's shared seed.
    """

    epoch: int
    step: int
    indices: Sequence[Any] | np.ndarray[Any, Any]
    worker: int = ANYONE
    slot: int = -1
    is_given: bool = False  # the indices are a batch sampler's own object, which `__getitems__` gets as it is
    origins: list[tuple[int, int]] | None = (
        None  # of rows after bad samples: which row they were ordered as, substitutes tried
    )
    ordered: Sequence[Any] | np.ndarray[Any, Any] | None = None  # the indices before bad samples; None: there were none

    @property
    def nrows(self) -> int:
        """Rows of the batch."""
        return len(self.indices)


class Delivery(NamedTuple):
    """An order's batch, and in torch mode what its worker said of itself. `batch` is NOTHING if none came of the order."""

    order: Order
    batch: Any
    note: Note | None


NOTHING = (
    object()
)  # the iterator of an iterable dataset was at its end, or every sample of the batch was bad and is skipped
