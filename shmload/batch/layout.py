"""The memory layout of a batch in its slot, and the structure of its samples.

A batch of `nrows` fixed samples is one C-order array per field, `(nrows, *shape)`, one after the other, each at a multiple of 64
bytes. So the address of a row is known before any sample is read, and several workers can fill one batch. The offsets follow from
the fields and `nrows` alone; trainer and workers compute them in the same way.

The structure of a sample (dicts, lists, tuples, named tuples around leaves) is kept as a tree of plain tuples: `("leaf", field)`,
`("dict", keys, trees)`, `("list", trees)`, `("tuple", trees)`, `("named", class, trees)`. A tuple of fields becomes a list in the
batch, as in torch's default collate; the batch type of a schema is used as given. `("tuples only", trees)` is such a tuple where a
list in its place would be a row.
"""

from __future__ import annotations

import copy
import math
import operator
import pickle
import sys
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np

from shmload.batch.element_types import ELEMENT_TYPES, ElementType, of_any, of_numpy, of_torch

ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def c_strides(shape: Sequence[int], step: int = 1) -> tuple[int, ...]:
    """Return the strides of an array in C order whose elements are `step` apart, in the unit of `step`."""
    strides = []
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


NUMBERS: dict[type, str] = {
    float: "float64",
    int: "int64",
    bool: "bool",
}  # element types that torch's collate uses for Python numbers


class NotFixedError(Exception):
    """Raised if a sample has no fixed layout: text, an unusual container, or a type that tensors lack."""


@dataclass(frozen=True)
class Field:
    """One array of a batch.

    Attributes:
        name: name of the field, or its path in the structure of a sample: "a.b".
        dtype: name of its element type (element_types.py); "str" or "bytes" for text.
        shape: shape of a row. A ragged dimension of a schema is None; a text field has one if its rows are lists of text.
        kind: what samples contain: "array", "tensor", "scalar" (of numpy), "int", "float", "bool"; or "view" if the dataset writes
            into the row, or "text" for str and bytes of a schema.
    """

    name: str
    dtype: str
    shape: tuple[Any, ...]
    kind: str

    @cached_property
    def element(self) -> ElementType:
        """Return the element type."""
        return ELEMENT_TYPES[self.dtype]

    @property
    def is_ragged(self) -> bool:
        """Return whether rows differ in size, so that their offsets are not fixed."""
        return None in self.shape or self.kind == "text"

    @cached_property
    def row_nbytes(self) -> int:
        """Return the number of bytes of one row."""
        return int(math.prod(self.shape)) * self.element.itemsize


@dataclass(frozen=True, eq=False)
class Layout:
    """The fields of a batch and the structure of its samples. Immutable.

    Attributes:
        fields: the fields, in the order of their memory.
        tree: the structure, as described above.
        zero_fill: whether rows are zeroed before the dataset writes them.
    """

    fields: tuple[Field, ...]
    tree: tuple[Any, ...]
    zero_fill: bool = False
    _offsets: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict, compare=False, repr=False)

    def place(self, nrows: int) -> tuple[tuple[int, ...], int]:
        """Return the offset of each field and the total size of a batch of `nrows`, which is at least 1 byte."""
        found = self._offsets.get(nrows)
        if found is None:
            offsets, end = [], 0
            for f in self.fields:
                offsets.append(end)
                end += aligned(nrows * f.row_nbytes)
            found = self._offsets[nrows] = (tuple(offsets), max(end, 1))
        return found

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """Return the keys if a batch is one dict of the fields in order, which is the usual case; else None."""
        is_flat = self.tree[0] == "dict" and self.tree[-1] == tuple(("leaf", i) for i in range(len(self.fields)))
        return tuple(self.tree[1]) if is_flat else None

    @cached_property
    def is_ragged(self) -> bool:
        """Return whether a schema has ragged fields, so that the rows of a batch have no fixed offsets."""
        return any(f.is_ragged for f in self.fields)

    @cached_property
    def fixed(self) -> Layout:
        """Return the layout of the fields that are not ragged."""
        fields = tuple(f for f in self.fields if not f.is_ragged)
        return Layout(fields, ("tuple", tuple(("leaf", i) for i in range(len(fields)))), self.zero_fill)

    def nbytes(self, nrows: int) -> int:
        """Return the size of a batch of `nrows`; at least 1, so that a slot is never empty."""
        return self.place(nrows)[1]

    def dumps(self) -> bytes:
        """Serialize the layout for the control block."""
        return pickle.dumps((self.fields, self.tree, self.zero_fill))

    @classmethod
    def loads(cls, text: bytes) -> Layout:
        """Parse the result of `dumps`. It comes from a process of this loader, through memory that only its user can write."""
        fields, tree, zero_fill = pickle.loads(text)
        return cls(fields, tree, zero_fill)

    def __str__(self) -> str:
        return ", ".join(f"{f.name}: {f.dtype}{list(f.shape)}" for f in self.fields)


