"""Ragged fields: rows of one field that differ in shape, delivered as a list, padded, end to end, or as one `torch.nested` tensor.

Which fields are ragged must not depend on luck: a batch whose rows happen to be equal would have another structure than its
neighbours. So a field is ragged because the dataset's schema says so (a `None` dimension), because `ragged={"name": mode}`
does, or, with a mode other than "list" and no schema, because it is an array of one or more dimensions. Only "list" goes by the
batch, since a stacked tensor is read like a list of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmload.batch.dtypes import ELEMENT_TYPES
from shmload.batch.packed import JAGGED, NESTED, PADDED, ROWS, TENSOR, Node, Packer, Room
from shmload.errors import SampleError

MODES = ("list", "pad", "nested", "jagged")


class AsTorchOrList(str):
    """The value of `ragged` that nobody has asked for: "list", but in torch mode torch's own refusal."""

    __slots__ = ()


AS_TORCH_OR_LIST = AsTorchOrList("list")


@dataclass(frozen=True)
class Ragged:
    """How ragged fields are delivered.

    Attributes:
        of_field: mode of the fields that were declared ragged, by name.
        of_arrays: mode of every array field of one or more dimensions; None: only declared fields are ragged for certain.
        dims: which dimensions a schema says are ragged, by field; the first where it says nothing.
    """

    of_field: Mapping[str, str]
    of_arrays: str | None
    dims: Mapping[str, tuple[int, ...]]

    @property
    def is_certain(self) -> bool:
        """Whether batches are known to have no fixed rows before the first sample is seen."""
        return bool(self.of_field) or self.of_arrays is not None

    def mode(self, name: str) -> str | None:
        """The mode of an array field; None: as its rows are."""
        return self.of_field.get(name, self.of_arrays)


def ragged_of(
    asked: str | Mapping[str, str], schema: Mapping[str, Any] | None, *, is_torch_mode: bool
) -> Ragged | None:
    """The rule of a loader; None: what torch's collate refuses is refused.

    Raises:
        ValueError: `asked` is no mode, nor a mapping of names to modes, or a mode does not go with the schema.
    """
    given = asked.values() if isinstance(asked, Mapping) else [asked]
    if not all(mode in MODES for mode in given):
        raise ValueError(
            f'ragged is "list", "pad", "nested", "jagged", or a mapping of field names to these; got {asked!r}'
        )
    shapes = {name: _shape_of(spec) for name, spec in (schema or {}).items()}
    dims = {
        name: tuple(i for i, extent in enumerate(shape) if extent is None)
        for name, shape in shapes.items()
        if None in shape
    }
    if isinstance(asked, Mapping):
        of_field = {**dict.fromkeys(dims, "list"), **asked}
    else:
        of_field = dict.fromkeys(dims, str(asked))
    for name, mode in of_field.items():
        if mode in ("nested", "jagged") and dims.get(name, (0,)) != (0,):
            raise ValueError(
                f'ragged="{mode}" needs the first dimension to be the ragged one, and no other; field {name!r} of the schema has '
                f'shape {shapes[name]}. Use "list" or "pad" for it: ragged={{{name!r}: "pad"}}'
            )
    has_text = any(_is_text(spec) for spec in (schema or {}).values())
    if isinstance(asked, AsTorchOrList) and is_torch_mode and not dims and not has_text:
        return None
    of_arrays = str(asked) if isinstance(asked, str) and asked != "list" and not dims else None
    return Ragged(of_field, of_arrays, dims)


def _shape_of(spec: Any) -> tuple[int | None, ...]:
    return tuple(spec[1]) if isinstance(spec, tuple) else ()


def _is_text(spec: Any) -> bool:
    return (spec[0] if isinstance(spec, tuple) else spec) in (str, bytes)


class Rows:
    """What the samples have in one field: arrays, or tensors, of one dtype."""

    def __init__(self, arrays: list[Any], dtype: str) -> None:
        self.arrays = arrays
        self.dtype = dtype
        self.shapes: list[tuple[int, ...]] = [tuple(array.shape) for array in arrays]

    @property
    def is_even(self) -> bool:
        """Whether all have one shape."""
        return self.shapes.count(self.shapes[0]) == len(self.shapes)

    def numels(self) -> list[int]:
        """Elements of each."""
        if len(self.shapes[0]) == 1:
            return [shape[0] for shape in self.shapes]
        return [math.prod(shape) for shape in self.shapes]


