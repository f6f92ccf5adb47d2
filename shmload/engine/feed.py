"""An engine whose batches arrive on a device, copied ahead by a stream of their own.

    slot ready ──lease──▶ host batch ──copies on the side stream──▶ device batch ──the consumer's stream waits for them──▶ yielded
                              └── dropped at once: its lease ends with the side stream current, so the slot cools until then

Ahead of the batch that is yielded, as many as are ready, `num_sent` at most, are copied in the same call; the host waits neither
for workers nor for the device over them. What was sent ahead stays *ordered* to those above: they count it, and it can be
abandoned. So a position, a state and torch's pace are the same with a device as without.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from shmload._core.trainer import READY, Order
from shmload.device.calls import Calls
from shmload.device.sending import BufferSet
from shmload.engine.engine import DEATH_LOOK_S, Engine
from shmload.engine.orders import NOTHING, Delivery
from shmload.engine.watching import WatchedEngine
from shmload.errors import CopyFailed
from shmload.worker.crew import STOP_GRACE_S, interrupts_held
from shmload.worker.snapshot import Note


@dataclass
class _Arrival:
    """A batch sent ahead, or what became of it."""

    order: Order
    batch: Any
    note: Note | None
    made: list[torch.Tensor]
    event: Any = None
    error: Exception | None = None


class FeedingEngine(Engine):
    """An engine over a pinned ring that yields what lies on the device; the arguments are Engine's."""

    def __init__(self, *args: Any) -> None:
        self._ahead: deque[_Arrival] = deque()
        super().__init__(*args)
        assert self._options.calls is not None
        assert self._options.num_sent is not None
        self._calls: Calls = self._options.calls
        self._num_sent = self._options.num_sent
        assert self._options.sender is not None
        self._sender = self._options.sender
        self._side: Any = None  # made with the first batch: workers that are forked should find the device untouched

    @property
    def num_queued(self) -> int:
        """Orders submitted and not delivered; those sent ahead are not."""
        return len(self._ahead) + super().num_queued

    @property
    def front(self) -> Order | None:
        """The order that `next` will deliver."""
        return self._ahead[0].order if self._ahead else super().front

    def next(self, *, in_order: bool = True) -> Delivery:
        """As of any engine; the batch's tensors lie on the device, and this thread's current stream waits for them by itself.

        Raises:
            CopyFailed: the batch could not be copied; it is lost, and the next call goes on behind it.
            ValueError: it is none that the device's options are for; likewise.
            RuntimeError: all static buffers are held; nothing is lost.
        """
        self._begin_next()
        buffers = self._sender.buffers
        if buffers is not None:
            buffers.look()
        try:
            if self._ahead:
                self._round()
                if monotonic() - self._death_look > DEATH_LOOK_S:
                    self._see_to_deaths()
            else:
                if buffers is not None:
                    buffers.check_room()
                order, is_ready = self._awaited(in_order)
                if not is_ready:
                    return order, NOTHING, None
                with interrupts_held():
                    self._ahead.append(self._sent(order))
            self._send_ahead(in_order)
        except BaseException:
            self._mend()
            raise
        return self._arrived(self._ahead.popleft())

    def _arrived(self, arrival: _Arrival) -> Delivery:
        if arrival.error is not None:
            self._lost = arrival.order
            raise arrival.error
        if arrival.event is not None:
            stream = self._calls.current_stream()
            self._calls.wait_on_stream(stream, arrival.event)
            if self._sender.buffers is not None and arrival.made:  # it is used here, wherever its last alias dies
                self._sender.buffers.name_stream(arrival.made[0], stream)
            for tensor in arrival.made:  # of the side stream's memory, which would use it again without asking this one
                self._calls.keep_for(tensor, stream)
        return arrival.order, arrival.batch, arrival.note

    def _send_ahead(self, in_order: bool) -> None:
        buffers = self._sender.buffers
        while len(self._ahead) <= self._num_sent and self._queue and (buffers is None or buffers.has_room):
            order = self._queue[0] if in_order else self._first_done()
            if order.slot < 0 or self._ring.look(order.slot) != READY:
                return
            with interrupts_held():
                self._ahead.append(self._sent(order))

    def _sent(self, order: Order) -> _Arrival:
        """Takes a ready order, and has its batch copied; what that raises is for the batch's turn."""
        try:
            _, batch, note = self._deliver_noted(order)
        except Exception as error:
            self.take_lost()
            return _Arrival(order, None, None, [], error=error)
        if batch is NOTHING:
            return _Arrival(order, batch, note, [])
        calls = self._calls
        try:
            with calls.using(self._side or self._new_side()):
                # the host's own batch is gone after this, while the side stream is still current
                batch, made = self._sender.send(batch, into=self._buffers_for(order), is_slot=True)
                return _Arrival(order, batch, note, made, event=calls.record(self._side))
        except (RuntimeError, ValueError) as error:
            # the batch dies with another stream current, and a part of it may be on its way
            if self.releases is not None:
                self.releases.name_stream(order.slot, self._side)
            error = error.with_traceback(None)  # whose frames hold the batch
            if isinstance(error, ValueError):
                return _Arrival(order, None, note, [], error=error)
            failure = CopyFailed(
                f"batch {order.step} of epoch {order.epoch} could not be copied to {calls.name}: {error}. Where it has too little "
                "memory, lower batch_size"
            )
            failure.__cause__ = error
            return _Arrival(order, None, note, [], error=failure)

    def _buffers_for(self, order: Order) -> BufferSet | None:
        buffers = self._sender.buffers
        return None if buffers is None else buffers.take(f"batch {order.step} of epoch {order.epoch}", self._side)

    def _new_side(self) -> Any:
        self._side = self._calls.side_stream()
        return self._side

    def abandon(self) -> None:
        """Forgets every order, and what was sent ahead."""
        self._ahead.clear()
        super().abandon()

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """As of any engine; waits for the copies that are under way."""
        self._ahead.clear()
        super().close(grace_s=grace_s)


class WatchedFeedingEngine(WatchedEngine, FeedingEngine):
    """The same, with who took each batch noted and slots poisoned once they have cooled."""
