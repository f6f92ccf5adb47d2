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

    ("value", v)  None, bool, int, float, complex, str, bytes, or a list of these
    ("text", count, nbytes, offset, kind)  a list of str or bytes, end to end
    ("tupled", node)  what is a list, as a tuple
    ("list", nodes)  ("tuple", nodes)  ("dict", keys, nodes)  ("named", pickled class, nodes)
    ("filled", keys, nodes, node)  a mapping of another kind than dict, like that of the last node
    ("sequence", nodes, node)  a sequence of another kind than list, like that of the last node
    ("record", pickled class, names, nodes)  a dataclass
    ("tensor" or "array", dtype, shape, strides or None, offset)
    ("rows", dtype, elements of each, shape of each or None, offset)  a list of tensors, end to end
    ("padded", values, lengths)  ("jagged", values, offsets)  ("nested", values, offsets, shortest, longest)
    ("sparse", layout, shape, is it coalesced, indices, values)  a sparse tensor; of its indices there are one or two nodes
    ("foreign", pickle)  anything else; arrays inside it travel as arrays

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
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.gather import gather_rows, gather_runs, pad_runs
from shmload._core.rows import copy_from
from shmload._core.text import BYTES, UTF8, TextColumn
from shmload.batch.layout import (
    ALIGNMENT,
    ELEMENT_TYPES,
    Field,
    Layout,
    aligned,
    array_over,
    c_strides,
    fits,
    is_plain_tensor,
    of_numpy,
    of_torch,
)
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


ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
PIECES_AT = ALIGNMENT  # where the first piece begins, behind the head
Node = tuple[Any, ...]
Room = NDArray[np.uint8]


Write = Callable[[Room], None]  # writes a piece: bytes of a batch that are not in its meta; the room is as large as they are


class PackedBatch(NamedTuple):
    """A batch ready to be written: its meta, its pieces (offset, bytes, how they are written), bytes in all, objects pickled."""

    meta: bytes
    pieces: list[tuple[int, int, Write]]
    nbytes: int
    num_foreign: int

    def write(self, room: Room) -> None:
        """Writes it at the start of `room`, which has at least `nbytes`."""
        for at, nbytes, write in self.pieces:
            write(room[at : at + nbytes])
        start = self.nbytes - len(self.meta)
        room[start : self.nbytes] = np.frombuffer(self.meta, np.uint8)
        room[:16].view(np.uint64)[:] = start, len(self.meta)


class Packer:
    """Makes the nodes of one batch and gathers its pieces.

    Args:
        first_free: where pieces may be placed from.
    """

    def __init__(self, first_free: int = PIECES_AT) -> None:
        self._pieces: list[tuple[int, int, Write]] = []
        self._end = first_free
        self._num_foreign = 0

    def packed(self, node: Node) -> PackedBatch:
        """The batch under this node, all of whose pieces have been placed."""
        meta = marshal.dumps(node)
        return PackedBatch(meta, self._pieces, self._end + len(meta), self._num_foreign)

    def place(self, nbytes: int, write: Write) -> int:
        """Gives a piece its offset."""
        at = self._end
        self._pieces.append((at, nbytes, write))
        self._end = aligned(at + nbytes)
        return at

    def node(self, value: Any) -> Node:
        """The node of any value.

        Raises:
            SampleError: it holds an object that cannot be pickled.
        """
        kind = type(value)
        if kind in ATOMS:
            return "value", value
        if kind is list:
            return self._atoms(value) or ("list", [self.node(v) for v in value])
        if kind is tuple:
            return "tuple", [self.node(v) for v in value]
        if kind is dict and all(type(k) in ATOMS for k in value):
            return "dict", list(value), [self.node(v) for v in value.values()]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return "named", pickle.dumps(kind), [self.node(v) for v in value]
        if is_plain_record(value):
            return "record", pickle.dumps(kind), list(vars(value)), [self.node(v) for v in vars(value).values()]
        return self.array(value) or self.foreign(value)

    def _atoms(self, values: list[Any]) -> Node | None:
        kinds = set(map(type, values))
        if kinds in ({str}, {bytes}):
            return self.text(values)
        return ("value", values) if kinds <= ATOMS else None

    def text(self, values: list[Any] | TextRuns) -> Node:
        """The node of a list of str or of bytes, which is not empty."""
        column = values if isinstance(values, TextRuns) else TextColumn(values)
        return "text", len(values), column.nbytes, self.place(column.nbytes, column.write), column.kind

    def tensor(self, array: np.ndarray[Any, Any]) -> Node:
        """The node of a tensor made of an array of ours."""
        return "tensor", array.dtype.name, array.shape, None, self.place(*_dense(np.ascontiguousarray(array)))

    def array(self, value: Any) -> Node | None:
        """The node of an array or a tensor; None if it is neither, or one whose bytes are not all there is to it."""
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
        value = value.detach()  # that it requires grad gets lost, as where torch sends it
        is_coo = str(value.layout) == "torch.sparse_coo"
        values = self.array(value._values() if is_coo else value.values())
        indices = [self.array(getattr(value, name)()) for name in INDICES_OF[str(value.layout)]]
        if values is None or None in indices:
            return None
        layout = str(value.layout).removeprefix("torch.")
        return "sparse", layout, tuple(value.shape), is_coo and value.is_coalesced(), indices, values

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
        return "foreign", stream.getvalue()


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