def layout_of_schema(schema: Mapping[str, Any], batch_type: type | str | None = None) -> Layout:
    """Return the layout that a dataset declares by its schema.

    Args:
        schema: maps names to (dtype, shape), or to a dtype for a scalar. None in a shape is a ragged dimension; `str` and `bytes`
            are dtypes of text, and `(str, (None,))` is a list of text, whose values may be None. If the schema has a true
            attribute `zero_fill`, rows are zeroed before the dataset writes them.
        batch_type: type of a batch: dict (default), tuple, list, a named tuple class with the schema's fields, or "single"
            for the only field by itself.
    Raises:
        TypeError, ValueError: the schema or the batch type is invalid.
    """
    if not isinstance(schema, Mapping) or not schema:
        raise TypeError(f"a schema is a mapping name -> (dtype, shape) with at least one field; got {schema!r}")
    fields = []
    for name, spec in schema.items():
        dtype, shape = dtype_and_shape(name, spec)
        if dtype in (str, bytes):
            if any(extent is not None for extent in shape):
                raise ValueError(
                    f"schema field {name!r} is text of shape {shape}: a row of text is one value, shape (), or a list, shape "
                    "(None,)"
                )
            fields.append(Field(str(name), dtype.__name__, shape, "text"))
            continue
        fields.append(Field(str(name), of_any(dtype).name, shape, "view"))
    if len({f.name for f in fields}) < len(fields):
        raise ValueError(f"two fields of the schema have one name as text: {', '.join(map(repr, schema))}; name each differently")
    leaves = tuple(("leaf", i) for i in range(len(fields)))
    trees: dict[Any, tuple[Any, ...]] = {dict: ("dict", tuple(schema), leaves), tuple: ("tuple", leaves), list: ("list", leaves)}
    tree: tuple[Any, ...]
    if batch_type == "single" and len(fields) == 1:
        tree = leaves[0]
    elif hasattr(batch_type, "_fields"):
        tree = ("named", batch_type, leaves)
    elif (batch_type or dict) in trees:
        tree = trees[batch_type or dict]
    else:
        raise TypeError(f"batch_type is dict, tuple, list or a named tuple class; got {batch_type!r}")
    return Layout(tuple(fields), tree, bool(getattr(schema, "zero_fill", False)))


def dtype_and_shape(name: Any, spec: Any) -> tuple[Any, tuple[int | None, ...]]:
    """Return the dtype and the shape that a schema gives for a field.

    Raises:
        TypeError: it gives something else.
        ValueError: an extent is negative.
    """
    dtype, shape = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, ())
    try:
        if dtype is None or isinstance(dtype, tuple | np.ndarray) or isinstance(shape, str):
            raise TypeError
        if dtype not in (str, bytes):
            of_any(dtype)
        extents = tuple(None if extent is None else operator.index(extent) for extent in shape)
    except TypeError as error:
        why = f" ({error})" if str(error) else ""
        raise TypeError(
            f"schema field {name!r} is {spec!r}: give (dtype, shape), such as ('float32', (3, 224, 224)), or the dtype of a "
            f"scalar{why}"
        ) from None
    if any(extent is not None and extent < 0 for extent in extents):
        raise ValueError(f"schema field {name!r} has shape {shape}: extents are at least 0, or None for a ragged dimension")
    return dtype, extents


def no_field_error(name: Any, names: Iterable[str]) -> KeyError:
    """Return the error for a name in a dataset's `out` that is not in its schema."""
    return KeyError(f"out[{name!r}]: the schema has {', '.join(names)}")


def layout_of_sample(sample: Any, *, lists_are_rows: bool = False) -> Layout:
    """Return the layout that torch's default collate gives to batches of samples like this one.

    Args:
        sample: the sample.
        lists_are_rows: whether lists in fields are rows, which may differ in length. If not, they are containers.
    Raises:
        NotFixedError: samples like this have no fixed rows.
    """
    fields: list[Field] = []
    tree = _tree_of(sample, "", fields, lists_are_rows)
    return Layout(tuple(fields), tree)


