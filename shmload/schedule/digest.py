"""Identify the values that an order was made from, so that a state saved under other values is rejected."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from numpy.typing import NDArray


def digest(values: NDArray[Any]) -> str:
    """Return 16 hex digits that identify the values, for the identity of an order."""
    return blake2b(values.tobytes(), digest_size=8).hexdigest()
