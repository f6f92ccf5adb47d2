"""Deliver ragged fields, whose rows differ in shape, as a list, padded, end to end, or as one `torch.nested` tensor.

Which fields are ragged must not depend on the data: otherwise a batch whose rows happen to be equal in shape would have another
structure than its neighbors. So a field is ragged if the dataset's schema declares it (a `None` dimension), if `ragged={"name":
mode}` does, or, with a mode other than "list" and no schema, if it is an array of one or more dimensions. Only "list" decides by
the batch, because a stacked tensor is read like a list of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np

from shmload._core.gather import pad_runs
from shmload.batch.element_types import ELEMENT_TYPES
from shmload.batch.layout import array_over
from shmload.batch.packed_batch import Node, Packer, Room, Write
from shmload.errors import SampleError

RaggedMode = Literal["list", "pad", "nested", "jagged"]
MODES: tuple[RaggedMode, ...] = get_args(RaggedMode)


class AsTorchOrList(str):
    """The default of `ragged`: "list" for arrays, while lists are transposed; torch mode rejects all samples that torch rejects."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<not given>"


AS_TORCH_OR_LIST: Any = AsTorchOrList("list")


@dataclass(frozen=True)
class Ragged:
    """The rule by which ragged fields are delivered.

    Attributes:
        of_field: delivery modes of declared ragged fields, by name.
        of_arrays: delivery mode of every array field of one or more dimensions; None if only declared fields are known to be
            ragged.
        dims: ragged dimensions of each field in the schema; the default is the first dimension.
        lists_are_rows: whether a list in any field is a row: an array, if it contains only numbers. Otherwise only the lists of
            declared fields are, and other lists are containers, as for torch.
    """

    of_field: Mapping[str, str]
    of_arrays: str | None
    dims: Mapping[str, tuple[int, ...]]
    lists_are_rows: bool = False

    @property
    def is_certain(self) -> bool:
        """Return whether batches are known to lack fixed rows before the first sample is seen."""
        return bool(self.of_field) or self.of_arrays is not None

    def mode(self, name: str) -> str | None:
        """Return the mode of an array field; None if it depends on the rows."""
        return self.of_field.get(name, self.of_arrays)


AS_LISTS = Ragged({}, None, {})  # no field is known to be ragged: the default in seed mode


def ragged_of(asked: str | Mapping[str, str], schema: Mapping[str, Any] | None, *, is_torch_mode: bool) -> Ragged | None:
    """Return a loader's rule for ragged fields; None if samples that torch's collate rejects are rejected.

    Args:
        asked: the loader's argument `ragged`.
        schema: the dataset's schema, if it has one.
        is_torch_mode: whether the loader is in torch mode.
    Raises:
        ValueError: `asked` is neither a mode nor a mapping of names to modes, or a mode does not match the schema.
    """
    given = asked.values() if isinstance(asked, Mapping) else [asked]
    if not all(mode in MODES for mode in given):
        raise ValueError(f'ragged is "list", "pad", "nested", "jagged", or a mapping of field names to these; got {asked!r}')
    specs = {name: spec if isinstance(spec, tuple) else (spec, ()) for name, spec in (schema or {}).items()}
    shapes = {name: tuple(shape) for name, (_, shape) in specs.items()}
    dims = {
        name: tuple(i for i, extent in enumerate(shape) if extent is None)
        for name, shape in shapes.items()
        if None in shape and specs[name][0] not in (str, bytes)
    }
    of_field = {**dict.fromkeys(dims, "list"), **asked} if isinstance(asked, Mapping) else dict.fromkeys(dims, str(asked))
    for name, mode in of_field.items():
        if mode in ("nested", "jagged") and dims.get(name, (0,)) != (0,):
            raise ValueError(
                f'ragged="{mode}" needs the first dimension to be the ragged one, and no other; field {name!r} of the schema has '
                f'shape {shapes[name]}. Use "list" or "pad" for it: ragged={{{name!r}: "pad"}}'
            )
    has_text = any(dtype in (str, bytes) for dtype, _ in specs.values())
    if isinstance(asked, AsTorchOrList) and is_torch_mode and not dims and not has_text:
        return None
    is_for_all = isinstance(asked, str) and not isinstance(asked, AsTorchOrList) and (asked == "list" or not dims)
    of_arrays = str(asked) if is_for_all and asked != "list" else None
    return Ragged(of_field, of_arrays, dims, is_for_all)


