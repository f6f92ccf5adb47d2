"""What a rank does beside its engine's work whose neighbours read other samples: the node's workers help each other.

The neighbours' workers in this rank's ring, as its trainer deals with them: let in, watched, their chunks taken back.

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
from contextlib import suppress
from typing import Any, NamedTuple

from shmload._core.neighbour import Neighbour
from shmload._core.trainer import TrainerRing
from shmload.engine.rank_hook import RankHook
from shmload.engine.ring import Ring
from shmload.processes import private_fds
from shmload.processes.identity import of_ticket, pidfd_of
from shmload.processes.interrupts import interrupts_held
from shmload.sharing.rank_group import RankGroup, poll_of
from shmload.shm.segment import Doorbell, map_segment, open_segment
from shmload.worker.job import PeerRing
from shmload.worker.pool import Death, written_stack

log = logging.getLogger("shmload")


class Helpers:
    """The helpers of one ring.

    Args:
        num_workers: of each rank.
        rings: what each neighbour has said of its own, by its number in the rank group.
    """

    def __init__(self, ring: TrainerRing, rank_group: RankGroup, num_workers: int, rings: dict[int, dict[str, Any]]) -> None:
        self._ring, self._rank_group, self._num_workers, self._rings = ring, rank_group, num_workers, rings
        self._watched: dict[int, tuple[int, int]] = {}  # (pidfd, pid) by record
        self._poll = select.poll()

    def look(self) -> int:
        """Lets in who waits, and sees off who has ended. Returns how many chunks were taken back. Cost: one poll."""
        num_taken_back = 0
        for pidfd, _ in self._poll.poll(0):
            record = next(record for record, (fd, _) in self._watched.items() if fd == pidfd)
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
        self._watched[record] = private_fds.keep(pidfd), pid
        self._poll.register(pidfd, select.POLLIN)
        self._ring.accept(record, ticket)

    def _place(self, record: int) -> tuple[int, int]:
        """(number of the rank in the rank group, worker of it) whose record this is."""
        steps, worker = divmod(record, self._num_workers)
        return (self._rank_group.me + steps) % len(self._rank_group.members), worker

    def _name(self, record: int) -> str:
        rank, worker = self._place(record)
        return f"worker {worker} of local rank {self._rank_group.members[rank].local_rank} (pid {self._watched[record][1]})"

    # ------------------------------------------------------------ what a worker pool does for its supervisor

    def stack(self, record: int) -> str:
        """Where a helper is now, in Python; or why that is not known."""
        rank, worker = self._place(record)
        try:
            fd = open_segment(self._rings[rank]["stacks"][worker])
        except OSError:
            return "(unknown: its rank has ended)"
        try:
            return written_stack(self._watched[record][0], fd)
        finally:
            os.close(fd)

    def kill(self, record: int) -> Death:
        """Ends a helper at once, and waits for that; its own rank replaces it."""
        pidfd, pid = self._watched[record]
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll_of([pidfd]).poll()
        return Death(record, pid, -signal.SIGKILL)

    def replace(self, record: int) -> None:
        """Makes way for another, once a helper's claims have been taken back."""
        pidfd, _ = self._watched.pop(record)
        self._poll.unregister(pidfd)
        private_fds.close(pidfd)
        self._ring.release(record)

    def close(self) -> None:
        """Watches nobody any more."""
        for pidfd, _ in self._watched.values():
            private_fds.close(pidfd)
        self._watched.clear()
        self._poll = select.poll()


class PeerPool(NamedTuple):
    """The worker pool of a neighbour, as this rank calls it."""

    neighbour: Neighbour
    bell: Doorbell


