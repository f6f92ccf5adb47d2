"""Datasets in which every byte identifies its sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Rows(Dataset[Any]):
    """A dataset whose sample i is i, in fields of two sizes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": np.full(16, i, np.int32), "label": i}


class Mixed(Rows):
    """The same with values that are not tensors, in rows of different lengths."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": np.full(i % 3 + 1, i, np.int32), "text": f"sample {i}", "pair": (i, np.full(3, i, np.float32))}


def rows_of(first: int, count: int = 2) -> torch.Tensor:
    """Returns field x of the batch that begins with sample `first`."""
    return torch.arange(first, first + count, dtype=torch.int32).repeat_interleave(16).view(count, 16)
