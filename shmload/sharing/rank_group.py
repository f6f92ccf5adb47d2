"""Who reads with whom: the ranks of a node say at a board what they want, and those that want the same are a group.

The board is JSON: a member for each local rank, then for each group how to come to its leader's ring. All ranks that the launcher
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
from shmload.shm.meeting import Meeting
from shmload.shm.names import meeting_stem, pidfd_of
from shmload.shm.segment import Group
from shmload.world import run_key, start_of

MEET_S = 300.0  # for the others to come, where the loader has no timeout: they may have more to import and to open
LOOK_MS = 10  # between looks at the board; a worker pool takes longer than that to start


class RankInfo(NamedTuple):
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
class RankGroup:
    """Ranks that share something, with this rank's number among them. `pidfds` are of the others, by number.

    They read the same, and the first leads; or each reads something else, and they are all of the node.
    """

    members: list[RankInfo]
    me: int
    pidfds: dict[int, int]
    meeting: Meeting
    group: Group

    @property
    def is_balanced(self) -> bool:
        """Whether each rank reads something else: then each has a ring, and the worker pools help each other."""
        return len({member.data for member in self.members}) == len(self.members)

    def announce(self, ring: dict[str, Any]) -> None:
        """Tells the others how to come to the ring; `{"failed": why}` if there is none. Leader only."""
        self.tell(ring)
        self.meeting.leave()

    def tell(self, ring: dict[str, Any]) -> None:
        """The same, and stays to hear what the others tell."""
        with self.meeting.at_board():
            board = json.loads(self.meeting.read())
            board["rings"][str(self.members[self.me].local_rank)] = ring
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
            found = {number: told.get(str(self.members[number].local_rank)) for number in self.pidfds}
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
                ring = json.loads(self.meeting.read())["rings"].get(str(self.members[0].local_rank))
            if ring is not None and "failed" not in ring:
                self.meeting.leave()
                return dict(ring)
            if ring is not None or has_ended:
                why = "has ended before its ring was there" if ring is None else f"could not make it: {ring['failed']}"
                raise RankLeft(f'{self.members[0]}, whose ring this rank was to read (share="node"), {why}')

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


def gather(name: str, data: tuple[int, int], promise: dict[str, Any], timeout_s: float) -> RankGroup:
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
    mine = RankInfo(local_rank, os.getpid(), start_of(os.getpid()), data, promise, sorted(os.sched_getaffinity(0)))
    group = Group()  # starts the reaper, which sees to the meeting if this process is killed
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    meeting = Meeting(meeting_stem("share", name, restart, *run_key()))
    pidfds: dict[int, int] = {}  # by local rank
    try:
        members = _all_members(meeting, mine, num_local, pidfds, timeout_s or MEET_S)
        rank_group = [member for member in members if member.data == data]
        if len({member.data for member in members}) == len(members):
            rank_group = members
        _check_promises(rank_group)
    except BaseException:
        for pidfd in pidfds.values():
            names.close(pidfd)
        meeting.leave()
        group.close()
        raise
    others = {number: pidfds.pop(member.local_rank) for number, member in enumerate(rank_group) if member != mine}
    for pidfd in pidfds.values():
        names.close(pidfd)
    return RankGroup(rank_group, rank_group.index(mine), others, meeting, group)


def _all_members(meeting: Meeting, mine: RankInfo, num_local: int, pidfds: dict[int, int], limit_s: float) -> list[RankInfo]:
    deadline = monotonic() + limit_s
    while True:
        members = _seated(meeting, mine)
        for member in members:
            if member != mine and member.local_rank not in pidfds:
                pidfds[member.local_rank] = names.keep(_pidfd_of(member))
        if len(members) == num_local:
            return members
        poll = select.poll()
        for pidfd in pidfds.values():
            poll.register(pidfd, select.POLLIN)
        if ended := [fd for fd, _ in poll.poll(LOOK_MS)]:
            gone = next(member for member in members if pidfds.get(member.local_rank) in ended)
            raise RankLeft(f'{gone} has ended before all ranks of this node had begun to read (share="node")')
        if monotonic() > deadline:
            missing = sorted(set(range(num_local)) - {member.local_rank for member in members})
            raise RankLeft(
                f'share="node": {len(members)} of the node\'s {num_local} ranks have begun to read within {limit_s:g} seconds; '
                f"local "
                f"ranks {missing} have not. All ranks of a node make such a loader and iterate over it"
            )


def _seated(meeting: Meeting, mine: RankInfo) -> list[RankInfo]:
    """Takes a member if this rank has none; gives all that are taken, by local rank."""
    with meeting.at_board():
        text = meeting.read()
        board = json.loads(text) if text else {"members": [], "rings": {}}
        members = [RankInfo(**{**row, "data": tuple(row["data"])}) for row in board["members"]]
        if mine not in members:
            if any(member.local_rank == mine.local_rank for member in members):
                raise ValueError(f'share="node": two processes of this run say that they are local rank {mine.local_rank}')
            members.append(mine)
            meeting.write(json.dumps({**board, "members": [found._asdict() for found in members]}).encode())
    return sorted(members, key=lambda member: member.local_rank)


def _check_promises(rank_group: list[RankInfo]) -> None:
    first = rank_group[0]
    for member in rank_group[1:]:
        differs = [name for name in first.promise if member.promise.get(name) != first.promise[name]]
        if differs:
            what = "the same part of the data" if member.data == first.data else "parts of the same data"
            theirs = "; ".join(f"{name}: {first.promise[name]!r} and {member.promise.get(name)!r}" for name in differs)
            raise ValueError(
                f'share="node": {first} and {member} read {what} with loaders that differ ({theirs}). Give all '
                "ranks the same arguments, and make their loaders in the same order"
            )


def _pidfd_of(member: RankInfo) -> int:
    pidfd = pidfd_of(member.pid, member.began)
    if pidfd < 0:
        raise RankLeft(f'{member} has ended before all ranks of this node had begun to read (share="node")')
    return pidfd
