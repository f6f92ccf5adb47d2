"""Copy the tensors of a batch to a device; other objects are passed through.

In a slot, a field is one storage, and rows of different shapes are views of it. The storage is copied once and viewed again, so a
thousand rows are one copy, and tensors that shared memory before share it afterwards.
"""

from __future__ import annotations

from typing import Any

import torch

from shmload.batch.mapped_batch import mapped
from shmload.batch.sparse_tensors import is_sparse, made_sparse, parts_of
from shmload.device.cuda import CudaDevice

NUM_SENT = 2  # batches copied ahead: one is being copied and one waits while the trainer computes with a third


def sent(batch: Any, device: CudaDevice, *, is_slot: bool) -> tuple[Any, list[torch.Tensor]]:
    """Copy a batch to the device on the current stream.

    Args:
        batch: the batch, of any structure.
        device: the device.
        is_slot: the batch is in a slot, where each storage is one field. Elsewhere a tensor may be a small part of a large storage.
    Returns:
        the batch, and every device tensor that owns its memory.
    """
    made: list[torch.Tensor] = []
    wholes: dict[int, torch.Tensor] = {}  # address of a storage -> its copy

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        made.append(device.copy(tensor))
        return made[-1]

    def send(tensor: torch.Tensor) -> torch.Tensor:
        if is_sparse(tensor) and not tensor.requires_grad:  # record_stream needs memory, which only the parts have
            is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
            layout = str(tensor.layout).removeprefix("torch.")
            return made_sparse(layout, tensor.shape, is_coalesced, [send(part) for part in parts_of(tensor)])
        if not is_slot or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
            return copied(tensor)
        if tensor.is_conj() or tensor.is_neg():  # a view of its storage has neither sign
            return copied(tensor.resolve_conj().resolve_neg())
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in wholes:
            if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                return wholes.setdefault(address, copied(tensor))
            wholes[address] = copied(torch.empty(0, dtype=torch.uint8).set_(storage))
        whole = wholes[address]
        like = torch.empty(0, dtype=tensor.dtype, device=whole.device)
        return like.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    return mapped(batch, send), made


def sent_now(batch: Any, device: CudaDevice | None) -> Any:
    """Copy a batch from private memory to the device on the current stream. Without a device, return it unchanged."""
    return batch if device is None else sent(batch, device, is_slot=False)[0]
