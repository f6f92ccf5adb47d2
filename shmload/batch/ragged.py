"""Ragged fields: rows of one field that differ in shape, delivered as a list, padded, end to end, or as one `torch.nested` tensor.

Which fields are ragged must not depend on luck: a batch whose rows happen to be equal would have another structure than its
neighbours. So a field is ragged because the dataset's schema says so (a `None` dimension), because `ragged={"name": mode}`
does, or, with a mode other than "list" and no schema, because it is an array of one or more dimensions. Only "list" goes by the
batch, since a stacked tensor is read like a list of its rows.

Rows of a batch whose schema has ragged or text fields, as `read_into` writes them: the views that `out.reserve` gives.

    head | fixed fields, row by row | one arena for each ragged field, its rows end to end | text | meta

The arenas lie in the slot, as large as earlier batches have taught, so a decoder writes each value once, where it is delivered.
What does not fit its arena is written to private memory, and the whole batch is copied to a larger slot when it is done. Fields
that are delivered padded are gathered in private memory, since where a row lies depends on the longest.

A batch of any structure in a slot: text, ragged fields, objects, what a custom collate_fn returns.

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

import copy
import dataclasses
import io
import marshal
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shmload._core.gather import gather_rows, gather_runs
from shmload._core.rows import copy_from
from shmload._core.text import BYTES, UTF8, TextColumn
from shmload.batch.layout import ALIGNMENT, ELEMENT_TYPES, Field, Layout, is_plain_tensor, of_numpy, of_torch
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


VALUE, TEXT, TUPLED, LIST, TUPLE, DICT, NAMED, RECORD, TENSOR, ARRAY, ROWS, PADDED, JAGGED, NESTED, FOREIGN, SPARSE = range(16)
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


AS_LISTS = Ragged({}, None, {})  # where no field is known to be ragged, and the mode is "list"


def ragged_of(asked: str | Mapping[str, str], schema: Mapping[str, Any] | None, *, is_torch_mode: bool) -> Ragged | None:
    """The rule of a loader; None: what torch's collate refuses is refused.

    Raises:
        ValueError: `asked` is no mode, nor a mapping of names to modes, or a mode does not go with the schema.
    """
    given = asked.values() if isinstance(asked, Mapping) else [asked]
    if not all(mode in MODES for mode in given):
        raise ValueError(f'ragged is "list", "pad", "nested", "jagged", or a mapping of field names to these; got {asked!r}')
    shapes = {name: _shape_of(spec) for name, spec in (schema or {}).items()}
    dims = {name: tuple(i for i, extent in enumerate(shape) if extent is None) for name, shape in shapes.items() if None in shape}
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


ROOM_FOR_MORE = 1.25  # an arena is this much larger than the most that a batch has taken so far


class Arenas:
    """How large the arenas of one worker's batches are: what it has learnt of each field, in bytes a row."""

    def __init__(self) -> None:
        self._of_row: dict[str, float] = {}

    def nbytes(self, name: str, nrows: int) -> int:
        """Bytes to set aside; none before the first batch."""
        return aligned(int(self._of_row.get(name, 0.0) * nrows * ROOM_FOR_MORE))

    def learn(self, name: str, nbytes: int, nrows: int) -> None:
        """Takes note of what a batch has needed."""
        self._of_row[name] = max(self._of_row.get(name, 0.0), nbytes / nrows)


