"""From a leased slot to the tensors the trainer sees.

Each array is a DLPack capsule over the slot; torch's storage owns the capsule and with it the lease, so whatever aliases the
storage (a slice, `.numpy()`, a parameter, an autograd graph) keeps the slot from being used again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor

from shmload import faults
from shmload._core.text import read_text
from shmload._core.trainer import Lease
from shmload.batch.dtypes import ELEMENT_TYPES
from shmload.batch.layout import Layout
from shmload.batch.packed import INDICES_OF, PackedBatch, is_plain_record

_from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


@faults.at("mapping")
def deliver_rows(layout: Layout, lease: Lease, nrows: int) -> tuple[Any, int]:
    """The batch of `nrows` fixed samples in a leased slot, and its bytes."""
    plan, nbytes = _plan(layout, nrows)
    names = layout.names
    if names is not None:
        return lease.tensors(plan, _from_dlpack, names), nbytes
    tensors = lease.tensors(plan, _from_dlpack)
    return tensors[0] if layout.tree[0] == "leaf" else structure(layout.tree, tensors), nbytes


@lru_cache(maxsize=64)
def _plan(layout: Layout, nrows: int) -> tuple[tuple[tuple[Any, ...], ...], int]:
    """Per field what a capsule needs, (offset, DLPack code, bits, shape), or how an empty one is made; and the bytes in all."""
    offsets, nbytes = layout.place(nrows)
    plan = tuple(
        (at, f.element.code, f.element.itemsize * 8, (nrows, *f.shape))
        if nrows * f.row_nbytes
        else (-1, torch.empty, (nrows, *f.shape), getattr(torch, f.dtype))
        for f, at in zip(layout.fields, offsets, strict=True)
    )
    return plan, nbytes


class LeasedBatch:
    """A packed batch in a leased slot."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.meta = lease.meta

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor over the slot, which holds the lease."""
        element = ELEMENT_TYPES[dtype]
        return _from_dlpack(self._lease.capsule(offset, element.code, element.itemsize * 8, shape))

    def text(self, count: int, nbytes: int, offset: int, kind: int) -> list[Any]:
        """A column of text as objects of their own."""
        lease = self._lease
        if offset + nbytes > lease.nbytes:
            raise ValueError(f"a text column of {nbytes} bytes at {offset} ends beyond the slot of {lease.nbytes}")
        return read_text(lease.address + offset, nbytes, count, kind)


class PrivateBatch:
    """A packed batch in private memory, as it is made where there is no ring."""

    def __init__(self, packed: PackedBatch) -> None:
        self._room = np.empty(packed.nbytes, np.uint8)
        packed.write(self._room)

    def meta(self) -> bytes:
        """Its last part, which says what the others are."""
        start, nbytes = self._room[:16].view(np.uint64).tolist()
        return self._room[start : start + nbytes].tobytes()

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor over the memory, which keeps it."""
        nbytes = math.prod(shape) * ELEMENT_TYPES[dtype].itemsize
        return torch.from_numpy(self._room[offset : offset + nbytes]).view(getattr(torch, dtype)).view(shape)

    def text(self, count: int, nbytes: int, offset: int, kind: int) -> list[Any]:
        """A column of text as objects of their own."""
        return read_text(self._room.ctypes.data + offset, nbytes, count, kind)


def structure(tree: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
    """Puts a layout's structure around its fields."""
    kind = tree[0]
    if kind == "leaf":
        return tensors[tree[1]]
    parts = [structure(t, tensors) for t in tree[-1]]
    if kind == "dict":
        return dict(zip(tree[1], parts, strict=True))
    if kind == "list":
        return parts
    if kind == "tuple":
        return tuple(parts)
    return tree[1](*parts)


def copied(batch: Any) -> Any:
    """The batch with every tensor and array in private memory, so that its slot can go back at once."""
    return mapped(batch, _cloned, _copied_leaf)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor.clone()
    try:
        return copy.deepcopy(tensor)  # a clone of a leaf that requires grad is none, and one of a Parameter is a Tensor
    except RuntimeError:  # torch deep-copies a class of a user's only if that class makes empty tensors of itself
        with torch._C.DisableTorchFunctionSubclass():
            private = tensor.detach().clone().as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
        private.__dict__.update(copy.deepcopy(tensor.__dict__))
        return private


def _copied_leaf(leaf: Any) -> Any:
    return leaf.copy(order="K") if isinstance(leaf, np.ndarray) else copy.deepcopy(leaf)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a tensor consists of: itself, if it is not sparse."""
    names = INDICES_OF.get(str(tensor.layout))
    if names is None:
        return [tensor] if tensor.layout is torch.strided else []
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return [values, *(getattr(tensor, name)() for name in names)]


def mapped(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_leaf: Callable[[Any], Any]) -> Any:
    """The same structure around other leaves.

    Args:
        of_tensor: makes one of each tensor; a nested one is made anew of its parts.
        of_leaf: makes one of whatever is neither a tensor nor a structure.
    """
    if isinstance(batch, NestedTensor):
        values, offsets, lengths = batch._values, batch._offsets, batch._lengths
        return torch.nested.nested_tensor_from_jagged(  # its own clone() would share the offsets
            of_tensor(values),
            of_tensor(offsets),
            None if lengths is None else of_tensor(lengths),
            batch._ragged_idx,
        )
    if isinstance(batch, torch.Tensor):
        return of_tensor(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(v, of_tensor, of_leaf) for v in batch))
    if type(batch) in (list, tuple):
        return type(batch)([mapped(v, of_tensor, of_leaf) for v in batch])
    if type(batch) is dict:
        return {k: mapped(v, of_tensor, of_leaf) for k, v in batch.items()}
    if is_plain_record(batch):
        record = copy.copy(batch)
        for name in vars(batch):
            leaf = mapped(getattr(batch, name), of_tensor, of_leaf)
            object.__setattr__(record, name, leaf)  # also where it is frozen
        return record
    return of_leaf(batch)
