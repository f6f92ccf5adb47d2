"""What the ring needs of a device, and nothing else. Streams and events are the device's own objects; nobody here looks inside.

A stream does what it is given in turn. An event is recorded behind what its stream has been given so far, and is done when that is.
Every call may raise RuntimeError; an error of work that was given earlier comes out of any later call, as CUDA has it.

CUDA, through torch: its streams, its caching allocator, its copies.

A failed cudaHostRegister leaves its error behind for the next one who asks for the last error, which is torch after its next
kernel; so the error is taken away at once. Registered memory is `is_pinned()` to torch, and a copy from it is asynchronous; unlike
memory of torch's own pinned allocator, nobody records an event for it: the pending copies below do.

The slots of one ring as pinned memory: each is a piece of its own, registered once and unregistered before it is unmapped.

Slot by slot, and not the segment at once, because a copy may not reach across two pieces, one that grows leaves the others as they
are, and a ring that is closed under living batches is left piece by piece. Each piece keeps its mapping. A device that will not
register (a limit on locked memory, say) is asked no more: batches are as good, and copies from them wait for themselves.

A slot comes back when its batch dies, and is free when the copies from it are done.

A copy with `non_blocking=True` from pinned memory has only been asked for when the call returns, and it holds no reference to the
tensor it reads. So where a lease ends an event is recorded behind it, on the thread's current streams, on those that were current
where the batch was delivered, and on those that `record_stream` has named. Until all of its events are done the slot *cools*.
They are asked at each `next()`; they are waited for only when the batch that is wanted has no slot. No thread is needed.

A lease may end where nothing can be recorded: in a thread that Python does not know, or by an error of the device. Such a slot has
no event; it is free once the whole device has been waited for, which is done when no other slot can be had.

A batch's tensors, copied to a device; what is no tensor stays as it is.

A field lies in a slot as one storage, and rows of differing shape are views of it: the storage is copied once and viewed again, so
a thousand rows are one copy, and what shared memory before shares it after.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from shmload._core.mapping import Mapping
from shmload._core.trainer import TrainerRing
from shmload.batch.deliver import is_sparse, made_sparse, mapped, parts_of
from shmload.errors import CopyFailed
from shmload.torch_names import has_cuda_context
from shmload.world import users_frame

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


class Calls:
    """One CUDA device, as the ring sees it.

    Args:
        index: which; None: the one that is current when it is first asked, and from then on that one.

    Attributes:
        name: what messages call it.
    """

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        self.name = "cuda" if index is None else f"cuda:{index}"

    @property
    def _device(self) -> torch.device:
        if self._index is None:  # not before: workers that are forked should find CUDA untouched
            self._index = torch.cuda.current_device()
        return torch.device("cuda", self._index)

    def register(self, address: int, nbytes: int) -> None:
        """Pins memory that is mapped already. A copy may not reach across two such pieces."""
        with torch.cuda.device(self._device):
            error = int(_runtime().cudaHostRegister(address, nbytes, PORTABLE))
        if error:
            _forget_last_error()
            raise RuntimeError(f"cudaHostRegister: error {error}")

    def unregister(self, address: int) -> None:
        """Ends that, for the piece that begins there. Nothing may be copying from it."""
        error = int(_runtime().cudaHostUnregister(address))
        if error:
            _forget_last_error()
            raise RuntimeError(f"cudaHostUnregister: error {error}")

    def current_streams(self) -> Sequence[Any]:
        """This thread's current stream of every device in use: what it copies now is on one of these.

        Refused while a graph is captured: an event recorded then says nothing of copies.
        """
        if self.is_capturing():
            raise RuntimeError("the current stream is capturing a graph")
        return [torch.cuda.current_stream(index) for index in _devices_in_use()]

    def current_stream(self) -> Any:
        """This thread's current stream of the device that batches go to."""
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> Any:
        """A new stream of that device, which runs beside all others."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's own

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream this thread's current one in a `with` block."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Any:
        """A new event behind all that the stream has been given."""
        return stream.record_event()

    def is_done(self, event: Any) -> bool:
        """Whether it is; never waits."""
        return bool(event.query())

    def wait_on_host(self, event: Any) -> None:
        """Returns when the event is done; other threads run meanwhile."""
        event.synchronize()

    def wait_on_stream(self, stream: Any, event: Any) -> None:
        """Has the stream begin nothing given from now on before the event is done."""
        stream.wait_event(event)

    def synchronize(self) -> None:
        """Returns when all that any stream of any device has been given is done."""
        for index in _devices_in_use():
            torch.cuda.synchronize(index)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device, filled from this one by the current stream, later. Host memory that is not pinned is read now."""
        return tensor.to(self._device, non_blocking=True)

    def is_capturing(self) -> bool:
        """Whether what the current stream is given now is kept for replays, and not done."""
        return torch.cuda.is_current_stream_capturing()

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Once the tensor dies, its memory is used again only when what the stream has been given by then is done."""
        tensor.record_stream(stream)


def _devices_in_use() -> list[int]:
    """Devices on which this process has a context; asking the others for a stream would make one."""
    return [index for index in range(torch.cuda.device_count()) if has_cuda_context(index)]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own


def _forget_last_error() -> None:
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")  # torch has it loaded
    except OSError:  # a torch that is linked with it
        return
    runtime.cudaGetLastError()


@dataclass
class _Piece:
    mapping: Mapping
    address: int
    nbytes: int
    is_registered: bool = False


class Pins:
    """Which slot lies where, and whether it is pinned."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pieces: dict[int, _Piece] = {}
        self._waiting: list[int] = []  # slots that have memory and are to be registered
        self._pid = os.getpid()
        self.has_failed = False
        self.warning = ""  # to be given where an exception loses nothing

    def add(self, slot: int, mapping: Mapping, offset: int, nbytes: int) -> None:
        """Says where a slot lies from now on. It is registered later: workers that are forked should find the device untouched."""
        self._pieces[slot] = _Piece(mapping, mapping.address + offset, nbytes)
        self._waiting.append(slot)

    def register(self) -> None:
        """Registers what has come since the last time."""
        while self._waiting:
            piece = self._pieces.get(self._waiting.pop())
            if piece is None or piece.is_registered or self.has_failed:  # a slot may have grown twice meanwhile
                continue
            try:
                self._calls.register(piece.address, piece.nbytes)
            except RuntimeError as error:
                self.has_failed = True
                self.warning = (
                    f"{piece.nbytes} bytes of the ring could not be pinned for {self._calls.name} ({error}): batches come in "
                    "memory that is not pinned, and copies from it are slower. Raise the limit on locked memory (ulimit -l), or "
                    "lower prefetch_factor, num_workers or batch_size"
                )
            else:
                piece.is_registered = True

    def remove(self, slot: int) -> None:
        """Lets a slot's piece go, from which nothing copies any more."""
        piece = self._pieces.pop(slot, None)
        if piece is not None and piece.is_registered:
            self._calls.unregister(piece.address)

    def slot_at(self, address: int) -> int:
        """The slot in which an address lies; -1: none."""
        for slot, piece in self._pieces.items():
            if 0 <= address - piece.address < piece.nbytes:
                return slot
        return -1

    def __del__(self) -> None:
        # what ended where nobody could hear of it; nobody has it any more
        if sys is None or sys.is_finalizing() or self._pid != os.getpid() or not self._pieces:
            return
        self._calls.synchronize()
        for slot in list(self._pieces):
            self.remove(slot)


