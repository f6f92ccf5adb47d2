"""The calls that the ring makes to a CUDA device, through torch. The tests replace `CudaDevice` with a simulated device.

A stream runs its work in order. An event is recorded after the work that a stream has been given so far, and is done when that
work is done. Every call may raise RuntimeError: CUDA reports an error of earlier work from any later call.

A failed cudaHostRegister leaves its error for the next caller that asks for the last error, which is torch after its next kernel,
so the error is cleared at once. torch sees registered memory as pinned (`is_pinned()`), so copies from it are asynchronous;
unlike for memory of torch's own pinned allocator, torch records no event for them: pending_copies.py does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from shmload.torch_names import has_cuda_context

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


class CudaDevice:
    """One CUDA device.

    Args:
        index: index of the device, or None for the device that is current at the first call that needs one.

    Attributes:
        name: name of the device in messages.
    """

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        self.name = "cuda" if index is None else f"cuda:{index}"

    @property
    def _device(self) -> torch.device:
        if self._index is None:  # as late as possible, because forked workers must find CUDA uninitialized
            self._index = torch.cuda.current_device()
        return torch.device("cuda", self._index)

    def register(self, address: int, nbytes: int) -> None:
        """Pin mapped memory. A copy must not cross the border of two registered pieces."""
        with torch.cuda.device(self._device):
            error = int(_runtime().cudaHostRegister(address, nbytes, PORTABLE))
        if error:
            _forget_last_error()
            raise RuntimeError(f"cudaHostRegister: error {error}")

    def unregister(self, address: int) -> None:
        """Unpin the piece that begins at `address`. No copy from it may be running."""
        error = int(_runtime().cudaHostUnregister(address))
        if error:
            _forget_last_error()
            raise RuntimeError(f"cudaHostUnregister: error {error}")

    def current_streams(self) -> Sequence[Any]:
        """Return this thread's current stream of every device in use. A copy that the thread starts now runs on one of them.

        Raises:
            RuntimeError: a graph is being captured; an event recorded now would not follow any copy.
        """
        if self.is_capturing():
            raise RuntimeError("the current stream is capturing a graph")
        return [torch.cuda.current_stream(index) for index in _devices_in_use()]

    def current_stream(self) -> Any:
        """Return this thread's current stream of this device."""
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> Any:
        """Create a stream of this device that runs concurrently with all others."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's own

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream this thread's current stream within a `with` block."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Any:
        """Record a new event after all work that the stream has been given."""
        return stream.record_event()

    def is_done(self, event: Any) -> bool:
        """Return whether the event is done, without waiting."""
        return bool(event.query())

    def wait_on_host(self, event: Any) -> None:
        """Wait until the event is done, without the GIL."""
        event.synchronize()

    def wait_on_stream(self, stream: Any, event: Any) -> None:
        """Make all later work of the stream wait for the event."""
        stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait until all work of all streams of all devices is done."""
        for index in _devices_in_use():
            torch.cuda.synchronize(index)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device on the current stream, asynchronously. Host memory that is not pinned is read immediately."""
        return tensor.to(self._device, non_blocking=True)

    def is_capturing(self) -> bool:
        """Return whether the current stream is capturing a graph instead of executing work."""
        return torch.cuda.is_current_stream_capturing()

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do not reuse the tensor's memory, once the tensor dies, before all work that the stream has by then is done."""
        tensor.record_stream(stream)


def _devices_in_use() -> list[int]:
    """Return the devices on which this process has a context; asking any other for a stream would create one."""
    return [index for index in range(torch.cuda.device_count()) if has_cuda_context(index)]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own


def _forget_last_error() -> None:
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")  # torch has loaded it
    except OSError:  # torch is linked statically with it
        return
    runtime.cudaGetLastError()


def check_device(device: Any) -> None:
    """Check a loader's `device` argument.

    Raises:
        ValueError, TypeError: it is not a CUDA device.
    """
    if device is None or isinstance(device, CudaDevice):
        return
    if not isinstance(device, str | torch.device):
        raise TypeError(f'device must be "cuda", "cuda:1", a torch.device or None, got {device!r}')
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f'device must be a CUDA device such as "cuda" or "cuda:1", or None, got {device!r}') from error
    if kind != "cuda":
        raise ValueError(
            f"batches can be sent to CUDA devices only, got device={str(device)!r}. Leave device out for batches in host memory"
        )


def open_device(device: Any) -> CudaDevice:
    """Return the device that a loader's `device` argument means.

    Raises:
        RuntimeError: CUDA is not available.
    """
    if isinstance(device, CudaDevice):
        return device
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device={str(device)!r} needs a GPU and a torch with CUDA: torch.cuda.is_available() is False here. Leave device out "
            "for batches in host memory"
        )
    return CudaDevice(torch.device(device).index)


def current_cuda() -> CudaDevice | None:
    """Return the current CUDA device, or None if CUDA is not available."""
    return CudaDevice() if torch.cuda.is_available() else None
