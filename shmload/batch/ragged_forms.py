"""The two forms in which the trainer receives a ragged field: padded and jagged."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Padded(NamedTuple):
    """The rows of a ragged field, padded with zeros to the longest of the batch: `ragged="pad"`.

    Attributes:
        values: shape `(batch_size, longest, ...)`, the samples' dtype; aliases the slot as every tensor of a batch does.
        lengths: length of each row, int64, shape `(batch_size,)`; `(batch_size, k)` if the schema has k ragged dimensions.
    Example:
        >>> import numpy as np
        >>> from shmload import ShmLoader
        >>> (batch,) = ShmLoader([np.arange(1), np.arange(3)], batch_size=2, ragged="pad")
        >>> batch.values.tolist(), batch.lengths.tolist()
        ([[0, 0, 0], [0, 1, 2]], [1, 3])
    """

    values: torch.Tensor
    lengths: torch.Tensor


class Jagged(NamedTuple):
    """The rows of a ragged field, end to end: `ragged="jagged"`, the form used by attention over sequences of varying length.

    Row i is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: shape `(sum of lengths, ...)`, the samples' dtype; aliases the slot as every tensor of a batch does.
        offsets: offset of each row and the end of the last one; int64, shape `(batch_size + 1,)`.
    Example:
        >>> import numpy as np
        >>> from shmload import ShmLoader
        >>> (batch,) = ShmLoader([np.arange(1), np.arange(3)], batch_size=2, ragged="jagged")
        >>> batch.values.tolist(), batch.offsets.tolist()
        ([0, 0, 1, 2], [0, 1, 4])
    """

    values: torch.Tensor
    offsets: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """Return the length of each row, int64, shape `(batch_size,)`."""
        return self.offsets.diff()