class RaggedRows:
    """One batch of `nrows`, being written.

    Args:
        room_of: (bytes wanted) -> the slot's memory; too little of it means that the batch is written elsewhere first.
    """

    def __init__(self, layout: Layout, ragged: Ragged, nrows: int, room_of: Callable[[int], Room], arenas: Arenas) -> None:
        self._layout = layout
        self._ragged = ragged
        self._nrows = nrows
        self._learnt = arenas
        offsets, fixed_nbytes = layout.fixed.place(nrows)
        self._fixed_at = {f.name: PIECES_AT + at for f, at in zip(layout.fixed.fields, offsets, strict=True)}
        end = PIECES_AT + aligned(fixed_nbytes)
        places: dict[str, int] = {}  # of arenas in the slot
        for f in layout.fields:
            if f.is_ragged and f.kind != "text" and ragged.of_field[f.name] != "pad":
                places[f.name] = end
                end += arenas.nbytes(f.name, nrows)
        room = room_of(end)
        self._capacity = len(room)
        self._is_in_slot = self._capacity >= end
        if not self._is_in_slot:
            room = np.empty(end, np.uint8)
        if layout.zero_fill:
            room[:end] = 0
        self._end = end
        self.fixed = {
            f.name: _array(f, room[at : at + nrows * f.row_nbytes], (nrows, *f.shape))
            for f, at in zip(layout.fixed.fields, self._fixed_at.values(), strict=True)
        }
        self.text_runs: dict[str, TextRuns] = {}  # whole columns, in place of what `texts` has
        self.texts: dict[str, list[Any]] = {f.name: [] for f in layout.fields if f.kind == "text"}
        self.arenas = {
            f.name: _Arena(f, room, places.get(f.name, -1), arenas.nbytes(f.name, nrows), zero_fill=layout.zero_fill)
            for f in layout.fields
            if f.is_ragged and f.kind != "text"
        }
        self._written = [*((name, arena.rows) for name, arena in self.arenas.items()), *self.texts.items()]

    def out(self, row: int) -> RaggedOut:
        """What `read_into` writes one row to."""
        return RaggedOut(self, row, 1)

    def out_rows(self) -> RaggedOut:
        """What `read_batch_into` writes the batch to."""
        return RaggedOut(self, slice(None), self._nrows)

    def check(self, num_rows: int) -> None:
        """Returns if the first `num_rows` rows are whole, and no other has been begun.

        Raises:
            SampleError: a ragged field was not written, or more than once.
        """
        for name, written in self._written:
            rows = self.text_runs.get(name, written)
            if len(rows) != num_rows:
                often = "did not write" if len(rows) < num_rows else "wrote more than once"
                raise SampleError(
                    f"read_into {often} field {name!r}: a ragged field needs one out.reserve({name!r}, n) or "
                    f"out[{name!r}] = ..., also where it is empty"
                )

    @property
    def names(self) -> Iterator[str]:
        """The schema's fields."""
        return (f.name for f in self._layout.fields)

    def finish(self) -> PackedBatch:
        """The batch, every row of which is written. What lies in the slot already stays there, if the rest fits behind it."""
        for name, arena in self.arenas.items():
            self._learnt.learn(name, arena.nbytes, self._nrows)
        if self._is_in_slot:
            if not any(arena.has_spilt for arena in self.arenas.values()):
                packed = self._packed(is_there=True)
                if packed.nbytes <= self._capacity:
                    return packed
            self._leave_slot()
        return self._packed(is_there=False)

    def _leave_slot(self) -> None:
        """Copies what lies in the slot: it is written anew, perhaps over itself."""
        self.fixed = {name: copy.deepcopy(array) for name, array in self.fixed.items()}
        for arena in self.arenas.values():
            arena.rows = [copy.deepcopy(row) for row in arena.rows]

    def _packed(self, *, is_there: bool) -> PackedBatch:
        packer = Packer(self._end) if is_there else Packer()
        nodes = [self._node(f, packer, is_there=is_there) for f in self._layout.fields]
        return packer.packed(_structured(self._layout.tree, nodes))

    def _node(self, field: Field, packer: Packer, *, is_there: bool) -> Node:
        name = field.name
        if field.kind == "text":
            return packer.text(self.text_runs.get(name, self.texts[name]))
        if name in self.fixed:
            if is_there:
                return TENSOR, field.dtype, (self._nrows, *field.shape), None, self._fixed_at[name]
            node = packer.array(self.fixed[name])
            assert node is not None
            return TENSOR, *node[1:]
        arena, mode = self.arenas[name], self._ragged.of_field[name]
        at = arena.at if is_there else -1
        return ragged_node(packer, Rows(arena.rows, field.dtype), mode, self._ragged.dims[name], at=at)


class RaggedOut(Mapping[str, Any]):
    """What `read_into` and `read_batch_into` write to where the schema has ragged fields.

    Fixed fields are views of their rows. `reserve(name, n)` gives the view of a ragged field's row of n elements; for a whole
    batch `reserve(name, lengths)` gives all rows, end to end. `out[name] = value` does both in one. Valid until they return.
    """

    __slots__ = ("_count", "_row", "_rows")

    def __init__(self, rows: RaggedRows, row: int | slice, count: int) -> None:
        self._rows = rows
        self._row = row
        self._count = count

    def reserve(self, name: str, n: Any) -> Any:
        """The writable view of a ragged field.

        Args:
            n: extent of the ragged dimension; with several, a tuple of one for each. For a batch, one of these for each row.
        Returns:
            an array of the schema's dtype and shape with n in place of None; for a batch one dimension, all rows' elements.
        Raises:
            KeyError: the schema has no such ragged field.
            ValueError: n does not go with the field's shape.
        """
        arena = self._rows.arenas.get(name)
        if arena is None:
            known = ", ".join(map(repr, self._rows.arenas)) or "none"
            raise KeyError(f"out.reserve({name!r}): not a ragged field of the schema; those are {known}")
        return arena.reserve(n) if type(self._row) is int else arena.reserve_many(n, self._count)

    def __getitem__(self, name: str) -> Any:
        if name in self._rows.fixed:
            return self._rows.fixed[name][self._row, ...]
        raise KeyError(f"out[{name!r}]: a ragged field has no view before out.reserve({name!r}, n) gives one")

    def __setitem__(self, name: str, value: Any) -> None:
        rows, is_row = self._rows, type(self._row) is int
        if name in rows.fixed:
            rows.fixed[name][self._row] = value
        elif isinstance(value, TextRuns):
            rows.text_runs[name] = value
        elif name in rows.texts:
            rows.texts[name].extend([value] if is_row else value)
        else:
            for one in [value] if is_row else value:
                rows.arenas[name].put(one)

    def __iter__(self) -> Iterator[str]:
        return self._rows.names

    def __len__(self) -> int:
        return len(list(self._rows.names))


