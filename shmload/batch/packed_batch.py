"""Packing a batch of any structure into bytes: text, ragged fields, objects, results of a custom collate_fn.

    16 bytes: offset of meta, its length | from 64 on: pieces, each at a multiple of 64 bytes | meta

`meta` is marshal (as fast as C, executes no code) of nested tuples, one per node of the batch:

    ("value", v)  None, bool, int, float, complex, str, bytes, or a list of these
    ("text", count, nbytes, offset, kind)  a list of str or bytes, end to end
    ("tupled", node)  a tuple, packed like a list
    ("list", nodes)  ("tuple", nodes)  ("dict", keys, nodes)  ("named", pickled class, nodes)
    ("filled", keys, nodes, node)  a mapping that is not a dict, of the class of the last node
    ("sequence", nodes, node)  a sequence that is not a list, of the class of the last node
    ("record", pickled class, names, nodes)  a dataclass
    ("tensor" or "array", dtype, shape, strides or None, offset)
    ("rows", dtype, elements of each, shape of each or None, offset)  a list of tensors, end to end
    ("padded", values, lengths)  ("jagged", values, offsets)  ("nested", values, offsets, shortest, longest)
    ("sparse", layout, shape, is it coalesced, indices, values)  a sparse tensor, with one or two nodes of indices
    ("foreign", pickle)  anything else; arrays inside it travel as arrays

So the trainer unpickles nothing unless the batch contains objects that need pickle; those are counted. Only processes of one loader
read and write the bytes, in memory of mode 0600. `deliver.py` reads them.
"""

from __future__ import annotations

import dataclasses
import io
import marshal
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.rows import copy_from
from shmload._core.text import TextColumn
from shmload.batch.element_types import of_numpy, of_torch
from shmload.batch.layout import ALIGNMENT, aligned, c_strides, is_plain_tensor
from shmload.batch.text_runs import TextRuns
from shmload.errors import SampleError

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
PIECES_AT = ALIGNMENT  # offset of the first piece, after the head

Node = tuple[Any, ...]

Room = NDArray[np.uint8]

Write = Callable[[Room], None]  # writes a piece, which is bytes of a batch outside its meta, into memory of the piece's size


class PackedBatch(NamedTuple):
    """A batch ready to be written: its meta, its pieces (offset, bytes, writer), its size, and the number of pickled objects."""

    meta: bytes
    pieces: list[tuple[int, int, Write]]
    nbytes: int
    num_foreign: int

    def write(self, room: Room) -> None:
        """Write the batch at the start of `room`, which has at least `nbytes`."""
        for at, nbytes, write in self.pieces:
            write(room[at : at + nbytes])
        start = self.nbytes - len(self.meta)
        room[start : self.nbytes] = np.frombuffer(self.meta, np.uint8)
        room[:16].view(np.uint64)[:] = start, len(self.meta)


class Packer:
    """Builds the nodes of one batch and collects its pieces.

    Args:
        first_free: first offset at which pieces may be placed.
    """

    def __init__(self, first_free: int = PIECES_AT) -> None:
        self._pieces: list[tuple[int, int, Write]] = []
        self._end = first_free
        self._num_foreign = 0

    def packed(self, node: Node) -> PackedBatch:
        """Return the batch under this node, after all its pieces have been placed."""
        meta = marshal.dumps(node)
        return PackedBatch(meta, self._pieces, self._end + len(meta), self._num_foreign)

    def place(self, nbytes: int, write: Write) -> int:
        """Place a piece and return its offset."""
        at = self._end
        self._pieces.append((at, nbytes, write))
        self._end = aligned(at + nbytes)
        return at

    def node(self, value: Any) -> Node:
        """Return the node of any value.

        Args:
            value: the value.
        Raises:
            SampleError: the value contains an object that cannot be pickled.
        """
        kind = type(value)
        if kind in ATOMS:
            return "value", value
        if kind is list:
            return self._atoms(value) or self.objects(value) or ("list", [self.node(v) for v in value])
        if kind is tuple:
            return "tuple", [self.node(v) for v in value]
        if kind is dict and all(type(k) in ATOMS for k in value):
            return "dict", list(value), [self.node(v) for v in value.values()]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return "named", pickle.dumps(kind), [self.node(v) for v in value]
        if is_plain_record(value):
            return "record", pickle.dumps(kind), list(vars(value)), [self.node(v) for v in vars(value).values()]
        return self.array(value) or self.foreign(value)

    def objects(self, values: list[Any]) -> Node | None:
        """Return the node of objects of one class that need pickle; None for any other list.

        One pickle names each class once and holds an object that several of them refer to once, as torch's does.
        """
        is_one_class = len(set(map(type, values))) == 1
        return self.foreign(values, len(values)) if is_one_class and all(map(_needs_pickle, values)) else None

    def _atoms(self, values: list[Any]) -> Node | None:
        kinds = set(map(type, values))
        if kinds in ({str}, {bytes}):
            return self.text(values)
        return ("value", values) if kinds <= ATOMS else None

    def text(self, values: list[Any] | TextRuns) -> Node:
        """Return the node of a non-empty list of str or bytes."""
        column = values if isinstance(values, TextRuns) else TextColumn(values)
        return "text", len(values), column.nbytes, self.place(column.nbytes, column.write), column.kind

    def tensor(self, array: np.ndarray[Any, Any]) -> Node:
        """Return the node of a tensor made from a numpy array that belongs to us."""
        return "tensor", array.dtype.name, array.shape, None, self.place(*_dense(np.ascontiguousarray(array)))

    def array(self, value: Any) -> Node | None:
        """Return the node of an array or tensor; None if it is neither, or if it is more than its bytes."""
        kind = type(value)
        if kind is np.ndarray or kind is np.memmap:
            element = of_numpy(value.dtype)
            if element is None:
                return None
            dense, strides = _compact(value, value.strides, value.itemsize, np.ascontiguousarray)
            return "array", element.name, value.shape, strides, self.place(*_dense(dense))
        if kind.__module__ == "torch" and kind.__name__ == "Tensor":
            if str(value.layout) in INDICES_OF:
                return self._sparse(value)
            element = of_torch(value.dtype)
            if element is None or not is_plain_tensor(value):
                return None
            dense, strides = _compact(value, value.stride(), 1, lambda t: t.contiguous())
            return "tensor", element.name, tuple(value.shape), strides, self.place(*_dense(dense))
        return None

    def _sparse(self, value: Any) -> Node | None:
        if value.device.type != "cpu":
            return None
        value = value.detach()  # requires_grad is lost, as when torch sends the tensor
        is_coo = str(value.layout) == "torch.sparse_coo"
        values = self.array(value._values() if is_coo else value.values())
        indices = [self.array(getattr(value, name)()) for name in INDICES_OF[str(value.layout)]]
        if values is None or None in indices:
            return None
        layout = str(value.layout).removeprefix("torch.")
        return "sparse", layout, tuple(value.shape), is_coo and value.is_coalesced(), indices, values

    def foreign(self, value: Any, count: int = 1) -> Node:
        """Return the node of an object, or of a list of `count` objects, that needs pickle."""
        self._num_foreign += count
        stream = io.BytesIO()
        pickler = _ForeignPickler(stream, self)
        try:
            pickler.dump(value)
        except Exception as error:
            raise SampleError(
                f"a {type(value[0] if count > 1 else value).__qualname__} in the batch cannot be pickled, and only pickle can "
                f"move it to the trainer: {type(error).__name__}: {error}. Return tensors, arrays, numbers, text and containers "
                "of them"
            ) from error
        return "foreign", stream.getvalue()


