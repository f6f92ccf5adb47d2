"""Build the batch of fixed rows in a leased slot.

Each array is a DLPack capsule over the slot. torch's storage owns the capsule and with it the lease, so whatever aliases the
storage (a slice, `.numpy()`, a parameter, an autograd graph) keeps the slot from being used again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from shmload import faults
from shmload._core.trainer import Lease
from shmload.batch.batch_memory import dlpack_code
from shmload.batch.layout import Layout, structure
from shmload.batch.mapped_batch import mapped
from shmload.torch_names import from_dlpack


@faults.at("mapping")
def deliver_rows(layout: Layout, lease: Lease, nrows: int) -> tuple[Any, int]:
    """Return the batch of `nrows` fixed rows in a leased slot, whose tensors alias the slot and keep the lease; and its size."""
    plan, nbytes, viewed = _plan(layout, nrows)
    names = layout.names
    if names is not None and not viewed:
        return lease.tensors(plan, from_dlpack, names), nbytes
    tensors = lease.tensors(plan, from_dlpack)
    for number, dtype in viewed:
        tensors[number] = tensors[number].view(dtype)
    return tensors[0] if layout.tree[0] == "leaf" else structure(layout.tree, tensors), nbytes


def copied_rows(batch: Any) -> Any:
    """Return a batch of fixed rows with every tensor copied to private memory, so that its slot can be released at once."""
    return mapped(batch, torch.Tensor.clone)


@functools.lru_cache(maxsize=64)
def _plan(layout: Layout, nrows: int) -> tuple[tuple[tuple[Any, ...], ...], int, tuple[tuple[int, torch.dtype], ...]]:
    """Return for each field the arguments of its capsule (offset, DLPack code, bits, shape) or of an empty tensor; the total size
    in bytes; and the fields that must be viewed as another dtype.
    """
    offsets, nbytes = layout.place(nrows)
    plan = tuple(
        (at, dlpack_code(f.element), f.element.itemsize * 8, (nrows, *f.shape))
        if nrows * f.row_nbytes
        else (-1, torch.empty, (nrows, *f.shape), getattr(torch, f.dtype))
        for f, at in zip(layout.fields, offsets, strict=True)
    )
    viewed = tuple((n, getattr(torch, f.dtype)) for n, f in enumerate(layout.fields) if dlpack_code(f.element) != f.element.code)
    return plan, nbytes, viewed
