"""A batch's tensors, copied to a device; what is no tensor stays as it is.

A field lies in a slot as one storage, and rows of differing shape are views of it: the storage is copied once and viewed again, so
a thousand rows are one copy, and what shared memory before shares it after.
"""

from __future__ import annotations

from typing import Any

import torch

from shmload.batch.deliver import mapped
from shmload.device.calls import Calls


def sent(batch: Any, calls: Calls, *, is_slot: bool) -> tuple[Any, list[torch.Tensor]]:
    """The batch on the device, by the current stream, and every tensor that was made for it.

    Args:
        is_slot: it lies in a slot, where a storage is a field. Elsewhere a tensor may be a small part of a large storage.
    """
    sending = _Sending(calls, is_slot)
    return mapped(batch, sending.copy, _itself), sending.made


def sent_now(batch: Any, calls: Calls | None) -> Any:
    """A batch in private memory, on the device, if one is asked for; the current stream has it next."""
    return batch if calls is None else sent(batch, calls, is_slot=False)[0]


class _Sending:
    def __init__(self, calls: Calls, is_slot: bool) -> None:
        self._calls = calls
        self._is_slot = is_slot
        self._wholes: dict[int, torch.Tensor] = {}  # address of a storage -> its copy
        self.made: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_slot or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
            return self._made(tensor)
        storage = tensor.untyped_storage()
        whole = self._wholes.get(storage.data_ptr())
        if whole is None:
            if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                return self._wholes.setdefault(storage.data_ptr(), self._made(tensor))
            whole = self._wholes[storage.data_ptr()] = self._made(torch.empty(0, dtype=torch.uint8).set_(storage))
        like = torch.empty(0, dtype=tensor.dtype, device=whole.device)
        return like.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        self.made.append(self._calls.copy(tensor))
        return self.made[-1]


def _itself(leaf: Any) -> Any:
    return leaf
