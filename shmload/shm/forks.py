"""What a forked child of the trainer sees of the batches that the trainer holds: the bytes of the moment of the fork.

A slot is shared memory. Without this a child would go on seeing it after the parent has dropped its batch, that is, the next
batch's bytes. So each fork with live leases takes one more reference on every one of them and makes a pipe; the child puts private
copies in the place of those slots and closes its end; the parent waits for that, and with it lets the references go. A child that
has no memory for copies keeps its end open instead: then the slots stay the parent's until it ends or execs. Where the child takes
longer than GRACE_S the parent goes on, and looks again at its next fork and in `settle`.

Memory: a child costs the bytes of the slots leased at its fork, whether it looks at them or not; usually that is one batch.
The crew's own workers never look at a batch, and pay nothing (`ours`).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shmload._core.trainer import Lease, live_leases, stop_poisoning
from shmload.shm import owner

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
        owner.close(fork.reader)


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
        _thread.fork = _Fork(leases, owner.keep(reader), writer)


def _in_parent() -> None:
    fork, _thread.fork = _thread.fork, None
    if fork is not None:
        _unsettled.append(fork)
        os.close(fork.writer)
        _settle(fork, GRACE_S)


def _in_child() -> None:
    fork, _thread.fork = _thread.fork, None
    stop_poisoning()
    _unsettled.clear()  # owner.py has closed the readers
    if fork is not None and all(
        _private(lease) for lease in fork.leases
    ):  # after the first refusal all slots stay kept
        os.close(fork.writer)


os.register_at_fork(before=_before, after_in_child=_in_child, after_in_parent=_in_parent)
