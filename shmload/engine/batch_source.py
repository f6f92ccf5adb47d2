"""The protocol through which a mode orders batches. An engine implements it, and so does a reader of another rank's ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shmload._core.mapping import Mapping
from shmload._core.trainer import Order
from shmload.batch.layout import Layout
from shmload.device.pending_copies import Releases
from shmload.engine.holders import Holders
from shmload.engine.iterator_lock import IteratorLock
from shmload.engine.outcome import Outcome
from shmload.worker.pool import STOP_GRACE_S


class BatchSource(Protocol):
    """A queue of orders whose batches come back in the same order.

    Attributes:
        iterator_lock: held by the thread that asks for a batch; the iterator uses the same object.
        num_slots: number of slots of the ring.
        control: mapping of the ring's control block.
        shared_by: number of ranks that read the ring.
        on_delivery: called after each batch, unless None.
    """

    iterator_lock: IteratorLock
    num_slots: int
    control: Mapping
    shared_by: int
    on_delivery: Callable[[], None] | None

    @property
    def num_queued(self) -> int:
        """Return the number of orders submitted and not delivered."""

    @property
    def front(self) -> Order | None:
        """Return the order that `next` will deliver if called in order; None without orders."""

    @property
    def layout(self) -> Layout | None:
        """Return the offsets of the fields in a slot; None until they are known."""

    @property
    def needs_pin_memory(self) -> bool:
        """Return whether batches should be passed to torch's `pin_memory`, which copies the tensors that are not pinned already."""

    @property
    def releases(self) -> Releases | None:
        """Return the record of streams to wait for when a lease ends; None if the ring is not pinned."""

    @property
    def holders(self) -> Holders | None:
        """Return the record of the lines of the program that took each batch; None if that is not recorded."""

    def submit(self, order: Order) -> None:
        """Queue an order after those submitted before.

        Args:
            order: which samples to read.
        """

    def next(self, *, in_order: bool = True) -> Outcome:
        """Wait for the oldest order and return its outcome. There must be an order.

        Args:
            in_order: if False, take the oldest finished order.
        Raises:
            WorkerDied: a worker died and may not be replaced.
            RuntimeError: the loader is closed, or `timeout` has passed.
        """

    def abandon(self) -> None:
        """Drop every order without waiting."""

    def begin_pass(self, num_steps: int, *, step_stride: int = 1) -> None:
        """Publish the length of the pass that begins, for readers of stats.

        Args:
            num_steps: batches of the pass; 0 if unknown.
            step_stride: difference between the step numbers of successive batches.
        """

    def leave_pass(self) -> None:
        """Tell the other ranks that read the ring, if any, that the pass was left before its end."""

    def counters(self) -> dict[str, Any]:
        """Return the ring's report for `shmload top`."""

    def totals(self) -> dict[str, Any]:
        """Return the ring's counters since it was made, with `wait_s` of the trainer and `busy_s` summed over all workers."""

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the workers; live batches stay valid.

        Args:
            grace_s: seconds that a worker gets to finish its claim before it is killed.
        """
