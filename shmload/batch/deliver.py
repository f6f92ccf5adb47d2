"""From a leased slot to the tensors the trainer sees.

Each array is a DLPack capsule over the slot; torch's storage owns the capsule and with it the lease, so whatever aliases the
storage (a slice, `.numpy()`, a parameter, an autograd graph) keeps the slot from being used again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shmload._core.trainer import Lease
from shmload.batch.dtypes import ELEMENT_TYPES
from shmload.batch.layout import Layout
from shmload.batch.packed import unpack

_from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


def deliver_rows(layout: Layout, lease: Lease, nrows: int) -> Any:
    """The batch of `nrows` fixed samples in a leased slot."""
    tensors = lease.tensors(_plan(layout, nrows), _from_dlpack)
    if layout.names is not None:
        return dict(zip(layout.names, tensors, strict=True))
    return structure(layout.tree, tensors)


@lru_cache(maxsize=64)
def _plan(layout: Layout, nrows: int) -> tuple[tuple[Any, ...], ...]:
    """Per field what a capsule needs: (offset, DLPack code, bits, shape); an empty field is a tensor of its own."""
    offsets, _ = layout.place(nrows)
    return tuple(
        (at, f.element.code, f.element.itemsize * 8, (nrows, *f.shape))
        if nrows * f.row_nbytes
        else (-1, torch.empty, (nrows, *f.shape), getattr(torch, f.dtype))
        for f, at in zip(layout.fields, offsets, strict=True)
    )


def deliver_packed(lease: Lease) -> Any:
    """The packed batch in a leased slot."""

    def make_array(dtype: str, shape: tuple[int, ...], strides: Any, offset: int, is_tensor: bool) -> Any:
        element = ELEMENT_TYPES[dtype]
        if 0 in shape:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        else:
            tensor = _from_dlpack(lease.capsule(offset, element.code, element.itemsize * 8, shape))
            if strides is not None:
                tensor = tensor.as_strided(shape, strides)
        return tensor if is_tensor else tensor.numpy()

    return unpack(lease.bytes_at, make_array)


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
    if isinstance(batch, torch.Tensor):
        return batch.clone(memory_format=torch.preserve_format)
    if isinstance(batch, np.ndarray):
        return batch.copy(order="K")
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copied(v) for v in batch))
    if type(batch) in (list, tuple):
        return type(batch)([copied(v) for v in batch])
    if type(batch) is dict:
        return {k: copied(v) for k, v in batch.items()}
    return copy.deepcopy(batch)