class NodeBell(Doorbell):
    """The worker pool's bell for orders. What is more than its idle workers can claim it rings the neighbours' idle workers for."""

    ring: TrainerRing
    peer_pools: dict[int, PeerPool]  # by number in the rank group, the next one first

    def post_up_to(self, count: int) -> None:
        """As of any bell; then the neighbours' as often as there are chunks left and workers idle."""
        super().post_up_to(count)
        num_left = self.ring.num_unattended
        for peer_pools in self.peer_pools.values():
            if num_left <= 0:
                return
            num_idle = peer_pools.neighbour.num_idle
            if num_idle:
                peer_pools.bell.post_up_to(min(num_left, num_idle))
                num_left -= num_idle


class Balancer(RankHook):
    """The part that an engine's rank takes whose neighbours' workers fill chunks of its ring when they have nothing else to do.

    Args:
        rank_group: these ranks.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._has_announced = False
        self.helpers: Helpers | None = None
        self._peer_pools: dict[int, PeerPool] = {}
        self._poll = poll_of(rank_group.pidfds.values())

    def order_bell(self, ring: TrainerRing, bell: Doorbell) -> Doorbell:
        """Return a doorbell that also wakes the neighbors' workers."""
        self._bell = NodeBell.attach(bell.name)
        self._bell.ring, self._bell.peer_pools = ring, self._peer_pools
        return self._bell

    def peer_rings(self, ring: Ring) -> tuple[PeerRing, ...]:
        """Announce this rank's ring, and return the rings of all ranks that still run and could make one."""
        rank_group, num_workers = self._rank_group, ring.num_workers
        num_ranks = len(rank_group.members)
        rank_group.announce(
            {
                "control": ring.control_segment.path,
                "orders": self._bell.name,
                "ready": ring.ready.name,
                "grants": ring.grants.name,
                "stacks": [stack.path for stack in ring.stacks.values()],
            }
        )
        self._has_announced = True
        rings = {number: ring for number, ring in rank_group.rings(rank_group.pidfds).items() if "failed" not in ring}
        self._ring, self._num_workers = ring.native, num_workers
        self.helpers = Helpers(ring.native, rank_group, num_workers, rings)
        peer_rings = []
        for steps in range(1, num_ranks):
            number = (rank_group.me + steps) % num_ranks
            if number not in rings:
                continue
            peer, member = rings[number], rank_group.members[number]
            try:
                self._peer_pools[number] = PeerPool(Neighbour(map_segment(peer["control"])), Doorbell.attach(peer["orders"]))
            except OSError:  # it has closed its loader meanwhile
                continue
            peer_rings.append(
                PeerRing(
                    trainer_pid=member.pid,
                    trainer_began=member.began,
                    control_path=peer["control"],
                    ready_bell=peer["ready"],
                    grants_bell=peer["grants"],
                    first_record=num_workers * (num_ranks - steps),  # as many ranks on from there is this one
                )
            )
        return tuple(peer_rings)

    def failed(self, error: BaseException) -> None:
        if not self._has_announced:
            self._rank_group.announce({"failed": f"{type(error).__name__}: {error}"})
        self.closed()

    def look(self) -> int:
        """Admit helpers, recover the chunks of those that have ended, and forget neighbors that have ended."""
        assert self.helpers is not None
        with interrupts_held():
            num_taken_back = self.helpers.look()
        ended = {pidfd for pidfd, _ in self._poll.poll(0)}
        for number, pidfd in self._rank_group.pidfds.items():
            if number in self._peer_pools and (pidfd in ended or self._peer_pools[number].neighbour.is_closing):
                del self._peer_pools[number]
        return num_taken_back

    def counters(self) -> dict[str, Any]:
        helpers = range(self._num_workers, self._ring.num_workers)
        return {
            "balanced_over": len(self._rank_group.members),
            "num_chunks_by_helpers": sum(self._ring.worker(record)["num_chunks"] for record in helpers),
        }

    def closed(self) -> None:
        """Helpers leave by themselves; the neighbours go on."""
        self._peer_pools.clear()
        if self.helpers is not None:
            self.helpers.close()
        self._rank_group.close()
