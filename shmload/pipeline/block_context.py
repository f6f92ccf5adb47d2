"""BlockContext: the errors of a block's items. An error names its item, and the other items of the block continue."""

from __future__ import annotations

from typing import Any

from shmload.worker.failure import Failure
from shmload.worker.stage_engine import FailedItem, Handler, StageContext, with_note

IN_WORKER = "in a worker of this pipeline"


class BlockContext(StageContext):
    """The context that the stages of a block share. `origin` is a position in the sequence below.

    Args:
        sequence: the sequence of the items; it has key() and name().
    """

    def __init__(self, sequence: Any) -> None:
        self._sequence, self.origin = sequence, 0

    def failed(self, error: Exception, stage: str, handler: Handler | None = None) -> FailedItem:
        error = with_note(error, stage, self._sequence.name(self._sequence.key(self.origin)))
        return FailedItem(Failure.of(error, IN_WORKER, ""))
