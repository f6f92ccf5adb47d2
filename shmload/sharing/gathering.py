"""Who reads with whom: the ranks of a node say at a board what they want, and those that want the same are a group.

The board is JSON: a seat for each local rank, then for each group how to come to its leader's ring. All ranks that the launcher
has started on this node come, once for each ring of each loader, in the order in which loaders begin to read. Nobody is let go
before all are there: only then it is known who leads. The loader's number and the run's own variables (world.run_key) are the name.
"""

from __future__ import annotations

import json
import os
import select
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from shmload.errors import RankLeft
from shmload.shm import names
from shmload.shm.group import Group
from shmload.shm.meeting import Meeting
from shmload.shm.names import meeting_stem, pidfd_of, start_of
from shmload.world import run_key

MEET_S = 300.0  # for the others to come, where the loader has no timeout: they may have more to import and to open
LOOK_MS = 10  # between looks at the board; a crew takes longer than that to start


class Seat(NamedTuple):
    """One rank: its process, and what it wants."""

    local_rank: int
    pid: int
    began: str  # the process's start, which tells it from a later one of the same id
    data: tuple[int, int]  # the rank and world size whose batches it reads
    promise: dict[str, Any]  # what must be the same in all ranks that read these
    cpus: list[int]

    def __str__(self) -> str:
        return f"local rank {self.local_rank} (pid {self.pid})"


@dataclass(frozen=True)
class Party:
    """Ranks that share something, with this rank's number among them. `pidfds` are of the others, by number.

    They read the same, and the first leads; or each reads something else, and they are all of the node.
    """

    seats: list[Seat]
    me: int
    pidfds: dict[int, int]
    meeting: Meeting
    group: Group

    @property
    def is_balanced(self) -> bool:
        """Whether each rank reads something else: then each has a ring, and the crews help each other."""
        return len({seat.data for seat in self.seats}) == len(self.seats)

    def announce(self, ring: dict[str, Any]) -> None:
        """Tells the others how to come to the ring; `{"failed": why}` if there is none. Leader only."""
        self.tell(ring)
        self.meeting.leave()

    def tell(self, ring: dict[str, Any]) -> None:
        """The same, and stays to hear what the others tell."""
        with self.meeting.at_board():
            board = json.loads(self.meeting.read())
            board["rings"][str(self.seats[self.me].local_rank)] = ring
            self.meeting.write(json.dumps(board).encode())

    def rings(self) -> dict[int, dict[str, Any]]:
        """How to come to the others' rings, by number, once each of them has told; without those that have ended or failed."""
        poll = select.poll()
        for pidfd in self.pidfds.values():
            poll.register(pidfd, select.POLLIN)
        while True:
            ended = {pidfd for pidfd, _ in poll.poll(0)}
            with self.meeting.at_board():
                told = json.loads(self.meeting.read())["rings"]
            found = {number: told.get(str(self.seats[number].local_rank)) for number in self.pidfds}
            if all(ring is not None or self.pidfds[number] in ended for number, ring in found.items()):
                self.meeting.leave()
                return {number: ring for number, ring in found.items() if ring is not None and "failed" not in ring}
            poll.poll(LOOK_MS)

    def ring(self) -> dict[str, Any]:
        """How to come to the leader's ring, once it is there.

        Raises:
            RankLeft: the leader has ended, or could not make it.
        """
        poll = select.poll()
        poll.register(self.pidfds[0], select.POLLIN)
        while True:
            has_ended = bool(poll.poll(LOOK_MS))
            with self.meeting.at_board():
                ring = json.loads(self.meeting.read())["rings"].get(str(self.seats[0].local_rank))
            if ring is not None and "failed" not in ring:
                self.meeting.leave()
                return dict(ring)
            if ring is not None or has_ended:
                why = "has ended before its ring was there" if ring is None else f"could not make it: {ring['failed']}"
                raise RankLeft(f'{self.seats[0]}, whose ring this rank was to read (share="node"), {why}')

    def close(self) -> None:
        """Watches nobody any more."""
        self.meeting.leave()
        for pidfd in self.pidfds.values():
            names.close(pidfd)
        self.group.close()


def local_place() -> tuple[int, int]:
    """(local rank, ranks on this node), as every launcher says.

    Raises:
        ValueError: nobody has said.
    """
    rank, size = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if rank is None or size is None:
        raise ValueError(
            'share="node" needs LOCAL_RANK and LOCAL_WORLD_SIZE, to know which ranks this node has: start the program by '
            f"shmload.spawn, `shmload launch` or torchrun, or set them; got LOCAL_RANK={rank}, LOCAL_WORLD_SIZE={size}"
        )
    return int(rank), int(size)


