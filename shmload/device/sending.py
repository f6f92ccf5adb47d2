"""A batch's tensors, copied to a device; what is no tensor stays as it is.

A field lies in a slot as one storage, and rows of differing shape are views of it: the storage is copied once and viewed again, so
a thousand rows are one copy, and what shared memory before shares it after.
"""

from __future__ import annotations

from typing import Any

import torch

from shmload.batch.deliver import mapped
from shmload.device.calls import Calls

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
