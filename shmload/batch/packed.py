"""A batch of any structure in a slot: text, ragged fields, objects, what a custom collate_fn returns.

    16 bytes: where meta begins, its length | from 64 on: pieces, each at a multiple of 64 bytes | meta

`meta` is marshal (C speed, no code runs) of nested tuples, one per node of the batch:

    (VALUE, v)  None, bool, int, float, complex, str, bytes, or a list of these
    (TEXT, count, nbytes, offset, kind)  a list of str or bytes, end to end
    (TUPLED, node)  what is a list, as a tuple
    (LIST, nodes)  (TUPLE, nodes)  (DICT, keys, nodes)  (NAMED, pickled class, nodes)  (RECORD, pickled class, names, nodes)
    (TENSOR | ARRAY, dtype, shape, strides or None, offset)
    (ROWS, dtype, elements of each, shape of each or None, offset)  a list of tensors, end to end
    (PADDED, values, lengths)  (JAGGED, values, offsets)  (NESTED, values, offsets, shortest, longest)
    (SPARSE, layout, shape, is it coalesced, indices, values)  a sparse tensor; of its indices there are one or two nodes
    (FOREIGN, pickle)  anything else; arrays inside it travel as arrays

so the trainer unpickles nothing unless the batch holds objects that only pickle can move; those are counted. The bytes are
written and read by processes of one loader over memory of mode 0600. `deliver.py` reads them.

A column of text whose values lie in memory already, as UTF-8 or bytes: copied to the slot; made objects only one by one.
"""

from __future__ import annotations

import dataclasses
import io
import marshal
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shmload._core.gather import gather_rows, gather_runs
from shmload._core.rows import copy_from
from shmload._core.text import BYTES, UTF8, TextColumn
from shmload.batch.layout import ALIGNMENT, is_plain_tensor, of_numpy, of_torch
from shmload.errors import SampleError


class TextRuns:
    """Values ready to be written, in the form that TextColumn gives its own (src/text.pyx).

    Args:
        addresses: where each value begins.
        lengths: bytes of each.
        is_bytes: bytes, not str.
        owner: what keeps the memory.
    """

    def __init__(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64], *, is_bytes: bool, owner: Any) -> None:
        self._addresses = addresses
        self._lengths = lengths
        self._owner = owner
        self.kind = BYTES if is_bytes else UTF8
        self.nbytes = 8 * len(lengths) + int(lengths.sum())

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> str | bytes:
        """One value, copied."""
        value = np.empty(int(self._lengths[row]), np.uint8)
        gather_rows(self._addresses[[row]], len(value), value)
        return value.tobytes() if self.kind == BYTES else value.tobytes().decode()

    def write(self, room: NDArray[np.uint8]) -> None:
        """Writes them at the start of `room`, which has `nbytes`."""
        ends = 8 * len(self)
        room[:ends].view(np.int64)[:] = np.cumsum(self._lengths)
        gather_runs(self._addresses, self._lengths, room[ends : self.nbytes])


VALUE, TEXT, TUPLED, LIST, TUPLE, DICT, NAMED, RECORD, TENSOR, ARRAY, ROWS, PADDED, JAGGED, NESTED, FOREIGN, SPARSE = (
    range(16)
)
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
PIECES_AT = ALIGNMENT  # where the first piece begins, behind the head
Node = tuple[Any, ...]
Room = NDArray[np.uint8]


class Piece(Protocol):
    """Bytes of a batch that are not in its meta."""

    @property
    def nbytes(self) -> int:
        """How many."""

    def write(self, room: Room) -> None:
        """Writes them; `room` has exactly that many."""


class PackedBatch(NamedTuple):
    """A batch ready to be written: its meta, its pieces with their offsets, bytes in all, objects pickled."""

    meta: bytes
    pieces: list[tuple[int, Piece]]
    nbytes: int
    num_foreign: int

    def write(self, room: Room) -> None:
        """Writes it at the start of `room`, which has at least `nbytes`."""
        for at, piece in self.pieces:
            piece.write(room[at : at + piece.nbytes])
        start = self.nbytes - len(self.meta)
        room[start : self.nbytes] = np.frombuffer(self.meta, np.uint8)
        room[:16].view(np.uint64)[:] = start, len(self.meta)


