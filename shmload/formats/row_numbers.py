"""Checks of the row numbers that are requested from a dataset."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def checked_indices(indices: Any, num_rows: int) -> Indices:
    """Return indices as row numbers, int64, from 0 on. Negative indices count from the end.

    Raises:
        IndexError: an index is out of range.
        TypeError: they are not integers.
    """
    given = np.asarray(indices)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"indices are integers; got {given.dtype}")
    rows = given.astype(np.int64)
    outside = (rows < -num_rows) | (rows >= num_rows) | ((rows < 0) & (given > 0))  # a uint64 beyond int64 becomes negative
    if outside.any():
        raise IndexError(f"index {given[outside][0]} is out of range: the dataset has {num_rows} samples")
    return np.where(rows < 0, rows + num_rows, rows)


def checked_index(index: Any, num_rows: int) -> int:
    """Return a single index as a row number, like `checked_indices` at a tenth of its cost.

    Raises:
        IndexError: the index is out of range.
        TypeError: it is not an integer.
    """
    number = operator.index(index)
    if not -num_rows <= number < num_rows:
        raise IndexError(f"index {number} is out of range: the dataset has {num_rows} samples")
    return number + num_rows if number < 0 else number
