"""Find out which code holds batches, detect reads of a batch that has been released, and read one sample alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from shmload.engine.holders import POISON, Holder, enable, is_enabled
from shmload.loader import ShmLoader
from shmload.worker.decoding_protocol import declares_decoding

__all__ = ["Holder", "enable", "is_enabled", "is_poisoned", "read"]


def is_poisoned(values: Any) -> bool:
    """Return whether all bytes have the value of new and released slots: nothing wrote the values, or they were read too late.

    Args:
        values: a tensor or array; an empty one is not poisoned. Device tensors are copied to the host.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return len(raw) > 0 and bool((raw == POISON).all())


def read(dataset: Any, index: int, *, seed: int = 0, epoch: int = 0) -> Any:
    """Read one sample in this process, as a ShmLoader in seed mode does, so that a decoder can be tried or stepped through.

    `sample_rng()` and `sample_info()` work, and the global generators of random, numpy and torch are unchanged afterward.

    Args:
        dataset: a map-style dataset, or a Subset or ConcatDataset of such. It may have only `read_into`.
        index: index of the sample, from 0 to `len(dataset) - 1` if the dataset decodes in place.
        seed: seed of the sample's random numbers, as in `ShmLoader(seed=)`.
        epoch: epoch of the sample's random numbers.
    Returns:
        what `dataset[index]` returns. If the dataset decodes in place, by a `schema` and `read_into` or `read_batch_into`, the
        sample as it is in a batch: a tensor, or a list item, for each field, which aliases nothing else.
    Raises:
        IndexError: the dataset decodes in place and has no sample of this index.
        Exception: whatever the dataset raises.
    Example:
        >>> import numpy as np
        >>> import shmload.debug
        >>> class Rows:
        ...     schema = {"x": (np.float32, (2,))}
        ...     def __len__(self):
        ...         return 10
        ...     def read_into(self, index, out):
        ...         out["x"][...] = index
        >>> shmload.debug.read(Rows(), 5)
        {'x': tensor([5., 5.])}
    """
    decodes_in_place = _decodes_in_place(dataset)
    options: dict[str, Any] = {} if decodes_in_place else {"collate_fn": _first}
    if decodes_in_place and not 0 <= index < len(dataset):
        raise IndexError(f"index must be 0 to {len(dataset) - 1}, because the dataset has {len(dataset)} samples; got {index}")
    with ShmLoader(dataset, 1, sampler=[index], num_workers=0, seed=seed, rank=0, world_size=1, **options) as loader:
        loader.set_epoch(epoch)
        batch = next(iter(loader))
    if not decodes_in_place:
        return batch
    if getattr(dataset, "batch_type", dict) == "single":
        return batch[0]
    if isinstance(batch, dict):
        return {name: rows[0] for name, rows in batch.items()}
    rows = [field[0] for field in batch]
    return type(batch)(*rows) if hasattr(batch, "_fields") else type(batch)(rows)


def _decodes_in_place(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _decodes_in_place(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_decodes_in_place, dataset.datasets))
    return declares_decoding(dataset)


def _first(samples: list[Any]) -> Any:
    return samples[0]
