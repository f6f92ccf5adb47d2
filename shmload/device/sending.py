"""A batch's tensors, copied to a device; what is no tensor stays as it is.

A field lies in a slot as one storage, and rows of differing shape are views of it: the storage is copied once and viewed again, so
a thousand rows are one copy, and what shared memory before shares it after.
"""

from __future__ import annotations

from typing import Any

import torch

from shmload.batch.deliver import mapped
from shmload.device.buffers import Buffers, BufferSet
from shmload.device.calls import Calls
from shmload.device.normalise import Normalise


class Sender:
    """How one loader's batches come to a device.

    Args:
        device: what the loader was given for it.
        static_buffers: sets of tensors that are filled in turn; None: every batch has its own.
    """

    def __init__(self, device: Any, calls: Calls, normalise: Normalise | None, static_buffers: int | None) -> None:
        self.device = device
        self.calls = calls
        self.normalise = normalise
        self.buffers = None if static_buffers is None else Buffers(calls, static_buffers)

    def send(self, batch: Any, *, into: BufferSet | None = None, is_slot: bool) -> tuple[Any, list[torch.Tensor]]:
        """The batch on the device, by the current stream, and every tensor of the device that it lies in.

        Args:
            into: tensors to be filled.
            is_slot: it lies in a slot, where a storage is a field. Elsewhere a tensor may be a small part of a large storage.
        Raises:
            ValueError: there is no image to normalise, or `into` is of another shape.
        """
        sending = _Sending(self, into, is_slot)
        sent = mapped(batch, sending.send, _itself)
        if self.normalise is not None and not sending.num_images:
            sending.refuse()
        return sent, sending.made

    def name_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Has a tensor's memory not be used again before what a stream has been given by the tensor's end is done."""
        if self.buffers is not None:
            self.buffers.name_stream(tensor, stream)
        else:
            self.calls.keep_for(tensor, stream)


def sent_now(batch: Any, sender: Sender | None) -> Any:
    """A batch in private memory, on the device, if one is asked for; the current stream has it next."""
    return batch if sender is None else sender.send(batch, is_slot=False)[0]


class _Sending:
    """One batch under way."""

    def __init__(self, sender: Sender, into: BufferSet | None, is_slot: bool) -> None:
        self._calls = sender.calls
        self._normalise = sender.normalise
        self._into = into
        self._is_slot = is_slot
        self._wholes: dict[tuple[int, bool], torch.Tensor] = {}  # address of a storage, is it of images -> its copy
        self._seen: list[str] = []
        self.num_images = 0
        self.made: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor of it, on the device."""
        if self._normalise is None:
            return self._copied(tensor, is_image=False)
        self._seen.append(f"{tensor.dtype} {tuple(tensor.shape)}")
        if not self._normalise.is_meant(tensor):
            return self._copied(tensor, is_image=False)
        self.num_images += 1
        bytes_there = self._copied(tensor, is_image=True)
        target = self._target(self._normalise.shape_of(tensor), self._normalise.dtype)
        return self._lent(self._calls.apply(self._normalise.made_of, bytes_there, target))

    def refuse(self) -> None:
        """There was nothing to normalise."""
        assert self._normalise is not None
        normalise, seen = self._normalise, ", ".join(self._seen) or "no tensor"
        raise ValueError(
            f"normalise needs a uint8 tensor of 3 or 4 dimensions with {len(normalise.mean)} channels in {normalise.source} order; "
            f"the batch has {seen}. Give source= or leave normalise out"
        )

    def _copied(self, tensor: torch.Tensor, *, is_image: bool) -> torch.Tensor:
        if not self._is_slot or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
            return self._whole(tensor, is_image)
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), is_image)
        whole = self._wholes.get(key)
        if whole is None:
            if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                return self._wholes.setdefault(key, self._whole(tensor, is_image))
            whole = self._wholes[key] = self._whole(torch.empty(0, dtype=torch.uint8).set_(storage), is_image)
        like = torch.empty(0, dtype=tensor.dtype, device=whole.device)
        return like.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _whole(self, tensor: torch.Tensor, is_image: bool) -> torch.Tensor:
        if is_image:  # only what is made of it is handed on: both are this stream's
            return self._calls.copy(tensor)
        return self._lent(self._calls.copy(tensor, self._target(tensor.shape, tensor.dtype)))

    def _target(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        return None if self._into is None else self._into.at(len(self.made), shape, dtype)

    def _lent(self, made: torch.Tensor) -> torch.Tensor:
        self.made.append(made)
        return made if self._into is None else self._into.lend(len(self.made) - 1, made)


def _itself(leaf: Any) -> Any:
    return leaf