class Packer:
    """Makes the nodes of one batch and gathers its pieces.

    Args:
        first_free: where pieces may be placed from.
    """

    def __init__(self, first_free: int = PIECES_AT) -> None:
        self._pieces: list[tuple[int, Piece]] = []
        self._end = first_free
        self._num_foreign = 0

    def packed(self, node: Node) -> PackedBatch:
        """The batch under this node, all of whose pieces have been placed."""
        meta = marshal.dumps(node)
        return PackedBatch(meta, self._pieces, self._end + len(meta), self._num_foreign)

    def place(self, piece: Piece) -> int:
        """Gives a piece its offset."""
        at = self._end
        self._pieces.append((at, piece))
        self._end = aligned(at + piece.nbytes)
        return at

    def node(self, value: Any) -> Node:
        """The node of any value.

        Raises:
            SampleError: it holds an object that cannot be pickled.
        """
        kind = type(value)
        if kind in ATOMS:
            return VALUE, value
        if kind is list:
            return self._atoms(value) or (LIST, [self.node(v) for v in value])
        if kind is tuple:
            return TUPLE, [self.node(v) for v in value]
        if kind is dict and all(type(k) in ATOMS for k in value):
            return DICT, list(value), [self.node(v) for v in value.values()]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return NAMED, pickle.dumps(kind), [self.node(v) for v in value]
        if is_plain_record(value):
            return RECORD, pickle.dumps(kind), list(vars(value)), [self.node(v) for v in vars(value).values()]
        return self.array(value) or self.foreign(value)

    def _atoms(self, values: list[Any]) -> Node | None:
        kinds = set(map(type, values))
        if kinds in ({str}, {bytes}):
            return self.text(values)
        return (VALUE, values) if kinds <= ATOMS else None

    def text(self, values: list[Any] | TextRuns) -> Node:
        """The node of a list of str or of bytes, which is not empty."""
        column = values if isinstance(values, TextRuns) else TextColumn(values)
        return TEXT, len(values), column.nbytes, self.place(column), column.kind

    def tensor(self, array: np.ndarray[Any, Any]) -> Node:
        """The node of a tensor made of an array of ours."""
        return TENSOR, array.dtype.name, array.shape, None, self.place(_Dense(np.ascontiguousarray(array)))

    def array(self, value: Any) -> Node | None:
        """The node of an array or a tensor; None if it is neither, or one whose bytes do not tell all about it."""
        kind = type(value)
        if kind is np.ndarray or kind is np.memmap:
            element = of_numpy(value.dtype)
            if element is None:
                return None
            dense, strides = _dense(value, value.strides, value.itemsize, np.ascontiguousarray)
            return ARRAY, element.name, value.shape, strides, self.place(_Dense(dense))
        if kind.__module__ == "torch" and kind.__name__ == "Tensor":
            if str(value.layout) in INDICES_OF:
                return self._sparse(value)
            element = of_torch(value.dtype)
            if element is None or not is_plain_tensor(value):
                return None
            dense, strides = _dense(value, value.stride(), 1, lambda t: t.contiguous())
            return TENSOR, element.name, tuple(value.shape), strides, self.place(_Dense(dense))
        return None

    def _sparse(self, value: Any) -> Node | None:
        if value.device.type != "cpu":
            return None
        value = value.detach()  # that it requires grad gets lost, as where torch sends it
        is_coo = str(value.layout) == "torch.sparse_coo"
        values = self.array(value._values() if is_coo else value.values())
        indices = [self.array(getattr(value, name)()) for name in INDICES_OF[str(value.layout)]]
        if values is None or None in indices:
            return None
        layout = str(value.layout).removeprefix("torch.")
        return SPARSE, layout, tuple(value.shape), is_coo and value.is_coalesced(), indices, values

    def foreign(self, value: Any, count: int = 1) -> Node:
        """The node of an object, or of a list of `count` of them, that only pickle can move."""
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
        return FOREIGN, stream.getvalue()


INDICES_OF = {  # by layout, what gives a sparse tensor's indices
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

    def persistent_id(self, value: Any) -> Node | None:
        return self._packer.array(value)


def is_record(kind: type) -> bool:
    """Whether instances of a class are dataclasses that can be made field by field."""
    return dataclasses.is_dataclass(kind) and _inherits(kind, "__new__")


def is_plain_record(value: Any) -> bool:
    """Whether an object is a dataclass that is nothing but its fields, and says nothing of its own about being pickled."""
    kind = type(value)
    return (
        is_record(kind)
        and _inherits(kind, "__reduce__", "__reduce_ex__", "__getstate__")
        and not hasattr(kind, "__setstate__")
        and hasattr(value, "__dict__")
        and vars(value).keys() == {f.name for f in dataclasses.fields(value)}
    )


def _inherits(kind: type, *names: str) -> bool:
    """Whether a class has these methods from object itself."""
    return all(getattr(kind, name) is getattr(object, name) for name in names)


class _Dense:
    """The memory of one array or tensor, as it lies."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.nbytes: int = array.nbytes

    def write(self, room: Room) -> None:
        array = self._array
        source = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
        copy_from(room.ctypes.data, source, self.nbytes)


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _dense(value: Any, strides: tuple[int, ...], unit: int, compact: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The array whose memory is to be copied, and its strides in elements if they are not C order's.

    An array that fills its memory without gaps in another order of axes (channels_last, Fortran) keeps that order.
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
    return value, None if in_elements == _c_strides(value.shape) else in_elements


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def pack(batch: Any) -> PackedBatch:
    """Prepares a batch of any structure for its slot.

    Raises:
        SampleError: it holds an object that cannot be pickled.
    """
    packer = Packer()
    return packer.packed(packer.node(batch))