class Rows:
    """The rows of one field: an array or tensor of each sample, of one dtype.

    Attributes:
        shapes: shape of each row.
    """

    def __init__(self, arrays: list[Any], dtype: str) -> None:
        self.arrays = arrays
        self.dtype = dtype
        self.shapes: list[tuple[int, ...]] = [tuple(array.shape) for array in arrays]

    @property
    def is_even(self) -> bool:
        """Return whether all rows have the same shape."""
        return self.shapes.count(self.shapes[0]) == len(self.shapes)

    def numels(self) -> list[int]:
        """Return the number of elements of each row."""
        if len(self.shapes[0]) == 1:
            return [shape[0] for shape in self.shapes]
        return [math.prod(shape) for shape in self.shapes]


def ragged_node(packer: Packer, rows: Rows, mode: str, dims: Sequence[int], *, at: int = -1) -> Node:
    """Return the node of a ragged field.

    Args:
        packer: builder of the batch.
        rows: the rows, all with the same number of dimensions.
        mode: how the field is delivered.
        dims: dimensions in which rows may differ.
        at: offset at which the rows already are, end to end; -1 if they must be placed.
    """
    shapes, dtype = rows.shapes, rows.dtype
    if mode == "pad":
        padded = (len(shapes), *map(max, zip(*shapes, strict=True)))
        values = ("tensor", dtype, padded, None, packer.place(*_padding(rows, padded)))
        of_row = itemgetter(*dims)  # a number, or a tuple of numbers
        return "padded", values, packer.tensor(np.array([of_row(shape) for shape in shapes], np.int64))
    numels = rows.numels()
    at = packer.place(*_joined(rows, sum(numels))) if at < 0 else at
    if mode == "list":
        return "rows", dtype, numels, None if len(shapes[0]) == 1 else shapes, at
    lengths_of = [shape[0] for shape in shapes]
    offsets = np.zeros(len(shapes) + 1, np.int64)
    np.cumsum(lengths_of, out=offsets[1:])
    values = ("tensor", dtype, (int(offsets[-1]), *shapes[0][1:]), None, at)
    if mode == "jagged":
        return "jagged", values, packer.tensor(offsets)
    return "nested", values, packer.tensor(offsets), min(lengths_of), max(lengths_of)


def check_rows(name: str, rows: Rows, dims: Sequence[int]) -> None:
    """Check that the rows differ in the ragged dimensions only.

    Args:
        name: name of the field, for the error.
        rows: the rows.
        dims: dimensions in which rows may differ.
    Raises:
        SampleError: rows differ in other dimensions.
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


def _joined(rows: Rows, numel: int) -> tuple[int, Write]:
    """Return the piece (size in bytes, writer) of rows stored end to end."""
    element = ELEMENT_TYPES[rows.dtype]

    def write(room: Room) -> None:
        if not numel:
            return
        arrays = rows.arrays if len(rows.shapes[0]) == 1 else [array.reshape(-1) for array in rows.arrays]
        if isinstance(arrays[0], np.ndarray):
            np.concatenate(arrays, out=room.view(arrays[0].dtype))
        else:
            import torch

            torch.cat(arrays, out=array_over(element, room, (numel,), as_tensor=True))

    return numel * element.itemsize, write


def stacked(rows: Rows) -> tuple[int, Write]:
    """Return the piece (size in bytes, writer) of rows of one shape, stored as rows of one array."""
    arrays, shape = rows.arrays, rows.shapes[0]

    def write(room: Room) -> None:
        if not len(room):
            return
        if not isinstance(arrays[0], np.ndarray):
            import torch

            torch.stack(arrays, out=array_over(ELEMENT_TYPES[rows.dtype], room, (len(arrays), *shape), as_tensor=True))
        elif shape:
            np.concatenate(arrays, out=room.view(arrays[0].dtype).reshape(-1, *shape[1:]))
        else:
            room.view(arrays[0].dtype)[:] = arrays

    return arrays[0].nbytes * len(arrays), write


def _padding(rows: Rows, padded: tuple[int, ...]) -> tuple[int, Write]:
    """Return the piece (size in bytes, writer) of rows, each padded with zeros to the largest extent in each dimension."""
    element = ELEMENT_TYPES[rows.dtype]

    def write(room: Room) -> None:
        if not len(room):
            return
        if isinstance(rows.arrays[0], np.ndarray) and all(shape[1:] == padded[2:] for shape in rows.shapes):
            with suppress(ValueError, BufferError):  # an array with gaps, or of a dtype that the buffer protocol lacks
                pad_runs(rows.arrays, len(room) // len(rows.arrays), room)
                return
        out = array_over(element, room, padded, as_tensor=not isinstance(rows.arrays[0], np.ndarray))
        for array, shape, place in zip(rows.arrays, rows.shapes, out, strict=True):
            inside = tuple(map(slice, shape))
            place[inside] = array
            for d in range(len(shape)):  # the padding, dimension by dimension, so that nothing is written twice
                place[(*inside[:d], slice(shape[d], None))] = 0

    return math.prod(padded) * element.itemsize, write
