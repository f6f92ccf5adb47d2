"""Arrays whose first axis counts samples, gathered row by row into a batch (src/array_rows.pyx).

An array here is numpy's, or a torch tensor's memory seen as numbers of the same width: which type they are matters only
for the batch.

A column of an arrow table as addresses: where the bytes of each row lie, chunk by chunk.

Arrow keeps the values of a column end to end, however deeply lists are nested around them; offsets (or a fixed length) say where
each row's begin. So a row of a column whose lists are all equally long is one run of bytes at a place that follows from its
number, and a row of text or of a ragged list is one run between two offsets. Nothing is copied or decoded to know this; the
buffers may be those of a file that is mapped into memory, and then every worker reads the same pages.

Offsets are believed only after they were looked at: what lies outside a chunk's values is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shmload._core.array_rows import RowGather
from shmload._core.gather import gather_rows, gather_runs
from shmload.batch.layout import is_plain_tensor, of_numpy, of_torch
from shmload.batch.ragged import TextRuns
from shmload.errors import SampleError

_SAME_WIDTH = {1: "uint8", 2: "int16", 4: "int32"}  # what a tensor of a type that numpy lacks is seen as


class TypedArray(NamedTuple):
    """An array and the name of its elements' type."""

    array: NDArray[Any]
    dtype: str

    @property
    def spec(self) -> tuple[str, tuple[int, ...]]:
        """Its field of a schema."""
        return self.dtype, self.array.shape[1:]


def typed_array(name: object, value: Any) -> TypedArray:
    """The memory of a numpy array or a torch tensor, not copied.

    Raises:
        TypeError, ValueError: rows of it cannot be rows of a tensor.
    """
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
        raise TypeError(f"array {name!r} is a {type(value).__name__}; needs a numpy array, a torch tensor or a .npy path")
    if element is None:
        raise TypeError(f"array {name!r} has dtype {value.dtype}, which no tensor has: convert it to numbers before")
    if array.ndim == 0:
        raise ValueError(f"array {name!r} has no axis: the first axis counts samples")
    return TypedArray(array, element.name)


