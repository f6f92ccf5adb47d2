"""Balance the load of a node's ranks that read different samples: idle workers of one rank fill chunks of another's ring.

This is the trainer's side: it admits and watches other ranks' workers in its ring, and recovers their chunks. The worker's side is
in worker/helping.py.

A helper is a child of another rank, which replaces it if it dies. In this rank's ring it has a record after those of the ring's own
workers, and it is admitted once this trainer has its pidfd (src/helpers.h): its end is then detected like that of a worker, once
all its threads are gone. Its death is not blamed on its current sample, because its own rank may have ended. But no other helper
touches that batch again, so a sample that kills its reader is found by the ring's own workers.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from contextlib import suppress
from typing import Any, NamedTuple

from shmload._core.peer_status import PeerStatus
from shmload._core.trainer import TrainerRing
from shmload.engine.rank_hook import RankHook
from shmload.engine.ring import Ring
from shmload.processes import private_fds
from shmload.processes.identity import pid_and_start, pidfd_of
from shmload.processes.interrupts import interrupts_held
from shmload.sharing.rank_group import RankGroup, poll_of
from shmload.shm.doorbell import Doorbell
from shmload.shm.segment import map_segment, open_segment
from shmload.worker.job import PeerRing
from shmload.worker.pool import Death, request_stack

log = logging.getLogger("shmload")


class Helpers:
    """The helpers of one ring: workers of other ranks, numbered by their records after those of the ring's own workers.

    Args:
        ring: the trainer's end of the ring.
        rank_group: the ranks of the node.
        num_workers: the number of workers of each rank.
        rings: the information that each rank has announced about its ring, by its number in the rank group.
    """

    def __init__(self, ring: TrainerRing, rank_group: RankGroup, num_workers: int, rings: dict[int, dict[str, Any]]) -> None:
        self._ring, self._rank_group, self._num_workers, self._rings = ring, rank_group, num_workers, rings
        self._watched: dict[int, tuple[int, int]] = {}  # record -> (pidfd, pid)
        self._poll = select.poll()

    def check(self) -> int:
        """Admit waiting helpers, and recover the chunks of those that have ended. Return the number of recovered chunks.

        Cost: one poll.
        """
        num_taken_back = 0
        for pidfd, _ in self._poll.poll(0):
            record = next(record for record, (fd, _) in self._watched.items() if fd == pidfd)
            while self._ring.recover(record) >= 0:
                num_taken_back += 1
            log.info("%s has ended; what it held is read again", self._name(record))
            self.replace(record)
        for record, identity in self._ring.requests():
            self._accept(record, identity)
        return num_taken_back

    def _accept(self, record: int, identity: int) -> None:
        pid, began = pid_and_start(identity)
        try:
            pidfd = pidfd_of(pid, began)
        except OSError as error:  # no descriptor is left; the helper will ask again
            log.warning("a worker of another rank (pid %d) cannot be watched, so it cannot help: %s", pid, error)
            return
        if pidfd < 0:
            self._ring.release(record)  # it has ended without claiming anything
            return
        self._watched[record] = private_fds.keep(pidfd), pid
        self._poll.register(pidfd, select.POLLIN)
        self._ring.accept(record, identity)

    def _place(self, record: int) -> tuple[int, int]:
        """Return (number of the rank in the rank group, number of its worker) for a record."""
        steps, worker = divmod(record, self._num_workers)
        return (self._rank_group.me + steps) % len(self._rank_group.members), worker

    def _name(self, record: int) -> str:
        rank, worker = self._place(record)
        return f"worker {worker} of local rank {self._rank_group.members[rank].local_rank} (pid {self._watched[record][1]})"

    # ------------------------------------------------------------ the methods that the supervisor calls, as of a worker pool

    def stack(self, record: int) -> str:
        """Return the Python stack of a helper, or the reason why it is not known."""
        rank, worker = self._place(record)
        try:
            fd = open_segment(self._rings[rank]["stacks"][worker])
        except OSError:
            return "(unknown: its rank has ended)"
        try:
            return request_stack(self._watched[record][0], fd)
        finally:
            os.close(fd)

    def kill(self, record: int) -> Death:
        """End a helper at once, and wait for its end; its own rank replaces it."""
        pidfd, pid = self._watched[record]
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll_of([pidfd]).poll()
        return Death(record, pid, -signal.SIGKILL)

    def replace(self, record: int) -> None:
        """Release a helper's record, once its claims have been recovered. Its own rank starts the replacement."""
        pidfd, _ = self._watched.pop(record)
        self._poll.unregister(pidfd)
        private_fds.close(pidfd)
        self._ring.release(record)

    def close(self) -> None:
        """Stop watching all helpers."""
        for pidfd, _ in self._watched.values():
            private_fds.close(pidfd)
        self._watched.clear()
        self._poll = select.poll()