LEASED = 3  # of TrainerRing.state


class Releases:
    """What the ends of leases leave behind. It knows no ring: leases that outlive theirs are given to it."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._events: dict[int, list[Any]] = {}  # slot -> the events it waits for
        self._named: dict[int, list[Any]] = {}  # slot -> streams beside the current ones
        self.pins = Pins(calls)
        self.is_closed = False

    def name_stream(self, slot: int, stream: Any) -> None:
        """Has a leased slot wait for this stream, too."""
        named = self._named.setdefault(slot, [])
        if stream not in named:
            named.append(stream)

    def delivered(self, slot: int) -> None:
        """A batch is handed out now, in this thread: its slot waits for what is current here, wherever the batch dies."""
        if not self._calls.is_capturing():  # what a graph copies no event can follow
            self._named[slot] = list(self._calls.current_streams())

    def ended(self, slot: int) -> None:
        """A lease ends now, in this thread."""
        self._events.pop(slot, None)
        named = self._named.pop(slot, [])
        streams = [*named, *(stream for stream in self._calls.current_streams() if stream not in named)]
        self._events[slot] = [self._calls.record(stream) for stream in streams]
        if self.is_closed:
            self.wait(slot)
            self.pins.remove(slot)

    def has_events(self, slot: int) -> bool:
        """Whether it is known what the slot waits for."""
        return slot in self._events

    def is_cool(self, slot: int) -> bool:
        """Whether its copies are known to be done."""
        events = self._events.get(slot)
        if events is None:
            return False
        try:
            if not all(self._calls.is_done(event) for event in events):
                return False
        except RuntimeError as error:
            self._events.pop(slot, None)  # then only the whole device can say
            raise self._failure(error) from error
        self._events.pop(slot, None)
        return True

    def wait(self, slot: int) -> None:
        """Returns when its copies are done."""
        try:
            for event in self._events.pop(slot, ()):
                self._calls.wait_on_host(event)
        except RuntimeError as error:
            raise self._failure(error) from error

    def wait_for_all(self) -> None:
        """Returns when all copies are done, of whatever slot."""
        try:
            self._calls.synchronize()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> CopyFailed:
        return CopyFailed(
            f"{self._calls.name} failed at something it was given before, perhaps a copy of a batch: {error}. Batches copied since "
            "the last synchronisation may be wrong; go on from a checkpoint in a new process"
        )


class PendingCopies:
    """The slots of one ring that copies may still read."""

    def __init__(self, ring: TrainerRing, calls: Calls) -> None:
        self._ring = ring
        self.releases = Releases(calls)
        self.pins = self.releases.pins
        ring.cool(self.releases.ended)

    def look(self) -> None:
        """Registers memory that is new, frees what has cooled. Never waits.

        Raises:
            CopyFailed: the device says so.
        """
        pins = self.pins
        pins.register()
        if pins.warning:
            text, pins.warning = pins.warning, ""
            warnings.warn(text, UserWarning, stacklevel=users_frame()[1])
        for slot in self._ring.pending_copies:
            if self.releases.is_cool(slot):
                self._ring.cooled(slot)

    def wait(self) -> bool:
        """Waits until a slot has cooled, the one that came back first if that is known. False: none cools."""
        pending_copies = self._ring.pending_copies
        known = next((slot for slot in pending_copies if self.releases.has_events(slot)), -1)
        if known >= 0:
            self.releases.wait(known)
            self._ring.cooled(known)
        elif pending_copies:
            self.releases.wait_for_all()
            for slot in pending_copies:
                self._ring.cooled(slot)
        return bool(pending_copies)

    def close(self) -> None:
        """Waits for all copies and unregisters what nobody holds; the rest goes with the batches that are left.

        Raises:
            CopyFailed: the device says so; everything is closed then, too.
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
            ring.cooled(slot)
        for slot in range(ring.num_slots):
            if ring.state(slot) != LEASED or releases.has_events(slot):  # the latter has ended this moment
                failure = _tried(releases.wait, slot) or failure
                failure = _tried(self.pins.remove, slot) or failure
        if failure is not None:
            raise failure


