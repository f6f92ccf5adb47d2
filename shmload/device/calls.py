"""What the ring needs of a device, and nothing else. Streams and events are the device's own objects; nobody here looks inside.

A stream does what it is given in turn. An event is recorded behind what its stream has been given so far, and is done when that is.
Every call may raise RuntimeError; an error of work that was given earlier comes out of any later call, as CUDA has it.

CUDA, through torch: its streams, its caching allocator, its copies.

A failed cudaHostRegister leaves its error behind for the next one who asks for the last error, which is torch after its next
kernel; so the error is taken away at once. Registered memory is `is_pinned()` to torch, and a copy from it is asynchronous; unlike
memory of torch's own pinned allocator, nobody records an event for it: pending_copies.py does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Calls(Protocol):
    """A device, as the ring sees it.

    Attributes:
        name: what messages call it.
    """

    name: str

    def register(self, address: int, nbytes: int) -> None:
        """Pins memory that is mapped already. A copy may not reach across two such pieces."""

    def unregister(self, address: int) -> None:
        """Ends that, for the piece that begins there. Nothing may be copying from it."""

    def current_streams(self) -> Sequence[Any]:
        """This thread's current stream of every device in use: what it copies now is on one of these."""

    def current_stream(self) -> Any:
        """This thread's current stream of the device that batches go to."""

    def side_stream(self) -> Any:
        """A new stream of that device, which runs beside all others."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream this thread's current one in a `with` block."""

    def record(self, stream: Any) -> Any:
        """A new event behind all that the stream has been given."""

    def is_done(self, event: Any) -> bool:
        """Whether it is; never waits."""

    def wait_on_host(self, event: Any) -> None:
        """Returns when the event is done; other threads run meanwhile."""

    def wait_on_stream(self, stream: Any, event: Any) -> None:
        """Has the stream begin nothing given from now on before the event is done."""

    def synchronize(self) -> None:
        """Returns when all that any stream of any device has been given is done."""

    def copy(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor of the device, filled from this one by the current stream, later. Host memory that is not pinned is read now.

        Args:
            into: one that the device made before, to be filled again. None: a new one.
        """

    def apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What a function makes of a tensor of the device, by the current stream, later; `into` as above."""

    def stream_for(self, tensor: torch.Tensor) -> Any | None:
        """This thread's current stream of the device that a tensor lies on; None: it lies on none of this kind."""

    def is_capturing(self) -> bool:
        """Whether what the current stream is given now is kept for replays, and not done."""

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Once the tensor dies, its memory is used again only when what the stream has been given by then is done."""


PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


class CudaCalls:
    """One CUDA device.

    Args:
        index: which; None: the one that is current when it is first asked, and from then on that one.
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
        """As of any device."""
        with torch.cuda.device(self._device):
            error = int(_runtime().cudaHostRegister(address, nbytes, PORTABLE))
        if error:
            _forget_last_error()
            raise RuntimeError(f"cudaHostRegister: error {error}")

    def unregister(self, address: int) -> None:
        """As of any device."""
        error = int(_runtime().cudaHostUnregister(address))
        if error:
            _forget_last_error()
            raise RuntimeError(f"cudaHostUnregister: error {error}")

    def current_streams(self) -> Sequence[Any]:
        """As of any device. Refused while a graph is captured: an event recorded then says nothing of copies."""
        if self.is_capturing():
            raise RuntimeError("the current stream is capturing a graph")
        return [torch.cuda.current_stream(index) for index in _devices_in_use()]

    def current_stream(self) -> Any:
        """As of any device."""
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> Any:
        """As of any device."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's own

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """As of any device."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Any:
        """As of any device."""
        return stream.record_event()

    def is_done(self, event: Any) -> bool:
        """As of any device."""
        return bool(event.query())

    def wait_on_host(self, event: Any) -> None:
        """As of any device."""
        event.synchronize()

    def wait_on_stream(self, stream: Any, event: Any) -> None:
        """As of any device."""
        stream.wait_event(event)

    def synchronize(self) -> None:
        """As of any device."""
        for index in _devices_in_use():
            torch.cuda.synchronize(index)

    def copy(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """As of any device."""
        if into is not None:
            return into.copy_(tensor, non_blocking=True)
        return tensor.to(self._device, non_blocking=True)

    def apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As of any device."""
        made = function(tensor)
        return made if into is None else into.copy_(made)

    def stream_for(self, tensor: torch.Tensor) -> Any | None:
        """As of any device."""
        return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    def is_capturing(self) -> bool:
        """As of any device."""
        return torch.cuda.is_current_stream_capturing()

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """As of any device."""
        tensor.record_stream(stream)


def _devices_in_use() -> list[int]:
    """Devices on which this process has a context; asking the others for a stream would make one."""
    has_context: Callable[[int], bool] = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # private
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own


def _forget_last_error() -> None:
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")  # torch has it loaded
    except OSError:  # a torch that is linked with it
        return
    runtime.cudaGetLastError()
