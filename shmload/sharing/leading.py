"""What the rank that leads does beside its engine's work: a slot is used again when all ranks have let it go."""

from __future__ import annotations

from time import monotonic
from typing import Any

from shmload._core.mapping import Mapping
from shmload._core.trainer import ANY_SLOT, Order, Share, share_nbytes
from shmload.engine.engine import WAIT_S
from shmload.engine.parts import Hook, Parts
from shmload.sharing.rank_group import RankGroup
from shmload.sharing.rank_sync import RankSync

LINGER_S = 5.0  # how long a leader that closes waits for ranks that have not read yet what it has


class Leader(Hook):
    """The part that an engine's rank takes whose ring other ranks read.

    Args:
        rank_group: these ranks.
        timeout_s: how long they may take to come to one place; 0: as long as it takes.
    """

    def __init__(self, rank_group: RankGroup, timeout_s: float) -> None:
        self._rank_group, self._timeout_s = rank_group, timeout_s
        self._rank_sync: RankSync | None = None

    def built(self, parts: Parts) -> None:
        self._ring, self._ready = parts.ring, parts.ready
        num_ranks = len(self._rank_group.members)
        nbytes = share_nbytes(num_ranks, parts.num_slots)
        segment = parts.group.segment("share", nbytes)
        share = Share(Mapping(segment.fd, nbytes), me=0, num_ranks=num_ranks, num_slots=parts.num_slots)
        parts.ring.share(share)
        self._rank_sync = RankSync(self._rank_group, share, self._sleep, parts.ring.wake, self._timeout_s)
        self._rank_group.announce({"control": parts.control_segment.path, "share": segment.path, "ready": parts.ready.name})

    def failed(self, error: BaseException) -> None:
        self._rank_group.announce({"failed": f"{type(error).__name__}: {error}"})
        self._rank_group.close()

    def _sleep(self, order: Order | None) -> None:
        self._ring.begin_wait(ANY_SLOT)  # so that ranks ring when they have passed a batch
        try:
            self._ready.wait(WAIT_S)
        finally:
            self._ring.end_wait()

    @property
    def rank_sync(self) -> RankSync:
        """The others, once there is a ring."""
        assert self._rank_sync is not None
        return self._rank_sync

    def before_next(self, order: Order) -> None:
        """Sees to it that all ranks come to the batch.

        Raises:
            RankLeft: another rank does not take it, or has ended.
        """
        self.rank_sync.before(order)

    def after_next(self, *, is_gone: bool) -> None:
        if is_gone:
            self.rank_sync.took()

    def look(self) -> None:
        self.rank_sync.look()
        self.rank_sync.check()

    def abandoned(self) -> None:
        self.rank_sync.abandon()

    def pass_begins(self) -> None:
        self.rank_sync.begin_pass()

    def pass_left(self) -> None:
        self.rank_sync.leave_pass()

    def counters(self) -> dict[str, Any]:
        return {"shared_by": len(self._rank_group.members)}

    def closing(self, *, is_broken: bool) -> None:
        """Ranks that are behind may still open what they have not opened yet, for a while."""
        rank_sync = self.rank_sync
        rank_sync.close()
        deadline = monotonic() + LINGER_S
        while not is_broken and not rank_sync.are_done() and monotonic() < deadline:
            self._sleep(None)

    def closed(self) -> None:
        self._rank_group.close()