class ArrayRows:
    """Named arrays of equally many rows."""

    def __init__(self, arrays: Mapping[str, TypedArray]) -> None:
        lengths = {name: len(a.array) for name, a in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all arrays have one row for each sample; got {lengths or 'no array'}")
        self.schema = {name: a.spec for name, a in arrays.items()}
        self._gathers = {name: _gather_of(a.array) for name, a in arrays.items()}
        self.num_rows = next(iter(lengths.values()))

    def read_batch_into(self, indices: Any, out: Any) -> None:
        """Writes the rows of these numbers; each field of `out` is C-contiguous, of the schema's type."""
        chosen = np.ascontiguousarray(indices, np.int64)
        for name, gather in self._gathers.items():
            address, nbytes = place_of(name, out[name])
            gather.into(address, nbytes, chosen)


def place_of(name: str, rows: Any) -> tuple[int, int]:
    """Address and bytes of a field of a batch.

    Raises:
        ValueError: it is not one run of memory.
    """
    if isinstance(rows, np.ndarray):
        if not rows.flags.c_contiguous:
            raise ValueError(f"field {name!r}: rows are written into C-contiguous memory; got strides {rows.strides}")
        return rows.__array_interface__["data"][0], rows.nbytes  # half of what .ctypes costs
    if not rows.is_contiguous():
        raise ValueError(f"field {name!r}: rows are written into C-contiguous memory; got strides {rows.stride()}")
    return rows.data_ptr(), rows.nbytes


def _gather_of(array: NDArray[Any]) -> RowGather:
    """Divides a row into as few runs as its strides allow."""
    item_nbytes, axes = array.itemsize, list(zip(array.shape[1:], array.strides[1:], strict=True))
    is_empty = array.size == 0
    while axes and (axes[-1][1] == item_nbytes or axes[-1][0] == 1) and not is_empty:
        item_nbytes *= axes.pop()[0]
    count, item_stride = axes.pop() if axes and not is_empty else (0 if is_empty else 1, item_nbytes)
    offsets = [sum(places) for places in product(*(range_of(n, step) for n, step in axes))] if not is_empty else [0]
    width = array.itemsize // (2 if array.dtype.kind == "c" else 1)
    swap = 1 if array.dtype.isnative else width
    address, stride = array.__array_interface__["data"][0], array.strides[0]
    return RowGather(address, len(array), stride, np.array(offsets, np.int64), count, item_nbytes, item_stride, swap, array)


def range_of(count: int, step: int) -> list[int]:
    """`count` multiples of a step, which may be 0 where an array is broadcast."""
    return [i * step for i in range(count)]


Indices = NDArray[np.int64]
Chunk = tuple[int, int, int, int]  # address of element 0, of the first offset (0: rows of one length), first, last element


@dataclass(frozen=True, eq=False)
class ArrowColumn:
    """One column.

    Attributes:
        dtype: numpy's of the values; str or bytes for text.
        extents: shape of a row; None in front: rows differ in it.
        is_variable: whether the first dimension may differ between rows, by its type.
        starts: row number at which each chunk begins, and the number of rows.
        table: keeps the memory.
    """

    name: str
    dtype: Any
    extents: tuple[int | None, ...]
    is_variable: bool
    starts: Indices
    chunks: NDArray[np.int64]  # a Chunk each
    offset_nbytes: int
    table: Any = field(repr=False)  # which would print its values

    @property
    def element_nbytes(self) -> int:
        """Bytes of one element of the first dimension; of a row where there is none."""
        return 1 if self.dtype in (str, bytes) else prod(self.inner) * int(self.dtype.itemsize)

    @property
    def inner(self) -> tuple[int, ...]:
        """The extents behind the first."""
        return tuple(e for e in self.extents[1:] if e is not None)

    def read(self, rows: Indices, out: NDArray[Any]) -> None:
        """Copies rows of one shape to `out`, of shape `(len(rows), *extents)`, converting them to its dtype."""
        chunk, local = self._located(rows)
        origins = self.chunks[chunk, 0]
        if self.dtype == np.bool_:
            bits = self.chunks[chunk, 2] + local
            held = np.empty(len(rows), np.uint8)
            gather_rows(origins + (bits >> 3), 1, held)
            out[...] = (held >> (bits & 7).astype(np.uint8)) & 1
            return
        nbytes = self.element_nbytes * ((self.extents[0] or 0) if self.extents else 1)
        addresses = origins + self.chunks[chunk, 2] * self.element_nbytes + local * nbytes
        if out.dtype == self.dtype:
            gather_rows(addresses, nbytes, out.reshape(-1).view(np.uint8))
            return
        rows_read = np.empty(out.shape, self.dtype)
        gather_rows(addresses, nbytes, rows_read.reshape(-1).view(np.uint8))
        with np.errstate(all="ignore"):  # a float64 beyond float32 is inf, as torch has it
            out[...] = rows_read

    def lengths(self, rows: Indices) -> tuple[Indices, Indices]:
        """Of ragged rows: (address, number of elements) of each."""
        chunk, local = self._located(rows)
        origins, _, first, last = self.chunks[chunk].T
        if not self.offset_nbytes:
            length = self.extents[0] or 0
            return origins + local * length * self.element_nbytes, np.full(len(rows), length, np.int64)
        pairs = np.empty((len(rows), 2), np.int32 if self.offset_nbytes == 4 else np.int64)
        addresses = self.chunks[chunk, 1] + local * self.offset_nbytes
        gather_rows(addresses, 2 * self.offset_nbytes, pairs.reshape(-1).view(np.uint8))
        begin, end = pairs.T.astype(np.int64)
        if (begin < first).any() or (end > last).any() or (end < begin).any():
            raise SampleError(
                f"column {self.name!r} of the arrow table has offsets that are not in order, or lead out of its values: the file "
                "is damaged; write it anew"
            )
        return origins + begin * self.element_nbytes, end - begin

    def read_ragged(self, rows: Indices, out: Any) -> None:
        """Copies ragged rows to what `out.reserve` gives."""
        addresses, lengths = self.lengths(rows)
        values = out.reserve(self.name, lengths.tolist())
        read = values if values.dtype == self.dtype else np.empty(values.shape, self.dtype)
        gather_runs(addresses, lengths * self.element_nbytes, read.view(np.uint8))
        if read is not values:
            with np.errstate(all="ignore"):
                values[...] = read

    def text(self, rows: Indices, *, strips_nul: bool) -> TextRuns:
        """Rows of text, to be copied from where they lie.

        Args:
            strips_nul: leave out the NULs at the end of values, as numpy's arrays of text do.
        """
        addresses, lengths = self.lengths(rows)
        if strips_nul:
            _strip_nul(addresses, lengths)
        return TextRuns(addresses, lengths, is_bytes=self.dtype is bytes, owner=self.table)

    def _located(self, rows: Indices) -> tuple[Any, Indices]:
        """(chunk, row within it) of each row."""
        if len(self.starts) == 2:
            return np.zeros(len(rows), np.int64), rows
        chunk = np.searchsorted(self.starts, rows, "right") - 1
        return chunk, rows - self.starts[chunk]


def _strip_nul(addresses: Indices, lengths: Indices) -> None:
    """Shortens the values that end with NUL."""
    left = np.flatnonzero(lengths)
    while len(left):
        ends = np.empty(len(left), np.uint8)
        gather_rows(addresses[left] + lengths[left] - 1, 1, ends)
        left = left[ends == 0]
        lengths[left] -= 1
        left = left[lengths[left] > 0]


def column_of(name: str, column: Any) -> ArrowColumn | None:
    """The addresses of a ChunkedArray; None if its rows are no plain numbers, text, or lists of numbers, or some are null."""
    kind, shape = column.type, None
    if isinstance(kind, pa.BaseExtensionType):
        if not _is_array_xd(kind):
            return None
        kind, shape = kind.storage_type, kind.shape
    depth, leaf = 0, kind
    while _is_list(leaf):
        depth, leaf = depth + 1, leaf.value_type
    dtype = _dtype_of(leaf)
    if column.null_count or dtype is None or (depth and (dtype in (str, bytes) or dtype == np.bool_)):
        return None
    arrays = [c if shape is None else c.storage for c in column.chunks if len(c)]
    if not arrays:
        return None
    walks = [_walked(array, dtype, shape) for array in arrays]
    if any(walk is None for walk in walks):
        return None
    chunks, extents = zip(*[walk for walk in walks if walk], strict=True)
    inner = {extents_of[1:] for extents_of in extents}
    outer = {extents_of[0] for extents_of in extents if extents_of}
    if len(inner) > 1 or 0 in next(iter(inner)):
        return None
    first = () if not outer else (outer.pop() if len(outer) == 1 else None,)
    offset_nbytes = 0
    if dtype in (str, bytes) or (depth and (shape is None or shape[0] is None)):
        offset_nbytes = _offset_nbytes(kind)
    return ArrowColumn(
        name,
        dtype,
        (*first, *next(iter(inner))),
        bool(depth) and offset_nbytes > 0,
        np.cumsum([0, *map(len, arrays)], dtype=np.int64),
        np.array(chunks, np.int64),
        offset_nbytes,
        column,
    )


def _walked(array: Any, dtype: Any, shape: tuple[int | None, ...] | None) -> tuple[Chunk, tuple[int | None, ...]] | None:
    """One chunk and the shape of its rows; None if it has nulls inside, or lists in lists that differ in length."""
    if dtype in (str, bytes):
        _, offsets, data = array.buffers()
        places = _offsets_of(array, offsets, 0, len(array))
        first, last = int(places[0]), int(places[-1])
        nbytes = 0 if data is None else data.size
        is_sound = 0 <= first <= last <= nbytes
        return ((data.address if data else 0, places.ctypes.data, first, last), ()) if is_sound else None
    if shape is not None and shape[0] is not None:
        return _walked_array_xd(array, dtype, shape)
    extents: list[int | None] = []
    outer: Any = None  # the first level's offsets, if it has any
    first, count = 0, len(array)
    while _is_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            length: int | None = array.type.list_size
            first, count = (array.offset + first) * array.type.list_size, count * array.type.list_size
        else:
            places = _offsets_of(array, array.buffers()[1], first, count)
            length = _common_length(places)
            if not 0 <= places[0] <= places[-1] <= len(array.values) or (length is None and extents):
                return None
            outer = outer if extents else places
            first, count = int(places[0]), int(places[-1]) - int(places[0])
        array = array.values
        extents.append(length)
        if array.null_count or first + count > len(array):
            return None
    if shape is not None and tuple(extents[1:]) != tuple(shape[1:]):
        return None
    data = array.buffers()[1]
    at = array.offset + first
    if dtype == np.bool_:
        return (data.address, 0, at, at + count), ()
    address = data.address + at * dtype.itemsize if data else 0
    if outer is None:
        return (address, 0, 0, count), tuple(extents)
    element_nbytes = prod(e or 0 for e in extents[1:]) * dtype.itemsize
    origin = address - int(outer[0]) * element_nbytes
    return (origin, outer.ctypes.data, int(outer[0]), int(outer[-1])), tuple(extents)


def _walked_array_xd(array: Any, dtype: Any, shape: tuple[Any, ...]) -> tuple[Chunk, tuple[int, ...]] | None:
    """A chunk of Array2D to Array5D of a fixed shape: only how many values a row has counts, as in datasets itself."""
    places = np.arange(len(array) + 1, dtype=np.int64)
    for _ in shape:
        offsets = _offsets_of(array, array.buffers()[1], 0, len(array))
        if places[0] < 0 or places[-1] >= len(offsets):
            return None
        places = offsets[places]
        array = array.values
        if array.null_count:
            return None
    if not 0 <= places[0] <= places[-1] <= len(array) or _common_length(places) != prod(shape):
        return None
    address = array.buffers()[1].address + (array.offset + int(places[0])) * dtype.itemsize
    return (address, 0, 0, int(places[-1])), tuple(shape)


def _offsets_of(array: Any, buffer: Any, first: int, count: int) -> NDArray[Any]:
    """The offsets of `count` rows of an array from its row `first` on, and one more."""
    if not count:  # which may have no buffer
        return np.zeros(1, np.int64)
    nbytes = _offset_nbytes(array.type)
    return np.frombuffer(buffer, f"int{8 * nbytes}", count + 1, (array.offset + first) * nbytes)


def _common_length(places: NDArray[Any]) -> int | None:
    """How long every row is; None if they differ."""
    count, total = len(places) - 1, int(places[-1]) - int(places[0])
    length = total // count if count else 0
    if total != length * count:  # which most ragged columns show by their sum
        return None
    return length if (np.diff(places) == length).all() else None


def _dtype_of(kind: Any) -> Any:
    """numpy's dtype of the values of an arrow type, str or bytes; None for what is none of these."""
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return str
    if types.is_binary(kind) or types.is_large_binary(kind):
        return bytes
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype())
    return None


def _is_list(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _offset_nbytes(kind: Any) -> int:
    """Bytes of one offset of a type; 0 if it has none."""
    types = pa.types
    if types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return 8
    return 0 if types.is_fixed_size_list(kind) else 4


def _is_array_xd(kind: Any) -> bool:
    return type(kind).__module__ == "datasets.features.features" and hasattr(kind, "shape")
