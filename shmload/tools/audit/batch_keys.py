"""The keys of a recorded batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmload.audit.audit_file import Batch


def ordered_keys(batch: Batch) -> list[Any] | np.ndarray[Any, Any] | None:
    """Return the keys as they were ordered, before samples were skipped or substituted."""
    if batch.keys is None or not batch.changes:
        return batch.keys
    keys = list(batch.keys)
    for row, key, substitute, _ in batch.changes:
        if substitute is None:
            keys.insert(row, key)
        elif row < len(keys):
            keys[row] = key
    return keys


def is_numeric_keys(keys: Any) -> bool:
    """Return whether all keys of a batch are integers."""
    return isinstance(keys, np.ndarray) or (keys is not None and all(type(key) in (int, np.int64) for key in keys))
