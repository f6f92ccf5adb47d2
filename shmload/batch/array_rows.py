"""Arrays whose first axis counts samples, gathered row by row into a batch (src/array_rows.pyx).

An array is numpy's, or the memory of a torch tensor viewed as numbers of the same width; the type matters only for the batch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.array_rows import RowGather
from shmload._core.gather import gather_rows_to
from shmload.batch.element_types import of_numpy, of_torch
from shmload.batch.layout import is_plain_tensor

_SAME_WIDTH = {1: "uint8", 2: "int16", 4: "int32"}  # numpy's view of tensors whose type numpy lacks


class TypedArray(NamedTuple):
    """An array and the name of its element type."""

    array: NDArray[Any]
    dtype: str

    @property
    def spec(self) -> tuple[str, tuple[int, ...]]:
        """Return the array's field in a schema: its element type and the shape of a row."""
        return self.dtype, self.array.shape[1:]


def is_masked(value: Any) -> bool:
    """Return whether a value is a masked array of numpy's. numpy.ma is not imported for this: it takes 6 MB of each worker."""
    ma = sys.modules.get("numpy.ma")
    return ma is not None and isinstance(value, ma.MaskedArray)


def typed_array(name: object, value: Any) -> TypedArray:
    """Return the memory of a numpy array or a torch tensor, without a copy.

    Args:
        name: name of the array, for errors.
        value: the array.
    Raises:
        TypeError, ValueError: rows of the array cannot become rows of a tensor.
    """
    if is_masked(value):
        raise TypeError(
            f"array {name!r} is masked, and no tensor has a mask: fill it with .filled(...), and give the mask as a field"
        )
    if isinstance(value, np.ndarray):
        element = of_numpy(value.dtype.newbyteorder("="))
        array = value
    elif type(value).__module__.startswith("torch") and hasattr(value, "data_ptr"):
        if not is_plain_tensor(value):
            raise TypeError(
                f"array {name!r} is a tensor on {value.device} with layout {value.layout} and requires_grad="
                f"{value.requires_grad}; rows are read from dense tensors in the CPU's memory: .detach(), .to_dense() or .cpu()"
            )
        element = of_torch(value.dtype)
        if element is not None:
            import torch

            same_width = value if element.numpy is not None else value.view(getattr(torch, _SAME_WIDTH[element.itemsize]))
            array = same_width.numpy()
    else:
        raise TypeError(f"array {name!r} is of type {type(value).__name__}; needs a numpy array, a torch tensor or a .npy path")
    if element is None:
        raise TypeError(f"array {name!r} has dtype {value.dtype}, which no tensor has: convert it to numbers first")
    if array.ndim == 0:
        raise ValueError(f"array {name!r} has no axis: the first axis counts samples")
    return TypedArray(array, element.name)


class ArrayRows:
    """Named arrays with the same number of rows, which are gathered into batches. It keeps the arrays alive.

    Args:
        arrays: the arrays by name.
    Attributes:
        schema: type and shape of a row of each array, by name.
        num_rows: number of rows.
    Raises:
        ValueError: the arrays differ in their number of rows, or there are none.
    """

    def __init__(self, arrays: Mapping[str, TypedArray]) -> None:
        lengths = {name: len(a.array) for name, a in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"arrays must have one row for each sample; got {lengths or 'no array'}")
        self.schema = {name: a.spec for name, a in arrays.items()}
        self._arrays = arrays
        self.num_rows = next(iter(lengths.values()))

    @cached_property
    def _gathers(self) -> dict[str, RowGather]:
        # made at the first read, because a loader asks for the schemas of thousands of members of a concatenation
        return {name: _gather_of(a.array) for name, a in self._arrays.items()}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        """Write the rows with these indices.

        Args:
            indices: int64, shape `(rows,)`; negative ones count from the end.
            out: for each field an array or tensor of the schema's type, C-contiguous, with a leading dimension of `rows`.
        Raises:
            IndexError: an index is out of range.
            ValueError: a field is not contiguous or has another size.
        """
        chosen = np.ascontiguousarray(indices, np.int64)
        for name, gather in self._gathers.items():
            address, nbytes = place_of(name, out[name])
            gather.into(address, nbytes, chosen)


class PooledRows:
    """The rows of several `ArrayRows` of one schema, gathered together by their addresses.

    Args:
        members: the `ArrayRows`, which must be kept alive.
    Raises:
        ValueError: the bytes of a row are not contiguous.
    """

    def __init__(self, members: Sequence[ArrayRows]) -> None:
        self._fields: dict[str, tuple[NDArray[np.int64], NDArray[np.int64], int]] = {}  # first rows, strides, bytes of a row
        for name in members[0].schema:
            arrays = [member._arrays[name].array for member in members]
            if not all(array[:1].flags.c_contiguous and array.dtype.isnative for array in arrays):
                raise ValueError(f"field {name!r}: the bytes of a row are not contiguous")
            first = np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
            nbytes = arrays[0].itemsize * math.prod(arrays[0].shape[1:])
            self._fields[name] = first, np.array([array.strides[0] for array in arrays], np.int64), nbytes

    def read_into(self, which: NDArray[np.int64], rows: NDArray[np.int64], out: Any) -> None:
        """Write rows into a batch.

        Args:
            which: the member of each row; int64, shape `(rows,)`.
            rows: the number of each row in its member, which must exist; int64, shape `(rows,)`.
            out: as for `ArrayRows.read_batch_into`.
        Raises:
            ValueError: a field is not contiguous or has another size.
        """
        for name, (first, strides, nbytes) in self._fields.items():
            gather_rows_to(first[which] + rows * strides[which], nbytes, *place_of(name, out[name]))


def place_of(name: str, rows: Any) -> tuple[int, int]:
    """Return the address and the number of bytes of a batch's field.

    Args:
        name: name of the field, for errors.
        rows: the field's memory.
    Raises:
        ValueError: the memory is not contiguous.
    """
    if isinstance(rows, np.ndarray):
        if not rows.flags.c_contiguous:
            raise ValueError(f"field {name!r}: rows are written into C-contiguous memory; got strides {rows.strides}")
        return rows.__array_interface__["data"][0], rows.nbytes  # takes half the time of .ctypes
    if not rows.is_contiguous():
        raise ValueError(f"field {name!r}: rows are written into C-contiguous memory; got strides {rows.stride()}")
    return rows.data_ptr(), rows.nbytes


def _gather_of(array: NDArray[Any]) -> RowGather:
    """Return a gatherer that divides a row into as few contiguous runs as its strides allow."""
    item_nbytes, axes = array.itemsize, list(zip(array.shape[1:], array.strides[1:], strict=True))
    is_empty = array.size == 0
    while axes and (axes[-1][1] == item_nbytes or axes[-1][0] == 1) and not is_empty:
        item_nbytes *= axes.pop()[0]
    count, item_stride = axes.pop() if axes and not is_empty else (0 if is_empty else 1, item_nbytes)
    offsets = [sum(places) for places in product(*([i * step for i in range(n)] for n, step in axes))] if not is_empty else [0]
    width = array.itemsize // (2 if array.dtype.kind == "c" else 1)
    swap = 1 if array.dtype.isnative else width
    address, stride = array.__array_interface__["data"][0], array.strides[0]
    return RowGather(address, len(array), stride, np.array(offsets, np.int64), count, item_nbytes, item_stride, swap, array)
