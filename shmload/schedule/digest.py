"""Identify the values that an order was made from, so that a state saved under other values is refused."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from numpy.typing import NDArray


def digest(values: NDArray[Any]) -> str:
    """16 hex digits that say which values an order was made of, for its identity."""
    return blake2b(values.tobytes(), digest_size=8).hexdigest()
