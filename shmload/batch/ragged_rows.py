"""Rows of a batch whose schema has ragged or text fields, as `read_into` writes them: the views that `out.reserve` gives.

    head | fixed fields, row by row | one arena for each ragged field, its rows end to end | text | meta

The arenas lie in the slot, as large as earlier batches have taught, so a decoder writes each value once, where it is delivered.
What does not fit its arena is written to private memory, and the whole batch is copied to a larger slot when it is done. Fields
that are delivered padded are gathered in private memory, since where a row lies depends on the longest.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shmload.batch.layout import Field, Layout
from shmload.batch.packed import DICT, LIST, NAMED, PIECES_AT, TENSOR, TUPLE, Node, PackedBatch, Packer, Room, aligned
from shmload.batch.ragged import Ragged, Rows, over, ragged_node
from shmload.errors import SampleError

ROOM_FOR_MORE = 1.25  # an arena is this much larger than the most that a batch has taken so far
_FIRST_GUESS = 1024  # bytes of a row, before there was one


class Arenas:
    """How large the arenas of one worker's batches are: what it has learnt of each field, in bytes a row."""

    def __init__(self) -> None:
        self._of_row: dict[str, float] = {}

    def nbytes(self, name: str, nrows: int) -> int:
        """Bytes to set aside."""
        return aligned(int(self._of_row.get(name, _FIRST_GUESS) * nrows * ROOM_FOR_MORE))

    def learn(self, name: str, nbytes: int, nrows: int) -> None:
        """Takes note of what a batch has needed."""
        self._of_row[name] = max(self._of_row.get(name, 0.0), nbytes / nrows)


class RaggedRows:
    """One batch of `nrows`, being written.

    Args:
        room: the slot's memory; too little of it means that the batch is written elsewhere first.
    """

    def __init__(self, layout: Layout, ragged: Ragged, nrows: int, room: Room, arenas: Arenas) -> None:
        self._layout = layout
        self._ragged = ragged
        self._nrows = nrows
        self._learnt = arenas
        self._text: dict[str, list[Any]] = {f.name: [] for f in layout.fields if f.kind == "text"}
        ragged_fields = [f for f in layout.fields if f.is_ragged and f.kind != "text"]
        offsets, fixed_nbytes = layout.fixed.place(nrows)
        end = PIECES_AT + aligned(fixed_nbytes)
        places: dict[str, int] = {}
        for f in ragged_fields:
            if ragged.of_field[f.name] != "pad":
                places[f.name] = end
                end += arenas.nbytes(f.name, nrows)
        self._is_in_slot = len(room) >= end
        self._end = end
        self._room = room if self._is_in_slot else np.empty(end, np.uint8)
        if layout.zero_fill:
            self._room[:end] = 0
        self._fixed = {
            f.name: _array(f, self._room[PIECES_AT + at : PIECES_AT + at + nrows * f.row_nbytes], (nrows, *f.shape))
            for f, at in zip(layout.fixed.fields, offsets, strict=True)
        }
        self._fixed_at = {f.name: PIECES_AT + at for f, at in zip(layout.fixed.fields, offsets, strict=True)}
        self._arenas = {
            f.name: _Arena(
                f, self._room, places.get(f.name, -1), arenas.nbytes(f.name, nrows), zero_fill=layout.zero_fill
            )
            for f in ragged_fields
        }

    def out(self, row: int) -> RaggedOut:
        """What `read_into` writes one row to."""
        return RaggedOut(self, row, 1)

    def out_rows(self) -> RaggedOut:
        """What `read_batch_into` writes the batch to."""
        return RaggedOut(self, slice(None), self._nrows)

    def check(self, num_written: int) -> None:
        """Returns if the first `num_written` rows are whole.

        Raises:
            SampleError: a ragged field was not written.
        """
        for name in (*self._arenas, *self._text):
            written = len(self._arenas[name].rows if name in self._arenas else self._text[name])
            if written != num_written:
                raise SampleError(
                    f"read_into did not write field {name!r}: a ragged field needs out.reserve({name!r}, n) or "
                    f"out[{name!r}] = ..., also where it is empty"
                )

    def finish(self) -> PackedBatch:
        """The batch, every row of which is written. What lies in the slot already stays there."""
        is_whole = self._is_in_slot and not any(arena.has_spilt for arena in self._arenas.values())
        packer = Packer(self._end) if is_whole else Packer()
        nodes = [self._node(f, packer, is_whole=is_whole) for f in self._layout.fields]
        for name, arena in self._arenas.items():
            self._learnt.learn(name, arena.nbytes, self._nrows)
        return packer.packed(_structured(self._layout.tree, nodes))

    def _node(self, field: Field, packer: Packer, *, is_whole: bool) -> Node:
        name = field.name
        if field.kind == "text":
            return packer.text(self._text[name])
        if name in self._fixed:
            if is_whole:
                return TENSOR, field.dtype, (self._nrows, *field.shape), None, self._fixed_at[name]
            node = packer.array(self._fixed[name])
            assert node is not None
            return TENSOR, *node[1:]
        arena, mode = self._arenas[name], self._ragged.of_field[name]
        at = arena.at if is_whole else -1
        return ragged_node(packer, Rows(arena.rows, field.dtype), mode, self._ragged.dims[name], at=at)

    def _reserve(self, name: str, extents: Any, count: int) -> Any:
        arena = self._arenas.get(name)
        if arena is None:
            known = ", ".join(map(repr, self._arenas)) or "none"
            raise KeyError(f"out.reserve({name!r}): not a ragged field of the schema; those are {known}")
        if count == 1:
            return arena.reserve(extents)
        return arena.reserve_many(extents, count)


