"""Form groups of ranks that read together, and keep their reading together.

Each rank of a node posts on a board (shm/meeting.py) which data it reads. Ranks with the same data are a group; if all ranks read
different data, the group is all of them.

The board is JSON: the members (`RankInfo`), and by local rank the information to attach to a ring. All ranks that the launcher has
started on this node meet once for each ring of each loader, in the order in which loaders begin to read. No rank continues before
all have arrived, because only then the groups are known. The name of the meeting consists of the loader's number and the key of the
run (processes/run_key.py).

`RankSync` lets the ranks that read one ring check each other's progress.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from shmload._core import trainer
from shmload._core.trainer import Order, Share
from shmload.engine.rank_hook import RankHook
from shmload.errors import RankLeft
from shmload.processes import private_fds
from shmload.processes.identity import pidfd_of, start_of
from shmload.processes.ranks import local_place
from shmload.processes.run_key import run_key
from shmload.shm.meeting import Meeting
from shmload.shm.names import meeting_stem
from shmload.shm.segment_group import SegmentGroup

MEET_S = 300.0  # longest wait for the other ranks if the loader has no timeout, because they may have more to import and to open
_ENDED = '{} has ended before all ranks of this node had begun to read (share="node")'
LOOK_MS = 10  # milliseconds between checks of the board; starting a worker pool takes longer


class RankInfo(NamedTuple):
    """One rank: its process, and the data that it reads."""

    local_rank: int
    pid: int
    began: str  # the process's start time, which distinguishes it from a later process with the same id
    data: tuple[int, int]  # the rank and world size whose batches it reads
    promise: dict[str, Any]  # values that must be equal in all ranks that read these data
    cpus: list[int]

    def __str__(self) -> str:
        return f"local rank {self.local_rank} (pid {self.pid})"


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that work together, as one of them sees it.

    Either all members read the same data, and the first is the leader; or each reads different data, and the group is all ranks of
    the node. A rank's number is its place in `members`.

    Attributes:
        members: the ranks, by local rank.
        me: number of this rank.
        pidfds: pidfd of each other rank, by number.
        meeting: the board.
        group: an empty segment group, which keeps the reaper running.
    """

    members: list[RankInfo]
    me: int
    pidfds: dict[int, int]
    meeting: Meeting
    group: SegmentGroup

    @property
    def is_balanced(self) -> bool:
        """Return whether each rank reads different data. Then each has its own ring, and the worker pools help each other."""
        return len({member.data for member in self.members}) == len(self.members)

    def announce(self, ring: dict[str, Any]) -> None:
        """Post on the board the information that others need to attach to this rank's ring, or `{"failed": reason}` without a ring.

        Args:
            ring: a JSON object; `Leader.started` and `Balancer.peer_rings` write it.
        """
        with self.meeting.locked_board():
            board = json.loads(self.meeting.read())
            board["rings"][str(self.members[self.me].local_rank)] = ring
            self.meeting.write(json.dumps(board).encode())

    def rings(self, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Wait until each of some ranks has announced its ring or has ended, leave the meeting, and return what they announced.

        Args:
            numbers: the ranks.
        Returns:
            what each has announced, by number; ranks that ended before are left out.
        """
        poll = poll_of(self.pidfds.values())
        ended: set[int] = set()
        while True:
            for pidfd, _ in poll.poll(0):
                ended.add(pidfd)
                poll.unregister(pidfd)  # it stays readable, and would end every wait at once
            with self.meeting.locked_board():
                said = json.loads(self.meeting.read())["rings"]
            found = {number: said.get(str(self.members[number].local_rank)) for number in numbers}
            if all(ring is not None or self.pidfds[number] in ended for number, ring in found.items()):
                self.meeting.leave()
                return {number: ring for number, ring in found.items() if ring is not None}
            poll.poll(LOOK_MS)

    def ring(self) -> dict[str, Any]:
        """Wait until the leader has announced its ring, leave the meeting, and return what it announced.

        Raises:
            RankLeft: the leader has ended, or could not create its ring.
        """
        ring = self.rings([0]).get(0, {"failed": None})
        if "failed" not in ring:
            return ring
        why = "has ended before its ring was there" if ring["failed"] is None else f"could not make it: {ring['failed']}"
        raise RankLeft(f'{self.members[0]}, whose ring this rank was to read (share="node"), {why}')

    def close(self) -> None:
        """Leave the meeting, and stop watching the other ranks."""
        self.meeting.leave()
        for pidfd in self.pidfds.values():
            private_fds.close(pidfd)
        self.group.close()


def poll_of(pidfds: Iterable[int]) -> select.poll:
    """Return a poll object that reports which of these processes have ended."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return poll


def gather(name: str, data: tuple[int, int], promise: dict[str, Any], timeout_s: float) -> RankGroup:
    """Wait for all ranks of the node. Return those that read the same data as this one, or all if no two read the same data.

    Args:
        name: the name of the ring, unique in this run.
        data: the rank and world size whose batches this rank reads.
        promise: values that must be equal within a group.
        timeout_s: seconds to wait for the others; 0 means MEET_S.
    Raises:
        ValueError: LOCAL_RANK or LOCAL_WORLD_SIZE is not set or invalid, two processes have the same local rank, or the promises of
            a group's ranks differ.
        RankLeft: a rank has ended, or has not arrived in time.
    """
    place = local_place()
    if place is None or place[0] >= place[1]:
        raise ValueError(
            'share="node" needs LOCAL_RANK, and LOCAL_WORLD_SIZE above it, to know which ranks this node has: start the program by '
            "shmload.spawn, `shmload launch`, torchrun, mpirun or srun, or set them; got "
            f"LOCAL_RANK={os.environ.get('LOCAL_RANK')}, LOCAL_WORLD_SIZE={os.environ.get('LOCAL_WORLD_SIZE')}"
        )
    local_rank, num_local = place
    mine = RankInfo(local_rank, os.getpid(), start_of(os.getpid()), data, promise, sorted(os.sched_getaffinity(0)))
    group = SegmentGroup()  # starts the reaper, which removes the meeting if this process is killed
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    meeting = Meeting(meeting_stem("share", name, restart, *run_key()))
    pidfds: dict[int, int] = {}  # by local rank
    try:
        members = _all_members(meeting, mine, num_local, pidfds, timeout_s or MEET_S)
        if len({member.data for member in members}) < len(members):
            members = [member for member in members if member.data == data]
        _check_promises(members)
    except BaseException:
        for pidfd in pidfds.values():
            private_fds.close(pidfd)
        meeting.leave()
        group.close()
        raise
    others = {number: pidfds.pop(member.local_rank) for number, member in enumerate(members) if member != mine}
    for pidfd in pidfds.values():
        private_fds.close(pidfd)
    return RankGroup(members, members.index(mine), others, meeting, group)


def _all_members(meeting: Meeting, mine: RankInfo, num_local: int, pidfds: dict[int, int], limit_s: float) -> list[RankInfo]:
    """Wait for all ranks of the node, and return them, by local rank. Their pidfds are added to `pidfds` as they arrive."""
    deadline = monotonic() + limit_s
    while True:
        members = _join_board(meeting, mine)
        for member in members:
            if member != mine and member.local_rank not in pidfds:
                pidfd = pidfd_of(member.pid, member.began)
                if pidfd < 0:
                    raise RankLeft(_ENDED.format(member))
                pidfds[member.local_rank] = private_fds.keep(pidfd)
        if len(members) == num_local:
            return members
        if ended := [fd for fd, _ in poll_of(pidfds.values()).poll(LOOK_MS)]:
            raise RankLeft(_ENDED.format(next(member for member in members if pidfds.get(member.local_rank) in ended)))
        if monotonic() > deadline:
            missing = sorted(set(range(num_local)) - {member.local_rank for member in members})
            raise RankLeft(
                f'share="node": {len(members)} of the node\'s {num_local} ranks have begun to read within {limit_s:g} seconds; '
                f"local ranks {missing} have not. All ranks of a node must create this loader and iterate over it"
            )


def _join_board(meeting: Meeting, mine: RankInfo) -> list[RankInfo]:
    """Add this rank to the board if it is missing; return all members, by local rank."""
    with meeting.locked_board():
        text = meeting.read()
        board = json.loads(text) if text else {"members": [], "rings": {}}
        members = [RankInfo(**{**row, "data": tuple(row["data"])}) for row in board["members"]]
        if mine not in members:
            if any(member.local_rank == mine.local_rank for member in members):
                raise ValueError(f'share="node": two processes of this run claim to be local rank {mine.local_rank}')
            members.append(mine)
            meeting.write(json.dumps({**board, "members": [found._asdict() for found in members]}).encode())
    return sorted(members, key=lambda member: member.local_rank)


def _check_promises(members: list[RankInfo]) -> None:
    first = members[0]
    for member in members[1:]:
        differs = [name for name in first.promise if member.promise.get(name) != first.promise[name]]
        if differs:
            what = "the same part of the data" if member.data == first.data else "parts of the same data"
            theirs = "; ".join(f"{name}: {first.promise[name]!r} and {member.promise.get(name)!r}" for name in differs)
            raise ValueError(
                f'share="node": {first} and {member} read {what} with loaders that differ ({theirs}). Give all '
                "ranks the same arguments, and make their loaders in the same order"
            )


class RankSync(RankHook):
    """The progress of ranks that read one ring, as one of them sees it. It reports its own progress and checks that of the others.

    The batches that ranks take after they began together at one position are a *round*. It ends for all ranks at the same
    batch, when the program leaves the loop, resumes or sets another epoch. Then the ranks wait for each other, and compare how many
    batches they have taken and where they begin.

    Args:
        rank_group: the ranks.
        timeout_s: seconds to wait for the others at the beginning of a round; 0 for no limit.
    """

    def __init__(self, rank_group: RankGroup, timeout_s: float) -> None:
        self._rank_group, self._timeout_s = rank_group, timeout_s
        self._poll = poll_of(rank_group.pidfds.values())
        self._ended: set[int] = set()  # ranks whose processes have ended
        self._count = 0  # batches taken in this round
        self._count_before = 0  # batches taken in the previous round
        self._num_passes = 0
        self._begins = True  # whether the ranks have yet to begin this round together

    def attach(self, share: Share, sleep: Callable[[Order | None], None], ring_others: Callable[[], None]) -> None:
        """Set the objects that exist only once there is a ring. Call this before the other methods.

        Args:
            share: the words that ranks share.
            sleep: (order, or None for any) -> None: sleeps until the batch may be ready or a rank has reported, at most 20 ms.
            ring_others: () -> None: wakes the other ranks.
        """
        self._share, self._sleep, self._ring_others = share, sleep, ring_others

    def pass_begins(self) -> None:
        self._num_passes += 1

    def pass_left(self) -> None:
        self._share.report(trainer.REPORT_LEFT, self._num_passes << 32 | self._count)
        self._ring_others()

    def abandoned(self) -> None:
        """Begin a new round, because the ordered batches are not wanted any more."""
        self._count_before, self._count = self._count, 0
        self._share.round += 1
        self._begins = True

    def leave(self) -> None:
        """Announce that this rank takes no more batches."""
        self._share.report(trainer.REPORT_CLOSED, 1)
        self._ring_others()

    def after_next(self, *, is_gone: bool) -> None:
        """If `is_gone`, count one more batch as taken or failed."""
        if is_gone:
            self._count += 1
            self._share.report(trainer.REPORT_COUNT, self._count)

    def before_next(self, order: Order) -> None:
        """Check, before this rank waits for a batch, that the others will take it, too. In a new round, wait for the others.

        Raises:
            RankLeft: another rank begins at another position, will not take this batch, or has ended.
            RuntimeError: the others have not begun within `timeout_s`.
        """
        if self._begins:
            self._begin(order)
        self.check_ranks()

    def _see_ended(self) -> None:
        """Check for ranks that have ended. Cost: one poll."""
        for pidfd, _ in self._poll.poll(0):
            self._ended.add(next(rank for rank, fd in self._rank_group.pidfds.items() if fd == pidfd))

    def check_ranks(self) -> int:
        """Check the other ranks. Return 0, because no chunks are recovered.

        Raises:
            RankLeft: another rank will not take the batch that this one wants, or has taken other batches.
        """
        self._see_ended()
        mine, reported = self._share.round, self._share.reported
        for rank in self._others():
            is_closed = reported(rank, trainer.REPORT_CLOSED)
            round = reported(rank, trainer.REPORT_ROUND)
            if round > mine:
                ended = reported(rank, trainer.REPORT_ENDED + _parity(round))
                if self._count >= ended:
                    raise self._diverged_error(rank, "has begun to read elsewhere", ended)
                continue
            count = reported(rank, trainer.REPORT_COUNT) if round == mine else 0
            if (is_closed or rank in self._ended) and self._count >= count:
                raise self._diverged_error(rank, "has closed its loader" if is_closed else "has ended", count)
            left, left_at = self._left(rank)
            if round == mine and left == self._num_passes and self._count >= left_at:
                raise self._diverged_error(rank, "has left the loop over its loader", left_at)
        return 0

    def others_have_caught_up(self) -> bool:
        """Return whether every other rank has taken all batches that this one has taken, or will take no more."""
        self._see_ended()
        mine, reported = self._share.round, self._share.reported
        return all(
            rank in self._ended
            or reported(rank, trainer.REPORT_CLOSED)
            or self._left(rank)[0] == self._num_passes
            or (reported(rank, trainer.REPORT_ROUND) >= mine and reported(rank, trainer.REPORT_COUNT) >= self._count)
            for rank in self._others()
        )

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self._share.num_ranks) if rank != self._share.me)

    def _left(self, rank: int) -> tuple[int, int]:
        """Return the pass that a rank has left before its end (0 if none), and the number of batches that it had taken by then."""
        return divmod(self._share.reported(rank, trainer.REPORT_LEFT), 1 << 32)

    def _begin(self, order: Order) -> None:
        """Begin a round at this order: report it, wait until all others have reported theirs, and compare."""
        share, reported = self._share, self._share.reported
        mine = share.round
        odd = _parity(mine)
        share.report(trainer.REPORT_ENDED + odd, self._count_before)
        share.report(trainer.REPORT_EPOCH + odd, order.epoch)
        share.report(trainer.REPORT_STEP + odd, order.step)
        share.report(trainer.REPORT_COUNT, 0)
        share.report(trainer.REPORT_ROUND, mine)
        self._ring_others()
        began = monotonic()
        while behind := [rank for rank in self._others() if reported(rank, trainer.REPORT_ROUND) < mine]:
            for rank in behind:
                is_closed, count = reported(rank, trainer.REPORT_CLOSED), reported(rank, trainer.REPORT_COUNT)
                if reported(rank, trainer.REPORT_ROUND) >= mine:
                    continue  # it has arrived in the meantime: its count belongs to the new round
                if count > self._count_before:
                    raise self._diverged_error(rank, "has continued to read while this rank has begun at another position", count)
                if is_closed or rank in self._ended:
                    raise self._diverged_error(rank, "has closed its loader" if is_closed else "has ended", count)
            if self._timeout_s and monotonic() - began > self._timeout_s:
                raise RuntimeError(
                    f"DataLoader timed out after {self._timeout_s} seconds: {self._rank_group.members[behind[0]]} has not reached "
                    'the step at which the ranks that share="node" begin together'
                )
            self._sleep(None)
            self._see_ended()
        for rank in self._others():
            place = reported(rank, trainer.REPORT_EPOCH + odd), reported(rank, trainer.REPORT_STEP + odd)
            ended = reported(rank, trainer.REPORT_ENDED + odd)
            if (ended, *place) != (self._count_before, order.epoch, order.step):
                raise RankLeft(
                    f'{self._rank_group.members[rank]} and this rank share a ring (share="node") and must read the same batches: '
                    f"it begins at step {place[1]} of epoch {place[0]}, having read {ended} since they began together last; this "
                    f"one at step {order.step} of epoch {order.epoch}, having read {self._count_before}. Break, load states and "
                    "set epochs in all ranks alike"
                )
        self._begins = False

    def _diverged_error(self, rank: int, what: str, count: int) -> RankLeft:
        return RankLeft(
            f'{self._rank_group.members[rank]}, which shares a ring with this rank (share="node"), {what}: it has read {count} '
            f"batches since they began together, and this one wants its batch {self._count + 1}. Ranks that share read the same "
            "batches: let all of them break, resume and close at the same step"
        )


def _parity(round: int) -> int:
    """Return the offset of a round's words for its beginning. Two sets of words alternate."""
    return trainer.REPORT_ODD * (round & 1)
