"""What the loader asks of the engine, and what it gets."""

from __future__ import annotations

from typing import Any, TypeAlias

from shmload._core.trainer import Order
from shmload.worker.snapshot import Note

__all__ = ["NOTHING", "Delivery", "Order"]

# An order, its batch (NOTHING if none came of it), and in torch mode what its worker said of itself.
Delivery: TypeAlias = tuple[Order, Any, Note | None]

# The iterator of an iterable dataset was at its end, or every sample of the batch was bad and is skipped.
NOTHING = object()
