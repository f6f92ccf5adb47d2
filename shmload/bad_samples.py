"""What is done about a sample that cannot be read: `on_error`.

A worker reports which rows of its batch it cannot read. "raise" raises its error; "skip" orders the batch again without them,
"substitute" with another index in their place. So the batch is made anew of what is then ordered, by the same code on the same
path, and the outcome depends on the bad samples alone, not on workers or timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shmload.errors import SampleError

if TYPE_CHECKING:
    from shmload.orders import Order

LISTED_MAX = 1000  # bad samples that stats() tells of singly
SUBSTITUTES_MAX = 100  # indices tried in place of one bad sample

OnError = Literal["raise", "skip", "substitute"]


class BadSamples:
    """Counts and replaces them, over the life of one loader.

    Args:
        max_bad: more bad samples than this raise SampleError; None: any number may be bad.
        next_index: (order, row, tries) -> the index that takes a row's place at that try, from 1.
    """

    def __init__(self, on_error: OnError, max_bad: int | None, next_index: Callable[[Order, int, int], int]) -> None:
        self._on_error = on_error
        self._max_bad = max_bad
        self._next_index = next_index
        self.count = 0
        self.listed: list[dict[str, Any]] = []

    @property
    def are_tolerated(self) -> bool:
        """Whether a bad sample may be anything but an error."""
        return self._on_error != "raise"

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        """The order's indices without its bad rows, or with others in their place.

        Raises:
            the worker's error, if on_error is "raise".
            SampleError: there are more bad samples than `max_bad`, or too many substitutes were bad, too.
        """
        if not self.are_tolerated:
            raise error()
        if order.ordered is None:
            order.ordered = order.indices
        origins = order.origins or [(row, 0) for row in range(order.nrows)]
        indices = list(order.indices)
        cause = error()
        for row in bad:
            self._count(order, row, indices[row], cause)
            first_row, tries = origins[row]
            if self._on_error == "substitute":
                if tries == SUBSTITUTES_MAX:
                    raise SampleError(
                        f"{SUBSTITUTES_MAX} samples tried in place of one bad sample of epoch {order.epoch} are bad, too: "
                        "look at the dataset"
                    ) from cause
                origins[row] = (first_row, tries + 1)
                indices[row] = self._next_index(order, first_row, tries + 1)
        if self._on_error == "skip":
            good = sorted(set(range(order.nrows)).difference(bad))
            indices, origins = [indices[row] for row in good], [origins[row] for row in good]
        order.origins = origins
        return np.array(indices, np.int64) if isinstance(order.indices, np.ndarray) else indices

    def _count(self, order: Order, row: int, index: Any, error: BaseException) -> None:
        self.count += 1
        if len(self.listed) < LISTED_MAX:
            lines = str(error).strip().splitlines() or [""]
            kind = type(error).__name__
            self.listed.append(
                {
                    "epoch": order.epoch,
                    "step": order.step,
                    "index": int(index) if isinstance(index, np.integer) else index,
                    # the last line of a worker's traceback, or the first of what was raised here, without the type's module
                    "error": f"{kind}: {lines[-1 if lines[0].startswith('Caught ') else 0].partition(f'{kind}: ')[2] or lines[0]}",
                }
            )
        if self._max_bad is not None and self.count > self._max_bad:
            raise SampleError(
                f"{self.count} bad samples are more than max_bad={self._max_bad} allows; the last was sample {index} of epoch "
                f"{order.epoch}. stats()['bad_samples'] lists them; mend the data, or raise max_bad"
            ) from error
