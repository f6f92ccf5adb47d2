"""Tensors of the device that are filled again and again, at addresses that stay: what a captured graph needs.

A batch fills one set of tensors, and what is yielded aliases it: through DLPack, so that it has a storage of its own, and the death
of that storage is the death of the last alias. `look`, at each `next()`, takes back the sets that nobody holds, and records
an event on the streams that are current then, and on those named; the stream that copies waits for these events before it
fills the set again. Sets are used in turn. Nothing that is held is ever overwritten: with all sets held there is no next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shmload.device.calls import Calls

_to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
_from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


class BufferSet:
    """The tensors of one batch, and what is known of who uses them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.batch = ""  # which batch it holds, in words
        self.events: list[Any] = []  # behind the last use
        self.named: list[Any] = []  # streams beside the current ones
        self._aliases: list[StorageWeakRef] = []

    def begin(self, batch: str) -> None:
        """Another batch comes in."""
        self.batch = batch
        self._aliases.clear()

    def at(self, number: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """The tensor for a batch's next field; None: it is not made yet.

        Raises:
            ValueError: it is of another shape or type.
        """
        if number >= len(self.tensors):
            return None
        found = self.tensors[number]
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(
                f"static_buffers needs batches of one shape: {self.batch} has a tensor of {dtype} {tuple(shape)} where those "
                f"before had {found.dtype} {tuple(found.shape)}. Give drop_last=True or a "
                "collate_fn that pads, or leave static_buffers out"
            )
        return found

    def lend(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of a tensor that was filled, whose life is followed."""
        if number == len(self.tensors):
            self.tensors.append(tensor)
        alias = _from_dlpack(_to_dlpack(tensor))
        self._aliases.append(StorageWeakRef(alias.untyped_storage()))  # type: ignore[no-untyped-call]  # torch's own
        return alias

    @property
    def is_held(self) -> bool:
        """Whether anybody has an alias."""
        return not all(alias.expired() for alias in self._aliases)  # type: ignore[no-untyped-call]  # torch's own


class Buffers:
    """The sets of one loader, for all of its passes.

    Args:
        count: of sets.
    """

    def __init__(self, calls: Calls, count: int) -> None:
        self._calls = calls
        self._count = count
        self._free = deque(BufferSet() for _ in range(count))
        self._lent: list[BufferSet] = []

    def look(self) -> None:
        """Takes back what nobody holds."""
        gone = [each for each in self._lent if not each.is_held]
        if not gone:
            return
        streams = self._calls.current_streams()
        for each in gone:
            others = (stream for stream in streams if stream not in each.named)
            each.events = [self._calls.record(stream) for stream in (*each.named, *others)]
            each.named = []
            self._lent.remove(each)
            self._free.append(each)

    @property
    def has_room(self) -> bool:
        """Whether a batch may come."""
        return bool(self._free)

    def check_room(self) -> None:
        """Returns if one may.

        Raises:
            RuntimeError: all sets are held.
        """
        if not self._free:
            held = ", ".join(each.batch for each in self._lent)
            raise RuntimeError(
                f"all {self._count} static buffers are held: {held}. A buffer is used again when nothing refers to its batch's "
                "tensors any more: clone what is to be kept, or raise static_buffers"
            )

    def take(self, batch: str, stream: Any) -> BufferSet:
        """The set whose turn it is, which a stream will fill once its last use is done."""
        taken = self._free[0]
        for event in taken.events:
            self._calls.wait_on_stream(stream, event)
        taken.begin(batch)
        self._free.popleft()
        self._lent.append(taken)
        return taken

    def name_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Has the set of a tensor wait for this stream, too."""
        address = tensor.data_ptr()
        for each in self._lent:
            if any(0 <= address - one.data_ptr() < max(one.nbytes, 1) for one in each.tensors):
                if stream not in each.named:
                    each.named.append(stream)
                return
