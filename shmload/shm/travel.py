"""Where a pickle goes: to a process of this machine, which maps what is shared, or to other machines, which must be sent it.

What holds shared memory asks `is_abroad()` while it is pickled, and gives `carried(memory)` in place of the way to it. That memory
is not part of the pickle but lies behind it, whole and once, so whoever unpickles reads it where it has arrived and makes no copy.
Anything else a pickle holds is as ever: a numpy array comes as one that can be written to.

    head: number of pieces, length of each  |  pickle  |  piece  |  piece ...     each at a multiple of 64 bytes
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

ALIGNMENT = 64
_load: ContextVar[list[pickle.PickleBuffer] | None] = ContextVar("_load", default=None)

Dump = Callable[[Any, Callable[[pickle.PickleBuffer], bool]], bytes]
"""(object, buffer_callback) -> its pickle by protocol 5."""


def is_abroad() -> bool:
    """Whether what is being pickled is for other machines."""
    return _load.get() is not None


def carried(memory: Any) -> Any:
    """What stands for some bytes in a pickle; unpickled it is a buffer of them.

    Args:
        memory: a contiguous buffer, which must not change before the pickle is done.
    """
    load = _load.get()
    if load is None:
        return bytes(memory)
    load.append(pickle.PickleBuffer(memory))
    return load[-1]


def dumps(value: Any, dump: Dump) -> bytearray:
    """A value for other machines."""
    with _abroad() as load:
        pickled = dump(value, lambda buffer: not any(buffer is piece for piece in load))
    pieces = [memoryview(pickled), *(piece.raw() for piece in load)]
    head = struct.pack(f"<{len(pieces) + 1}Q", len(pieces), *(piece.nbytes for piece in pieces))
    ends = [len(head)]
    for piece in pieces:
        ends.append(_aligned(ends[-1]) + piece.nbytes)
    packed = bytearray(ends[-1])
    packed[: len(head)] = head
    for piece, end in zip(pieces, ends[1:], strict=True):
        memoryview(packed)[end - piece.nbytes : end] = piece
    return packed


def loads(packed: Any) -> Any:
    """The value; what was carried aliases `packed`.

    Raises:
        pickle.UnpicklingError: these bytes are not of `dumps`.
    """
    view = memoryview(packed)
    try:
        (num_pieces,) = struct.unpack_from("<Q", view)
        sizes = struct.unpack_from(f"<{num_pieces}Q", view, 8)
    except (struct.error, MemoryError, OverflowError) as error:
        raise pickle.UnpicklingError(f"{view.nbytes} bytes are no job for other machines: {error}") from error
    pieces, end = [], 8 * (1 + num_pieces)
    for nbytes in sizes:
        begin = _aligned(end)
        end = begin + nbytes
        pieces.append(view[begin:end])
    return pickle.loads(pieces[0], buffers=pieces[1:])


@contextmanager
def _abroad() -> Iterator[list[pickle.PickleBuffer]]:
    load: list[pickle.PickleBuffer] = []
    token = _load.set(load)
    try:
        yield load
    finally:
        _load.reset(token)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
