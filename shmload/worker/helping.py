"""Let a worker whose own ring has no open chunk fill chunks of rings that belong to other ranks of the node.

A helper reads with its own dataset, and claims and finishes chunks as the ring's own workers do. It must not wait for that ring's
trainer, which may itself be waiting, in an all-reduce, for a batch that this worker owes its own trainer. So it helps only once the
layout is known, and leaves a batch that needs more room to be ordered again (slot_memory.py). It requests permission before it
claims (src/helpers.h).
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
from shmload._core.peer_status import PeerStatus
from shmload.processes.identity import own_identity, pidfd_of
from shmload.shm.doorbell import Doorbell
from shmload.worker.job import Job, PeerRing
from shmload.worker.loop import WorkerLoop
from shmload.worker.slot_memory import Bell

LOOK_S = 1.0  # interval at which a busy worker checks whether a helped rank has ended, to release its memory


class HelperRing(WorkerRing):
    """Another rank's ring, in which the worker's record has another number than in its own ring."""

    _own_id: int

    def __new__(cls, control: Mapping, record: int, worker_id: int) -> HelperRing:
        """Return the ring as seen by the worker of this record."""
        ring: HelperRing = super().__new__(cls, control, record)  # type: ignore[assignment]  # of the class that was asked for
        ring._own_id = worker_id
        return ring

    @property
    def worker_id(self) -> int:
        """Return the number of the worker in its own pool, as used in samples and errors."""
        return self._own_id


class HelpedRank:
    """A rank that this worker helps, and the parts of its ring that this worker has mapped.

    Args:
        peer_ring: the rank's ring.
        worker_id: number of this worker in its own pool.
        job: the work.
        orders: the doorbell that wakes this worker.
        open_memory: (path) -> mapping of a trainer's segment.

    Attributes:
        loop: the loop that fills the rank's chunks.
        pidfd: descriptor of the rank's process.
        status: the part of the rank's control block that shows whether it waits or is closing.

    Raises:
        FileNotFoundError: the rank has ended.
    """

    def __init__(self, peer_ring: PeerRing, worker_id: int, job: Job, orders: Bell, open_memory: Callable[[str], Mapping]) -> None:
        pidfd = pidfd_of(peer_ring.trainer_pid, peer_ring.trainer_began)
        if pidfd < 0:
            raise FileNotFoundError(f"the trainer that owns the ring, process {peer_ring.trainer_pid}, has ended")
        self.pidfd = pidfd
        try:
            self._poll = select.poll()
            self._poll.register(pidfd, select.POLLIN)
            control = open_memory(peer_ring.control_path)
            self.status = PeerStatus(control)
            self._ring = HelperRing(control, peer_ring.first_record + worker_id, worker_id)
            ready, grants = Doorbell.attach(peer_ring.ready_bell), Doorbell.attach(peer_ring.grants_bell)
            self.loop = WorkerLoop(
                self._ring, job, ready=ready, orders=orders, grants=grants, open_memory=open_memory, is_helper=True
            )
        except BaseException:
            os.close(pidfd)
            raise

    @property
    def has_gone(self) -> bool:
        """Return whether the rank's loader has closed or its trainer has ended."""
        return self.status.is_closing or bool(self._poll.poll(0))

    def claims(self, identity: int) -> bool:
        """Request permission to help, and claim a chunk if it was granted before. Return whether a chunk was claimed."""
        ring = self._ring
        return ring.request(identity) and ring.has_layout and ring.claim()


class HelpedRanks:
    """The other ranks of the node, which one worker helps.

    Args:
        peer_rings: rings of these ranks, in the order in which they are tried if no trainer waits.
        worker_id: number of the worker.
        job: the work.
        orders: the doorbell that wakes this worker.
        open_memory: (path) -> mapping of a trainer's segment.
    """

    def __init__(
        self, peer_rings: tuple[PeerRing, ...], worker_id: int, job: Job, *, orders: Bell, open_memory: Callable[[str], Mapping]
    ) -> None:
        self._peer_rings: tuple[PeerRing, ...] | None = peer_rings  # None once they have been opened
        self._parts: tuple[Any, ...] = (worker_id, job, orders, open_memory)
        self._identity = own_identity()
        self._ranks: list[HelpedRank] = []
        self._looked = monotonic()

    def claim(self) -> WorkerLoop | None:
        """Claim a chunk of the rank whose trainer has waited longest, or of the next rank that has an open chunk.

        Returns:
            the loop that fills it; None if there is nothing to do.
        """
        self._look()
        for rank in sorted(self._ranks, key=lambda rank: rank.status.waiting_since_ns or 1 << 64):
            if rank.claims(self._identity):
                faults.hit("visiting")
                return rank.loop
        return None

    def leave_ended_ranks(self) -> None:
        """Leave ranks that have ended, if `LOOK_S` have passed since the last check."""
        if monotonic() - self._looked > LOOK_S:
            self._look()

    def _look(self) -> None:
        self._looked = monotonic()
        if self._peer_rings is not None:
            for peer_ring in self._peer_rings:
                try:
                    self._ranks.append(HelpedRank(peer_ring, *self._parts))
                except OSError:  # it has ended or cannot be reached, so it gets no help
                    continue
            self._peer_rings = None
        gone = [rank for rank in self._ranks if rank.has_gone]
        for rank in gone:
            os.close(rank.pidfd)
            self._ranks.remove(rank)  # unmaps all its memory
