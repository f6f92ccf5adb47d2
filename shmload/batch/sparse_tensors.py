"""Take sparse tensors apart into dense ones, and build them from these."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shmload.batch.packed_batch import INDICES_OF


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether the tensor consists of several tensors (see `parts_of`)."""
    return str(tensor.layout) in INDICES_OF


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that a tensor consists of: itself if it is dense, else its values and then its indices."""
    names = INDICES_OF.get(str(tensor.layout))
    if names is None:
        return [tensor] if tensor.layout is torch.strided else []
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return [values, *(getattr(tensor, name)() for name in names)]


def made_sparse(layout: str, shape: tuple[int, ...], is_coalesced: bool, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Build a sparse tensor from its parts, which it aliases; `parts` is as returned by `parts_of`."""
    values, *indices = parts
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(indices[0], values, shape, is_coalesced=is_coalesced, check_invariants=False)
    return torch.sparse_compressed_tensor(
        indices[0], indices[1], values, shape, layout=getattr(torch, layout), check_invariants=False
    )
