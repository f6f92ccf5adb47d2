"""A batch of any structure in a slot: what a custom collate_fn returns, text, objects.

    8 bytes: length of meta | meta | arrays, each at a multiple of 64 bytes

`meta` is marshal (C speed, no code runs) of nested tuples, one per node of the batch:

    (VALUE, v)  None, bool, int, float, complex, str, bytes
    (LIST, nodes)  (TUPLE, nodes)  (DICT, keys, nodes)  (NAMED, pickled class, nodes)
    (TENSOR | ARRAY, dtype, shape, strides or None, offset)
    (FOREIGN, pickle)  anything else; arrays inside it travel as arrays

so the trainer unpickles nothing unless the batch holds objects that only pickle can move; those are counted. The bytes are
written and read by processes of one loader over memory of mode 0600.
"""

from __future__ import annotations

import io
import marshal
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shmload._core.mapping import Mapping as Memory
from shmload._core.rows import copy_bytes, copy_from
from shmload.batch.dtypes import of_numpy, of_torch
from shmload.batch.layout import ALIGNMENT, is_plain_tensor
from shmload.errors import SampleError

VALUE, LIST, TUPLE, DICT, NAMED, TENSOR, ARRAY, FOREIGN = range(8)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


class PackedBatch(NamedTuple):
    """A batch ready to be written: its meta, its arrays with their offsets after the meta, bytes in all, objects pickled."""

    meta: bytes
    arrays: list[tuple[int, Any]]
    nbytes: int
    num_foreign: int

    def write(self, memory: Memory, offset: int) -> None:
        """Writes it at `offset` of a mapped segment that has room for `nbytes`."""
        address = memory.address + offset
        copy_bytes(address, len(self.meta).to_bytes(8, "little"), 8)
        copy_bytes(address + 8, self.meta, len(self.meta))
        start = address + _aligned(8 + len(self.meta))
        for at, array in self.arrays:
            if isinstance(array, np.ndarray):
                copy_from(start + at, array.ctypes.data, array.nbytes)
            else:
                copy_from(start + at, array.data_ptr(), array.nbytes)


class _Packer:
    def __init__(self) -> None:
        self.arrays: list[tuple[int, Any]] = []
        self.end = 0
        self.num_foreign = 0

    def node(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if kind in _ATOMS:
            return VALUE, value
        if kind is list:
            return LIST, [self.node(v) for v in value]
        if kind is tuple:
            return TUPLE, [self.node(v) for v in value]
        if kind is dict and all(type(k) in _ATOMS for k in value):
            return DICT, list(value), [self.node(v) for v in value.values()]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return NAMED, pickle.dumps(kind), [self.node(v) for v in value]
        return self.array(value) or self.foreign(value)

    def array(self, value: Any) -> tuple[Any, ...] | None:
        kind = type(value)
        if kind is np.ndarray or kind is np.memmap:
            element = of_numpy(value.dtype)
            if element is None:
                return None
            dense, strides = _dense(value, value.strides, value.itemsize, np.ascontiguousarray)
            return ARRAY, element.name, value.shape, strides, self.place(dense)
        if kind.__module__ == "torch" and kind.__name__ == "Tensor" and is_plain_tensor(value):
            element = of_torch(value.dtype)
            if element is None:
                return None
            dense, strides = _dense(value, value.stride(), 1, lambda t: t.contiguous())
            return TENSOR, element.name, tuple(value.shape), strides, self.place(dense)
        return None

    def place(self, array: Any) -> int:
        at = self.end
        self.arrays.append((at, array))
        self.end = _aligned(at + array.nbytes)
        return at

    def foreign(self, value: Any) -> tuple[Any, ...]:
        self.num_foreign += 1
        stream = io.BytesIO()
        pickler = _ForeignPickler(stream, self)
        try:
            pickler.dump(value)
        except Exception as error:
            raise SampleError(
                f"a {type(value).__qualname__} in the batch cannot be pickled, and only pickle can move it to the trainer: "
                f"{type(error).__name__}: {error}. Return tensors, arrays, numbers, text and containers of them"
            ) from error
        return FOREIGN, stream.getvalue()


class _ForeignPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, packer: _Packer) -> None:
        super().__init__(stream, protocol=5)
        self._packer = packer

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        return self._packer.array(value)


class _ForeignUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, build: Callable[[tuple[Any, ...]], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._build = build

    def persistent_load(self, node: tuple[Any, ...]) -> Any:
        return self._build(node)


def _aligned(nbytes: int) -> int:
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
    packer = _Packer()
    meta = marshal.dumps(packer.node(batch))
    return PackedBatch(meta, packer.arrays, _aligned(8 + len(meta)) + packer.end, packer.num_foreign)


def unpack(head: Callable[[int, int], bytes], make_array: Callable[[str, tuple[int, ...], Any, int, bool], Any]) -> Any:
    """Rebuilds a packed batch.

    Args:
        head: (offset, nbytes) -> a copy of those bytes of the slot.
        make_array: (dtype, shape, strides in elements or None, offset in the slot, is_tensor) -> an array over the slot.
    """
    meta_nbytes = int.from_bytes(head(0, 8), "little")
    return _Builder(make_array, _aligned(8 + meta_nbytes)).build(marshal.loads(head(8, meta_nbytes)))


class _Builder:
    """Turns nodes back into objects. A class and not a closure that calls itself: that would be a reference cycle, and hold the
    lease until the garbage collector comes by."""

    def __init__(self, make_array: Callable[[str, tuple[int, ...], Any, int, bool], Any], start: int) -> None:
        self._make_array = make_array
        self._start = start

    def build(self, node: tuple[Any, ...]) -> Any:
        kind = node[0]
        if kind == VALUE:
            return node[1]
        if kind == LIST:
            return [self.build(n) for n in node[1]]
        if kind == TUPLE:
            return tuple([self.build(n) for n in node[1]])
        if kind == DICT:
            return {k: self.build(n) for k, n in zip(node[1], node[2], strict=True)}
        if kind == NAMED:
            return pickle.loads(node[1])(*[self.build(n) for n in node[2]])
        if kind == FOREIGN:
            return _ForeignUnpickler(node[1], self.build).load()
        return self._make_array(node[1], node[2], node[3], self._start + node[4], kind == TENSOR)