def gather(name: str, data: tuple[int, int], promise: dict[str, Any], timeout_s: float) -> Party:
    """Waits for all ranks of the node; gives those that read what this one does, or all where no two read the same.

    Args:
        name: of the ring among this run's.
        promise: what must be equal within a group.
        timeout_s: how long the others may take; 0: MEET_S.
    Raises:
        ValueError: those that share promise different things.
        RankLeft: one has ended, or has not come in time.
    """
    local_rank, num_local = local_place()
    mine = Seat(local_rank, os.getpid(), start_of(os.getpid()), data, promise, sorted(os.sched_getaffinity(0)))
    group = Group()  # starts the reaper, which sees to the meeting if this process is killed
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    meeting = Meeting(meeting_stem("share", name, restart, *run_key()))
    pidfds: dict[int, int] = {}  # by local rank
    try:
        seats = _all_seats(meeting, mine, num_local, pidfds, timeout_s or MEET_S)
        party = [seat for seat in seats if seat.data == data]
        if len({seat.data for seat in seats}) == len(seats):
            party = seats
        _check_promises(party)
    except BaseException:
        for pidfd in pidfds.values():
            names.close(pidfd)
        meeting.leave()
        group.close()
        raise
    others = {number: pidfds.pop(seat.local_rank) for number, seat in enumerate(party) if seat != mine}
    for pidfd in pidfds.values():
        names.close(pidfd)
    return Party(party, party.index(mine), others, meeting, group)


def _all_seats(meeting: Meeting, mine: Seat, num_local: int, pidfds: dict[int, int], limit_s: float) -> list[Seat]:
    deadline = monotonic() + limit_s
    while True:
        seats = _seated(meeting, mine)
        for seat in seats:
            if seat != mine and seat.local_rank not in pidfds:
                pidfds[seat.local_rank] = names.keep(_pidfd_of(seat))
        if len(seats) == num_local:
            return seats
        poll = select.poll()
        for pidfd in pidfds.values():
            poll.register(pidfd, select.POLLIN)
        if ended := [fd for fd, _ in poll.poll(LOOK_MS)]:
            gone = next(seat for seat in seats if pidfds.get(seat.local_rank) in ended)
            raise RankLeft(f'{gone} has ended before all ranks of this node had begun to read (share="node")')
        if monotonic() > deadline:
            missing = sorted(set(range(num_local)) - {seat.local_rank for seat in seats})
            raise RankLeft(
                f'share="node": {len(seats)} of the node\'s {num_local} ranks have begun to read within {limit_s:g} seconds; local '
                f"ranks {missing} have not. All ranks of a node make such a loader and iterate over it"
            )


def _seated(meeting: Meeting, mine: Seat) -> list[Seat]:
    """Takes a seat if this rank has none; gives all that are taken, by local rank."""
    with meeting.at_board():
        text = meeting.read()
        board = json.loads(text) if text else {"seats": [], "rings": {}}
        seats = [Seat(**{**row, "data": tuple(row["data"])}) for row in board["seats"]]
        if mine not in seats:
            if any(seat.local_rank == mine.local_rank for seat in seats):
                raise ValueError(
                    f'share="node": two processes of this run say that they are local rank {mine.local_rank}'
                )
            seats.append(mine)
            meeting.write(json.dumps({**board, "seats": [found._asdict() for found in seats]}).encode())
    return sorted(seats, key=lambda seat: seat.local_rank)


def _check_promises(party: list[Seat]) -> None:
    first = party[0]
    for seat in party[1:]:
        differs = [name for name in first.promise if seat.promise.get(name) != first.promise[name]]
        if differs:
            what = "the same part of the data" if seat.data == first.data else "parts of the same data"
            theirs = "; ".join(f"{name}: {first.promise[name]!r} and {seat.promise.get(name)!r}" for name in differs)
            raise ValueError(
                f'share="node": {first} and {seat} read {what} with loaders that differ ({theirs}). Give all '
                "ranks the same arguments, and make their loaders in the same order"
            )


def _pidfd_of(seat: Seat) -> int:
    pidfd = pidfd_of(seat.pid, seat.began)
    if pidfd < 0:
        raise RankLeft(f'{seat} has ended before all ranks of this node had begun to read (share="node")')
    return pidfd
