"""Where a pickle goes: to a process of this machine, which maps what is shared, or to other machines, which must be sent it.

What holds shared memory asks `is_abroad()` while it is pickled, and gives `carried(memory)` in place of the way to it. That memory
is not part of the pickle but lies behind it, whole, and so do the arrays that have at least LEAST_NBYTES: what pickle's protocol 5
hands out as buffers, and the storages of torch's tensors. Whoever unpickles reads them where they have arrived and makes no copy,
so they are read-only there; a tensor cannot be, and is copied. Anything smaller is as ever: an array comes as one that can be
written to. The limit is where sharing begins to pay: what a dataset writes to (counts, a buffer for one sample) is smaller, and
what it only reads and would be missed in each process is larger.

    head: number of pieces, length of each  |  pickle  |  piece  |  piece ...     each at a multiple of 64 bytes

Rejected: several objects of 64 MiB, so that the first travel while others are put. What 16 arrays of 64 MB took to the first batch
on another node was the same within the noise (2.6 to 3.0 s in pieces, 2.5 to 3.0 s whole): the transfer takes all of the time.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

ALIGNMENT = 64
LEAST_NBYTES = 1 << 20

_held: ContextVar[list[pickle.PickleBuffer] | None] = ContextVar("_held", default=None)

Dump = Callable[[Any, Callable[[pickle.PickleBuffer], bool]], Any]
"""(object, buffer_callback) -> its pickle by protocol 5, a buffer."""


def is_abroad() -> bool:
    """Whether what is being pickled is for other machines."""
    return _held.get() is not None


def carried(memory: Any) -> Any:
    """What stands for some bytes in a pickle; unpickled it is a buffer of them.

    Args:
        memory: a contiguous buffer, which must not change before the parcel is written.
    """
    held = _held.get()
    if held is None:
        return bytes(memory)
    held.append(pickle.PickleBuffer(memory))
    return held[-1]


class Parcel:
    """A value for other machines; its large parts are still where the value has them, and are copied once, by `write`.

    Args:
        dump: pickles it.
    Attributes:
        nbytes: of all.
    """

    def __init__(self, value: Any, dump: Dump) -> None:
        held: list[pickle.PickleBuffer] = []
        pieces: list[memoryview] = []

        def is_part_of_pickle(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < LEAST_NBYTES and not any(buffer is one for one in held):
                return True
            pieces.append(raw)
            return False

        token = _held.set(held)
        try:
            pickled = dump(value, is_part_of_pickle)
        finally:
            _held.reset(token)
        self._pieces = [memoryview(pickled), *pieces]
        sizes = [piece.nbytes for piece in self._pieces]
        self._head = struct.pack(f"<{len(sizes) + 1}Q", len(sizes), *sizes)
        self._places = _places(sizes)
        self.nbytes = self._places[-1][1]

    def write(self, fd: int) -> None:
        """Copies all of it to the beginning of a file of zeros.

        By pwrite, which takes half of what it takes to write to a mapping whose pages are new.

        Raises:
            OSError: there is no room.
        """
        _write(fd, memoryview(self._head), 0)
        for piece, (begin, _) in zip(self._pieces, self._places, strict=True):
            _write(fd, piece, begin)


def _write(fd: int, piece: memoryview, begin: int) -> None:
    at = 0
    while at < piece.nbytes:  # one call writes 2 GiB at most
        at += os.pwrite(fd, piece[at:], begin + at)


def loads(packed: Any) -> Any:
    """The value; what was carried, and large arrays, alias `packed` and are read-only.

    Raises:
        pickle.UnpicklingError: these bytes are not a parcel's.
    """
    view = memoryview(packed).toreadonly()
    try:
        (num_pieces,) = struct.unpack_from("<Q", view)
        sizes = struct.unpack_from(f"<{num_pieces}Q", view, 8)
    except (struct.error, MemoryError, OverflowError) as error:
        raise pickle.UnpicklingError(f"{view.nbytes} bytes are no job for other machines: {error}") from error
    pieces = [view[begin:end] for begin, end in _places(sizes)]
    return pickle.loads(pieces[0], buffers=pieces[1:])


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of each piece."""
    places, end = [], 8 * (1 + len(sizes))
    for nbytes in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + nbytes
        places.append((begin, end))
    return places


# ---------------------------------------------------------------- torch's tensors


class LocalPickler(pickle.Pickler):
    """By protocol 5, with which arrays keep their byte order too, of tensors of every dtype."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.dispatch_table = {**copyreg.dispatch_table, **reducers()}


def dumps(value: Any) -> bytes:
    """Its pickle for a process of this machine."""
    pickled = io.BytesIO()
    LocalPickler(pickled).dump(value)
    return pickled.getvalue()


def reducers() -> dict[type, Callable[[Any], Any]]:
    """For a pickler's dispatch_table: a tensor's memory as a buffer, where torch would pickle copies of it.

    Of dtypes that have no storage class of their own (uint16, float8, ...) torch's pickles cannot be read (torch 2.13).
    """
    torch = sys.modules.get("torch")
    return {} if torch is None else {torch.storage.TypedStorage: _reduced, torch.UntypedStorage: _reduced_untyped}


def _reduced_untyped(memory: Any) -> Any:
    import torch

    if memory.device.type != "cpu":
        return memory.__reduce__()
    return _storage, (torch.uint8, pickle.PickleBuffer(_bytes_of(memory)))  # what makes the tensor again looks into it


def _reduced(storage: Any) -> Any:
    memory = storage._untyped_storage  # its public name warns of itself
    if memory.device.type != "cpu" or memory.nbytes() < LEAST_NBYTES:
        return storage.__reduce__()
    return _storage, (storage.dtype, pickle.PickleBuffer(_bytes_of(memory)))


def _storage(dtype: Any, memory: Any) -> Any:
    """A copy of a tensor's memory, which can be written to."""
    import torch

    mine = torch.UntypedStorage(memoryview(memory).nbytes)  # type: ignore[no-untyped-call]
    _bytes_of(mine)[:] = np.frombuffer(memory, np.uint8)
    return torch.storage.TypedStorage(wrap_storage=mine, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _bytes_of(memory: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(memory).numpy()
