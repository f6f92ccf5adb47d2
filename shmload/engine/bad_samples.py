"""Skip or replace samples that cannot be read, according to the loader's `on_error`.

A worker reports the rows of its batch that it could not read. "raise" raises its error, "skip" orders the batch again without these
rows, and "substitute" orders it with other indices in their place. The new order is read in the same way as the first, so the
outcome depends only on the bad samples, not on workers or timing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from shmload._core.trainer import Order
from shmload.batch.uneven import Uneven, sample_name
from shmload.errors import SampleError

log = logging.getLogger("shmload")

LISTED_MAX = 1000  # most bad samples that stats() lists
SUBSTITUTES_MAX = 100  # most indices tried in place of one bad sample

OnError = Literal["raise", "skip", "substitute"]
NextIndex: TypeAlias = Callable[[Order, int, int], Any]  # (order, row, tries) -> index; see `BadSamples`


class BadSamples:
    """The count of one loader's bad samples over its whole life, and the rule by which they are replaced.

    Args:
        on_error: "raise", "skip" or "substitute".
        max_bad: more bad samples than this raise SampleError; None allows any number.
        next_index: (order, row, tries) -> the index that replaces a row of the batch as first ordered. `tries` numbers the
            substitutes of the row from 1. Needed for "substitute", and may be set after construction.

    Attributes:
        count: bad samples so far.
        num_irregular: files read in this process that break a rule of their format; the ring counts those of workers.
        listed: a dict for each of the first `LISTED_MAX` bad samples.
        step_stride: difference between the step numbers of successive batches.
    """

    def __init__(self, on_error: OnError, max_bad: int | None, next_index: NextIndex | None = None) -> None:
        self._on_error, self._max_bad, self.next_index = on_error, max_bad, next_index
        self.count = 0
        self.num_irregular = 0
        self.listed: list[dict[str, Any]] = []
        self.step_stride = 1
        self._has_uneven = False

    def report_uneven(self, order: Order, found: Uneven) -> None:
        """Log a warning about the loader's first batch that has a list in place of a tensor, because its samples differ.

        Args:
            order: the order of the batch.
            found: the field and two samples that differ.
        """
        if self._has_uneven:
            return
        self._has_uneven = True
        where = f"epoch {order.epoch}, batch {order.step // self.step_stride}"
        log.warning("%s", found.warning(where, found.difference(order.indices, self.name)))

    def name(self, key: Any) -> str:
        """Return the name of a sample in messages."""
        return sample_name(key)

    @property
    def are_tolerated(self) -> bool:
        """Return whether a bad sample is skipped or replaced instead of raised."""
        return self._on_error != "raise"

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        """Return an order's indices without its bad rows, or with other indices in their place, and count the bad rows.

        Args:
            order: the order. Its `ordered` is set to the indices as first ordered, and its `origins` to two numbers for each new
                row: its row as first ordered, and how many substitutes were tried for it. Its `indices` stay as they are.
            bad: rows that could not be read.
            error: returns the worker's error.
        Returns:
            an int64 array if `order.indices` is an array, else a list.
        Raises:
            the worker's error, if on_error is "raise".
            SampleError: there are more bad samples than `max_bad`, or `SUBSTITUTES_MAX` substitutes were bad, too.
        """
        if not self.are_tolerated:
            raise error()
        if order.ordered is None:
            order.ordered = order.indices
        origins = order.origins or [(row, 0) for row in range(order.nrows)]
        indices = list(order.indices)
        cause = error()
        for row in bad:
            self._count(order, indices[row], cause)
            first_row, tries = origins[row]
            if self._on_error == "substitute":
                if tries == SUBSTITUTES_MAX:
                    raise SampleError(
                        f"{SUBSTITUTES_MAX} substitutes for one bad sample of epoch {order.epoch} were bad, too: check the dataset"
                    ) from cause
                origins[row] = (first_row, tries + 1)
                assert self.next_index is not None
                indices[row] = self.next_index(order, first_row, tries + 1)
        if self._on_error == "skip":
            good = sorted(set(range(order.nrows)).difference(bad))
            indices, origins = [indices[row] for row in good], [origins[row] for row in good]
        order.origins = origins
        return np.array(indices, np.int64) if isinstance(order.indices, np.ndarray) else indices

    def _count(self, order: Order, index: Any, error: BaseException) -> None:
        """Count and list a bad sample; raise SampleError if there are more than `max_bad`."""
        self.count += 1
        if len(self.listed) < LISTED_MAX:
            lines = str(error).strip().splitlines() or [""]
            kind = type(error).__name__
            self.listed.append(
                {
                    "epoch": order.epoch,
                    "step": order.step,
                    "index": int(index) if isinstance(index, np.integer) else index,
                    # the last line of a worker's traceback, or the first line of an error raised here, without the type's module
                    "error": f"{kind}: {lines[-1 if lines[0].startswith('Caught ') else 0].partition(f'{kind}: ')[2] or lines[0]}",
                }
            )
        if self._max_bad is not None and self.count > self._max_bad:
            raise SampleError(
                f"{self.count} bad samples are more than max_bad={self._max_bad} allows; the last was sample {index} of epoch "
                f"{order.epoch}. stats()['bad_samples'] lists them; repair the data, or raise max_bad"
            ) from error
