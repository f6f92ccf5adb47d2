"""Write samples to the rows of a batch, and the `out` objects through which datasets do so.

A `RowPlacer` writes to the memory of one slot for a fixed number of rows. `put` writes a sample that is already decoded; `out`
gives the dataset a writable view of a row, or of a slice of rows, so that it decodes in place. `OneSample` and `SingleRow` let a
dataset that reads batches implement `__getitem__` and `read_into`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shmload._core.mapping import Mapping as Memory
from shmload._core.rows import ArrayColumn, BoolColumn, Column, DictPart, FloatColumn, IntColumn, Part, SequencePart, TensorColumn
from shmload.batch.element_types import of_any
from shmload.batch.layout import Field, Layout, array_over, is_plain_tensor, no_field_error, structure


class SingleRow:
    """The `out` of `read_batch_into` for a batch of one row, built on the `out` of `read_into`.

    Args:
        out: views of one row (`RowOut`, `RaggedOut`).
    """

    def __init__(self, out: Any) -> None:
        self._out = out

    def reserve(self, name: str, lengths: Any) -> Any:
        """Return the writable, one-dimensional view of a ragged field's only row."""
        (n,) = lengths
        return self._out.reserve(name, n).reshape(-1)

    def __getitem__(self, name: str) -> Any:
        return self._out[name][None]

    def __setitem__(self, name: str, value: Any) -> None:
        try:
            rows = self[name]
        except (KeyError, TypeError):  # text or ragged: there is no memory yet, and `value` has one element per row
            (self._out[name],) = value
        else:
            rows[...] = value  # may be one value for all rows


class OneSample:
    """The `out` of a batch of one row, for `__getitem__` of a dataset that reads batches.

    Args:
        schema: maps a field's name to (dtype, shape), or to str or bytes.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._fields: dict[str, Any] = {}
        for name, spec in schema.items():
            dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
            if dtype not in (str, bytes) and None not in shape:
                self._fields[name] = empty_rows(dtype, (1, *shape))

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __setitem__(self, name: str, values: Any) -> None:
        self._fields[name] = values

    def reserve(self, name: str, lengths: Any) -> Any:
        """Return the writable, one-dimensional memory of a ragged field's only row."""
        dtype, shape = self._schema[name]
        (extents,) = lengths
        given = iter(extents if isinstance(extents, tuple) else (extents,))
        values = self._fields[name] = empty_rows(dtype, (1, *(next(given) if extent is None else extent for extent in shape)))
        return values.reshape(-1)

    def sample(self) -> dict[str, Any]:
        """Return the sample: its fields by name, as arrays, numpy scalars or text, which alias this object's memory."""
        found = {name: self._fields[name][0] for name in self._schema}
        return {name: value[()] if isinstance(value, np.ndarray) and not value.ndim else value for name, value in found.items()}


