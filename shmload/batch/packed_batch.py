"""Pack a batch of any structure into bytes: text, ragged fields, objects, results of a custom collate_fn.

    16 bytes: offset of meta, its length | from 64 on: pieces, each at a multiple of 64 bytes | meta

`meta` is marshal (as fast as C, executes no code) of nested tuples, one per node of the batch:

    ("value", v)  None, bool, int, float, complex, str, bytes, or lists, tuples and dicts of these
    ("outline", v, groups)  such a value with Ellipsis in place of each leaf; a group is (numbers of leaves, node of their list)
    ("text", count, nbytes, offset, kind)  a list of str or bytes, end to end
    ("tupled", node)  a tuple, packed like a list
    ("list", nodes)  ("tuple", nodes)  ("dict", keys, nodes)  ("named", pickled class, nodes)
    ("named rows", pickled class, node)  ("record rows", pickled class, names, node)  a list of them, made of a list of tuples
    ("filled", keys, nodes, node)  a mapping that is not a dict, of the class of the last node
    ("sequence", nodes, node)  a sequence that is not a list, of the class of the last node
    ("record", pickled class, names, nodes)  a dataclass
    ("tensor" or "array", dtype, shape, strides or None, offset)  along an axis of stride 0, there is one element
    ("rows", dtype, elements of each, shape of each or None, offset)  a list of tensors, end to end
    ("row arrays", dtype, elements of each, shape of each, offset)  a list of arrays, end to end
    ("padded", values, lengths)  ("jagged", values, offsets)  ("nested", values, offsets, shortest, longest)
    ("sparse", layout, shape, is it coalesced, indices, values)  a sparse tensor, with one or two nodes of indices
    ("foreign", pickle)  a list of anything else; arrays inside it travel as arrays
    ("first", node)  the first element of a list
    ("uneven", found, node)  the whole batch, one of whose fields is a list because its samples differ (uneven.py)

So the trainer unpickles nothing unless the batch contains objects that need pickle; those are counted. Only processes of one loader
read and write the bytes, in memory of mode 0600. `unpacking.py` reads them.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import marshal
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.outline import split
from shmload._core.rows import copy_from
from shmload._core.text import TextColumn
from shmload.batch.element_types import of_numpy, of_torch
from shmload.batch.layout import ALIGNMENT, aligned, c_strides, is_plain_tensor
from shmload.batch.text_runs import TextRuns
from shmload.errors import SampleError

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SMALL_ARRAY = 4096  # bytes up to which building an array of its own would take longer than copying it
PIECES_AT = ALIGNMENT  # offset of the first piece, after the head

Node = tuple[Any, ...]

Room = NDArray[np.uint8]

Write = Callable[[Room], None]  # writes a piece (some of the batch's bytes that are not meta) to memory of the piece's size


class PackedBatch(NamedTuple):
    """A batch that is ready to be written.

    Attributes:
        meta: its last part.
        pieces: (offset, size in bytes, function that writes it) of each piece. The functions refer to the samples' memory.
        nbytes: size of the batch.
        num_foreign: number of objects that were pickled.
    """

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
    """A builder of the nodes of one batch, which also collects its pieces.

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
        """Assign the next offset to a piece of `nbytes` bytes, which `write` will write. Return the offset."""
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
        outline, leaves = split(value)
        if outline is Ellipsis:  # the value itself is a leaf
            return self._alone(value) or ("first", self._together(_group_of(value), [value]))
        return ("outline", outline, self._grouped(leaves)) if leaves else ("value", outline)

    def _grouped(self, leaves: list[Any]) -> list[tuple[list[int], Node]]:
        """Return groups of leaves that share a piece or a pickle: (numbers of the leaves, node of their list).

        Leaves are grouped because a batch may have thousands of them.
        """
        like: dict[_GroupKey | None, list[int]] = {}
        groups: list[tuple[list[int], Node]] = []
        pickled_classes = set()  # classes of which every instance needs pickle, so that a class is checked once
        for number, leaf in enumerate(leaves):
            key = None if type(leaf) in pickled_classes else _group_of(leaf)
            if key is None and type(leaf) not in pickled_classes:
                if (node := self._alone(leaf)) is not None:
                    groups.append(([number], ("list", [node])))
                    continue
                if not (_is_array_class(type(leaf)) or type(leaf) in (list, dict) or is_record(type(leaf))):
                    pickled_classes.add(type(leaf))
            like.setdefault(key, []).append(number)
        groups += [(numbers, self._together(key, [leaves[number] for number in numbers])) for key, numbers in like.items()]
        return groups

    def _alone(self, leaf: Any) -> Node | None:
        """Return the node of a leaf that is packed by itself: text, a list of text or an array; None for any other leaf."""
        kind = type(leaf)
        if kind is str or kind is bytes:
            return "value", leaf
        if kind is list and {*map(type, leaf)} in ({str}, {bytes}):
            return self.text(leaf)
        return self.array(leaf)

    def _together(self, key: _GroupKey | None, leaves: list[Any]) -> Node:
        """Return the node of the list of these leaves, whose key `_group_of` returned."""
        if key is None:
            return self._pickled(leaves)
        if key.form == "text":
            return self.text(leaves)
        if key.form == "named rows":
            return key.form, pickle.dumps(key.kind), self.node([tuple(leaf) for leaf in leaves])
        if key.form == "record rows":
            return key.form, pickle.dumps(key.kind), key.names, self.node([tuple(vars(leaf).values()) for leaf in leaves])
        return self._end_to_end(key, leaves)

    def _end_to_end(self, key: _GroupKey, arrays: list[Any]) -> Node:
        """Return the node of the list of these arrays, or tensors, of one dtype."""
        is_tensor, dtype = key.form == "rows", key.kind
        element = of_torch(dtype) if is_tensor else of_numpy(dtype)
        assert element is not None
        shapes = [tuple(array.shape) for array in arrays]
        numels = [math.prod(shape) for shape in shapes]
        numel = sum(numels)

        def write(room: Room) -> None:
            flat = [array.reshape(-1) for array in arrays]
            if numel and is_tensor:
                torch = sys.modules["torch"]
                torch.cat(flat, out=torch.from_numpy(room).view(dtype))
            elif numel:
                np.concatenate(flat, out=room.view(dtype))

        at = self.place(numel * element.itemsize, write)
        return key.form, element.name, numels, shapes, at

    def text(self, values: list[Any] | TextRuns) -> Node:
        """Return the node of a non-empty list of str or bytes."""
        column = values if isinstance(values, TextRuns) else TextColumn(values)
        return "text", len(values), column.nbytes, self.place(column.nbytes, column.write), column.kind

    def tensor(self, array: np.ndarray[Any, Any]) -> Node:
        """Return the node of a tensor with the values of a numpy array, which must not change before the batch is written."""
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
            strides = value.stride()
            held = _unexpanded(value) if 0 in strides else value
            dense, held_strides = _compact(held, held.stride(), 1, lambda t: t.contiguous())
            if held.shape != value.shape:
                found = held_strides or c_strides(held.shape)
                held_strides = tuple(own and new for own, new in zip(strides, found, strict=True))
            return "tensor", element.name, tuple(value.shape), held_strides, self.place(*_dense(dense))
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

    def foreign(self, value: Any) -> Node:
        """Return the node of an object that needs pickle."""
        return "first", self._pickled([value])

    def _pickled(self, values: list[Any]) -> Node:
        """Return the node of a list of objects that need pickle."""
        self._num_foreign += len(values)
        stream = io.BytesIO()
        try:
            _array_pickler(stream, self).dump(values)
        except Exception as error:
            if len(values) > 1:
                for value in values:  # raises for the object that is at fault
                    self._pickled([value])
            raise SampleError(
                f"a value of type {type(values[0]).__qualname__} in the batch cannot be pickled, and only pickle can move it to "
                f"the trainer: {type(error).__name__}: {error}. Return tensors, arrays, numbers, text and containers of them"
            ) from error
        return "foreign", stream.getvalue()


