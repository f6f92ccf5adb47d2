"""What ragged fields are delivered as, where that is neither a list nor a `torch.nested` tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Padded(NamedTuple):
    """A ragged field's rows, filled up with zeros to the longest of the batch: `ragged="pad"`.

    Attributes:
        values: shape `(batch_size, longest, ...)`, the samples' dtype; aliases the slot as every tensor of a batch does.
        lengths: how long each row is, int64, shape `(batch_size,)`; `(batch_size, k)` where a schema has k ragged dimensions.
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
    """A ragged field's rows end to end: `ragged="jagged"`, as attention over sequences of varying length takes them.

    Row i is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: shape `(sum of lengths, ...)`, the samples' dtype; aliases the slot as every tensor of a batch does.
        offsets: where each row begins, and where the last one ends; int64, shape `(batch_size + 1,)`.
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
        """How long each row is, int64, shape `(batch_size,)`."""
        return self.offsets.diff()
