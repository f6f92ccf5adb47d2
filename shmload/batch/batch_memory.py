"""The memory of a packed batch: a leased slot, or private memory. Its tensors keep it alive."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from shmload._core.text import read_text
from shmload._core.trainer import Lease
from shmload.batch.element_types import ELEMENT_TYPES, FLOAT8_CODE, UINT_CODE, ElementType
from shmload.batch.packed_batch import PackedBatch
from shmload.torch_names import DLPACK_HAS_FLOAT8, from_dlpack


def dlpack_code(element: ElementType) -> int:
    """Return the DLPack code of the capsule. Eight-bit floats are passed as bytes if this torch lacks their codes."""
    return element.code if element.code < FLOAT8_CODE or DLPACK_HAS_FLOAT8 else UINT_CODE


class LeasedBatch:
    """A packed batch in a leased slot. `meta()` returns its last part, which describes the others."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.meta = lease.meta

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a tensor over the slot at `offset`; the tensor keeps the lease."""
        element = ELEMENT_TYPES[dtype]
        code = dlpack_code(element)
        tensor = from_dlpack(self._lease.capsule(offset, code, element.itemsize * 8, shape))
        return tensor if code == element.code else tensor.view(getattr(torch, dtype))

    def text(self, count: int, nbytes: int, offset: int, kind: int) -> list[Any]:
        """Return the text column of `count` values and `nbytes` bytes at `offset` as independent objects; `kind`: src/text.pyx."""
        lease = self._lease
        if offset + nbytes > lease.nbytes:
            raise ValueError(f"a text column of {nbytes} bytes at {offset} ends beyond the slot of {lease.nbytes}")
        return read_text(lease.address + offset, nbytes, count, kind)


class CopiedBatch(LeasedBatch):
    """A packed batch in a leased slot, of which each tensor is a private copy, so that nothing made from it keeps the lease."""

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a private copy of the tensor in the slot at `offset`."""
        return super().tensor(dtype, shape, offset).clone()


class PrivateBatch:
    """A packed batch in private memory, used if there is no ring."""

    def __init__(self, packed: PackedBatch) -> None:
        self._room, self._meta = np.empty(packed.nbytes, np.uint8), packed.meta
        packed.write(self._room)

    def meta(self) -> bytes:
        """Return its last part, which describes the others."""
        return self._meta

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a tensor over the memory, which keeps it alive."""
        nbytes = math.prod(shape) * ELEMENT_TYPES[dtype].itemsize
        return torch.from_numpy(self._room[offset : offset + nbytes]).view(getattr(torch, dtype)).view(shape)

    def text(self, count: int, nbytes: int, offset: int, kind: int) -> list[Any]:
        """Return a column of text as independent objects."""
        return read_text(self._room.ctypes.data + offset, nbytes, count, kind)


BatchMemory = LeasedBatch | PrivateBatch
