"""Build the structure of a batch around other tensors, for example around copies."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shmload._core.outline import join, split
from shmload.batch.layout import filled, is_sequence, sequence_like
from shmload.batch.packed_batch import is_plain_record
from shmload.torch_names import NestedTensor


def mapped(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Build the same structure around other tensors. Everything else in it stays.

    Args:
        batch: the structure.
        of_tensor: maps each tensor; a nested tensor is rebuilt from its mapped parts.
    """
    if isinstance(batch, NestedTensor):
        values, offsets, lengths = batch._values, batch._offsets, batch._lengths
        return torch.nested.nested_tensor_from_jagged(  # clone() would share the offsets
            of_tensor(values), of_tensor(offsets), None if lengths is None else of_tensor(lengths), batch._ragged_idx
        )
    if isinstance(batch, torch.Tensor):
        return of_tensor(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(v, of_tensor) for v in batch))
    if type(batch) in (list, tuple, dict):
        outline, leaves = split(batch)
        if outline is not Ellipsis:
            return join(outline, [mapped(leaf, of_tensor) for leaf in leaves])
        if type(batch) is dict:  # with keys of other classes
            return {k: mapped(v, of_tensor) for k, v in batch.items()}
        return [mapped(v, of_tensor) for v in batch]
    if isinstance(batch, Mapping):
        return filled(batch, {k: mapped(v, of_tensor) for k, v in batch.items()})  # with its other attributes
    if is_sequence(batch) and not isinstance(batch, (tuple, range, array)):
        return sequence_like(batch, [mapped(v, of_tensor) for v in batch])
    if is_plain_record(batch):
        record = copy.copy(batch)
        for name in vars(batch):
            leaf = mapped(getattr(batch, name), of_tensor)
            object.__setattr__(record, name, leaf)  # works for frozen dataclasses, too
        return record
    return batch
