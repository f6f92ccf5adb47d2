"""From the samples of a batch straight to its bytes in the slot, with no batch in between.

Where torch's default collate makes a batch of the samples, this makes the same: arrays and numbers stacked, text in lists, dicts,
lists and tuples of these turned inside out. Two degrees of strictness about the rest:

* strict (torch mode, unless `ragged` was asked for): whatever is unusual is left to torch's own collate, also to be refused by it;
* with a `Ragged` rule: every kind of sample is taken. Arrays of different shapes become ragged fields, dataclasses one dataclass of
  columns; None, objects that only pickle can move, and values of mixed types other than numbers come as lists.

One row seen as a run of one row: for what only reads batches.

Placing samples as rows of one batch in a slot.

`RowPlacer` stands over one slot's memory for one number of rows. `put` writes a sample that the worker has already decoded;
`out` hands the dataset a writable view of the row, so that it decodes in place; a slice of rows is as good.

Arrays whose first axis counts samples, gathered row by row into a batch (src/array_rows.pyx).

An array here is numpy's, or a torch tensor's memory seen as numbers of the same width: which type they are matters only
for the batch.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.array_rows import RowGather
from shmload._core.mapping import Mapping as Memory
from shmload._core.rows import ArrayColumn, BoolColumn, Column, DictPart, FloatColumn, IntColumn, Part, SequencePart, TensorColumn
from shmload.batch.layout import (
    NUMBERS,
    Field,
    Layout,
    array_over,
    filled,
    is_plain_tensor,
    is_sequence,
    of_any,
    of_numpy,
    of_torch,
    structure,
)
from shmload.batch.ragged import ATOMS, Node, PackedBatch, Packer, Ragged, Rows, check_rows, is_record, ragged_node, stacked
from shmload.errors import SampleError


class SingleRow:
    """What `read_batch_into` writes to, over what `read_into` writes to.

    Args:
        out: views of one row (`RowOut`, `RaggedOut`).
    """

    def __init__(self, out: Any) -> None:
        self._out = out

    def reserve(self, name: str, lengths: Any) -> Any:
        """The writable view of a ragged field's only row, in one dimension."""
        (n,) = lengths
        return self._out.reserve(name, n).reshape(-1)

    def __getitem__(self, name: str) -> Any:
        return self._out[name][None]

    def __setitem__(self, name: str, value: Any) -> None:
        try:
            rows = self[name]
        except (KeyError, TypeError):  # text, or ragged: there is no place yet, and a value for each row
            (self._out[name],) = value
        else:
            rows[...] = value  # perhaps one for all rows


class OneSample:
    """What a dataset that reads batches answers `__getitem__` with: the `out` of a batch of one row.

    Args:
        schema: mapping name -> (dtype, shape), or str or bytes.
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
        """The memory of a ragged row."""
        dtype, shape = self._schema[name]
        (extents,) = lengths
        given = iter(extents if isinstance(extents, tuple) else (extents,))
        values = self._fields[name] = empty_rows(dtype, (1, *(next(given) if extent is None else extent for extent in shape)))
        return values.reshape(-1)

    def sample(self) -> dict[str, Any]:
        """The fields: arrays, numpy's scalars, text."""
        found = {name: self._fields[name][0] for name in self._schema}
        return {name: value[()] if isinstance(value, np.ndarray) and not value.ndim else value for name, value in found.items()}