INDICES_OF = {  # functions that return a sparse tensor's indices, by layout
    "torch.sparse_coo": ("_indices",),
    "torch.sparse_csr": ("crow_indices", "col_indices"),
    "torch.sparse_csc": ("ccol_indices", "row_indices"),
    "torch.sparse_bsr": ("crow_indices", "col_indices"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices"),
}


class _ForeignPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, packer: Packer) -> None:
        super().__init__(stream, protocol=5)
        self._packer = packer

    def reducer_override(self, value: Any) -> Any:
        """Replace an array by a call of `placed`; unlike `persistent_id`, this is not called for each int and str."""
        node = self._packer.array(value)
        return NotImplemented if node is None else (placed, (node,))


def placed(node: Node) -> Any:
    """Mark the place of an array in a pickle. The unpickler calls its own builder in place of this function."""
    raise SampleError(f"an array at {node} can only be unpickled with its batch")


def _needs_pickle(value: Any) -> bool:
    """Return whether an object other than a tensor has no node but "foreign"."""
    kind = type(value)
    if kind is np.ndarray or kind is np.memmap:
        return of_numpy(value.dtype) is None
    has_node = kind in ATOMS or kind in (list, tuple, dict) or (isinstance(value, tuple) and hasattr(value, "_fields"))
    is_tensor = kind.__module__ == "torch" and kind.__name__ == "Tensor"
    return not (has_node or is_tensor or is_plain_record(value))


def is_record(kind: type) -> bool:
    """Return whether instances of a class are dataclasses that can be rebuilt field by field."""
    return dataclasses.is_dataclass(kind) and _inherits(kind, "__new__")


def is_plain_record(value: Any) -> bool:
    """Return whether an object is a dataclass with no state besides its fields and no pickling methods of its own."""
    kind = type(value)
    return (
        is_record(kind)
        and _inherits(kind, "__reduce__", "__reduce_ex__", "__getstate__")
        and not hasattr(kind, "__setstate__")
        and hasattr(value, "__dict__")
        and vars(value).keys() == {f.name for f in dataclasses.fields(value)}
    )


def _inherits(kind: type, *names: str) -> bool:
    """Return whether a class inherits these methods from object."""
    return all(getattr(kind, name) is getattr(object, name) for name in names)


def _dense(array: Any) -> tuple[int, Write]:
    """Return the piece of one array or tensor, a copy of its memory."""

    def write(room: Room) -> None:
        source = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
        copy_from(room.ctypes.data, source, array.nbytes)

    return array.nbytes, write


def _compact(value: Any, strides: tuple[int, ...], unit: int, compact: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the array whose memory is copied, and its strides in elements if they are not those of C order.

    An array whose memory has no gaps but another order of axes (channels_last, Fortran) keeps that order.
    """
    expected, axes = 1, sorted(range(value.ndim), key=lambda axis: (strides[axis], value.shape[axis]))
    is_dense = True
    for axis in axes:
        if value.shape[axis] != 1:
            is_dense = is_dense and strides[axis] == expected * unit
            expected *= value.shape[axis]
    if not is_dense or math.prod(value.shape) == 0:
        return compact(value), None
    in_elements = tuple(stride // unit for stride in strides)
    return value, None if in_elements == c_strides(value.shape) else in_elements


def pack(batch: Any) -> PackedBatch:
    """Prepare a batch of any structure for its slot.

    Args:
        batch: the batch.
    Raises:
        SampleError: the batch contains an object that cannot be pickled.
    """
    packer = Packer()
    return packer.packed(packer.node(batch))
