"""Samples out of arrays: one row of each is a sample, and rows go straight into the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from shmload.batch.array_rows import ArrayRows
from shmload.formats.arrays.held import HeldArrays


class ArrayDataset:
    """Samples that are rows of arrays.

    Arrays in memory are read where they are, and not copied for forked workers; for others they are put into shared memory
    once, when the dataset is pickled or by `shared`, and changes made to the originals later do not show.

    Args:
        arrays: what a batch looks like: a dict, a tuple, a list, a named tuple, or one alone, of `.npy` paths, memmaps, numpy
            arrays (strided ones, any byte order) and torch tensors of the CPU. The first axis counts samples.
    Raises:
        ShardCorrupt: a file is not what its head says.
        TypeError, ValueError: the arrays' rows make no samples; the message names the array.
    Cost: a copy of each row; the GIL is released while a batch is gathered.
    Thread/process safety: reading is safe from any thread; a pickled dataset lives as long as the one it was made of.
    Example:
        >>> import numpy as np
        >>> from shmload.formats import ArrayDataset
        >>> dataset = ArrayDataset({"x": np.arange(6).reshape(3, 2), "y": np.arange(3)})
        >>> len(dataset), dataset[-1]["x"].tolist()
        (3, [4, 5])
    """

    def __init__(self, arrays: Any) -> None:
        self.batch_type: Any
        if isinstance(arrays, Mapping):
            self.batch_type, named = dict, {str(k): v for k, v in arrays.items()}
        elif isinstance(arrays, (tuple, list)):
            self.batch_type = type(arrays)
            names = getattr(arrays, "_fields", None) or [str(i) for i in range(len(arrays))]
            named = dict(zip(names, arrays, strict=True))
        else:
            self.batch_type, named = "single", {"data": arrays}
        self._held = HeldArrays(named)
        self._bind()

    def _bind(self) -> None:
        self._rows = ArrayRows(self._held.arrays)
        self.schema = self._rows.schema

    def read_batch_into(self, indices: Any, out: Any) -> None:
        """Writes the rows of these numbers.

        Args:
            indices: int64, shape `(rows,)`.
            out: an array for each field, C-contiguous, with a leading dimension of `rows`.
        """
        self._held.check()
        self._rows.read_batch_into(indices, out)

    def shared(self) -> Self:
        """This dataset, its arrays in shared memory from now on."""
        self._held.share()
        self._bind()
        return self

    def __len__(self) -> int:
        return self._rows.num_rows

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        self._held.check()
        values = [_row(array[index], dtype) for array, dtype in self._held.arrays.values()]
        if self.batch_type == "single":
            return values[0]
        if self.batch_type is dict:
            return dict(zip(self.schema, values, strict=True))
        return self.batch_type(*values) if hasattr(self.batch_type, "_fields") else self.batch_type(values)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> tuple[Any, HeldArrays]:
        self.shared()
        return self.batch_type, self._held

    def __setstate__(self, state: tuple[Any, HeldArrays]) -> None:
        self.batch_type, self._held = state
        self._bind()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {dtype}{list(shape)}" for name, (dtype, shape) in self.schema.items())
        return f"<{type(self).__name__} of {len(self)} samples, {fields}>"


def _row(row: Any, dtype: str) -> Any:
    copied = np.array(row, row.dtype.newbyteorder("="))
    try:
        is_numpys = np.dtype(dtype) == copied.dtype
    except TypeError:  # bfloat16 and the like
        is_numpys = False
    if is_numpys:
        return copied if copied.ndim else copied[()]
    import torch

    return torch.from_numpy(copied).view(getattr(torch, dtype))
