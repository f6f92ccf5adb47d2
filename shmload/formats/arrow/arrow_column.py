"""`ArrowColumn`: the addresses of a column's rows in the memory of an arrow table, chunk by chunk.

Arrow stores the values of a column contiguously, even if they are in nested lists; offsets (or a fixed length) define where each
row begins. So if all lists have one length, a row is one run of bytes at an address that follows from its number, and a row of text
or of a ragged list is one run between two offsets. Nothing is copied or decoded to find the rows. If the buffers are those of a
mapped file, every worker reads the same pages.

Offsets are checked before they are used: nothing outside the values of a chunk is ever read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shmload._core.gather import gather_rows, gather_runs
from shmload.batch.text_runs import TextRuns
from shmload.errors import SampleError
from shmload.formats.arrow.arrow_types import dtype_of, is_list, offset_nbytes
from shmload.formats.row_numbers import Indices

# address of element 0; address of the first offset, or 0 without offsets; number of the first element; number after the last one
Chunk = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class ArrowColumn:
    """A column of one or several groups, as addresses of its rows.

    Attributes:
        name: name of the column.
        dtype: numpy's dtype of the values; str or bytes for text.
        extents: shape of a row; a leading None means that rows differ in length.
        is_variable: whether the arrow type allows rows of different lengths.
        starts: row number at which each chunk begins, and the number of rows; shape `(chunks + 1,)`.
        chunks: a `Chunk` for each arrow chunk; shape `(chunks, 4)`.
        offset_nbytes: number of bytes of one offset; 0 if rows have one length.
        table: keeps the memory alive.
    """

    name: str
    dtype: Any
    extents: tuple[int | None, ...]
    is_variable: bool
    starts: Indices
    chunks: NDArray[np.int64]
    offset_nbytes: int
    table: Any = field(repr=False)  # its repr would print all values

    @property
    def element_nbytes(self) -> int:
        """Return the size of one element of the first dimension in bytes, or of a row if it has no dimensions."""
        return 1 if self.dtype in (str, bytes) else prod(self.inner) * int(self.dtype.itemsize)

    @property
    def inner(self) -> tuple[int, ...]:
        """Return the extents after the first dimension."""
        return tuple(e for e in self.extents[1:] if e is not None)

    def read(self, rows: Indices, out: NDArray[Any]) -> None:
        """Copy rows of one shape to `out`, of shape `(len(rows), *extents)`, converting them to its dtype."""
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
        self._fill(out, lambda room: gather_rows(addresses, nbytes, room))

    def lengths(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return the addresses and the numbers of elements of ragged rows.

        Raises:
            SampleError: an offset is outside the values.
        """
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
                f"column {self.name!r} of the arrow table has offsets that are out of order, or beyond its values: the file "
                "is damaged; write it again"
            )
        return origins + begin * self.element_nbytes, end - begin

    def read_ragged(self, rows: Indices, out: Any) -> None:
        """Copy ragged rows to the memory that `out.reserve` returns."""
        addresses, lengths = self.lengths(rows)
        self._fill(
            out.reserve(self.name, lengths.tolist()), lambda room: gather_runs(addresses, lengths * self.element_nbytes, room)
        )

    def _fill(self, out: Any, gather: Callable[[Any], None]) -> None:
        """Gather values of the column into `out`, which may be of another dtype."""
        held = out if out.dtype == self.dtype else np.empty(out.shape, self.dtype)
        gather(held.reshape(-1).view(np.uint8))
        if held is not out:
            with np.errstate(all="ignore"):  # a float64 beyond float32 is inf, as in torch
                out[...] = held

    def text(self, rows: Indices, *, strips_nul: bool) -> TextRuns:
        """Return the addresses of rows of text. The text is copied later; the result keeps the memory alive.

        Args:
            rows: numbers of the rows.
            strips_nul: leave out the NULs at the end of values, as numpy's arrays of text do.
        Raises:
            SampleError: an offset is outside the values.
        """
        addresses, lengths = self.lengths(rows)
        if strips_nul:
            _strip_nul(addresses, lengths)
        return TextRuns(addresses, lengths, is_bytes=self.dtype is bytes, owner=self.table)

    def _located(self, rows: Indices) -> tuple[Any, Indices]:
        """Return the chunk of each row, and the number of the row within the chunk."""
        if len(self.starts) == 2:
            return np.zeros(len(rows), np.int64), rows
        chunk = np.searchsorted(self.starts, rows, "right") - 1
        return chunk, rows - self.starts[chunk]


