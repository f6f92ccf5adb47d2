"""Where each rank of a group stands, as it tells and as the others ask.

Ranks count the batches that they have taken since all began at one place: that is a *generation*. It ends for all at the same
batch, where the program breaks off, resumes or sets another epoch; there they meet, and compare.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from time import monotonic

from shmload._core.trainer import (
    TOLD_CLOSED,
    TOLD_COUNT,
    TOLD_ENDED,
    TOLD_EPOCH,
    TOLD_GENERATION,
    TOLD_LEFT,
    TOLD_ODD,
    TOLD_STEP,
    Order,
    Share,
)
from shmload.errors import RankLeft
from shmload.sharing.rank_group import RankGroup


class RankSync:
    """The ranks that read one ring, for one of them.

    Args:
        rank_group: who they are.
        share: their words.
        sleep: (order, or None for none in particular) sleeps until something may have changed, 20 ms at most.
        ring_others: wakes those who sleep.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        share: Share,
        sleep: Callable[[Order | None], None],
        ring_others: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._rank_group, self._share = rank_group, share
        self._sleep, self._ring_others, self._timeout_s = sleep, ring_others, timeout_s
        self._poll = select.poll()
        for pidfd in rank_group.pidfds.values():
            self._poll.register(pidfd, select.POLLIN)
        self._ended: set[int] = set()  # ranks whose processes have
        self._count = 0  # batches taken of this generation
        self._count_before = 0  # of the one before
        self._num_passes = 0
        self._begins = True  # this generation is still to be begun together

    def begin_pass(self) -> None:
        """One more pass over the loader."""
        self._num_passes += 1

    def leave_pass(self) -> None:
        """Says that this rank has left the pass before its end."""
        self._share.tell(TOLD_LEFT, self._num_passes << 32 | self._count)
        self._ring_others()

    def abandon(self) -> None:
        """What is ordered is not wanted: a new generation."""
        self._count_before, self._count = self._count, 0
        self._share.generation += 1
        self._begins = True

    def close(self) -> None:
        """Says that this rank takes nothing any more."""
        self._share.tell(TOLD_CLOSED, 1)
        self._ring_others()

    def took(self) -> None:
        """One batch more was taken, or has failed."""
        self._count += 1
        self._share.tell(TOLD_COUNT, self._count)

    def before(self, order: Order) -> None:
        """Sees to it that all ranks come to a batch in the same way.

        Raises:
            RankLeft: one of them does not, or has ended.
        """
        if self._begins:
            self._begin(order)
        self.look()
        self.check()

    def look(self) -> None:
        """Looks for ranks that have ended. Cost: one poll."""
        for pidfd, _ in self._poll.poll(0):
            self._ended.add(next(rank for rank, fd in self._rank_group.pidfds.items() if fd == pidfd))

    def check(self) -> None:
        """Raises RankLeft if another rank will not take the batch that this one wants, or has not taken the same so far."""
        mine, told = self._share.generation, self._share.told
        for rank in self._others():
            is_closed = told(rank, TOLD_CLOSED)
            generation = told(rank, TOLD_GENERATION)
            if generation > mine:
                ended = told(rank, TOLD_ENDED + _odd(generation))
                if self._count >= ended:
                    raise self._apart(rank, "has begun to read elsewhere", ended)
                continue
            count = told(rank, TOLD_COUNT) if generation == mine else 0
            if (is_closed or rank in self._ended) and self._count >= count:
                raise self._apart(rank, "has closed its loader" if is_closed else "has ended", count)
            left, left_at = self._left(rank)
            if generation == mine and left == self._num_passes and self._count >= left_at:
                raise self._apart(rank, "has left the loop over its loader", left_at)

    def are_done(self) -> bool:
        """Whether no other rank still takes a batch that this one has taken."""
        self.look()
        mine, told = self._share.generation, self._share.told
        return all(
            rank in self._ended
            or told(rank, TOLD_CLOSED)
            or self._left(rank)[0] == self._num_passes
            or (told(rank, TOLD_GENERATION) >= mine and told(rank, TOLD_COUNT) >= self._count)
            for rank in self._others()
        )

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self._share.num_ranks) if rank != self._share.me)

    def _left(self, rank: int) -> tuple[int, int]:
        """The pass that a rank has left before its end, 0: none, and the batches it had taken by then."""
        return divmod(self._share.told(rank, TOLD_LEFT), 1 << 32)

    def _begin(self, order: Order) -> None:
        """Begins a generation together with all others."""
        share, told = self._share, self._share.told
        mine = share.generation
        odd = _odd(mine)
        share.tell(TOLD_ENDED + odd, self._count_before)
        share.tell(TOLD_EPOCH + odd, order.epoch)
        share.tell(TOLD_STEP + odd, order.step)
        share.tell(TOLD_COUNT, 0)
        share.tell(TOLD_GENERATION, mine)
        self._ring_others()
        began = monotonic()
        while behind := [rank for rank in self._others() if told(rank, TOLD_GENERATION) < mine]:
            for rank in behind:
                is_closed, count = told(rank, TOLD_CLOSED), told(rank, TOLD_COUNT)
                if told(rank, TOLD_GENERATION) >= mine:
                    continue  # it has come meanwhile, and what was read is of there
                if count > self._count_before:
                    raise self._apart(rank, "has read on where this rank has begun elsewhere", count)
                if is_closed or rank in self._ended:
                    raise self._apart(rank, "has closed its loader" if is_closed else "has ended", count)
            if self._timeout_s and monotonic() - began > self._timeout_s:
                raise RuntimeError(
                    f"DataLoader timed out after {self._timeout_s} seconds: {self._rank_group.members[behind[0]]} has not come to "
                    f"where "
                    'the ranks that share="node" begin together'
                )
            self._sleep(None)
            self.look()
        for rank in self._others():
            place = told(rank, TOLD_EPOCH + odd), told(rank, TOLD_STEP + odd)
            ended = told(rank, TOLD_ENDED + odd)
            if (ended, *place) != (self._count_before, order.epoch, order.step):
                raise RankLeft(
                    f'{self._rank_group.members[rank]} and this rank share a ring (share="node") and must read the same batches: '
                    f"it "
                    f"begins at step {place[1]} of epoch {place[0]}, having read {ended} since they began together last; this one "
                    f"at step {order.step} of epoch {order.epoch}, having read {self._count_before}. Break, load states and set "
                    "epochs in all ranks alike"
                )
        self._begins = False

    def _apart(self, rank: int, what: str, count: int) -> RankLeft:
        return RankLeft(
            f'{self._rank_group.members[rank]}, which shares a ring with this rank (share="node"), {what}: it has read {count} '
            f"batches "
            f"since they began together, and this one wants its batch {self._count + 1}. Ranks that share read the same batches: "
            "let all of them break, resume and close at the same step"
        )


def _odd(generation: int) -> int:
    """What is added to the words of the place where a generation begins."""
    return TOLD_ODD * (generation & 1)
