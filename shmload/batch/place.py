"""Placing samples as rows of one batch in a slot.

`RowPlacer` stands over one slot's memory for one number of rows. `put` writes a sample that the worker has already decoded;
`out` hands the dataset a writable view of the row, so that it decodes in place; `out_rows` does the same for a run of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shmload._core.mapping import Mapping as Memory
from shmload._core.rows import ArrayColumn, BoolColumn, FloatColumn, IntColumn, TensorColumn
from shmload.batch.layout import Field, Layout, is_plain_tensor

Put = Callable[[int, Any], bool]


class RowPlacer:
    """The fields of one batch of `nrows` at `offset` of a mapped segment."""

    def __init__(self, layout: Layout, memory: Memory, offset: int, nrows: int) -> None:
        self.layout = layout
        offsets, _ = layout.place(nrows)
        self.rows = {f.name: _rows(f, memory, offset + at, nrows) for f, at in zip(layout.fields, offsets, strict=True)}
        self._memory = memory
        columns = [
            _column(f, self.rows[f.name], memory, memory.address + offset + at)
            for f, at in zip(layout.fields, offsets, strict=True)
        ]
        self.put: Callable[[Any, int], bool] = _putter(layout.tree, columns)

    def get(self, row: int) -> Any:
        """The sample that `put` wrote into a row, as objects like those it came from."""
        return _sample_of(self.layout.tree, [_value(f, self.rows[f.name], row) for f in self.layout.fields])

    def out(self, row: int) -> RowOut:
        """Writable views of one row: `out["image"]` is an array, `out["label"] = 3` writes through."""
        if self.layout.zero_fill:
            for rows in self.rows.values():
                rows[row] = 0
        return RowOut(self.rows, row)

    def out_rows(self, first: int, end: int) -> RowOut:
        """Writable views of rows `first` to `end`, with a leading row dimension."""
        if self.layout.zero_fill:
            for rows in self.rows.values():
                rows[first:end] = 0
        return RowOut(self.rows, slice(first, end))


class RowOut(Mapping[str, Any]):
    """What `read_into` and `read_batch_into` write to: field name -> writable view, valid until they return."""

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: dict[str, Any], row: int | slice) -> None:
        self._rows = rows
        self._row = row

    def __getitem__(self, name: str) -> Any:
        return self._rows[name][self._row, ...]

    def __setitem__(self, name: str, value: Any) -> None:
        self._rows[name][self._row] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def reserve(self, name: str, n: Any) -> Any:
        """The view of a ragged field's row: for schemas that have one."""
        raise KeyError(
            f"out.reserve({name!r}): the schema has no ragged field; give one the dimension None in its shape"
        )


def private_tensors(layout: Layout, nrows: int) -> list[Any]:
    """Rows in private memory: one tensor `(nrows, *shape)` for each field."""
    import torch

    make = torch.zeros if layout.zero_fill else torch.empty
    return [make((nrows, *f.shape), dtype=getattr(torch, f.dtype)) for f in layout.fields]


def private_rows(layout: Layout, nrows: int, tensors: list[Any] | None = None) -> dict[str, Any]:
    """The same as what a dataset writes to: numpy's arrays, or torch's tensors for types numpy lacks."""
    return {
        f.name: t.numpy() if f.element.numpy is not None else t
        for f, t in zip(layout.fields, tensors or private_tensors(layout, nrows), strict=True)
    }


def _rows(field: Field, memory: Memory, offset: int, nrows: int) -> Any:
    """The field's rows as an array `(nrows, *shape)` over the slot: numpy's, or torch's for types numpy lacks."""
    shape = (nrows, *field.shape)
    if field.element.numpy is not None and field.kind != "tensor":
        return np.ndarray(shape, field.element.numpy, memory, offset)  # type: ignore[arg-type]  # a buffer
    import torch

    count = nrows * field.row_nbytes // field.element.itemsize
    dtype = getattr(torch, field.dtype)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _column(field: Field, rows: Any, memory: Memory, address: int) -> Put:
    if field.kind == "int":
        return IntColumn(address, field.row_nbytes, memory).put
    if field.kind == "float":
        return FloatColumn(address, field.row_nbytes, memory).put
    if field.kind == "bool":
        return BoolColumn(address, field.row_nbytes, memory).put
    if field.kind == "tensor":
        return TensorColumn(address, field.row_nbytes, memory, rows, is_plain_tensor).put
    if field.kind == "view":
        return _refuse
    return ArrayColumn(address, field.row_nbytes, memory, rows, field.kind == "scalar").put


def _value(field: Field, rows: Any, row: int) -> Any:
    if field.kind in ("int", "float", "bool"):
        return rows[row].item()
    if field.kind == "tensor":
        return rows[row].clone()
    return rows[row].copy()


def _sample_of(tree: tuple[Any, ...], values: list[Any]) -> Any:
    kind = tree[0]
    if kind == "leaf":
        return values[tree[1]]
    parts = [_sample_of(t, values) for t in tree[-1]]
    if kind == "dict":
        return dict(zip(tree[1], parts, strict=True))
    return tree[1](*parts) if kind == "named" else parts


def _refuse(row: int, value: Any) -> bool:
    return False


def _putter(tree: tuple[Any, ...], columns: list[Put]) -> Callable[[Any, int], bool]:
    """A function that writes a sample of exactly this structure into a row, or answers False."""
    kind = tree[0]
    if kind == "leaf":
        put = columns[tree[1]]
        return lambda sample, row: put(row, sample)
    if kind == "dict":
        keys, parts = tree[1], [_putter(t, columns) for t in tree[2]]
        pairs = list(zip(keys, parts, strict=True))

        def put_dict(sample: Any, row: int) -> bool:
            if type(sample) is not dict or len(sample) != len(pairs):
                return False
            for key, part in pairs:
                if key not in sample or not part(sample[key], row):
                    return False
            return True

        return put_dict
    kinds: tuple[type, ...] = (tree[1],) if kind == "named" else (tuple, list)
    parts = [_putter(t, columns) for t in tree[-1]]

    def put_sequence(sample: Any, row: int) -> bool:
        if type(sample) not in kinds or len(sample) != len(parts):
            return False
        for part, value in zip(parts, sample):  # noqa: B905  # lengths were compared, and strict costs 0.1 us a sample
            if not part(value, row):
                return False
        return True

    return put_sequence
