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
            flat = (leaf.values() if leaf.is_nested else leaf).detach().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        else:
            continue
        flat[::TOUCHED_EVERY].max(initial=0)
        nbytes += flat.nbytes
    return nbytes


def num_rows(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor or array, else of its first list or tuple, else 1."""
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim:
            return len(leaf)
    if isinstance(batch, Mapping):  # columns of text, for example
        batch = next(iter(batch.values()), None)
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def digest(batch: Any) -> int:
    """Return a digest of dtypes, shapes and all bytes, to compare loaders without keeping batches. Container types are ignored."""
    return digest_of(list(leaves(batch)))[0]
