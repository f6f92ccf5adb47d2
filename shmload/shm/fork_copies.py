"""Give a forked child of the trainer private copies of the leased batches, with their contents at the moment of the fork.

A slot is shared memory. Without a copy, a child would see the next batch's bytes once the parent has dropped its batch. So each
fork with live leases takes one more reference to every one of them and makes a pipe. The child replaces those slots by private
copies and closes its end of the pipe. The parent waits for that, and then drops the references. A child without memory for copies
keeps its end open, so that the slots are not reused until the child ends or execs. If the child takes longer than GRACE_S, the
parent continues, and checks again at its next fork and in `release_copied`.

Memory: a child costs the bytes of the slots leased at its fork, even if it never reads them; usually that is one batch. Workers
never read a batch, so none are copied for them (`without_copies`).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from shmload._core.trainer import Lease, live_leases, stop_poisoning
from shmload.processes import private_fds

GRACE_S = 1.0  # longest time that os.fork waits in the parent for the child's copies


class _Fork(NamedTuple):
    """A fork in progress: the leases it keeps, and a pipe whose other end its child holds until it has copied them."""

    leases: list[Lease]
    reader: int
    writer: int


# `.fork`: the fork in progress, between this thread's handlers; `.makes_no_copies`: see `without_copies`
_thread = threading.local()
_unsettled: list[_Fork] = []


@contextmanager
def without_copies() -> Iterator[None]:
    """Make no copies for forks in this block, because their children use no batch."""
    _thread.makes_no_copies = True
    try:
        yield
    finally:
        _thread.makes_no_copies = False


def release_copied() -> int:
    """Drop the references of forks whose children have copied or ended. Return the number of forks whose children have not."""
    for fork in _unsettled.copy():
        _await_child_copy(fork, 0)
    return len(_unsettled)


def _await_child_copy(fork: _Fork, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(fork.reader, select.POLLIN)
    if poll.poll(timeout_s * 1000):  # nothing is ever written, so this is the end of the file
        with suppress(ValueError):  # another thread that forks may have removed it in the meantime
            _unsettled.remove(fork)
        private_fds.close(fork.reader)


def _private(lease: Lease) -> bool:
    return bool(lease.make_private())


def _before() -> None:
    _thread.fork = None
    if getattr(_thread, "makes_no_copies", False):
        return
    release_copied()
    leases = live_leases()
    if leases:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        _thread.fork = _Fork(leases, private_fds.keep(reader), writer)


def _in_parent() -> None:
    fork, _thread.fork = _thread.fork, None
    if fork is not None:
        _unsettled.append(fork)
        os.close(fork.writer)
        _await_child_copy(fork, GRACE_S)


def _in_child() -> None:
    fork, _thread.fork = _thread.fork, None
    stop_poisoning()
    _unsettled.clear()  # private_fds.py has closed their pipes
    if fork is not None and all(_private(lease) for lease in fork.leases):  # after the first refusal, all slots stay kept
        os.close(fork.writer)


os.register_at_fork(before=_before, after_in_child=_in_child, after_in_parent=_in_parent)
