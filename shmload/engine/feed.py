"""How batches arrive on a device: copied ahead, by a stream of their own.

    slot ready ──lease──▶ host batch ──copies on the side stream──▶ device batch ──the consumer's stream waits for them──▶ yielded
                              └── dropped at once: its lease ends with the side stream current, so the slot cools until then

Ahead of the batch that is yielded, as many as are ready, `num_sent` at most, are copied in the same call; the host waits neither
for workers nor for the device over them. What was sent ahead stays *ordered* to those above: they count it, and it can be
abandoned. So a position, a state and torch's pace are the same with a device as without.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shmload._core.trainer import Order
from shmload.device.calls import Calls
from shmload.device.sending import BufferSet
from shmload.engine.orders import NOTHING, Delivery
from shmload.errors import CopyFailed
from shmload.worker.pool import interrupts_held
from shmload.worker.snapshot import Note

if TYPE_CHECKING:
    from shmload.engine.engine import Engine
    from shmload.engine.parts import EngineOptions


@dataclass
class Arrival:
    """A batch sent ahead, or what became of it."""

    order: Order
    batch: Any
    note: Note | None
    made: list[torch.Tensor]
    event: Any = None
    error: Exception | None = None


class DeviceFeed:
    """Sends the batches of an engine over a pinned ring to a device.

    Attributes:
        ahead: batches that were sent and are not delivered.
    """

    def __init__(self, engine: Engine, options: EngineOptions) -> None:
        assert options.calls is not None
        assert options.num_sent is not None
        assert options.sender is not None
        self._engine = weakref.ref(engine)  # the engine has this
        self._calls: Calls = options.calls
        self._num_sent, self._sender = options.num_sent, options.sender
        self.ahead: deque[Arrival] = deque()
        self._side: Any = None  # made with the first batch: workers that are forked should find the device untouched

    def next(self, in_order: bool) -> Delivery:
        """The next batch; its tensors lie on the device, and this thread's current stream waits for them by itself.

        Raises:
            CopyFailed: the batch could not be copied; it is lost, and the next call goes on behind it.
            ValueError: it is none that the device's options are for; likewise.
            RuntimeError: all static buffers are held; nothing is lost.
        """
        engine = self._engine()
        assert engine is not None
        buffers = self._sender.buffers
        if buffers is not None:
            buffers.look()
        if self.ahead:
            engine.work()
        else:
            if buffers is not None:
                buffers.check_room()
            order, is_ready = engine.awaited(in_order)
            if not is_ready:
                return order, NOTHING, None
            with interrupts_held():
                self.ahead.append(self._sent(engine, order))
        while len(self.ahead) <= self._num_sent and (buffers is None or buffers.has_room):
            ready = engine.first_ready(in_order)
            if ready is None:
                break
            with interrupts_held():
                self.ahead.append(self._sent(engine, ready))
        return self._arrived(engine, self.ahead.popleft())

    def _arrived(self, engine: Engine, arrival: Arrival) -> Delivery:
        if arrival.error is not None:
            engine.has_lost(arrival.order)
            raise arrival.error
        if arrival.event is not None:
            stream = self._calls.current_stream()
            self._calls.wait_on_stream(stream, arrival.event)
            if self._sender.buffers is not None and arrival.made:  # it is used here, wherever its last alias dies
                self._sender.buffers.name_stream(arrival.made[0], stream)
            for tensor in arrival.made:  # of the side stream's memory, which would use it again without asking this one
                self._calls.keep_for(tensor, stream)
        return arrival.order, arrival.batch, arrival.note

    def _sent(self, engine: Engine, order: Order) -> Arrival:
        """Takes a ready order, and has its batch copied; what that raises is for the batch's turn."""
        try:
            _, batch, note = engine.deliver(order)
        except Exception as error:
            engine.take_lost()
            return Arrival(order, None, None, [], error=error)
        if batch is NOTHING:
            return Arrival(order, batch, note, [])
        calls = self._calls
        try:
            with calls.using(self._side or self._new_side()):
                # the host's own batch is gone after this, while the side stream is still current
                batch, made = self._sender.send(batch, into=self._buffers_for(order), is_slot=True)
                return Arrival(order, batch, note, made, event=calls.record(self._side))
        except (RuntimeError, ValueError) as error:
            # the batch dies with another stream current, and a part of it may be on its way
            if engine.releases is not None:
                engine.releases.name_stream(order.slot, self._side)
            error = error.with_traceback(None)  # whose frames hold the batch
            if isinstance(error, ValueError):
                return Arrival(order, None, note, [], error=error)
            failure = CopyFailed(
                f"batch {order.step} of epoch {order.epoch} could not be copied to {calls.name}: {error}. Where it has too little "
                "memory, lower batch_size"
            )
            failure.__cause__ = error
            return Arrival(order, None, note, [], error=failure)

    def _buffers_for(self, order: Order) -> BufferSet | None:
        buffers = self._sender.buffers
        return None if buffers is None else buffers.take(f"batch {order.step} of epoch {order.epoch}", self._side)

    def _new_side(self) -> Any:
        self._side = self._calls.side_stream()
        return self._side
