"""Failed items: placeholders that let the other items of a block continue."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from shmload.worker.failure import Failure, no_end

IN_WORKER = "in a worker of this pipeline"


class FailedItem(NamedTuple):
    """Takes the place of an item that could not be made."""

    failure: Failure


class BlockReading(threading.local):
    """The row that this thread expands, and the position it has read last."""

    row: Any  # what has key() and name()
    position = 0

    def name(self, _: int = 0) -> str:
        """Return the name of the item read last, for error messages."""
        name: str = self.row.name(self.row.key(self.position))
        return name


reading = BlockReading()


def failed(error: Exception, stage: str, position: int | None = None) -> FailedItem:
    """Return the placeholder for an item that failed in a stage.

    Args:
        error: that the stage raised.
        stage: its name, or empty for the source.
        position: of the source item; None for the one read last.
    """
    row = reading.row
    name = reading.name() if position is None else row.name(row.key(position))
    if isinstance(error, StopIteration):  # it would end the iteration
        error = no_end(error, f"the function of {stage}" if stage else "reading the source")
    error.add_note(f"shmload: {stage}, of {name}" if stage else f"shmload: {name}")
    return FailedItem(Failure.of(error, IN_WORKER, ""))