def _tried(call: Callable[..., object], *arguments: Any) -> RuntimeError | None:
    """What a call fails with: the rest is to be closed all the same."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return error
    return None


NUM_SENT = 2  # batches copied ahead: one is being copied while one waits, and the third is computed with


def sent(batch: Any, calls: Calls, *, is_slot: bool) -> tuple[Any, list[torch.Tensor]]:
    """The batch on the device, by the current stream, and every tensor of the device that it lies in.

    Args:
        is_slot: it lies in a slot, where a storage is a field. Elsewhere a tensor may be a small part of a large storage.
    """
    made: list[torch.Tensor] = []
    wholes: dict[int, torch.Tensor] = {}  # address of a storage -> its copy

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        made.append(calls.copy(tensor))
        return made[-1]

    def send(tensor: torch.Tensor) -> torch.Tensor:
        if is_sparse(tensor) and not tensor.requires_grad:  # streams are told of memory, which its parts have
            is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
            layout = str(tensor.layout).removeprefix("torch.")
            return made_sparse(layout, tensor.shape, is_coalesced, [send(part) for part in parts_of(tensor)])
        if not is_slot or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
            return copied(tensor)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in wholes:
            if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                return wholes.setdefault(address, copied(tensor))
            wholes[address] = copied(torch.empty(0, dtype=torch.uint8).set_(storage))
        whole = wholes[address]
        like = torch.empty(0, dtype=tensor.dtype, device=whole.device)
        return like.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    return mapped(batch, send, lambda leaf: leaf), made


def sent_now(batch: Any, calls: Calls | None) -> Any:
    """A batch in private memory, on the device, if one is asked for; the current stream has it next."""
    return batch if calls is None else sent(batch, calls, is_slot=False)[0]


def check_device(device: Any) -> None:
    """Returns if batches may be sent there.

    Raises:
        ValueError, TypeError: it is no CUDA device.
    """
    if device is None or isinstance(device, Calls):
        return
    if not isinstance(device, str | torch.device):
        raise TypeError(f'device is "cuda", "cuda:1" or a torch.device, or None; got {device!r}')
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f'device is "cuda" or "cuda:1" and the like, or None; got {device!r}') from error
    if kind != "cuda":
        raise ValueError(
            f"batches are sent to CUDA devices only; got device={str(device)!r}. Leave it out for batches in host memory"
        )


def calls_of(device: Any) -> Calls:
    """The device that a loader's argument means.

    Raises:
        RuntimeError: there is none.
    """
    if isinstance(device, Calls):
        return device
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device={str(device)!r} needs a GPU and a torch with CUDA: torch.cuda.is_available() is False here. Leave device out "
            "for batches in host memory"
        )
    return Calls(torch.device(device).index)


def calls_of_cuda() -> Calls | None:
    """The current CUDA device; None: there is none."""
    return Calls() if torch.cuda.is_available() else None