class _Arena:
    """The rows of one ragged field, end to end as long as there is room."""

    def __init__(self, field: Field, room: Room, at: int, nbytes: int, *, zero_fill: bool) -> None:
        self._field = field
        self.at = at
        self._values = _array(field, room[at : at + nbytes] if at >= 0 else np.empty(nbytes, np.uint8), (-1,))
        self._has_one_dimension = len(field.shape) == 1
        self._zero_fill = zero_fill
        self._used = 0
        self._spilt_nbytes = 0
        self.rows: list[Any] = []

    @property
    def has_spilt(self) -> bool:
        """Whether a row did not fit."""
        return self._spilt_nbytes > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows so far."""
        return self._used * self._field.element.itemsize + self._spilt_nbytes

    def reserve(self, extents: Any) -> Any:
        """The view of the next row."""
        if self._has_one_dimension and type(extents) is int and extents >= 0:
            row = self._take(extents)
        else:
            shape = self._shape(extents)
            row = self._take(math.prod(shape)).reshape(shape)
        self.rows.append(row)
        return row

    def reserve_many(self, extents: Any, count: int) -> Any:
        """The view of all rows, end to end."""
        numels = extents.tolist() if hasattr(extents, "tolist") else list(extents)
        is_flat = self._has_one_dimension and set(map(type, numels)) <= {int} and min(numels, default=0) >= 0
        shapes = [] if is_flat else [self._shape(e.tolist() if hasattr(e, "tolist") else e) for e in extents]
        if len(numels) != count or self.rows:
            raise ValueError(
                f"out.reserve({self._field.name!r}, ...) of a batch needs one length for each of its {count} rows, once"
            )
        if not is_flat:
            numels = [math.prod(shape) for shape in shapes]
        values = self._take(sum(numels))
        ends = [0, *accumulate(numels)]
        self.rows += [values[start:end] for start, end in pairwise(ends)]
        if not is_flat:
            self.rows[:] = [row.reshape(shape) for row, shape in zip(self.rows, shapes, strict=True)]
        return values

    def put(self, value: Any) -> None:
        """Writes the next row."""
        shape = tuple(np.shape(value))
        wanted = self._field.shape
        if len(shape) != len(wanted) or any(w not in (None, s) for w, s in zip(wanted, shape, strict=True)):
            raise SampleError(f"field {self._field.name!r} has shape {wanted} in the schema; a row of {shape} was given")
        row = self._take(math.prod(shape)).reshape(shape)
        self.rows.append(row)
        row[...] = value

    def _take(self, numel: int) -> Any:
        """The next so many elements, in one dimension."""
        end = self._used + numel
        if end <= len(self._values):
            values = self._values[self._used : end]
            self._used = end
            return values
        nbytes = numel * self._field.element.itemsize
        self._spilt_nbytes += nbytes
        return _array(self._field, (np.zeros if self._zero_fill else np.empty)(nbytes, np.uint8), (-1,))

    def _shape(self, extents: Any) -> tuple[int, ...]:
        wanted = self._field.shape
        given = list(extents) if isinstance(extents, tuple | list) else [extents]
        if len(given) != wanted.count(None) or any(int(n) < 0 for n in given):
            raise ValueError(
                f"out.reserve({self._field.name!r}, n) needs an extent of 0 or more for each None of the shape {wanted}; "
                f"got {extents!r}"
            )
        numbers = iter(given)
        return tuple(int(next(numbers)) if extent is None else extent for extent in wanted)


def _array(field: Field, room: Room, shape: tuple[int, ...]) -> Any:
    """An array of the field's dtype over some memory: numpy's, or torch's for types numpy lacks."""
    if field.element.numpy is not None:
        return room.view(field.element.numpy).reshape(shape)
    if not len(room):
        import torch

        return torch.empty(tuple(max(n, 0) for n in shape), dtype=getattr(torch, field.dtype))
    return over(room, field.dtype).reshape(shape)


def _structured(tree: tuple[Any, ...], nodes: list[Node]) -> Node:
    """The layout's structure around the fields' nodes."""
    kind = tree[0]
    if kind == "dict":
        return DICT, list(tree[1]), nodes
    if kind == "named":
        return NAMED, pickle.dumps(tree[1]), nodes
    return (TUPLE if kind == "tuple" else LIST), nodes