def _dense(array: Any) -> tuple[int, Write]:
    """The piece of one array or tensor, whose memory is copied as it lies."""

    def write(room: Room) -> None:
        source = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
        copy_from(room.ctypes.data, source, array.nbytes)

    return array.nbytes, write


def _compact(value: Any, strides: tuple[int, ...], unit: int, compact: Callable[[Any], Any]) -> tuple[Any, Any]:
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
    return value, None if in_elements == c_strides(value.shape) else in_elements


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
    of_arrays = str(asked) if isinstance(asked, str) and asked != "list" and not dims else None
    return Ragged(of_field, of_arrays, dims)


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
        padded = (len(shapes), *map(max, zip(*shapes, strict=True)))
        values = ("tensor", dtype, padded, None, packer.place(*_padding(rows, padded)))
        of_row = itemgetter(*dims)  # a number, or a tuple of them
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


def _joined(rows: Rows, numel: int) -> tuple[int, Write]:
    """The piece of rows end to end."""
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
    """The piece of rows of one shape, as the rows of one array."""
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
    """The piece of rows of one number of dimensions, each filled up with zeros to the largest in each dimension."""
    element = ELEMENT_TYPES[rows.dtype]

    def write(room: Room) -> None:
        if not len(room):
            return
        if isinstance(rows.arrays[0], np.ndarray) and all(shape[1:] == padded[2:] for shape in rows.shapes):
            with suppress(ValueError, BufferError):  # an array with gaps, or of a dtype that buffers do not have
                pad_runs(rows.arrays, len(room) // len(rows.arrays), room)
                return
        out = array_over(element, room, padded, as_tensor=not isinstance(rows.arrays[0], np.ndarray))
        for array, shape, place in zip(rows.arrays, rows.shapes, out, strict=True):
            inside = tuple(map(slice, shape))
            place[inside] = array
            for d in range(len(shape)):  # the rest, dimension by dimension, so that nothing is written twice
                place[(*inside[:d], slice(shape[d], None))] = 0

    return math.prod(padded) * element.itemsize, write


ROOM_FOR_MORE = 1.25  # an arena is this much larger than the most that a batch has taken so far


Arenas = dict[str, float]  # bytes a row that earlier batches of a worker have needed of each ragged field


class RaggedRows:
    """One batch of `nrows`, being written.

    Args:
        room_of: (bytes wanted) -> the slot's memory; too little of it means that the batch is written elsewhere first.
    """

    def __init__(self, layout: Layout, ragged: Ragged, nrows: int, room_of: Callable[[int], Room], arenas: Arenas) -> None:
        self.layout = layout
        self._ragged = ragged
        self.num_rows = nrows
        self._learnt = arenas
        room_for = {name: aligned(int(row_nbytes * nrows * ROOM_FOR_MORE)) for name, row_nbytes in arenas.items()}
        offsets, fixed_nbytes = layout.fixed.place(nrows)
        self._fixed_at = {f.name: PIECES_AT + at for f, at in zip(layout.fixed.fields, offsets, strict=True)}
        end = PIECES_AT + aligned(fixed_nbytes)
        places: dict[str, int] = {}  # of arenas in the slot
        for f in layout.fields:
            if f.is_ragged and f.kind != "text" and ragged.of_field[f.name] != "pad":
                places[f.name] = end
                end += room_for.get(f.name, 0)
        room = room_of(end)
        self._capacity = len(room)
        self._is_in_slot = self._capacity >= end
        if not self._is_in_slot:
            room = np.empty(end, np.uint8)
        if layout.zero_fill:
            room[:end] = 0
        self._end = end
        self.fixed = {
            f.name: array_over(f.element, room, (nrows, *f.shape), at)
            for f, at in zip(layout.fixed.fields, self._fixed_at.values(), strict=True)
        }
        self.text_runs: dict[str, TextRuns] = {}  # whole columns, in place of what `texts` has
        self.texts: dict[str, list[Any]] = {f.name: [] for f in layout.fields if f.kind == "text"}
        self.arenas = {
            f.name: _Arena(f, room, places.get(f.name, -1), room_for.get(f.name, 0), zero_fill=layout.zero_fill)
            for f in layout.fields
            if f.is_ragged and f.kind != "text"
        }
        self._written = [*((name, arena.rows) for name, arena in self.arenas.items()), *self.texts.items()]

    def out(self, row: int | slice) -> RaggedOut:
        """What `read_into` writes one row to, or `read_batch_into` all of them, `slice(None)`."""
        return RaggedOut(self, row)

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

    def finish(self) -> PackedBatch:
        """The batch, every row of which is written. What lies in the slot already stays there, if the rest fits behind it."""
        for name, arena in self.arenas.items():
            self._learnt[name] = max(self._learnt.get(name, 0.0), arena.nbytes / self.num_rows)
        if self._is_in_slot:
            if not any(arena.spilt_nbytes for arena in self.arenas.values()):
                packed = self._packed(is_there=True)
                if packed.nbytes <= self._capacity:
                    return packed
            # it is written anew, perhaps over itself
            self.fixed = copy.deepcopy(self.fixed)
            for arena in self.arenas.values():
                arena.rows = [copy.deepcopy(row) for row in arena.rows]
        return self._packed(is_there=False)

    def _packed(self, *, is_there: bool) -> PackedBatch:
        packer = Packer(self._end) if is_there else Packer()
        nodes = [self._node(f, packer, is_there=is_there) for f in self.layout.fields]
        tree = self.layout.tree
        if tree[0] == "leaf":
            return packer.packed(nodes[0])
        if tree[0] == "dict":
            return packer.packed(("dict", tree[1], nodes))
        if tree[0] == "named":
            return packer.packed(("named", pickle.dumps(tree[1]), nodes))
        return packer.packed(("tuple" if tree[0] == "tuple" else "list", nodes))

    def _node(self, field: Field, packer: Packer, *, is_there: bool) -> Node:
        name = field.name
        if field.kind == "text" and field.shape:
            return self._lists(field, packer)
        if field.kind == "text":
            try:
                return packer.text(self.text_runs.get(name, self.texts[name]))
            except TypeError as error:
                raise SampleError(f"field {name!r} is {field.dtype} in the schema: {error}; write one type of text") from error
        if name in self.fixed:
            if is_there:
                return "tensor", field.dtype, (self.num_rows, *field.shape), None, self._fixed_at[name]
            node = packer.array(self.fixed[name])
            assert node is not None
            return "tensor", *node[1:]
        arena, mode = self.arenas[name], self._ragged.of_field[name]
        at = arena.at if is_there else -1
        return ragged_node(packer, Rows(arena.rows, field.dtype), mode, self._ragged.dims[name], at=at)

    def _lists(self, field: Field, packer: Packer) -> Node:
        """The node of a field whose rows are lists of text, perhaps of lists."""
        rows = self.texts[field.name]
        wrong = next((row for row in rows if type(row) is not list), None)
        if wrong is not None:
            raise SampleError(
                f"field {field.name!r} is lists of {field.dtype} in the schema, and a row of it is a {type(wrong).__name__}; write "
                "a list"
            )
        return packer.node(rows)


class RaggedOut(Mapping[str, Any]):
    """What `read_into` and `read_batch_into` write to where the schema has ragged fields.

    Fixed fields are views of their rows. `reserve(name, n)` gives the view of a ragged field's row of n elements; for a whole
    batch `reserve(name, lengths)` gives all rows, end to end. `out[name] = value` does both in one. Valid until they return.
    """

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: RaggedRows, row: int | slice) -> None:
        self._rows = rows
        self._row = row

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
        return arena.reserve(n) if type(self._row) is int else arena.reserve_many(n, self._rows.num_rows)

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
        return (f.name for f in self._rows.layout.fields)

    def __len__(self) -> int:
        return len(self._rows.layout.fields)


class _Arena:
    """The rows of one ragged field, end to end as long as there is room."""

    def __init__(self, field: Field, room: Room, at: int, nbytes: int, *, zero_fill: bool) -> None:
        self._field = field
        self.at = at
        self._private = np.zeros if zero_fill else np.empty  # what makes memory beyond the slot's
        memory = room[at : at + nbytes] if at >= 0 else self._private(nbytes, np.uint8)
        self._values = array_over(field.element, memory, (nbytes // field.element.itemsize,))
        self._has_one_dimension = len(field.shape) == 1
        self._used = 0
        self.spilt_nbytes = 0  # of rows that did not fit
        self.rows: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the rows so far."""
        return self._used * self._field.element.itemsize + self.spilt_nbytes

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
        if not fits(shape, wanted):
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
        self.spilt_nbytes += nbytes
        return array_over(self._field.element, self._private(nbytes, np.uint8), (numel,))

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
