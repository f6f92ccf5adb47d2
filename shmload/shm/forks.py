"""What a forked child of the trainer sees of the batches that the trainer holds: the bytes of the moment of the fork.

A slot is shared memory. Without this a child would go on seeing it after the parent has dropped its batch, that is, the next
batch's bytes. So each fork with live leases takes one more reference on every one of them and makes a pipe; the child puts private
copies in the place of those slots and closes its end; the parent waits for that, and with it lets the references go. A child that
has no memory for copies keeps its end open instead: then the slots stay the parent's until it ends or execs. Where the child takes
longer than GRACE_S the parent goes on, and looks again at its next fork and in `settle`.

Memory: a child costs the bytes of the slots leased at its fork, whether it looks at them or not; usually that is one batch.
The worker pool's own workers never look at a batch, and pay nothing (`ours`).

Where a pickle goes: to a process of this machine, which maps what is shared, or to other machines, which must be sent it.

What holds shared memory asks `is_abroad()` while it is pickled, and gives `carried(memory)` in place of the way to it. That memory
is not part of the pickle but lies behind it, whole and once, so whoever unpickles reads it where it has arrived and makes no copy.
Anything else a pickle holds is as ever: a numpy array comes as one that can be written to.

    head: number of pieces, length of each  |  pickle  |  piece  |  piece ...     each at a multiple of 64 bytes
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from shmload._core.trainer import Lease, live_leases, stop_poisoning
from shmload.shm import names

GRACE_S = 1.0


class _Fork(NamedTuple):
    """One fork under way: the leases it keeps, and the pipe whose other end its child holds until it has copied them."""

    leases: list[Lease]
    reader: int
    writer: int


_thread = threading.local()  # `.fork`, between this thread's handlers; `.is_ours`
_unsettled: list[_Fork] = []


@contextmanager
def ours() -> Iterator[None]:
    """Forks in this block are not looked at: their children use no batch."""
    _thread.is_ours = True
    try:
        yield
    finally:
        _thread.is_ours = False


def settle() -> int:
    """Lets the references of forks go whose children have copied or ended. Returns how many have not."""
    for fork in _unsettled:
        _settle(fork, 0)
    return len(_unsettled)


def _settle(fork: _Fork, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(fork.reader, select.POLLIN)
    if poll.poll(timeout_s * 1000):  # nothing is ever written: this is the end of the file
        _unsettled.remove(fork)
        names.close(fork.reader)


def _private(lease: Lease) -> bool:
    return bool(lease.make_private())


def _before() -> None:
    _thread.fork = None
    if getattr(_thread, "is_ours", False):
        return
    settle()
    leases = live_leases()
    if leases:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        _thread.fork = _Fork(leases, names.keep(reader), writer)


def _in_parent() -> None:
    fork, _thread.fork = _thread.fork, None
    if fork is not None:
        _unsettled.append(fork)
        os.close(fork.writer)
        _settle(fork, GRACE_S)


def _in_child() -> None:
    fork, _thread.fork = _thread.fork, None
    stop_poisoning()
    _unsettled.clear()  # names.py has closed the readers
    if fork is not None and all(
        _private(lease) for lease in fork.leases
    ):  # after the first refusal all slots stay kept
        os.close(fork.writer)


os.register_at_fork(before=_before, after_in_child=_in_child, after_in_parent=_in_parent)


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
