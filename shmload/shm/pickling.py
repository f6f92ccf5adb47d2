"""Pickle values for processes of this machine, which can map shared memory, and for other machines, which must receive the bytes.

A value for other machines becomes a *parcel*: a pickle, followed by large pieces of memory. An object with shared memory calls
`is_for_another_machine()` while it is pickled; if that is true, it pickles `out_of_band(memory)` in place of its path, and the
memory becomes a piece. So do arrays of at least LEAST_NBYTES: the buffers of pickle's protocol 5, and the storages of torch's
tensors. The receiver reads the pieces in place without a copy, so they are read-only there; a tensor cannot be read-only, and is
copied. Anything smaller is pickled as usual, and its arrays are writable. The limit is chosen so that objects that a dataset writes
to (counts, a buffer for one sample) are usually smaller, and large data that it only reads do not exist once per process.

    head: number of pieces, length of each  |  pickle  |  piece  |  piece ...     each at a multiple of 64 bytes

Rejected: splitting a parcel into several of Ray's objects of 64 MiB, so that the first is transferred while others are stored. With
16 arrays of 64 MB, the time until the first batch on another node was the same within the noise (2.6 to 3.0 s split, 2.5 to 3.0 s
whole), because the transfer takes all of it.
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

ALIGNMENT = 64  # bytes; of each piece
LEAST_NBYTES = 1 << 20  # smallest array that becomes a piece

_held: ContextVar[list[pickle.PickleBuffer] | None] = ContextVar("_held", default=None)

Dump = Callable[[Any, Callable[[pickle.PickleBuffer], bool]], Any]
"""(object, buffer_callback) -> its pickle by protocol 5, a buffer."""


def is_for_another_machine() -> bool:
    """Return whether the object that is being pickled is for other machines."""
    return _held.get() is not None


def out_of_band(memory: Any) -> Any:
    """Return an object to pickle in place of some bytes; unpickling it gives a read-only buffer of them.

    Args:
        memory: a contiguous buffer, which must not change before the parcel is written.
    """
    held = _held.get()
    if held is None:
        return bytes(memory)
    held.append(pickle.PickleBuffer(memory))
    return held[-1]


class Parcel:
    """A value pickled for other machines. Its large pieces are not copied until `write`, which copies them once.

    Args:
        value: the value, which must not change before `write`.
        dump: the function that pickles it.
    Attributes:
        nbytes: the size of the whole parcel.
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
        """Copy the parcel to the beginning of a file of zeros.

        pwrite takes half the time of writing to a mapping whose pages are new.

        Args:
            fd: descriptor of the file.
        Raises:
            OSError: the file system is full.
        """
        _write(fd, memoryview(self._head), 0)
        for piece, (begin, _) in zip(self._pieces, self._places, strict=True):
            _write(fd, piece, begin)


def _write(fd: int, piece: memoryview, begin: int) -> None:
    at = 0
    while at < piece.nbytes:  # one call writes at most 2 GiB
        at += os.pwrite(fd, piece[at:], begin + at)


def loads(packed: Any) -> Any:
    """Return the value of a parcel. Its memory pieces and large arrays are read-only and alias `packed`, which they keep alive.

    Args:
        packed: a buffer with the whole parcel.
    Raises:
        pickle.UnpicklingError: these bytes are not a parcel.
    """
    view = memoryview(packed).toreadonly()
    try:
        (num_pieces,) = struct.unpack_from("<Q", view)
        sizes = struct.unpack_from(f"<{num_pieces}Q", view, 8)
    except (struct.error, MemoryError, OverflowError) as error:
        raise pickle.UnpicklingError(f"{view.nbytes} bytes are not a parcel: {error}") from error
    pieces = [view[begin:end] for begin, end in _places(sizes)]
    return pickle.loads(pieces[0], buffers=pieces[1:])


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of each piece."""
    places, end = [], 8 * (1 + len(sizes))
    for nbytes in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + nbytes
        places.append((begin, end))
    return places


# ---------------------------------------------------------------- torch's tensors


class LocalPickler(pickle.Pickler):
    """A pickler with protocol 5 that can pickle tensors of every dtype."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.dispatch_table = {**copyreg.dispatch_table, **reducers()}


def dumps(value: Any) -> bytes:
    """Pickle a value for a process of this machine; `pickle.loads` reads the result."""
    pickled = io.BytesIO()
    LocalPickler(pickled).dump(value)
    return pickled.getvalue()


def reducers() -> dict[type, Callable[[Any], Any]]:
    """Return entries for a pickler's dispatch_table that pickle a tensor's memory as a buffer, where torch would copy it.

    They are also needed for dtypes without a storage class (uint16, float8, ...), whose pickles torch 2.13 cannot read.
    """
    torch = sys.modules.get("torch")
    return {} if torch is None else {torch.storage.TypedStorage: _reduced, torch.UntypedStorage: _reduced_untyped}


def _reduced_untyped(memory: Any) -> Any:
    import torch

    if memory.device.type != "cpu":
        return memory.__reduce__()
    return _storage, (torch.uint8, pickle.PickleBuffer(_bytes_of(memory)))  # rebuilding the tensor reads from it


def _reduced(storage: Any) -> Any:
    memory = storage._untyped_storage  # its public name emits a warning
    if memory.device.type != "cpu" or memory.nbytes() < LEAST_NBYTES:
        return storage.__reduce__()
    return _storage, (storage.dtype, pickle.PickleBuffer(_bytes_of(memory)))


def _storage(dtype: Any, memory: Any) -> Any:
    """Return a writable copy of a tensor's memory."""
    import torch

    mine = torch.UntypedStorage(memoryview(memory).nbytes)  # type: ignore[no-untyped-call]
    _bytes_of(mine)[:] = np.frombuffer(memory, np.uint8)
    return torch.storage.TypedStorage(wrap_storage=mine, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _bytes_of(memory: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(memory).numpy()
