"""Copy batches to a device ahead of their turn, on a side stream.

    slot ready ──lease──▶ host batch ──copies on the side stream──▶ device batch ──the consumer's stream waits for them──▶ yielded
                              └── dropped at once: its lease ends with the side stream current, so the slot is kept until then

Each call of `next` returns one batch and starts the copies of up to `num_sent` batches after it, if they are ready; it never waits
in order to copy ahead. A batch that was sent ahead still counts as ordered and can be abandoned, so the position, the state and the
pace at which samplers are read are the same with a device as without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shmload._core.trainer import Order
from shmload.device.cuda import CudaDevice
from shmload.device.pending_copies import Releases
from shmload.device.sending import sent
from shmload.engine.outcome import NOTHING, Outcome
from shmload.errors import CopyFailed
from shmload.processes.interrupts import interrupts_held


class ReadyBatches(Protocol):
    """The part of an engine that its device feed uses.

    Attributes:
        releases: record of the streams to wait for when a lease ends; None if the ring is not pinned.
    """

    releases: Releases | None

    def work(self) -> None:
        """Run all pending work without blocking."""

    def wait_for_next(self, in_order: bool) -> tuple[Order, Outcome | None]:
        """Wait for the next order. Return it with None once it is ready, or with its outcome if it will have no batch."""

    def first_ready(self, in_order: bool) -> Order | None:
        """Return the next order if it is ready, else None."""

    def deliver(self, order: Order) -> Outcome:
        """Return the outcome of a ready order."""


@dataclass
class SentBatch:
    """A batch that was sent ahead.

    Attributes:
        outcome: the outcome that `next` will return.
        tensors: the copies; they are allocated on the side stream.
        event: recorded on the side stream after the copies; None if nothing was copied.
    """

    outcome: Outcome
    tensors: Sequence[torch.Tensor] = ()
    event: Any = None


class DeviceFeed:
    """The queue of batches on their way from an engine to a device.

    Args:
        device: the device.
        num_sent: number of batches to send ahead.

    Attributes:
        ahead: batches that were sent and are not delivered, the oldest first.
    """

    def __init__(self, device: CudaDevice, num_sent: int) -> None:
        self._device, self._num_sent = device, num_sent
        self.ahead: deque[SentBatch] = deque()
        self._side: Any = None  # made with the first batch, because the device must not be used before workers are forked

    def next(self, batches: ReadyBatches, in_order: bool) -> Outcome:
        """Return the next outcome; its tensors are on the device, and this thread's current stream waits for them.

        Args:
            batches: the engine.
            in_order: if False, take the oldest finished order.
        Returns:
            an outcome whose error is CopyFailed if the batch could not be copied.
        """
        if self.ahead:
            batches.work()
        else:
            order, outcome = batches.wait_for_next(in_order)
            if outcome is not None:
                return outcome
            with interrupts_held():
                self.ahead.append(self._send(batches, order))
        while len(self.ahead) <= self._num_sent:
            ready = batches.first_ready(in_order)
            if ready is None:
                break
            with interrupts_held():
                self.ahead.append(self._send(batches, ready))
        arrival = self.ahead.popleft()
        if arrival.event is not None:
            stream = self._device.current_stream()
            self._device.wait_on_stream(stream, arrival.event)
            for tensor in arrival.tensors:  # else the side stream could reuse the memory while this stream still reads it
                self._device.keep_for(tensor, stream)
        return arrival.outcome

    def _send(self, batches: ReadyBatches, order: Order) -> SentBatch:
        """Take a ready batch and start its copies. An error becomes part of the outcome and is raised in the batch's turn."""
        outcome = batches.deliver(order)
        if outcome.error is not None or outcome.batch is NOTHING:
            return SentBatch(outcome)
        note, batch = outcome.note, outcome.batch
        del outcome  # otherwise it would keep the host's batch alive, which must die below
        device = self._device
        try:
            if self._side is None:
                self._side = device.side_stream()
            with device.using(self._side):
                # the last reference to the host's batch goes away while the side stream is current
                batch, tensors = sent(batch, device, is_slot=True)
                return SentBatch(Outcome(order, batch, note), tensors, event=device.record(self._side))
        except Exception as error:  # raised by the device, or by the user's named tuple when it is rebuilt
            # the host's batch dies while another stream is current, and copies from a part of it may still run on the side stream
            if batches.releases is not None:
                batches.releases.name_stream(order.slot, self._side)
            error = error.with_traceback(None)  # its frames hold the batch
            failure = CopyFailed(
                f"batch {order.step} of epoch {order.epoch} could not be copied to {device.name}: {error}. If the device is out of "
                "memory, lower batch_size"
            )
            failure.__cause__ = error
            return SentBatch(Outcome(order, None, note, failure))
