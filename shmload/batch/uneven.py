"""Describe a field that became a list in one batch, and is a tensor in batches whose samples are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def sample_name(key: Any) -> str:
    """Return the name of a sample in messages."""
    return f"sample {key!s:.200}"


class Uneven(NamedTuple):
    """The first field of a batch whose samples cannot be stacked, although one of them could be.

    Attributes:
        field: its path; "data" if it is the samples themselves.
        num_samples: number of samples in the batch.
        rows: the rows of two samples that differ.
        kinds: their types or shapes, as text.
        can_pad: whether the rows of this batch differ only in their first dimension or dtype, so that `ragged="pad"` pads them.
    """

    field: str
    num_samples: int
    rows: tuple[int, int]
    kinds: tuple[str, str]
    can_pad: bool

    def difference(self, keys: Sequence[Any] | NDArray[np.int64] | None, name: Callable[[Any], str] = sample_name) -> str:
        """Return the two samples and how they differ.

        Args:
            keys: the keys of the batch's samples, if they are known.
            name: the name of the sample with a key.
        """
        of_rows = keys if keys is not None and len(keys) == self.num_samples else [None] * self.num_samples
        names = [f"row {row}" if of_rows[row] is None else f"{name(of_rows[row])} (row {row})" for row in self.rows]
        return " and ".join(f"{sample} is {kind}" for sample, kind in zip(names, self.kinds, strict=True))

    def warning(self, where: str, difference: str) -> str:
        """Return the warning about the batch.

        Args:
            where: name of the batch.
            difference: a result of `difference`.
        """
        pad = 'ragged="pad" pads rows of different lengths, and raises an error for rows that cannot be joined; '
        return (
            f"{where}: field {self.field!r} is a list of the samples' values, because these cannot be stacked: {difference}. "
            f'Correct the data if other batches are tensors. {pad if self.can_pad else ""}ragged="list" accepts lists and stops '
            "this warning, which is given once"
        )
