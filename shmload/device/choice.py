"""Which device a loader's arguments mean."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from shmload.device.calls import Calls
from shmload.device.cuda import CudaCalls
from shmload.device.normalise import Normalise
from shmload.device.sending import Sender

NUM_SENT = 2  # batches copied ahead: one is being copied while one waits, and the third is computed with


@dataclass(frozen=True)
class Device:
    """A device that batches are sent to, and what is done with them there: `ShmLoader(..., device=Device("cuda", ...))`.

    Args:
        where: "cuda", "cuda:1" or such a torch.device.
        normalise: makes floating-point numbers of a batch's images, behind the copy and on its stream.
        static_buffers: how many sets of tensors there are, which are filled in turn and keep their addresses as long as the loader
            lives, as captured graphs need it. Batches must have one shape, and workers. A batch's set is used again when nothing
            refers to the batch's tensors any more and what the streams current in its and the next `next()`, or named by
            `record_stream`, were given until then is done; with all sets held `next()` is a RuntimeError. 3 let the copy of a
            batch run beside the step of the one before. None: each batch has memory of its own.
    Raises:
        ValueError, TypeError: they are not such.
    Example:
        >>> from shmload import Device, Normalise
        >>> Device("cuda", normalise=Normalise((0.5,), (0.25,)), static_buffers=3).static_buffers
        3
    """

    where: Any = "cuda"
    _: KW_ONLY
    normalise: Normalise | None = None
    static_buffers: int | None = None

    def __post_init__(self) -> None:
        if self.where is None or isinstance(self.where, Device):
            raise TypeError(f'Device(where=...) is "cuda", "cuda:1" or a torch.device; got {self.where!r}')
        check_device(self.where)
        if self.normalise is not None and not isinstance(self.normalise, Normalise):
            raise TypeError(f"Device(normalise=...) is a shmload.Normalise or None; got {self.normalise!r}")
        count = self.static_buffers
        if count is not None and (not isinstance(count, int) or count < 2):
            raise ValueError(
                f"static_buffers is at least 2, as a loop holds one batch while it takes the next, or None; got {count!r}"
            )


def check_device(device: Any) -> None:
    """Returns if batches may be sent there.

    Raises:
        ValueError, TypeError: it is no CUDA device.
    """
    if device is None or isinstance(device, Calls | Device):
        return
    if not isinstance(device, str | torch.device):
        raise TypeError(f'device is "cuda", "cuda:1" or a torch.device, a shmload.Device, or None; got {device!r}')
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f'device is "cuda" or "cuda:1" and the like, or None; got {device!r}') from error
    if kind != "cuda":
        raise ValueError(
            f"batches are sent to CUDA devices only; got device={str(device)!r}. Leave it out for batches in host memory"
        )


def calls_of(device: Any, *, pin_memory: bool) -> Calls | None:
    """The device that the ring is pinned for; None: it need not be.

    Raises:
        RuntimeError: a device is asked for and there is none.
    """
    if isinstance(device, Device):
        device = device.where
    if isinstance(device, Calls):
        return device
    if device is None:
        return calls_of_cuda() if pin_memory else None
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device={str(device)!r} needs a GPU and a torch with CUDA: torch.cuda.is_available() is False here. Leave device out "
            "for batches in host memory"
        )
    return CudaCalls(torch.device(device).index)


def sender_of(device: Any) -> Sender:
    """What sends batches to a device that is asked for.

    Raises:
        RuntimeError: there is none.
    """
    calls = calls_of(device, pin_memory=False)
    assert calls is not None
    options = device if isinstance(device, Device) else Device(device)
    return Sender(device, calls, options.normalise, options.static_buffers)


def calls_of_cuda() -> Calls | None:
    """The current CUDA device; None: there is none."""
    return CudaCalls() if torch.cuda.is_available() else None