@dataclass(frozen=True, eq=False)
class TextLists:
    """A column whose rows are lists of text. They are read by pyarrow, not by address.

    Attributes:
        name: name of the column.
        table: a ChunkedArray of the rows.
    """

    name: str
    table: Any = field(repr=False)

    def read(self, rows: Indices) -> list[Any]:
        """Return rows as pyarrow's `to_pylist` does: lists of str or bytes; nulls within them are None."""
        found: list[Any] = self.table.take(pa.array(rows)).to_pylist()
        return found


_FEW_NULS = 2  # at the end of a value; more are found value by value


def _strip_nul(addresses: Indices, lengths: Indices) -> None:
    """Shorten values that end with NUL, in place."""
    left = np.flatnonzero(lengths)
    for _ in range(_FEW_NULS):
        ends = np.empty(len(left), np.uint8)
        gather_rows(addresses[left] + lengths[left] - 1, 1, ends)
        left = left[ends == 0]
        lengths[left] -= 1
        left = left[lengths[left] > 0]
    for row in left.tolist():  # a padded value, which may have any number of them
        lengths[row] = len(ctypes.string_at(int(addresses[row]), int(lengths[row])).rstrip(b"\0"))


def column_of(name: str, column: Any) -> ArrowColumn | None:
    """Return a ChunkedArray as an `ArrowColumn`, which keeps it alive.

    Return None if rows are not numbers, text or lists of numbers, or if they contain nulls.
    """
    depth, leaf = 0, column.type
    while is_list(leaf):
        depth, leaf = depth + 1, leaf.value_type
    dtype = dtype_of(leaf)
    if column.null_count or dtype is None or (depth and (dtype in (str, bytes) or dtype == np.bool_)):
        return None
    arrays = [chunk for chunk in column.chunks if len(chunk)]
    walks = [walk for array in arrays if (walk := _walked(array, dtype)) is not None]
    if not walks or len(walks) < len(arrays):
        return None
    chunks, extents = zip(*walks, strict=True)
    inner = {extents_of[1:] for extents_of in extents}
    outer = {extents_of[0] for extents_of in extents if extents_of}
    if len(inner) > 1 or 0 in next(iter(inner)):
        return None
    first = () if not outer else (outer.pop() if len(outer) == 1 else None,)
    width = offset_nbytes(column.type) if depth or dtype in (str, bytes) else 0
    return ArrowColumn(
        name,
        dtype,
        (*first, *next(iter(inner))),
        bool(depth) and width > 0,
        np.cumsum([0, *map(len, arrays)], dtype=np.int64),
        np.array(chunks, np.int64),
        width,
        column,
    )


def _walked(array: Any, dtype: Any) -> tuple[Chunk, tuple[int | None, ...]] | None:
    """Return the addresses of one arrow array and the shape of its rows.

    Return None if it contains nulls, or lists within lists that differ in length, or if its offsets are outside its values.
    """
    if dtype in (str, bytes):
        _, offsets, data = array.buffers()
        places = _offsets_of(array, offsets, 0, len(array))
        first, last = int(places[0]), int(places[-1])
        nbytes = 0 if data is None else data.size
        is_sound = 0 <= first <= last <= nbytes
        return ((data.address if data else 0, places.ctypes.data, first, last), ()) if is_sound else None
    extents: list[int | None] = []
    outer: Any = None  # the first level's offsets, if it has any
    first, count = 0, len(array)  # the values of the current level: number of the first one, and how many
    while is_list(array.type):
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


def _offsets_of(array: Any, buffer: Any, first: int, count: int) -> NDArray[Any]:
    """Return the `count + 1` offsets of `count` rows of an array, starting at row `first`."""
    if not count:  # then the buffer may be missing
        return np.zeros(1, np.int64)
    nbytes = offset_nbytes(array.type)
    return np.frombuffer(buffer, f"int{8 * nbytes}", count + 1, (array.offset + first) * nbytes)


def _common_length(places: NDArray[Any]) -> int | None:
    """Return the length that all rows have, given their offsets; None if rows differ in length."""
    count, total = len(places) - 1, int(places[-1]) - int(places[0])
    length = total // count if count else 0
    if total != length * count:  # the sums of most ragged columns differ already
        return None
    return length if (np.diff(places) == length).all() else None