def empty_rows(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Rows of a field to be written: an array, or for a dtype that numpy has not a tensor."""
    element = of_any(dtype)
    return array_over(element, np.empty(math.prod(shape) * element.itemsize, np.uint8), shape)


class RowPlacer:
    """The fields of one batch of `nrows` at `offset` of a mapped segment."""

    def __init__(self, layout: Layout, memory: Memory, offset: int, nrows: int) -> None:
        self.layout = layout
        offsets, _ = layout.place(nrows)
        self.rows = {
            f.name: array_over(f.element, memory, (nrows, *f.shape), offset + at, as_tensor=f.kind == "tensor")
            for f, at in zip(layout.fields, offsets, strict=True)
        }
        self._memory = memory
        columns = [
            _column(f, self.rows[f.name], memory, memory.address + offset + at)
            for f, at in zip(layout.fields, offsets, strict=True)
        ]
        self.part = _part(layout.tree, columns)
        self.put = self.part.put

    def get(self, row: int) -> Any:
        """The sample that `put` wrote into a row, as objects like those it came from."""
        values = []
        for field in self.layout.fields:
            value = self.rows[field.name][row]
            is_number = field.kind in _OF_NUMBERS
            values.append(value.item() if is_number else value.clone() if field.kind == "tensor" else value.copy())
        return structure(self.layout.tree, values)

    def out(self, row: int | slice) -> RowOut:
        """Writable views of one row: `out["image"]` is an array, `out["label"] = 3` writes through; or of several."""
        if self.layout.zero_fill:
            for rows in self.rows.values():
                rows[row] = 0
        return RowOut(self.rows, row)


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

    def at(self, number: int) -> RowOut:
        """One of several rows, by its number among these."""
        assert isinstance(self._row, slice)
        return RowOut(self._rows, range(len(self._rows[next(iter(self._rows))]))[self._row][number])

    def reserve(self, name: str, n: Any) -> Any:
        """The view of a ragged field's row: for schemas that have one."""
        raise KeyError(f"out.reserve({name!r}): the schema has no ragged field; give one the dimension None in its shape")


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
    """What writes a sample of exactly this structure into a row."""
    kind = tree[0]
    if kind == "leaf":
        number: int = tree[1]
        return columns[number]
    if kind == "dict":
        return DictPart(tree[1], [_part(t, columns) for t in tree[2]])
    return SequencePart((tree[1],) if kind == "named" else (tuple, list), [_part(t, columns) for t in tree[-1]])


class _UnusualError(Exception):
    """The samples are for torch's own collate."""


def samples_in(batch: Any) -> list[Any] | None:
    """Return the samples of what `__getitems__` returned; None if only torch's own collate can say what they are.

    A list, a tuple and an array of numbers give the same batch as the list of their elements.
    """
    kind = type(batch)
    if kind is list:
        samples: list[Any] = batch
        return samples
    if kind is tuple or (kind is np.ndarray and batch.ndim > 0 and of_numpy(batch.dtype) is not None):
        return list(batch)
    return None


def pack_samples(batch: Any, ragged: Ragged | None, functions: RegisteredFunctions | None) -> PackedBatch | None:
    """Prepare the batch of some samples for its slot; return None if torch's own collate has to make it.

    Args:
        batch: the samples, usually in a list; or whatever else the dataset's `__getitems__` returned.
        functions: the collate functions that the user has registered with torch.
    Raises:
        SampleError: with a rule, what even that does not allow.
    """
    samples = samples_in(batch)
    if samples is None or (functions is not None and ragged is None):
        return None
    packer = Packer()
    columns = _Columns(packer, ragged, functions)
    is_tuple = type(batch) is tuple
    try:
        node = columns.node(samples, "", is_tuple=is_tuple)
    except _UnusualError:
        return None
    columns.check_names()
    return packer.packed(("tupled", node) if is_tuple and node[0] == "text" else node)


_OF_ROWS = (dict, list, tuple, int, float, np.generic, np.ndarray)  # with Tensor, the types of samples that have fixed rows


class RegisteredFunctions:
    """The user's changes to `default_collate_fn_map`, torch's table of collate functions.

    Attributes:
        table: the table when it was looked at.
        concern_rows: whether a changed entry may apply to a sample, or a part of one, that would be written into a row. Then the
            batch is not rows of the samples, and no sample may be written before the function has seen it.
    """

    def __init__(self, torchs: Any) -> None:
        self.table: dict[Any, Any] = dict(torchs.default_collate_fn_map)
        entries = self.table.keys() | _SHIPPED.keys() | {torchs.torch.Tensor, np.ndarray}
        self._changed = {kind for kind in entries if not _is_shipped(kind, self.table.get(kind), torchs)}
        of_rows = (*_OF_ROWS, torchs.torch.Tensor)
        self.concern_rows = any(_may_apply(kind, of_rows) for kind in self._changed)
        self._concerns_tensors = torchs.torch.Tensor in self._changed

    def __bool__(self) -> bool:
        return bool(self._changed)

    def function_of(self, head: Any) -> Callable[[Any], Any] | None:
        """Return the user's function for values of which the first is `head`, by torch's rules; None if torch's own applies."""
        kind: Any = type(head)
        if kind not in self.table:
            kind = next((registered for registered in self.table if isinstance(head, registered)), None)
        # torch's function for arrays makes tensors of them and collates those by the table
        is_users = kind in self._changed or (kind is np.ndarray and self._concerns_tensors)
        return partial(self.table[kind], collate_fn_map=self.table) if is_users and kind in self.table else None


_SHIPPED: dict[Any, str] = {  # the entries of torch's table, by the names of their functions; two more are those of `_is_shipped`
    float: "collate_float_fn",
    int: "collate_int_fn",
    str: "collate_str_fn",
    bytes: "collate_str_fn",
    (np.bool_, np.number, np.object_): "collate_numpy_scalar_fn",
    np.ndarray: "collate_numpy_array_fn",
}


def _is_shipped(kind: Any, function: Any, torchs: Any) -> bool:
    """Return whether torch's table has this function for this type as it is shipped."""
    name = "collate_tensor_fn" if kind is torchs.torch.Tensor else _SHIPPED.get(kind)
    return name is not None and function is getattr(torchs, name, None)


def _may_apply(kind: Any, types: tuple[type, ...]) -> bool:
    """Return whether a table's entry may be that of an instance of one of these types, or of a subclass."""
    if isinstance(kind, tuple):
        return any(_may_apply(one, types) for one in kind)
    return not isinstance(kind, type) or any(issubclass(kind, one) or issubclass(one, kind) for one in types)


_last_seen: RegisteredFunctions | None = None  # made anew when torch's table has changed


def registered_functions() -> RegisteredFunctions | None:
    """Return the collate functions that the user has registered with torch; None if there are none. Takes less than 1 us."""
    global _last_seen
    torchs = sys.modules.get("torch.utils.data._utils.collate")
    if torchs is None:
        return None
    if _last_seen is None or _last_seen.table != torchs.default_collate_fn_map:
        _last_seen = RegisteredFunctions(torchs)
    return _last_seen or None


def collates_as_shipped() -> bool:
    """Return whether the user has left it as it was how torch collates samples that have fixed rows."""
    functions = registered_functions()
    return functions is None or not functions.concern_rows


_ANY_NUMBER = (int, float, np.number, np.bool_)


class _Columns:
    def __init__(self, packer: Packer, ragged: Ragged | None, functions: RegisteredFunctions | None) -> None:
        self._packer = packer
        self._ragged = ragged
        self._functions = functions
        self._seen: list[str] = []

    def check_names(self) -> None:
        """Returns if every field that was declared ragged is there."""
        missing = set(self._ragged.of_field).difference(self._seen) if self._ragged else ()
        if missing:
            raise SampleError(
                f"ragged names {', '.join(sorted(map(repr, missing)))}, but samples have arrays only in "
                f"{', '.join(map(repr, self._seen)) or 'no field'}"
            )

    def node(self, values: list[Any], name: str, *, is_tuple: bool = False) -> Node:
        """The node of what the samples have in one place.

        Args:
            is_tuple: torch gives the values to a registered function as a tuple.
        """
        head = values[0]
        kind = type(head)
        kinds = set(map(type, values))
        if self._functions is not None and (function := self._functions.function_of(head)) is not None:
            return self._packer.node(function(tuple(values) if is_tuple else values))
        if kinds == {str} or kinds == {bytes}:
            return self._packer.text(values)
        if len(kinds) == 1:
            if kind in NUMBERS:
                return self._numbers(values, name)
            if kind is np.ndarray or kind is np.memmap or isinstance(head, np.generic):
                return self._arrays(values, name)
            if kind.__module__ == "torch" and kind.__name__ == "Tensor":
                return self._tensors(values, name)
            if kind is dict:
                return self._dicts(values, name)
            if isinstance(head, tuple) and hasattr(head, "_fields"):
                return "named", pickle.dumps(kind), self._transposed(values, name)
        if kinds <= {tuple, list}:
            return self._sequences(values, name)
        if (torch := sys.modules.get("torch")) is not None and all(isinstance(v, torch.Tensor) for v in values):
            return self._unusual_tensors(values, name)
        if self._ragged is None:
            raise _UnusualError
        if all(isinstance(value, Mapping) for value in values):
            return self._mappings(values, name)
        if len(kinds) == 1 and is_record(kind):
            names = [f.name for f in dataclasses.fields(head)]
            columns = [self.node([getattr(v, n) for v in values], _joined(name, n)) for n in names]
            return "record", pickle.dumps(kind), names, columns
        if all(isinstance(value, _ANY_NUMBER) for value in values):
            return self._unlike_numbers(values, name)
        if isinstance(head, np.ndarray) and all(isinstance(value, np.ndarray) or is_tensor(value) for value in values):
            return self._promoted(values, name)
        if all(map(is_sequence, values)):
            return self._sequences(values, name)
        return self._list(values, name)

    # ------------------------------------------------------------ leaves

    def _numbers(self, values: list[Any], name: str) -> Node:
        try:
            return self._packer.tensor(np.array(values, NUMBERS[type(values[0])]))
        except OverflowError:  # torch's collate raises it
            return self._list(values, name)

    def _unlike_numbers(self, values: list[Any], name: str) -> Node:
        """Collate numbers of several types, or of a subclass such as IntEnum, as torch does; those it refuses become a list."""
        from torch.utils.data import default_collate

        try:
            return self._packer.node(default_collate(values))
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return self._list(values, name)

    def _arrays(self, values: list[Any], name: str) -> Node:
        """Of arrays, or of numpy's numbers."""
        dtype = values[0].dtype
        element = of_numpy(dtype)
        if element is None or [v.dtype for v in values].count(dtype) != len(values):
            return self._promoted(values, name)
        if isinstance(values[0], np.generic):
            return self._packer.tensor(np.array(values, dtype))
        return self._rows(Rows(values, element.name), name)

    def _tensors(self, values: list[Any], name: str) -> Node:
        dtype = values[0].dtype
        element = of_torch(dtype)
        if element is None or not all(v.dtype is dtype and is_plain_tensor(v) for v in values):
            return self._unusual_tensors(values, name)
        return self._rows(Rows(values, element.name), name)

    def _unusual_tensors(self, values: list[Any], name: str) -> Node:
        """Tensors that are more than bytes (of a subclass, Parameters, that require grad, quantised), as torch stacks them."""
        rule, first = self._ragged, values[0]
        if rule is None:
            raise _UnusualError
        if all(type(v).__name__ == "Tensor" and is_plain_tensor(v) for v in values):
            return self._promoted(values, name)
        is_strided = all(str(v.layout) == "torch.strided" and not v.is_nested for v in values)
        if rule.mode(name or "data") is not None or not is_strided or any(v.shape != first.shape for v in values):
            return self._list(values, name)
        try:
            return self._packer.node(sys.modules["torch"].stack(values))
        except RuntimeError:  # of dtypes that have none in common
            return self._list(values, name)

    def _promoted(self, values: list[Any], name: str) -> Node:
        """Arrays or tensors of one shape and several dtypes, as torch's collate promotes them; a list if it refuses them."""
        if self._ragged is None:
            raise _UnusualError
        import torch

        if any(v.shape != values[0].shape for v in values):
            return self._list(values, name)
        try:
            tensors = torch.stack([torch.as_tensor(_writable(v)) for v in values])
        except (TypeError, ValueError, RuntimeError):
            return self._list(values, name)
        element = of_torch(tensors.dtype)
        if element is not None:
            return self._rows(Rows(list(tensors), element.name), name)
        return self._packer.node(tensors) if self._ragged.mode(name or "data") is None else self._list(values, name)

    def _rows(self, rows: Rows, name: str) -> Node:
        """Rows of one dtype: stacked if they are equal in shape and nothing else was asked for."""
        name = name or "data"
        self._seen.append(name)
        rule, shapes = self._ragged, rows.shapes
        mode = None if rule is None or not shapes[0] else rule.mode(name)
        if mode is None:
            if rows.is_even:
                return "tensor", rows.dtype, (len(shapes), *shapes[0]), None, self._packer.place(*stacked(rows))
            if rule is None:
                raise _UnusualError
            if rule.is_certain:
                other = next(shape for shape in shapes if shape != shapes[0])
                raise SampleError(
                    f"field {name!r} has rows of shapes {shapes[0]} and {other}, and was not declared ragged: add it to "
                    "ragged={...}, or give it a None dimension in the dataset's schema"
                )
            mode = "list"
        assert rule is not None
        if len(set(map(len, shapes))) > 1:
            if mode == "list":
                return self._list(rows.arrays, name)
            raise SampleError(f'field {name!r} has rows of different numbers of dimensions: only ragged="list" takes these')
        dims = rule.dims.get(name, (0,))
        if mode != "list":
            check_rows(name, rows, dims)
        return ragged_node(self._packer, rows, mode, dims)

    def _list(self, values: list[Any], name: str) -> Node:
        """The values as they are, one by one."""
        if self._ragged is None:
            raise _UnusualError
        nodes = [self._packer.node(v) for v in values]
        return "list", [("tensor", *node[1:]) if node[0] == "array" else node for node in nodes]

    # ------------------------------------------------------------ containers

    def _dicts(self, values: list[dict[Any, Any]], name: str) -> Node:
        keys = list(values[0])
        if not set(map(type, keys)) <= ATOMS:
            raise _UnusualError
        for number, value in enumerate(values):
            if list(value) != keys and value.keys() != values[0].keys():  # lists compare twice as fast
                if self._ragged is None:  # torch ignores keys that the first sample lacks
                    raise _UnusualError
                raise SampleError(
                    f"row {number} of the batch has the keys {list(value)}, row 0 has {keys}: samples of one batch need the same "
                    "ones; give what is missing as None"
                )
        return "dict", keys, [self.node([v[key] for v in values], _joined(name, key)) for key in keys]

    def _mappings(self, values: list[Any], name: str) -> Node:
        """Mappings of another kind than dict: one of that kind, with columns in it."""
        _, keys, columns = self._dicts(values, name)
        like = filled(values[0], dict.fromkeys(keys))
        return ("dict", keys, columns) if type(like) is dict else ("filled", keys, columns, self._packer.foreign(like))

    def _sequences(self, values: list[Any], name: str) -> Node:
        rule = self._ragged
        is_asked = rule is not None and rule.mode(name or "data") is not None
        is_even = len(set(map(len, values))) == 1
        if is_even and not is_asked:
            return self._sequence(values, name)
        if rule is None:
            raise _UnusualError
        arrays = _as_arrays(values)
        if arrays is not None:
            return self._rows(Rows(arrays, str(arrays[0].dtype)), name)
        if is_even:
            return self._sequence(values, name)
        return "list", [self._packer.node(v) for v in values]

    def _sequence(self, values: list[Any], name: str) -> Node:
        """Sequences of one length: one of the first one's kind, with columns in it."""
        columns, head = self._transposed(values, name), values[0]
        if isinstance(head, tuple) and hasattr(head, "_fields"):
            return "named", pickle.dumps(type(head)), columns
        return (
            ("list", columns)
            if type(head) is list or isinstance(head, tuple)
            else ("sequence", columns, self._packer.foreign(head))
        )

    def _transposed(self, values: list[Any], name: str) -> list[Node]:
        columns = [self.node(list(column), _joined(name, i), is_tuple=True) for i, column in enumerate(zip(*values, strict=True))]
        return [("tupled", column) if column[0] == "text" else column for column in columns]  # as torch's collate has it


def _as_arrays(values: list[Any]) -> list[np.ndarray[Any, Any]] | None:
    """Lists of numbers as arrays of one dtype, the one that torch's collate takes Python's numbers for; None if they are not."""
    kinds = {type(number) for value in values for number in value}
    if not kinds <= {int, float}:
        return None
    dtype = np.float64 if float in kinds else np.int64
    try:
        return [np.array(value, dtype) for value in values]
    except OverflowError:
        return None


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without an import of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _writable(value: Any) -> Any:
    """Return an array that torch takes without a warning; a tensor as it is."""
    return np.array(value) if isinstance(value, np.ndarray) and not value.flags.writeable else value


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


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
    offsets = [sum(places) for places in product(*([i * step for i in range(n)] for n, step in axes))] if not is_empty else [0]
    width = array.itemsize // (2 if array.dtype.kind == "c" else 1)
    swap = 1 if array.dtype.isnative else width
    address, stride = array.__array_interface__["data"][0], array.strides[0]
    return RowGather(address, len(array), stride, np.array(offsets, np.int64), count, item_nbytes, item_stride, swap, array)