def ragged_node(packer: Packer, rows: Rows, mode: str, dims: Sequence[int], *, at: int = -1) -> Node:
    """The node of a ragged field.

    Args:
        rows: all of one number of dimensions.
        dims: the dimensions in which rows may differ.
        at: where the rows lie already, end to end; -1: they are to be placed.
    """
    shapes, dtype = rows.shapes, rows.dtype
    if mode == "pad":
        padding = _Padding(rows)
        values = (TENSOR, dtype, padding.shape, None, packer.place(padding))
        lengths = np.array([[shape[d] for d in dims] for shape in shapes], np.int64)
        return PADDED, values, packer.tensor(lengths[:, 0] if len(dims) == 1 else lengths)
    numels = rows.numels()
    at = packer.place(Joined(rows, sum(numels))) if at < 0 else at
    if mode == "list":
        return ROWS, dtype, numels, None if len(shapes[0]) == 1 else shapes, at
    lengths_of = [shape[0] for shape in shapes]
    offsets = np.zeros(len(shapes) + 1, np.int64)
    np.cumsum(lengths_of, out=offsets[1:])
    values = (TENSOR, dtype, (int(offsets[-1]), *shapes[0][1:]), None, at)
    if mode == "jagged":
        return JAGGED, values, packer.tensor(offsets)
    return NESTED, values, packer.tensor(offsets), min(lengths_of), max(lengths_of)


def check_rows(name: str, rows: Rows, dims: Sequence[int]) -> None:
    """Returns if the rows differ in the ragged dimensions only.

    Raises:
        SampleError: they differ in others.
    """
    first = rows.shapes[0]
    for d in set(range(len(first))).difference(dims):
        for number, shape in enumerate(rows.shapes):
            if shape[d] != first[d]:
                raise SampleError(
                    f"field {name!r} may differ in dimension {', '.join(map(str, dims))} only; row 0 of the batch has shape "
                    f"{first}, row {number} has {shape}. Say in the dataset's schema which dimensions are ragged (None), or use "
                    'ragged="list"'
                )


class Joined:
    """Rows end to end."""

    def __init__(self, rows: Rows, numel: int) -> None:
        self._rows = rows
        self.nbytes = numel * ELEMENT_TYPES[rows.dtype].itemsize

    def write(self, room: Room) -> None:
        """Writes them."""
        if not self.nbytes:
            return
        arrays = self._rows.arrays
        if len(self._rows.shapes[0]) != 1:
            arrays = [array.reshape(-1) for array in arrays]
        if isinstance(arrays[0], np.ndarray):
            np.concatenate(arrays, out=room.view(arrays[0].dtype))
        else:
            import torch

            torch.cat(arrays, out=over(room, self._rows.dtype))


class Stacked:
    """Rows of one shape, as the rows of one array."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.nbytes: int = rows.arrays[0].nbytes * len(rows.arrays)

    def write(self, room: Room) -> None:
        """Writes them."""
        if not self.nbytes:
            return
        arrays, shape = self._rows.arrays, self._rows.shapes[0]
        if not isinstance(arrays[0], np.ndarray):
            import torch

            torch.stack(arrays, out=over(room, self._rows.dtype).view(len(arrays), *shape))
        elif shape:
            np.concatenate(arrays, out=room.view(arrays[0].dtype).reshape(-1, *shape[1:]))
        else:
            room.view(arrays[0].dtype)[:] = arrays


class _Padding:
    """Rows of one number of dimensions, each filled up with zeros to the largest in each dimension."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.shape = (len(rows.shapes), *map(max, zip(*rows.shapes, strict=True)))
        self.nbytes = math.prod(self.shape) * ELEMENT_TYPES[rows.dtype].itemsize

    def write(self, room: Room) -> None:
        if not self.nbytes:
            return
        arrays = self._rows.arrays
        is_numpy = isinstance(arrays[0], np.ndarray)
        out = (room.view(arrays[0].dtype) if is_numpy else over(room, self._rows.dtype)).reshape(self.shape)
        for array, shape, place in zip(arrays, self._rows.shapes, out, strict=True):
            inside = tuple(map(slice, shape))
            place[inside] = array
            for d in range(len(shape)):  # the rest, dimension by dimension, so that nothing is written twice
                place[(*inside[:d], slice(shape[d], None))] = 0


def over(room: Room, dtype: str) -> Any:
    """A tensor of one dimension over the same memory."""
    import torch

    return torch.frombuffer(room, dtype=getattr(torch, dtype))
