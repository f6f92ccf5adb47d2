"""What a rank does beside its engine's work whose neighbours read other samples: the node's workers help each other."""

from __future__ import annotations

import os
import select
from typing import Any, NamedTuple

from shmload._core.mapping import Mapping
from shmload._core.neighbour import Neighbour
from shmload._core.trainer import TrainerRing
from shmload.engine.parts import Hook, Parts
from shmload.sharing.gathering import Party
from shmload.sharing.guests import Guests
from shmload.shm.group import Doorbell
from shmload.shm.segment import open_segment
from shmload.worker.crew import interrupts_held
from shmload.worker.spec import Invitation


class Helpers(NamedTuple):
    """The crew of a neighbour, as this rank calls it."""

    neighbour: Neighbour
    bell: Doorbell


class NodeBell(Doorbell):
    """The crew's bell for orders. What is more than its idle workers can claim it rings the neighbours' idle workers for."""

    ring: TrainerRing
    helpers: dict[int, Helpers]  # by number in the party, the next one first

    def post_up_to(self, count: int) -> None:
        """As of any bell; then the neighbours' as often as there are chunks left and workers idle."""
        super().post_up_to(count)
        num_left = self.ring.num_unattended
        for helpers in self.helpers.values():
            if num_left <= 0:
                return
            num_idle = helpers.neighbour.num_idle
            if num_idle:
                helpers.bell.post_up_to(min(num_left, num_idle))
                num_left -= num_idle


class Balancer(Hook):
    """The part that an engine's rank takes whose neighbours' workers fill chunks of its ring when they have nothing else to do.

    Args:
        party: these ranks.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._has_told = False
        self._guests: Guests | None = None
        self._helpers: dict[int, Helpers] = {}
        self._poll = select.poll()
        for pidfd in party.pidfds.values():
            self._poll.register(pidfd, select.POLLIN)

    def order_bell(self, parts: Parts, bell: Doorbell) -> Doorbell:
        """The crew's bell, by which the neighbours' workers are called, too."""
        self._bell = NodeBell.attach(bell.name)
        self._bell.ring, self._bell.helpers = parts.ring, self._helpers
        return self._bell

    def neighbours(self, parts: Parts) -> tuple[Invitation, ...]:
        """Tells the others of the ring, and hears of theirs. A rank that has ended, or could make none, is gone without."""
        party, num_workers = self._party, parts.options.num_workers
        num_ranks = len(party.seats)
        party.tell(
            {
                "control": parts.control_segment.path,
                "orders": self._bell.name,
                "ready": parts.ready.name,
                "grants": parts.grants.name,
                "stacks": [stack.path for stack in parts.stacks.values()],
            }
        )
        self._has_told = True
        rings = party.rings()
        self._ring, self._num_workers = parts.ring, num_workers
        self._guests = Guests(parts.ring, party, num_workers, rings)
        invitations = []
        for steps in range(1, num_ranks):
            number = (party.me + steps) % num_ranks
            if number not in rings:
                continue
            ring, seat = rings[number], party.seats[number]
            try:
                self._helpers[number] = Helpers(Neighbour(_mapped(ring["control"])), Doorbell.attach(ring["orders"]))
            except OSError:  # it has closed its loader meanwhile
                continue
            invitations.append(
                Invitation(
                    trainer_pid=seat.pid,
                    trainer_began=seat.began,
                    control_path=ring["control"],
                    ready_bell=ring["ready"],
                    grants_bell=ring["grants"],
                    first_record=num_workers * (num_ranks - steps),  # as many ranks on from there is this one
                )
            )
        return tuple(invitations)

    def built(self, parts: Parts) -> None:
        self._supervisor = parts.supervisor
        self._supervisor.guests = self._guests

    def failed(self, error: BaseException) -> None:
        if not self._has_told:
            self._party.tell({"failed": f"{type(error).__name__}: {error}"})
        self.closed()

    def look(self) -> None:
        """Lets guests in, and takes back what those held that have ended; forgets neighbours that are gone."""
        assert self._guests is not None
        with interrupts_held():
            num_taken_back = self._guests.look()
        self._supervisor.num_taken_back += num_taken_back
        if num_taken_back:
            self._bell.post_up_to(num_taken_back)
        ended = {pidfd for pidfd, _ in self._poll.poll(0)}
        for number, pidfd in self._party.pidfds.items():
            if number in self._helpers and (pidfd in ended or self._helpers[number].neighbour.is_closing):
                del self._helpers[number]

    def counters(self) -> dict[str, Any]:
        guests = range(self._num_workers, self._ring.num_workers)
        return {
            "balanced_over": len(self._party.seats),
            "num_chunks_by_guests": sum(self._ring.worker(record)["num_chunks"] for record in guests),
        }

    def closed(self) -> None:
        """Guests leave by themselves; the neighbours go on."""
        self._helpers.clear()
        if self._guests is not None:
            self._guests.close()
        self._party.close()


def _mapped(path: str) -> Mapping:
    fd = open_segment(path)
    try:
        return Mapping(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