INDICES_OF = {  # functions that return a sparse tensor's indices, by layout
    "torch.sparse_coo": ("_indices",),
    "torch.sparse_csr": ("crow_indices", "col_indices"),
    "torch.sparse_csc": ("ccol_indices", "row_indices"),
    "torch.sparse_bsr": ("crow_indices", "col_indices"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices"),
}


def _array_pickler(stream: io.BytesIO, packer: Packer) -> pickle.Pickler:
    """Return a pickler that places the arrays and tensors it meets and writes a call of `placed` for each.

    It has a table of classes, because `reducer_override` would be called for each object of any class.
    """

    def reduce(value: Any) -> Any:
        node = packer.array(value)
        return value.__reduce_ex__(5) if node is None else (placed, (node,))

    pickler = pickle.Pickler(stream, protocol=5)
    torch = sys.modules.get("torch")
    classes = [np.ndarray, np.memmap, *([] if torch is None else [torch.Tensor])]
    pickler.dispatch_table = {**copyreg.dispatch_table, **dict.fromkeys(classes, reduce)}
    if torch is not None:
        pickler.dispatch_table[torch.UntypedStorage] = lambda storage: (
            storage_of,
            (torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes(),),
        )
    return pickler


def storage_of(data: bytes) -> Any:
    """Return a torch storage with these bytes. Needed because pickle cannot open what torch writes for an untyped storage."""
    import torch

    values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return values.untyped_storage()


def placed(node: Node) -> Any:
    """Mark the place of an array in a pickle. The unpickler calls its own builder in place of this function."""
    raise SampleError(f"an array at {node} can only be unpickled with its batch")


def _is_array_class(kind: type) -> bool:
    return kind in (np.ndarray, np.memmap) or (kind.__module__ == "torch" and kind.__name__ == "Tensor")


class _GroupKey(NamedTuple):
    """The properties shared by leaves that are packed together: their node's form, their class or dtype, and a record's fields."""

    form: str
    kind: Any
    names: tuple[str, ...] = ()


def _group_of(leaf: Any) -> _GroupKey | None:
    """Return the key of the leaves with which a leaf is packed.

    None for a leaf that is packed alone, such as a large array, which keeps its alignment and order of axes, or that needs pickle.
    """
    kind = type(leaf)
    if kind is str or kind is bytes:
        return _GroupKey("text", kind)
    if kind is np.ndarray:
        is_small = leaf.nbytes <= _SMALL_ARRAY and leaf.flags.c_contiguous
        return _GroupKey("row arrays", leaf.dtype) if is_small and of_numpy(leaf.dtype) is not None else None
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        is_small = is_plain_tensor(leaf) and leaf.nbytes <= _SMALL_ARRAY and leaf.is_contiguous()
        return _GroupKey("rows", leaf.dtype) if is_small and of_torch(leaf.dtype) is not None else None
    if isinstance(leaf, tuple) and hasattr(leaf, "_fields"):
        return _GroupKey("named rows", kind)
    if is_plain_record(leaf):
        return _GroupKey("record rows", kind, tuple(vars(leaf)))
    return None


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


def _unexpanded(tensor: Any) -> Any:
    """Return the elements of an expanded tensor, such as a mask for all heads, without the repetitions along its axes."""
    strides_and_extents = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor[tuple(slice(None if stride or not extent else 1) for stride, extent in strides_and_extents)]


def _dense(array: Any) -> tuple[int, Write]:
    """Return the piece of one array or tensor in C order or without gaps: (size in bytes, function that copies its memory)."""

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
    in_c_order = c_strides(value.shape)
    # an axis of one element may have any stride, even a negative one, which torch refuses
    in_elements = tuple(stride // unit if stride >= 0 else c for stride, c in zip(strides, in_c_order, strict=True))
    return value, None if in_elements == in_c_order else in_elements


def pack(batch: Any) -> PackedBatch:
    """Return a batch of any structure in a form that can be written to a slot.

    Args:
        batch: the batch.
    Raises:
        SampleError: the batch contains an object that cannot be pickled.
    """
    packer = Packer()
    return packer.packed(packer.node(batch))
