"""The outcome of one order: its batch, the error that replaced it, or nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

from shmload._core.trainer import Order
from shmload.worker.note import Note

NOTHING = object()  # the batch of an order that has none: an iterable dataset was exhausted, or all samples were bad and skipped


class Outcome(NamedTuple):
    """The outcome of one order.

    The order has left the queue, whether or not it failed. An error of the whole engine (it was closed, a worker died for good, a
    timeout) is raised instead and leaves the order in the queue.

    Attributes:
        order: the order.
        batch: the batch, whose arrays alias the slot until their last alias dies; `NOTHING` if there is none; None after an error.
        note: the worker's report of its position, in torch mode.
        error: the error because of which there is no batch, if any. Delete the outcome before raising it, or the traceback keeps
            both alive.
    """

    order: Order
    batch: Any
    note: Note | None
    error: BaseException | None = None
