"""What the bench does with a delivered batch: touch it as a trainer would, or digest every byte of it."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

PAGE = 4096


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in a batch that is not a container, in order; mappings by their own order."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def flat_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes in row-major order, of a nested one its values'; a view if it is contiguous."""
    if tensor.is_nested:
        tensor = tensor.values()
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def touch(batch: Any) -> int:
    """Reads one byte of every page of every tensor and array; returns the bytes delivered."""
    nbytes = 0
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            flat = flat_bytes(leaf)
        elif isinstance(leaf, np.ndarray) and leaf.flags.c_contiguous and not leaf.dtype.hasobject:
            flat = leaf.reshape(-1).view(np.uint8)
        else:
            continue
        flat[::PAGE].max(initial=0)
        nbytes += flat.nbytes
    return nbytes


def num_rows(batch: Any) -> int:
    """Samples in a batch of unknown make: the length of its first tensor or array, else of its first list of strings."""
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim:
            return len(leaf)
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def rows_digest(batch: Any) -> int:
    """The sum of the digests of a batch's rows: summed over an epoch it tells which samples came, whatever their order."""
    found = list(leaves(batch))
    total = 0
    for row in range(num_rows(batch)):
        state = hashlib.blake2b(digest_size=16)
        for leaf in found:
            values = np.ascontiguousarray(
                leaf[row].numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf[row])
            )
            state.update(f"{values.dtype} {values.shape}".encode())
            state.update(values.tobytes())
        total += int.from_bytes(state.digest(), "little")
    return total % (1 << 128)


def digest(batch: Any) -> str:
    """A digest of structure, dtypes, shapes and every byte: two loaders are compared without keeping batches."""
    state = hashlib.blake2b(digest_size=16)
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            state.update(f"tensor {leaf.dtype} {tuple(leaf.shape)}".encode())
            state.update(np.ascontiguousarray(flat_bytes(leaf)).data)
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            state.update(f"array {leaf.dtype} {leaf.shape}".encode())
            state.update(np.ascontiguousarray(leaf).tobytes())
        else:
            state.update(f"{type(leaf).__name__} {leaf!r}".encode())
    return state.hexdigest()