def _tree_of(value: Any, name: str, fields: list[Field], lists_are_rows: bool) -> tuple[Any, ...]:
    kind = type(value)
    if kind is list and lists_are_rows and (name or {type(part) for part in value} <= {int, float}):
        raise NotFixedError(kind)
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if kind in (dict, tuple, list) or is_named:
        parts = value.items() if kind is dict else enumerate(value)
        trees = tuple(_tree_of(part, f"{name}.{key}" if name else str(key), fields, lists_are_rows) for key, part in parts)
        if kind is dict or is_named:
            return ("dict", tuple(value), trees) if kind is dict else ("named", kind, trees)
        return "tuples only" if kind is tuple and lists_are_rows else "list", trees
    fields.append(_leaf(value, name or "data"))
    return "leaf", len(fields) - 1


def _leaf(value: Any, name: str) -> Field:
    kind = type(value)
    if kind in NUMBERS:
        return Field(name, NUMBERS[kind], (), kind.__name__)
    element: ElementType | None
    if kind is np.ndarray or kind is np.memmap:
        element, shape, how = of_numpy(value.dtype), value.shape, "array"
    elif isinstance(value, np.generic):
        element, shape, how = of_numpy(value.dtype), (), "scalar"
    elif kind.__module__ == "torch" and kind.__name__ == "Tensor" and is_plain_tensor(value):
        element, shape, how = of_torch(value.dtype), tuple(value.shape), "tensor"
    else:
        raise NotFixedError(kind)
    if element is None:
        raise NotFixedError(value.dtype)
    return Field(name, element.name, shape, how)


def filled(like: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the class and attributes of `like` with other values, as torch's collate does."""
    try:
        if isinstance(like, MutableMapping):
            made = copy.copy(like)
            made.update(values)
            return made
        make: Any = type(like)
        return cast(Mapping[Any, Any], make(values))
    except TypeError:  # the class does not support it
        return values


def is_sequence(value: Any) -> bool:
    """Return whether samples like this one are transposed, as torch's collate does: any sequence but text and runs of bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def sequence_like(like: Sequence[Any], values: list[Any]) -> Any:
    """Return a sequence of the same class as `like` with other values, as torch's collate does."""
    if isinstance(like, tuple):
        return values
    try:
        if isinstance(like, MutableSequence):
            made = copy.copy(like)
            for i, value in enumerate(values):
                made[i] = value
            return made
        make: Any = type(like)
        return make(values)
    except TypeError:  # the class does not support it
        return values


def structure(tree: tuple[Any, ...], leaves: list[Any], *, of_sample: bool = False) -> Any:
    """Build the structure that `Layout.tree` describes around the values of its fields, given in their order.

    Args:
        tree: the structure.
        leaves: the values.
        of_sample: whether they are those of one sample, and not of a batch.
    """
    kind = tree[0]
    if kind == "leaf":
        return leaves[tree[1]]
    parts = [structure(t, leaves, of_sample=of_sample) for t in tree[-1]]
    if kind == "dict":
        return dict(zip(tree[1], parts, strict=True))
    if kind == "named":
        return tree[1](*parts)
    return tuple(parts) if kind == "tuple" or (kind == "tuples only" and of_sample) else parts


def array_over(element: ElementType, memory: Any, shape: tuple[int, ...], offset: int = 0, *, as_tensor: bool = False) -> Any:
    """Return an array that aliases `memory` from `offset` on and keeps it alive.

    It is a numpy array, or a torch tensor for types that numpy lacks or if `as_tensor` is set.
    """
    if element.numpy is not None and not as_tensor:
        return np.ndarray(shape, element.numpy, memory, offset)
    import torch

    dtype, count = getattr(torch, element.name), math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    """Return whether a shape matches a schema's shape, in which None matches any extent."""
    return len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))


def is_plain_tensor(value: Any) -> bool:
    """Return whether a torch.Tensor is only bytes in this process's memory, without further state."""
    return (
        value.is_cpu
        and value.layout is sys.modules["torch"].strided
        and not (value.is_nested or value.requires_grad or value.is_conj() or value.is_neg())
        and bool(value.data_ptr() or not value.numel())  # autograd has zero tensors without memory
    )
