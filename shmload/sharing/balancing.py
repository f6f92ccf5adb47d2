"""The engine of a rank whose neighbours read other samples: a ring and crew of its own, and the node's workers help each other."""

from __future__ import annotations

import os
import select
from typing import Any, NamedTuple

from shmload._core.mapping import Mapping
from shmload._core.neighbour import Neighbour
from shmload._core.trainer import TrainerRing
from shmload.engine.engine import Engine
from shmload.engine.orders import BadSamples
from shmload.engine.parts import EngineOptions
from shmload.sharing.gathering import Party
from shmload.sharing.guests import Guests
from shmload.shm.doorbell import Doorbell
from shmload.shm.segment import open_segment
from shmload.worker.crew import STOP_GRACE_S, interrupts_held
from shmload.worker.spec import Invitation, Job


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


class BalancingEngine(Engine):
    """An engine whose neighbours' workers fill chunks of its ring when they have nothing else to do.

    Args:
        party: these ranks.
    """

    def __init__(self, job: Job, options: EngineOptions, bad_samples: BadSamples, party: Party) -> None:
        self._party = party
        self._has_told = False
        self._guests: Guests | None = None
        self._helpers: dict[int, Helpers] = {}
        self._poll = select.poll()
        for pidfd in party.pidfds.values():
            self._poll.register(pidfd, select.POLLIN)
        super().__init__(job, options, bad_samples)

    def _build(self) -> None:
        try:
            super()._build()
        except BaseException as error:
            if not self._has_told:
                self._party.tell({"failed": f"{type(error).__name__}: {error}"})
            raise
        self._supervisor.guests = self._guests
        bell = NodeBell.attach(self._orders[0].name)
        bell.ring, bell.helpers = self._ring, self._helpers
        self._orders[0] = bell  # the writer has this list, too

    def _neighbours(self) -> tuple[Invitation, ...]:
        """Tells the others of the ring, and hears of theirs. A rank that has ended, or could make none, is gone without."""
        party, num_workers = self._party, self._options.num_workers
        num_ranks = len(party.seats)
        party.tell(
            {
                "control": self._control_path,
                "orders": self._orders[0].name,
                "ready": self._ready.name,
                "grants": self._grants.name,
                "stacks": [stack.path for stack in self._stacks.values()],
            }
        )
        self._has_told = True
        rings = party.rings()
        self._guests = Guests(self._ring, party, num_workers, rings)
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

    def _see_to_deaths(self) -> None:
        guests = self._guests
        assert guests is not None
        with interrupts_held():
            num_taken_back = guests.look()
        self._supervisor.num_taken_back += num_taken_back
        if num_taken_back:
            self._orders[0].post_up_to(num_taken_back)
        ended = {pidfd for pidfd, _ in self._poll.poll(0)}
        for number, pidfd in self._party.pidfds.items():
            if number in self._helpers and (pidfd in ended or self._helpers[number].neighbour.is_closing):
                del self._helpers[number]
        super()._see_to_deaths()

    def counters(self) -> dict[str, Any]:
        """As of any engine; and what the neighbours have done of it."""
        guests = range(self._options.num_workers, self._ring.num_workers)
        return {
            **super().counters(),
            "balanced_over": len(self._party.seats),
            "num_chunks_by_guests": sum(self._ring.worker(record)["num_chunks"] for record in guests),
        }

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """As of any engine. Guests leave by themselves; the neighbours go on."""
        is_first = not self._is_closed and os.getpid() == self._pid
        super().close(grace_s=grace_s)
        if is_first:
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
