"""The neighbours' workers in this rank's ring, as its trainer deals with them: let in, watched, their chunks taken back.

A helper is the child of another rank, which replaces it. Here it has a record of its own behind those of the worker pool, and it is
let in when its process is in hand (src/helpers.h): its end is then seen like that of a worker, once every thread of it is gone. Its
death is not put down to the sample it was at, as it may well be its own rank's end; but no other helper touches that batch any
more, so the worker pool finds out.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from typing import Any

from shmload._core.trainer import TrainerRing
from shmload.sharing.rank_group import RankGroup
from shmload.shm import names
from shmload.shm.names import of_ticket, pidfd_of
from shmload.shm.segment import open_segment
from shmload.worker.pool import Death, written_stack

log = logging.getLogger("shmload")


class Helpers:
    """The helpers of one ring.

    Args:
        num_workers: of each rank.
        rings: what each neighbour has told of its own, by its number in the rank group.
    """

    def __init__(
        self, ring: TrainerRing, rank_group: RankGroup, num_workers: int, rings: dict[int, dict[str, Any]]
    ) -> None:
        self._ring, self._rank_group, self._num_workers, self._rings = ring, rank_group, num_workers, rings
        self._pidfds: dict[int, int] = {}  # by record
        self._pids: dict[int, int] = {}
        self._poll = select.poll()

    def look(self) -> int:
        """Lets in who waits, and sees off who has ended. Returns how many chunks were taken back. Cost: one poll."""
        num_taken_back = 0
        for pidfd, _ in self._poll.poll(0):
            record = next(record for record, fd in self._pidfds.items() if fd == pidfd)
            while self._ring.recover(record) >= 0:
                num_taken_back += 1
            log.info("%s has ended; what it held is read again", self._name(record))
            self.replace(record)
        for record, ticket in self._ring.requests():
            self._accept(record, ticket)
        return num_taken_back

    def _accept(self, record: int, ticket: int) -> None:
        pid, began = of_ticket(ticket)
        try:
            pidfd = pidfd_of(pid, began)
        except OSError as error:  # no descriptor is left: it asks again
            log.warning("a worker of another rank (pid %d) cannot be watched, and so not help: %s", pid, error)
            return
        if pidfd < 0:
            self._ring.release(record)  # it has ended, and has claimed nothing
            return
        self._pidfds[record], self._pids[record] = names.keep(pidfd), pid
        self._poll.register(pidfd, select.POLLIN)
        self._ring.accept(record, ticket)

    def _place(self, record: int) -> tuple[int, int]:
        """(number of the rank in the rank group, worker of it) whose record this is."""
        steps, worker = divmod(record, self._num_workers)
        return (self._rank_group.me + steps) % len(self._rank_group.members), worker

    def _name(self, record: int) -> str:
        rank, worker = self._place(record)
        return (
            f"worker {worker} of local rank {self._rank_group.members[rank].local_rank} (pid {self._pids.get(record)})"
        )

    # ------------------------------------------------------------ what a worker pool does for its supervisor

    def stack(self, record: int) -> str:
        """Where a helper is now, in Python; or why that is not known."""
        rank, worker = self._place(record)
        try:
            fd = open_segment(self._rings[rank]["stacks"][worker])
        except OSError:
            return "(unknown: its rank has ended)"
        try:
            return written_stack(self._pidfds[record], fd)
        finally:
            os.close(fd)

    def kill(self, record: int) -> Death:
        """Ends a helper at once, and waits for that; its own rank replaces it."""
        pidfd = self._pidfds[record]
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll()
        return Death(record, self._pids[record], -signal.SIGKILL)

    def replace(self, record: int) -> None:
        """Makes way for another, once a helper's claims have been taken back."""
        pidfd = self._pidfds.pop(record)
        self._poll.unregister(pidfd)
        names.close(pidfd)
        self._pids.pop(record)
        self._ring.release(record)

    def close(self) -> None:
        """Watches nobody any more."""
        for pidfd in self._pidfds.values():
            names.close(pidfd)
        self._pidfds.clear()
        self._poll = select.poll()
