"""Failed items: placeholders that let the other items of a block continue."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from shmload.worker.failure import Failure, no_end

IN_WORKER = "in a worker of this pipeline"


class FailedItem(NamedTuple):
    """Stands among items where one could not be made, so that the others come."""

    failure: Failure


class BlockReading(threading.local):
    """Which row this thread expands, and the position that it has read last."""

    row: Any  # what has key() and name()
    position = 0

    def name(self, _: int = 0) -> str:
        """The item that was read last, for people."""
        name: str = self.row.name(self.row.key(self.position))
        return name


reading = BlockReading()


def failed(error: Exception, stage: str, position: int | None = None) -> FailedItem:
    """What stands for an item that a stage has failed with.

    Args:
        position: of the item that it comes of. None: of the one that was read last.
    """
    row = reading.row
    name = reading.name() if position is None else row.name(row.key(position))
    if isinstance(error, StopIteration):  # it would end the items
        error = no_end(error, f"the function of {stage}" if stage else "reading the source")
    error.add_note(f"shmload: {stage}, of {name}" if stage else f"shmload: {name}")
    return FailedItem(Failure.of(error, IN_WORKER, ""))
