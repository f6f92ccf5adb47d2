"""Where each field of a batch lies in its slot, and what structure the batch has.

A batch of `nrows` fixed samples is one C-order array per field, `(nrows, *shape)`, one after the other, each at a multiple of
64 bytes. So a row's place is known before any sample is read, and several workers may fill one batch. Offsets follow from the
fields and `nrows` alone; trainer and workers compute them alike.

The structure of a sample (dicts, lists, tuples, named tuples around leaves) is kept as a tree of plain tuples:
`("leaf", field)`, `("dict", keys, trees)`, `("list", trees)`, `("tuple", trees)`, `("named", class, trees)`. A tuple of fields
becomes a list in the batch, as torch's default collate makes it; a schema's batch type is kept as it says.

One name per element type, and what numpy, torch and DLPack call it.

Workers that never touch torch must not import it, so torch's dtypes are looked up by name only where a tensor is at hand.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np


class ElementType(NamedTuple):
    """An element type: its name (torch's and numpy's, where both have it), size in bytes, DLPack code, numpy dtype or None."""

    name: str
    itemsize: int
    code: int
    numpy: np.dtype[Any] | None


UINT_CODE, FLOAT8_CODE = 1, 10  # DLPack's; from the latter on eight-bit floats, of DLPack 1.1


def _table() -> dict[str, ElementType]:
    table = {}
    sizes = (8, 16, 32, 64)
    numbers = ((0, "int", sizes), (UINT_CODE, "uint", sizes), (2, "float", sizes[1:]), (5, "complex", (64, 128)))
    names = [(f"{kind}{bits}", code) for code, kind, sizes in numbers for bits in sizes]
    for name, code in [*names, ("bool", 6)]:
        table[name] = ElementType(name, np.dtype(name).itemsize, code, np.dtype(name))
    eights = [f"float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
    for name, nbytes, code in [("bfloat16", 2, 4), ("complex32", 4, 5), *((n, 1, FLOAT8_CODE + i) for i, n in enumerate(eights))]:
        table[name] = ElementType(name, nbytes, code, None)
    return table


ELEMENT_TYPES = _table()
_BY_NUMPY = {t.numpy: t for t in ELEMENT_TYPES.values() if t.numpy is not None}


def of_numpy(dtype: np.dtype[Any]) -> ElementType | None:
    """The element type of a native numpy dtype; None if torch has no such type."""
    return _BY_NUMPY.get(dtype) if dtype.isnative else None


def of_torch(dtype: Any) -> ElementType | None:
    """The element type of a torch dtype; None if a slot cannot hold it (quantised types, and those of less than a byte)."""
    return ELEMENT_TYPES.get(str(dtype).removeprefix("torch."))


def of_any(dtype: Any) -> ElementType:
    """The element type a schema names: a torch dtype, or anything numpy takes for one.

    Raises:
        TypeError: neither, or one that no tensor can have.
    """
    if type(dtype).__module__ == "torch":
        found = of_torch(dtype)
    elif isinstance(dtype, str) and dtype in ELEMENT_TYPES:
        found = ELEMENT_TYPES[dtype]
    else:
        found = of_numpy(np.dtype(dtype))
    if found is None:
        raise TypeError(f"a field needs one of {', '.join(ELEMENT_TYPES)}; got {dtype!r}")
    return found


ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def c_strides(shape: Sequence[int], step: int = 1) -> tuple[int, ...]:
    """The strides of an array in C order whose elements are `step` apart."""
    strides = []
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


NUMBERS: dict[type, str] = {float: "float64", int: "int64", bool: "bool"}  # the types of Python's, as torch collates them


class NotFixedError(Exception):
    """A sample holds something without a fixed place: text, an unusual container, a type that no tensor has."""


@dataclass(frozen=True)
class Field:
    """One array of a batch: name, element type, shape of a row, and what kind of object the samples carry.

    `kind` is "array", "tensor", "scalar" (numpy's), "int", "float", "bool", "view" where the dataset writes into the row, or "text"
    for a schema's str and bytes. A ragged dimension of a schema is None in the shape; text has it where a row is a list of text.
    """

    name: str
    dtype: str
    shape: tuple[Any, ...]
    kind: str

    @cached_property
    def element(self) -> ElementType:
        """The element type."""
        return ELEMENT_TYPES[self.dtype]

    @property
    def is_ragged(self) -> bool:
        """Whether its rows differ in size, so that they have no places of their own."""
        return None in self.shape or self.kind == "text"

    @cached_property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return int(math.prod(self.shape)) * self.element.itemsize


@dataclass(frozen=True, eq=False)
class Layout:
    """The fields of a batch and the structure around them."""

    fields: tuple[Field, ...]
    tree: tuple[Any, ...]
    zero_fill: bool = False
    _offsets: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict, compare=False, repr=False)

    def place(self, nrows: int) -> tuple[tuple[int, ...], int]:
        """(offset of each field, bytes in all) for a batch of `nrows`, from the slot's start; at least 1 byte in all."""
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
        """The keys of a batch that is one dict of the fields in their order, as most are; None if it is anything else."""
        is_flat = self.tree[0] == "dict" and self.tree[-1] == tuple(("leaf", i) for i in range(len(self.fields)))
        return tuple(self.tree[1]) if is_flat else None

    @cached_property
    def is_ragged(self) -> bool:
        """Whether a schema has ragged fields: then a batch has no rows at known places."""
        return any(f.is_ragged for f in self.fields)

    @cached_property
    def fixed(self) -> Layout:
        """The fields that are not ragged, by themselves."""
        fields = tuple(f for f in self.fields if not f.is_ragged)
        return Layout(fields, ("tuple", tuple(("leaf", i) for i in range(len(fields)))), self.zero_fill)

    def nbytes(self, nrows: int) -> int:
        """Bytes of a batch of `nrows`; at least 1, so that a slot is never empty."""
        return self.place(nrows)[1]

    def dumps(self) -> bytes:
        """The layout as text for the control block."""
        return pickle.dumps((self.fields, self.tree, self.zero_fill))

    @classmethod
    def loads(cls, text: bytes) -> Layout:
        """Inverse of `dumps`. The text comes from a process of this loader, over memory that only its user can write."""
        fields, tree, zero_fill = pickle.loads(text)
        return cls(fields, tree, zero_fill)

    def __str__(self) -> str:
        return ", ".join(f"{f.name}: {f.dtype}{list(f.shape)}" for f in self.fields)


def layout_of_schema(schema: Mapping[str, Any], batch_type: type | str | None = None) -> Layout:
    """The layout a dataset declares: mapping name -> (dtype, shape), or -> dtype for a scalar.

    Args:
        schema: a None in a shape is a ragged dimension; `str` and `bytes` are dtypes of text, and `(str, (None,))` is a list
            of text, in which values may be None. It may be an object with a true attribute `zero_fill`: rows are zeroed before the
            dataset writes them.
        batch_type: what a batch is: dict (default), tuple, list, a named tuple class with the schema's fields; or "single",
            the one field by itself.
    """
    if not isinstance(schema, Mapping) or not schema:
        raise TypeError(f"a schema is a mapping name -> (dtype, shape) with at least one field; got {schema!r}")
    fields = []
    for name, spec in schema.items():
        dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
        if any(extent is not None and int(extent) < 0 for extent in shape):
            raise ValueError(f"schema field {name!r} has shape {shape}: extents are at least 0, or None for a ragged dimension")
        if dtype in (str, bytes):
            if any(extent is not None for extent in shape):
                raise ValueError(
                    f"schema field {name!r} is text of shape {shape}: a row of text is one value, shape (), or a list, shape "
                    "(None,)"
                )
            fields.append(Field(str(name), dtype.__name__, tuple(shape), "text"))
            continue
        extents = tuple(None if extent is None else int(extent) for extent in shape)
        fields.append(Field(str(name), of_any(dtype).name, extents, "view"))
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


def layout_of_sample(sample: Any) -> Layout:
    """The layout that torch's default collate gives batches of samples like this one.

    Raises:
        NotFixedError: the sample has no fixed rows.
    """
    fields: list[Field] = []
    tree = _tree_of(sample, "", fields)
    return Layout(tuple(fields), tree)


def _tree_of(value: Any, name: str, fields: list[Field]) -> tuple[Any, ...]:
    kind = type(value)
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if kind in (dict, tuple, list) or is_named:
        parts = value.items() if kind is dict else enumerate(value)
        trees = tuple(_tree_of(part, f"{name}.{key}" if name else str(key), fields) for key, part in parts)
        return ("dict", tuple(value), trees) if kind is dict else ("named", kind, trees) if is_named else ("list", trees)
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
    """A mapping of the same kind, with all else that it has, around other values: as torch's collate makes batches of mappings."""
    try:
        if isinstance(like, MutableMapping):
            made = copy.copy(like)
            made.update(values)
            return made
        make: Any = type(like)
        return cast(Mapping[Any, Any], make(values))
    except TypeError:  # it cannot be made so
        return values


def is_sequence(value: Any) -> bool:
    """Return whether samples like this one are transposed, as torch's collate does: any sequence but text and runs of bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def sequence_like(like: Sequence[Any], values: list[Any]) -> Any:
    """Return a sequence of the same kind as `like`, around other values: as torch's collate makes batches of sequences."""
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
    except TypeError:  # it cannot be made so
        return values


def structure(tree: tuple[Any, ...], leaves: list[Any]) -> Any:
    """Puts a layout's structure around the values of its fields."""
    kind = tree[0]
    if kind == "leaf":
        return leaves[tree[1]]
    parts = [structure(t, leaves) for t in tree[-1]]
    if kind == "dict":
        return dict(zip(tree[1], parts, strict=True))
    if kind == "named":
        return tree[1](*parts)
    return parts if kind == "list" else tuple(parts)


def array_over(element: ElementType, memory: Any, shape: tuple[int, ...], offset: int = 0, *, as_tensor: bool = False) -> Any:
    """An array over some memory: numpy's, or torch's for types that numpy lacks or if asked for."""
    if element.numpy is not None and not as_tensor:
        return np.ndarray(shape, element.numpy, memory, offset)
    import torch

    dtype, count = getattr(torch, element.name), math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    """Whether a shape is one of a schema's, where None is any extent."""
    return len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))


def is_plain_tensor(value: Any) -> bool:
    """Whether a torch.Tensor's elements are just bytes in this process's memory, with nothing to remember about them."""
    return (
        value.is_cpu
        and value.layout is sys.modules["torch"].strided
        and not (value.is_nested or value.requires_grad or value.is_conj() or value.is_neg())
        and bool(value.data_ptr() or not value.numel())  # autograd has zeros without memory
    )
