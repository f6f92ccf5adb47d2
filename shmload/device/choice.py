"""Which device a loader's arguments mean."""

from __future__ import annotations

from typing import Any

import torch

from shmload.device.calls import Calls
from shmload.device.cuda import CudaCalls

NUM_SENT = 2  # batches copied ahead: one is being copied while one waits, and the third is computed with


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


def calls_of(device: Any, *, pin_memory: bool) -> Calls | None:
    """The device that the ring is pinned for; None: it need not be.

    Raises:
        RuntimeError: a device is asked for and there is none.
    """
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


def calls_of_cuda() -> Calls | None:
    """The current CUDA device; None: there is none."""
    return CudaCalls() if torch.cuda.is_available() else None