class RaggedOut(Mapping[str, Any]):
    """What `read_into` and `read_batch_into` write to where the schema has ragged fields.

    Fixed fields are views of their rows. `reserve(name, n)` gives the view of a ragged field's row of n elements; for a whole
    batch `reserve(name, lengths)` gives all rows, end to end. `out[name] = value` does both in one. Valid until they return.
    """

    __slots__ = ("_count", "_row", "_rows")

    def __init__(self, rows: RaggedRows, row: int | slice, count: int) -> None:
        self._rows = rows
        self._row = row
        self._count = count

    def reserve(self, name: str, n: int | Sequence[Any]) -> Any:
        """The writable view of a ragged field.

        Args:
            n: extent of the ragged dimension; with several, one for each. For a batch, one of these for each row.
        Returns:
            an array of the schema's dtype and shape with n in place of None; for a batch one dimension, all rows' elements.
        """
        return self._rows._reserve(name, n, self._count if isinstance(self._row, slice) else 1)

    def __getitem__(self, name: str) -> Any:
        if name in self._rows._fixed:
            return self._rows._fixed[name][self._row, ...]
        raise KeyError(f"out[{name!r}]: a ragged field has no view before out.reserve({name!r}, n) gives one")

    def __setitem__(self, name: str, value: Any) -> None:
        rows = self._rows
        if name in rows._fixed:
            rows._fixed[name][self._row] = value
        elif name in rows._text:
            rows._text[name].extend(value if isinstance(self._row, slice) else [value])
        elif isinstance(self._row, slice):
            for one in value:
                rows._arenas[name].put(one)
        else:
            rows._arenas[name].put(value)

    def __iter__(self) -> Iterator[str]:
        return iter(f.name for f in self._rows._layout.fields)

    def __len__(self) -> int:
        return len(self._rows._layout.fields)


class _Arena:
    """The rows of one ragged field, end to end as long as there is room."""

    def __init__(self, field: Field, room: Room, at: int, nbytes: int, *, zero_fill: bool) -> None:
        self._field = field
        self.at = at
        self._values = _array(field, room[at : at + nbytes] if at >= 0 else np.empty(nbytes, np.uint8), (-1,))
        self._zero_fill = zero_fill
        self._used = 0
        self.rows: list[Any] = []
        self.has_spilt = False

    @property
    def nbytes(self) -> int:
        """Bytes of the rows so far."""
        return sum(row.nbytes for row in self.rows)

    def reserve(self, extents: Any) -> Any:
        """The view of the next row."""
        row = self._take(self._shape(extents))
        self.rows.append(row)
        return row

    def reserve_many(self, extents: Any, count: int) -> Any:
        """The view of all rows, end to end."""
        shapes = [self._shape(e.tolist() if hasattr(e, "tolist") else e) for e in extents]
        if len(shapes) != count or self.rows:
            raise ValueError(
                f"out.reserve({self._field.name!r}, ...) of a batch needs one length for each of its {count} rows, once"
            )
        numels = [math.prod(shape) for shape in shapes]
        values = self._take((sum(numels),))
        start = 0
        for numel, shape in zip(numels, shapes, strict=True):
            self.rows.append(values[start : start + numel].reshape(shape))
            start += numel
        return values

    def put(self, value: Any) -> None:
        """Writes the next row."""
        shape = np.shape(value)
        wanted = self._field.shape
        if len(shape) != len(wanted) or any(w not in (None, s) for w, s in zip(wanted, shape, strict=True)):
            raise SampleError(
                f"field {self._field.name!r} has shape {wanted} in the schema; a row of {tuple(shape)} was given"
            )
        row = self._take(tuple(shape))
        self.rows.append(row)
        row[...] = value

    def _take(self, shape: tuple[int, ...]) -> Any:
        numel = math.prod(shape)
        if self._used + numel <= len(self._values):
            row = self._values[self._used : self._used + numel].reshape(shape)
            self._used += numel
            return row
        self.has_spilt = True
        nbytes = numel * self._field.element.itemsize
        return _array(self._field, (np.zeros if self._zero_fill else np.empty)(nbytes, np.uint8), shape)

    def _shape(self, extents: Any) -> tuple[int, ...]:
        wanted = self._field.shape
        given = list(extents) if isinstance(extents, tuple | list) else [extents]
        if len(given) != wanted.count(None) or any(int(n) < 0 for n in given):
            raise ValueError(
                f"out.reserve({self._field.name!r}, n) needs an extent of 0 or more for each None of the shape {wanted}; "
                f"got {extents!r}"
            )
        numbers = iter(given)
        return tuple(int(next(numbers)) if extent is None else extent for extent in wanted)


def _array(field: Field, room: Room, shape: tuple[int, ...]) -> Any:
    """An array of the field's dtype over some memory: numpy's, or torch's for types numpy lacks."""
    if field.element.numpy is not None:
        return room.view(field.element.numpy).reshape(shape)
    if not len(room):
        import torch

        return torch.empty(tuple(max(n, 0) for n in shape), dtype=getattr(torch, field.dtype))
    return over(room, field.dtype).reshape(shape)


def _structured(tree: tuple[Any, ...], nodes: list[Node]) -> Node:
    """The layout's structure around the fields' nodes."""
    kind = tree[0]
    if kind == "dict":
        return DICT, list(tree[1]), nodes
    if kind == "named":
        return NAMED, pickle.dumps(tree[1]), nodes
    return (TUPLE if kind == "tuple" else LIST), nodes