class PeerPool(NamedTuple):
    """The worker pool of another rank, with the means to wake it."""

    status: PeerStatus  # shows whether its workers are idle
    bell: Doorbell  # the bell for its orders


class NodeBell(Doorbell):
    """The bell for a ring's orders, which also wakes other ranks' idle workers for chunks that the ring's own workers leave."""

    ring: TrainerRing
    peer_pools: dict[int, PeerPool]  # by number in the rank group, beginning with the rank after this one

    def post_up_to(self, count: int) -> None:
        """Ring as any bell does, then ring the other ranks' bells for the remaining chunks, as far as workers are idle there."""
        super().post_up_to(count)
        num_left = self.ring.num_unattended
        for pool in self.peer_pools.values():
            if num_left <= 0:
                return
            num_idle = pool.status.num_idle
            if num_idle:
                pool.bell.post_up_to(min(num_left, num_idle))
                num_left -= num_idle


class Balancer(RankHook):
    """The hook of a rank that lets other ranks' idle workers fill chunks of its ring.

    Args:
        rank_group: the ranks of the node.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._has_announced = False
        self.helpers: Helpers | None = None  # None until the rank's ring is announced
        self._peer_pools: dict[int, PeerPool] = {}
        self._poll = poll_of(rank_group.pidfds.values())

    def order_bell(self, ring: TrainerRing, bell: Doorbell) -> Doorbell:
        """Return a doorbell that also wakes other ranks' workers."""
        self._bell = NodeBell.attach(bell.name)
        self._bell.ring, self._bell.peer_pools = ring, self._peer_pools
        return self._bell

    def peer_rings(self, ring: Ring) -> tuple[PeerRing, ...]:
        """Announce this rank's ring, wait for the others, and return the rings of all other ranks that still run and have one."""
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
                self._peer_pools[number] = PeerPool(PeerStatus(map_segment(peer["control"])), Doorbell.attach(peer["orders"]))
            except OSError:  # that rank has closed its loader in the meantime
                continue
            peer_rings.append(
                PeerRing(
                    trainer_pid=member.pid,
                    trainer_began=member.began,
                    control_path=peer["control"],
                    ready_bell=peer["ready"],
                    grants_bell=peer["grants"],
                    first_record=num_workers * (num_ranks - steps),  # this rank is `num_ranks - steps` ranks after the ring's
                )
            )
        return tuple(peer_rings)

    def failed(self, error: BaseException) -> None:
        if not self._has_announced:
            self._rank_group.announce({"failed": f"{type(error).__name__}: {error}"})
        self.closed()

    def check_ranks(self) -> int:
        """Admit helpers, recover the chunks of those that have ended, and forget ranks that have ended."""
        assert self.helpers is not None
        with interrupts_held():
            num_taken_back = self.helpers.check()
        ended = {pidfd for pidfd, _ in self._poll.poll(0)}
        for number, pidfd in self._rank_group.pidfds.items():
            if number in self._peer_pools and (pidfd in ended or self._peer_pools[number].status.is_closing):
                del self._peer_pools[number]
        return num_taken_back

    def counters(self) -> dict[str, Any]:
        helpers = range(self._num_workers, self._ring.num_workers)
        return {
            "balanced_over": len(self._rank_group.members),
            "num_chunks_by_helpers": sum(self._ring.worker(record)["num_chunks"] for record in helpers),
        }

    def closed(self) -> None:
        """Stop watching the helpers, which notice by themselves that the ring is closing; the other ranks continue."""
        self._peer_pools.clear()
        if self.helpers is not None:
            self.helpers.close()
        self._rank_group.close()
