"""Touch, count and digest what is in a batch of any type."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shmload.audit.batch_digest import digest_of

TOUCHED_EVERY = 4096


def leaves(batch: Any) -> Iterator[Any]:
    """Yield everything in a batch that is not a container, in order; mappings in their own order."""
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        yield batch
        return
    for value in batch:
        yield from leaves(value)


def touch(batch: Any) -> int:
    """Read one byte of every page of every tensor and array, and return the bytes delivered."""
    nbytes = 0
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            dense = _dense(leaf)
            if dense is None:
                continue
            flat = dense.detach().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        else:
            continue
        flat[::TOUCHED_EVERY].max(initial=0)
        nbytes += flat.nbytes
    return nbytes


def _dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the elements of a tensor of any layout; None for a layout without elements in one block of memory."""
    if tensor.is_nested or tensor.layout is torch.sparse_coo:
        return tensor.values() if tensor.is_nested else tensor._values()  # not `values`, which sums up equal positions first
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.values()
    return tensor.resolve_conj().resolve_neg() if tensor.layout is torch.strided and not tensor.is_quantized else None


def num_rows(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor or array, else of its first list or tuple, else 1."""
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim:
            return len(leaf)
    if isinstance(batch, Mapping):  # columns of text, for example
        batch = next(iter(batch.values()), None)
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def digest(batch: Any) -> int | None:
    """Return a digest of dtypes, shapes and all bytes, to compare loaders without keeping batches. Container types are ignored.

    None if the batch contains objects, such as dates, whose contents a digest leaves out.
    """
    found, is_partial = digest_of(list(leaves(batch)))
    return None if is_partial else found
