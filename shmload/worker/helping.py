"""Helping the node's other ranks: a worker whose own ring has nothing open fills chunks of theirs, as their helper.

A helper reads with its own dataset and claims and finishes as the ring's own workers do. What it must not do is wait for that
ring's trainer: that one may be waiting, in an all-reduce, for a batch that this worker owes its own. So it comes only when there is
a layout, and leaves a batch that needs more room to be ordered again (slot_memory.py). It requests before it claims
(src/helpers.h).
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from time import monotonic
from typing import Any

from shmload import faults
from shmload._core.filler import WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.neighbour import Neighbour
from shmload.shm.group import Doorbell
from shmload.shm.names import own_ticket, pidfd_of
from shmload.worker.loop import WorkerLoop
from shmload.worker.slot_memory import Bell
from shmload.worker.spec import Job, PeerRing

LOOK_S = 1.0  # how often a worker that is never idle looks whether a neighbour has ended: its memory is kept until then


class HelperRing(WorkerRing):
    """A worker's view of a neighbour's ring, where its record has another number than it has itself."""

    _own_id: int

    def __new__(cls, control: Mapping, record: int, worker_id: int) -> HelperRing:
        """The view under a record of the neighbour's."""
        ring: HelperRing = super().__new__(cls, control, record)  # type: ignore[assignment]  # of the class that was asked for
        ring._own_id = worker_id
        return ring

    @property
    def worker_id(self) -> int:
        """The worker's number in its own worker pool, which samples and errors are told."""
        return self._own_id


class Host:
    """One neighbour, and what this worker has mapped of it.

    Raises:
        FileNotFoundError: it has ended.
    """

    def __init__(
        self, peer_ring: PeerRing, worker_id: int, job: Job, orders: Bell, open_memory: Callable[[str], Mapping]
    ) -> None:
        pidfd = pidfd_of(peer_ring.trainer_pid, peer_ring.trainer_began)
        if pidfd < 0:
            raise FileNotFoundError(f"process {peer_ring.trainer_pid} has ended")
        self._pidfd = pidfd
        try:
            self._poll = select.poll()
            self._poll.register(pidfd, select.POLLIN)
            control = open_memory(peer_ring.control_path)
            self._neighbour = Neighbour(control)
            self._ring = HelperRing(control, peer_ring.first_record + worker_id, worker_id)
            ready, grants = Doorbell.attach(peer_ring.ready_bell), Doorbell.attach(peer_ring.grants_bell)
            self.body = WorkerLoop(
                self._ring, job, ready=ready, orders=orders, grants=grants, open_memory=open_memory, is_helper=True
            )
        except BaseException:
            os.close(pidfd)
            raise

    @property
    def waits_since_ns(self) -> int:
        """When its trainer began to wait for a batch; 0: it does not."""
        return self._neighbour.waiting_since_ns

    @property
    def has_gone(self) -> bool:
        """Whether its loader is closed or its trainer has ended."""
        return self._neighbour.is_closing or bool(self._poll.poll(0))

    def claims(self, ticket: int) -> bool:
        """Claims a chunk, if there is one for a helper and the trainer has let this one in."""
        ring = self._ring
        return ring.request(ticket) and ring.has_layout and ring.claim()

    def leave(self) -> None:
        """Watches it no more."""
        os.close(self._pidfd)


class Visits:
    """One worker's way to the node's other ranks.

    Args:
        peer_rings: of these ranks, in the order in which they are gone to where none is in need.
        orders: the bell that wakes this worker.
        open_memory: (path) -> mapping of a segment that a trainer has made.
    """

    def __init__(
        self,
        peer_rings: tuple[PeerRing, ...],
        worker_id: int,
        job: Job,
        *,
        orders: Bell,
        open_memory: Callable[[str], Mapping],
    ) -> None:
        self._peer_rings: tuple[PeerRing, ...] | None = peer_rings  # None: they have been followed
        self._parts: tuple[Any, ...] = (worker_id, job, orders, open_memory)
        self._ticket = own_ticket()
        self._hosts: list[Host] = []
        self._looked = monotonic()

    def claim(self) -> WorkerLoop | None:
        """Claims a chunk of the neighbour in most need: whose trainer has waited for longest, else the next one.

        Returns:
            who does what is claimed; None: there is nothing to do.
        """
        self._look()
        for host in sorted(self._hosts, key=lambda host: host.waits_since_ns or 1 << 64):
            if host.claims(self._ticket):
                faults.hit("visiting")
                return host.body
        return None

    def look_at_times(self) -> None:
        """Leaves neighbours that have ended, when it is time to look."""
        if monotonic() - self._looked > LOOK_S:
            self._look()

    def _look(self) -> None:
        self._looked = monotonic()
        if self._peer_rings is not None:
            for peer_ring in self._peer_rings:
                try:
                    self._hosts.append(Host(peer_ring, *self._parts))
                except OSError:  # it has ended, or cannot be reached: it goes without help
                    continue
            self._peer_rings = None
        gone = [host for host in self._hosts if host.has_gone]
        for host in gone:
            host.leave()
            self._hosts.remove(host)  # and with it all that was mapped
