"""What a rank does beside its engine's work whose neighbours read other samples: the node's workers help each other."""

from __future__ import annotations

import os
import select
from typing import Any, NamedTuple

from shmload._core.mapping import Mapping
from shmload._core.neighbour import Neighbour
from shmload._core.trainer import TrainerRing
from shmload.engine.parts import Hook, Parts
from shmload.sharing.helpers import Helpers
from shmload.sharing.rank_group import RankGroup
from shmload.shm.group import Doorbell
from shmload.shm.segment import open_segment
from shmload.worker.pool import interrupts_held
from shmload.worker.spec import PeerRing


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


class Balancer(Hook):
    """The part that an engine's rank takes whose neighbours' workers fill chunks of its ring when they have nothing else to do.

    Args:
        rank_group: these ranks.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._has_told = False
        self._helpers: Helpers | None = None
        self._peer_pools: dict[int, PeerPool] = {}
        self._poll = select.poll()
        for pidfd in rank_group.pidfds.values():
            self._poll.register(pidfd, select.POLLIN)

    def order_bell(self, parts: Parts, bell: Doorbell) -> Doorbell:
        """The worker pool's bell, by which the neighbours' workers are called, too."""
        self._bell = NodeBell.attach(bell.name)
        self._bell.ring, self._bell.peer_pools = parts.ring, self._peer_pools
        return self._bell

    def neighbours(self, parts: Parts) -> tuple[PeerRing, ...]:
        """Tells the others of the ring, and hears of theirs. A rank that has ended, or could make none, is gone without."""
        rank_group, num_workers = self._rank_group, parts.options.num_workers
        num_ranks = len(rank_group.members)
        rank_group.tell(
            {
                "control": parts.control_segment.path,
                "orders": self._bell.name,
                "ready": parts.ready.name,
                "grants": parts.grants.name,
                "stacks": [stack.path for stack in parts.stacks.values()],
            }
        )
        self._has_told = True
        rings = rank_group.rings()
        self._ring, self._num_workers = parts.ring, num_workers
        self._helpers = Helpers(parts.ring, rank_group, num_workers, rings)
        peer_rings = []
        for steps in range(1, num_ranks):
            number = (rank_group.me + steps) % num_ranks
            if number not in rings:
                continue
            ring, member = rings[number], rank_group.members[number]
            try:
                self._peer_pools[number] = PeerPool(
                    Neighbour(_mapped(ring["control"])), Doorbell.attach(ring["orders"])
                )
            except OSError:  # it has closed its loader meanwhile
                continue
            peer_rings.append(
                PeerRing(
                    trainer_pid=member.pid,
                    trainer_began=member.began,
                    control_path=ring["control"],
                    ready_bell=ring["ready"],
                    grants_bell=ring["grants"],
                    first_record=num_workers * (num_ranks - steps),  # as many ranks on from there is this one
                )
            )
        return tuple(peer_rings)

    def built(self, parts: Parts) -> None:
        self._supervisor = parts.supervisor
        self._supervisor.helpers = self._helpers

    def failed(self, error: BaseException) -> None:
        if not self._has_told:
            self._rank_group.tell({"failed": f"{type(error).__name__}: {error}"})
        self.closed()

    def look(self) -> None:
        """Lets helpers in, and takes back what those held that have ended; forgets neighbours that are gone."""
        assert self._helpers is not None
        with interrupts_held():
            num_taken_back = self._helpers.look()
        self._supervisor.num_taken_back += num_taken_back
        if num_taken_back:
            self._bell.post_up_to(num_taken_back)
        ended = {pidfd for pidfd, _ in self._poll.poll(0)}
        for number, pidfd in self._rank_group.pidfds.items():
            if number in self._peer_pools and (pidfd in ended or self._peer_pools[number].neighbour.is_closing):
                del self._peer_pools[number]

    def counters(self) -> dict[str, Any]:
        helpers = range(self._num_workers, self._ring.num_workers)
        return {
            "balanced_over": len(self._rank_group.members),
            "num_chunks_by_helpers": sum(self._ring.worker(record)["num_chunks"] for record in helpers),
        }

    def closed(self) -> None:
        """Helpers leave by themselves; the neighbours go on."""
        self._peer_pools.clear()
        if self._helpers is not None:
            self._helpers.close()
        self._rank_group.close()


def _mapped(path: str) -> Mapping:
    fd = open_segment(path)
    try:
        return Mapping(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
