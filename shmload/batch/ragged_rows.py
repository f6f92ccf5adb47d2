"""`RaggedRows`: the rows of a batch whose schema has ragged or text fields, which `read_into` writes by `out.reserve`.

    head | fixed fields, row by row | one arena for each ragged field, its rows end to end | text | meta

The arenas are in the slot and as large as earlier batches needed, so a decoder writes each value once, directly to where it is
delivered. Rows that do not fit in their arena are written to private memory, and the finished batch is copied to a larger slot.
Fields that are delivered padded are gathered in private memory, because the offset of a row depends on the longest row.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from shmload.batch.layout import Field, Layout, aligned, array_over, fits, no_field_error
from shmload.batch.packed_batch import PIECES_AT, Node, PackedBatch, Packer, Room
from shmload.batch.ragged import Ragged, Rows, ragged_node
from shmload.batch.text_runs import TextRuns
from shmload.errors import SampleError

ROOM_FOR_MORE = 1.25  # size of an arena relative to the largest batch so far

_TEXT_TYPES: dict[str, type] = {"str": str, "bytes": bytes}

Arenas = dict[str, float]  # bytes per row that a worker's earlier batches needed, by ragged field


class RaggedRows:
    """A batch of `nrows` rows that a dataset is writing.

    Args:
        layout: layout of the batch.
        ragged: rule for ragged fields.
        nrows: number of rows.
        room_of: returns the slot's memory, given the number of bytes wanted. If it is too small, the batch is first written to
            private memory.
        arenas: bytes per row to reserve for each ragged field; updated when the batch is finished.
    """

    def __init__(self, layout: Layout, ragged: Ragged, nrows: int, room_of: Callable[[int], Room], arenas: Arenas) -> None:
        self.layout = layout
        self._ragged = ragged
        self.num_rows = nrows
        self._learnt = arenas
        room_for = {name: aligned(int(row_nbytes * nrows * ROOM_FOR_MORE)) for name, row_nbytes in arenas.items()}
        offsets, fixed_nbytes = layout.fixed.place(nrows)
        self._fixed_at = {f.name: PIECES_AT + at for f, at in zip(layout.fixed.fields, offsets, strict=True)}
        end = PIECES_AT + aligned(fixed_nbytes)
        places: dict[str, int] = {}  # offsets of the arenas in the slot
        for f in layout.fields:
            if f.is_ragged and f.kind != "text" and ragged.of_field[f.name] != "pad":
                places[f.name] = end
                end += room_for.get(f.name, 0)
        room = room_of(end)
        self._capacity = len(room)
        self._is_in_slot = self._capacity >= end
        if not self._is_in_slot:
            room = np.empty(end, np.uint8)
        if layout.zero_fill:
            room[:end] = 0
        self._end = end
        self.fixed = {
            f.name: array_over(f.element, room, (nrows, *f.shape), at)
            for f, at in zip(layout.fixed.fields, self._fixed_at.values(), strict=True)
        }
        self.text_runs: dict[str, TextRuns] = {}  # whole columns, instead of rows in `texts`
        self._text_fields = {f.name: f for f in layout.fields if f.kind == "text"}
        self.texts: dict[str, list[Any]] = {name: [] for name in self._text_fields}
        self.arenas = {
            f.name: _Arena(f, room, places.get(f.name, -1), room_for.get(f.name, 0), zero_fill=layout.zero_fill)
            for f in layout.fields
            if f.is_ragged and f.kind != "text"
        }
        self._written = [*((name, arena.rows) for name, arena in self.arenas.items()), *self.texts.items()]

    def out(self, row: int | slice) -> RaggedOut:
        """Return the `out` of `read_into` for one row, or of `read_batch_into` for all rows, `slice(None)`."""
        return RaggedOut(self, row)

    def check(self, num_rows: int) -> None:
        """Check that the first `num_rows` rows are complete and no further row has been started.

        Args:
            num_rows: number of rows.
        Raises:
            SampleError: a ragged field was not written, or more than once.
        """
        for name, written in self._written:
            rows = self.text_runs.get(name, written)
            if len(rows) != num_rows:
                often = "did not write" if len(rows) < num_rows else "wrote more than once"
                raise SampleError(
                    f"read_into {often} field {name!r}: a ragged field needs one out.reserve({name!r}, n) or "
                    f"out[{name!r}] = ..., also where it is empty"
                )

    def add_texts(self, name: str, values: Iterable[Any]) -> None:
        """Add the next rows of a text field.

        Raises:
            SampleError: a value is not of the schema's type.
        """
        field, rows = self._text_fields[name], self.texts[name]
        wanted = list if field.shape else _TEXT_TYPES[field.dtype]
        count = len(rows)
        rows.extend(values)
        if len(rows) == count + 1 and type(rows[-1]) is wanted:
            return
        for value in rows[count:]:
            if not isinstance(value, wanted):
                what = f"lists of {field.dtype}" if field.shape else field.dtype
                raise SampleError(
                    f"field {name!r} is {what} in the schema, and {value!r:.80} of type {type(value).__name__} was written; "
                    f"write a {wanted.__name__}"
                )

    def finish(self) -> PackedBatch:
        """Return the batch after every row was written. Writing it does not move data in the slot if the rest fits after it."""
        for name, arena in self.arenas.items():
            self._learnt[name] = max(self._learnt.get(name, 0.0), arena.nbytes / self.num_rows)
        if self._is_in_slot:
            if not any(arena.spilt_nbytes for arena in self.arenas.values()):
                packed = self._packed(is_there=True)
                if packed.nbytes <= self._capacity:
                    return packed
            # it is written again, possibly over itself
            self.fixed = copy.deepcopy(self.fixed)
            for arena in self.arenas.values():
                arena.rows = [copy.deepcopy(row) for row in arena.rows]
        return self._packed(is_there=False)

    def _packed(self, *, is_there: bool) -> PackedBatch:
        packer = Packer(self._end) if is_there else Packer()
        nodes = [self._node(f, packer, is_there=is_there) for f in self.layout.fields]
        tree = self.layout.tree
        if tree[0] == "leaf":
            return packer.packed(nodes[0])
        if tree[0] == "dict":
            return packer.packed(("dict", tree[1], nodes))
        if tree[0] == "named":
            return packer.packed(("named", pickle.dumps(tree[1]), nodes))
        return packer.packed(("tuple" if tree[0] == "tuple" else "list", nodes))

    def _node(self, field: Field, packer: Packer, *, is_there: bool) -> Node:
        name = field.name
        if field.kind == "text" and field.shape:
            return packer.node(self.texts[name])
        if field.kind == "text":
            return packer.text(self.text_runs.get(name, self.texts[name]))
        if name in self.fixed:
            if is_there:
                return "tensor", field.dtype, (self.num_rows, *field.shape), None, self._fixed_at[name]
            node = packer.array(self.fixed[name])
            assert node is not None
            return "tensor", *node[1:]
        arena, mode = self.arenas[name], self._ragged.of_field[name]
        at = arena.at if is_there else -1
        return ragged_node(packer, Rows(arena.rows, field.dtype), mode, self._ragged.dims[name], at=at)


class RaggedOut(Mapping[str, Any]):
    """The `out` of `read_into` and `read_batch_into` if the schema has ragged fields.

    Fixed fields are views of their rows. `reserve(name, n)` gives the view of a ragged field's row of n elements; for a whole
    batch `reserve(name, lengths)` gives all rows, end to end. `out[name] = value` does both in one. Valid until they return.
    """

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: RaggedRows, row: int | slice) -> None:
        self._rows = rows
        self._row = row

    def reserve(self, name: str, n: Any) -> Any:
        """Return the writable view of a ragged field.

        Args:
            name: name of the field.
            n: extent of the ragged dimension; a tuple of extents if there are several. For a batch, one of these per row.
        Returns:
            an array of the schema's dtype and shape with n in place of None; for a batch, one dimension with all rows' elements.
        Raises:
            KeyError: the schema has no such ragged field.
            ValueError: n does not match the field's shape.
        """
        arena = self._rows.arenas.get(name)
        if arena is None:
            known = ", ".join(map(repr, self._rows.arenas)) or "none"
            raise KeyError(f"out.reserve({name!r}): not a ragged field of the schema; those are {known}")
        return arena.reserve(n) if type(self._row) is int else arena.reserve_many(n, self._rows.num_rows)

    def __getitem__(self, name: str) -> Any:
        if name in self._rows.fixed:
            return self._rows.fixed[name][self._row, ...]
        if name not in set(self):
            raise no_field_error(name, self)
        raise KeyError(f"out[{name!r}]: a ragged field has no view before out.reserve({name!r}, n) gives one")

    def __setitem__(self, name: str, value: Any) -> None:
        rows, is_row = self._rows, type(self._row) is int
        if name in rows.fixed:
            rows.fixed[name][self._row] = value
        elif isinstance(value, TextRuns):
            rows.text_runs[name] = value
        elif name in rows.texts:
            rows.add_texts(name, [value] if is_row else value)
        elif name not in rows.arenas:
            raise no_field_error(name, self)
        else:
            for one in [value] if is_row else value:
                rows.arenas[name].put(one)

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in self._rows.layout.fields)

    def __len__(self) -> int:
        return len(self._rows.layout.fields)

    def __repr__(self) -> str:
        return f"<out of {self._rows.layout}>"


class _Arena:
    """The rows of one ragged field, end to end as long as there is room for them."""

    def __init__(self, field: Field, room: Room, at: int, nbytes: int, *, zero_fill: bool) -> None:
        self._field = field
        self.at = at
        self._private = np.zeros if zero_fill else np.empty  # allocates private memory for rows beyond the slot
        memory = room[at : at + nbytes] if at >= 0 else self._private(nbytes, np.uint8)
        self._values = array_over(field.element, memory, (nbytes // field.element.itemsize,))
        self._has_one_dimension = len(field.shape) == 1
        self._used = 0
        self.spilt_nbytes = 0  # bytes of rows that did not fit
        self.rows: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the rows so far."""
        return self._used * self._field.element.itemsize + self.spilt_nbytes

    def reserve(self, extents: Any) -> Any:
        """Return the writable view of the next row, whose ragged extents are `extents`."""
        if self._has_one_dimension and type(extents) is int and extents >= 0:
            row = self._take(extents)
        else:
            shape = self._shape(extents)
            row = self._take(math.prod(shape)).reshape(shape)
        self.rows.append(row)
        return row

    def reserve_many(self, extents: Any, count: int) -> Any:
        """Return the writable view of all `count` rows, end to end; `extents` has one entry per row."""
        numels = extents.tolist() if hasattr(extents, "tolist") else list(extents)
        is_flat = self._has_one_dimension and set(map(type, numels)) <= {int} and min(numels, default=0) >= 0
        shapes = [] if is_flat else [self._shape(e.tolist() if hasattr(e, "tolist") else e) for e in extents]
        if len(numels) != count or self.rows:
            raise ValueError(
                f"out.reserve({self._field.name!r}, ...) of a batch needs one length for each of its {count} rows, once"
            )
        if not is_flat:
            numels = [math.prod(shape) for shape in shapes]
        values = self._take(sum(numels))
        ends = [0, *accumulate(numels)]
        self.rows += [values[start:end] for start, end in pairwise(ends)]
        if not is_flat:
            self.rows[:] = [row.reshape(shape) for row, shape in zip(self.rows, shapes, strict=True)]
        return values

    def put(self, value: Any) -> None:
        """Write `value` to the next row."""
        shape = tuple(np.shape(value))
        wanted = self._field.shape
        if not fits(shape, wanted):
            raise SampleError(f"field {self._field.name!r} has shape {wanted} in the schema; a row of {shape} was given")
        row = self._take(math.prod(shape)).reshape(shape)
        self.rows.append(row)
        row[...] = value

    def _take(self, numel: int) -> Any:
        """Return the view of the next `numel` elements, in one dimension."""
        end = self._used + numel
        if end <= len(self._values):
            values = self._values[self._used : end]
            self._used = end
            return values
        nbytes = numel * self._field.element.itemsize
        self.spilt_nbytes += nbytes
        return array_over(self._field.element, self._private(nbytes, np.uint8), (numel,))

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
