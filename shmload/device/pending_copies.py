"""Delay the reuse of a slot until the copies from it to a device are done.

A copy with `non_blocking=True` from pinned memory has only been requested when the call returns, and it holds no reference to the
tensor that it reads. So when a lease ends, an event is recorded on the thread's current streams, on the streams that were current
where the batch was delivered, and on the streams that `record_stream` has named. Until all of its events are done, the slot has
*pending copies*. The events are queried at each `next()`; the trainer waits for them only if the next batch has no other slot. No
thread is needed.

A lease may end where no event can be recorded: in a thread that Python does not know, or after an error of the device. Such a
slot has no events. It is free once the whole device has been synchronized, which happens only if no other slot is available.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from shmload._core.trainer import LEASED, TrainerRing
from shmload.device.cuda import CudaDevice
from shmload.device.pinned_slots import PinnedSlots
from shmload.errors import CopyFailed
from shmload.introspect.users_frame import users_frame


class Releases:
    """The events that each released slot waits for. It does not refer to the ring, because leases may outlive their ring."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._events: dict[int, list[Any]] = {}  # slot -> the events that it waits for
        self._named: dict[int, list[Any]] = {}  # slot -> streams in addition to those current when the lease ends
        self.pins = PinnedSlots(device)
        self.is_closed = False

    def name_stream(self, slot: int, stream: Any) -> None:
        """Make a leased slot wait for this stream, too."""
        named = self._named.setdefault(slot, [])
        if stream not in named:
            named.append(stream)

    def delivered(self, slot: int) -> None:
        """Make the slot of a batch that is delivered now wait for this thread's current streams, wherever the batch dies."""
        if not self._device.is_capturing():  # no event can follow the copies of a graph
            self._named[slot] = list(self._device.current_streams())

    def ended(self, slot: int) -> None:
        """Record events for a lease that ends now, in this thread; once the ring is closed, wait for them and unpin the slot."""
        self._events.pop(slot, None)
        named = self._named.pop(slot, [])
        streams = [*named, *(stream for stream in self._device.current_streams() if stream not in named)]
        self._events[slot] = [self._device.record(stream) for stream in streams]
        if self.is_closed:
            self.wait(slot)
            self.pins.remove(slot)

    def has_events(self, slot: int) -> bool:
        """Return whether events were recorded for the slot."""
        return slot in self._events

    def are_done(self, slot: int) -> bool:
        """Return whether the copies from the slot are known to be done.

        Raises:
            CopyFailed: the device reported an error.
        """
        events = self._events.get(slot)
        if events is None:
            return False
        try:
            if not all(self._device.is_done(event) for event in events):
                return False
        except RuntimeError as error:
            self._events.pop(slot, None)  # from now on only a synchronization of the whole device can tell
            raise self._failure(error) from error
        self._events.pop(slot, None)
        return True

    def wait(self, slot: int) -> None:
        """Wait until the copies from the slot are done."""
        try:
            for event in self._events.pop(slot, ()):
                self._device.wait_on_host(event)
        except RuntimeError as error:
            raise self._failure(error) from error

    def wait_for_all(self) -> None:
        """Wait until the copies from all slots are done."""
        try:
            self._device.synchronize()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> CopyFailed:
        return CopyFailed(
            f"{self._device.name} failed at earlier work, perhaps a copy of a batch: {error}. Batches copied since the last "
            "synchronization may be wrong; continue from a checkpoint in a new process"
        )


class PendingCopies:
    """The slots of one ring that copies may still be reading."""

    def __init__(self, ring: TrainerRing, device: CudaDevice) -> None:
        self._ring = ring
        self.releases = Releases(device)
        self.pins = self.releases.pins
        ring.await_copies(self.releases.ended)

    def look(self) -> None:
        """Register new memory and free the slots whose copies are done, without waiting.

        Raises:
            CopyFailed: the device reported an error.
        """
        pins = self.pins
        pins.register()
        if pins.warning:
            text, pins.warning = pins.warning, ""
            warnings.warn(text, UserWarning, stacklevel=users_frame()[1])
        for slot in self._ring.pending_copies:
            if self.releases.are_done(slot):
                self._ring.copies_done(slot)

    def wait(self) -> bool:
        """Wait until the copies from one slot with events are done, or from all slots if none has events.

        Returns:
            whether any slot had pending copies.
        """
        pending_copies = self._ring.pending_copies
        known = next((slot for slot in pending_copies if self.releases.has_events(slot)), -1)
        if known >= 0:
            self.releases.wait(known)
            self._ring.copies_done(known)
        elif pending_copies:
            self.releases.wait_for_all()
            for slot in pending_copies:
                self._ring.copies_done(slot)
        return bool(pending_copies)

    def close(self) -> None:
        """Wait for all copies and unregister all slots that are not leased. Leased slots are unregistered when their batches die.

        Raises:
            CopyFailed: the device reported an error; everything is closed nevertheless.
        """
        releases, ring = self.releases, self._ring
        if releases.is_closed:
            return
        releases.is_closed = True
        failure: RuntimeError | None = None
        pending_copies = ring.pending_copies
        is_unknown = False
        for slot in pending_copies:
            is_unknown |= not releases.has_events(slot)
            failure = _tried(releases.wait, slot) or failure
        if is_unknown or failure is not None:
            failure = _tried(releases.wait_for_all) or failure
        for slot in pending_copies:
            ring.copies_done(slot)
        for slot in range(ring.num_slots):
            if ring.state(slot) != LEASED or releases.has_events(slot):  # the latter: its lease has ended just now
                failure = _tried(releases.wait, slot) or failure
                failure = _tried(self.pins.remove, slot) or failure
        if failure is not None:
            raise failure


def _tried(call: Callable[..., object], *arguments: Any) -> RuntimeError | None:
    """Return the error of a call instead of raising it, so that the rest is closed."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return error
    return None