def empty_rows(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return uninitialized rows of a field: an array, or a tensor if numpy lacks the dtype."""
    element = of_any(dtype)
    return array_over(element, np.empty(math.prod(shape) * element.itemsize, np.uint8), shape)


class RowPlacer:
    """A writer of samples to the fields of one batch of `nrows` rows, at `offset` of a mapped segment.

    Attributes:
        part: the writer that `put` belongs to.
        put: `put(sample, row)` writes a decoded sample; it returns False if the sample does not have the layout's structure.
    """

    def __init__(self, layout: Layout, memory: Memory, offset: int, nrows: int) -> None:
        self.layout = layout
        offsets, _ = layout.place(nrows)
        # an array or tensor `(nrows, *shape)` for each field; not by name, because the paths of two fields may be the same text
        self._rows = [
            array_over(f.element, memory, (nrows, *f.shape), offset + at, as_tensor=f.kind == "tensor")
            for f, at in zip(layout.fields, offsets, strict=True)
        ]
        self._memory = memory
        columns = [
            _column(f, rows, memory, memory.address + offset + at)
            for f, rows, at in zip(layout.fields, self._rows, offsets, strict=True)
        ]
        self.part = _part(layout.tree, columns)
        self.put = self.part.put

    @cached_property
    def _rows_by_name(self) -> dict[str, Any]:
        return {field.name: rows for field, rows in zip(self.layout.fields, self._rows, strict=True)}

    def get(self, row: int) -> Any:
        """Return the sample that `put` wrote to a row, as objects of the same types."""
        values = []
        for field, rows in zip(self.layout.fields, self._rows, strict=True):
            value = rows[row, ...] if field.kind == "array" else rows[row]  # an array without dimensions stays an array
            is_number = field.kind in _OF_NUMBERS
            values.append(value.item() if is_number else value.clone() if field.kind == "tensor" else value.copy())
        return structure(self.layout.tree, values, of_sample=True)

    def out(self, row: int | slice) -> RowOut:
        """Return writable views of one row or of several: `out["image"]` is an array, `out["label"] = 3` writes through."""
        if self.layout.zero_fill:
            for rows in self._rows:
                rows[row] = 0
        return RowOut(self._rows_by_name, row)


class RowOut(Mapping[str, Any]):
    """The `out` of `read_into` and `read_batch_into`: maps a field's name to a writable view, valid until they return."""

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: dict[str, Any], row: int | slice) -> None:
        self._rows = rows
        self._row = row

    def __getitem__(self, name: str) -> Any:
        try:
            rows = self._rows[name]
        except KeyError:
            raise no_field_error(name, self._rows) from None
        return rows[self._row, ...]

    def __setitem__(self, name: str, value: Any) -> None:
        try:
            rows = self._rows[name]
        except KeyError:
            raise no_field_error(name, self._rows) from None
        rows[self._row] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        fields = (f"{name}: {str(view.dtype).removeprefix('torch.')}{[*view.shape]}" for name, view in self.items())
        return f"<out of {', '.join(fields)}>"

    def at(self, number: int) -> RowOut:
        """Return one of several rows, by its number among these."""
        assert isinstance(self._row, slice)
        return RowOut(self._rows, range(len(self._rows[next(iter(self._rows))]))[self._row][number])

    def reserve(self, name: str, n: Any) -> Any:
        """Raise KeyError, because only schemas with ragged fields have rows to reserve."""
        raise KeyError(f"out.reserve({name!r}): the schema has no ragged field; give one the dimension None in its shape")


def private_tensors(layout: Layout, nrows: int) -> list[Any]:
    """Return rows in private memory: one tensor `(nrows, *shape)` per field."""
    import torch

    make = torch.zeros if layout.zero_fill else torch.empty
    return [make((nrows, *f.shape), dtype=getattr(torch, f.dtype)) for f in layout.fields]


def private_rows(layout: Layout, nrows: int, tensors: list[Any] | None = None) -> dict[str, Any]:
    """Return rows in private memory for a dataset to write to, by field: numpy arrays, or tensors for types that numpy lacks.

    The rows alias `tensors` (from `private_tensors`) if they are given.
    """
    return {
        f.name: t.numpy() if f.element.numpy is not None else t
        for f, t in zip(layout.fields, tensors or private_tensors(layout, nrows), strict=True)
    }


_OF_NUMBERS: dict[str, type[IntColumn | FloatColumn | BoolColumn]] = {"int": IntColumn, "float": FloatColumn, "bool": BoolColumn}


def _column(field: Field, rows: Any, memory: Memory, address: int) -> Column:
    if field.kind in _OF_NUMBERS:
        return _OF_NUMBERS[field.kind](address, field.row_nbytes, memory)
    if field.kind == "tensor":
        return TensorColumn(address, field.row_nbytes, memory, rows, field.element.code, is_plain_tensor)
    if field.kind == "view":
        return Column(address, field.row_nbytes, memory)
    return ArrayColumn(address, field.row_nbytes, memory, rows, field.kind == "scalar")


def _part(tree: tuple[Any, ...], columns: Sequence[Part]) -> Part:
    """Return the writer of samples with exactly this structure."""
    kind = tree[0]
    if kind == "leaf":
        number: int = tree[1]
        return columns[number]
    if kind == "dict":
        return DictPart(tree[1], [_part(t, columns) for t in tree[2]])
    kinds = (tree[1],) if kind == "named" else (tuple,) if kind == "tuples only" else (tuple, list)
    return SequencePart(kinds, [_part(t, columns) for t in tree[-1]])
