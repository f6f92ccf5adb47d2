"""For finding faults: who holds batches, and what was read after its batch had died."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmload.engine.parts import Holder, enable, is_enabled

__all__ = ["Holder", "enable", "is_enabled", "is_poisoned"]

POISON = 0xA5  # src/lease.h writes it


def is_poisoned(values: Any) -> bool:
    """Whether every byte is what a slot is overwritten with: then this was read after its batch had died.

    Args:
        values: a tensor or array; an empty one is not poisoned. Tensors of a device are copied.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return len(raw) > 0 and bool((raw == POISON).all())
