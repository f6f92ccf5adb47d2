"""The hook of a group's leader, the rank whose ring the other ranks of the group read."""

from __future__ import annotations

import atexit
import os
import weakref
from time import monotonic
from typing import Any

from shmload._core.mapping import Mapping
from shmload._core.trainer import ANY_SLOT, Order, Share, share_nbytes
from shmload.engine.engine import WAIT_S
from shmload.engine.ring import Ring
from shmload.sharing.rank_group import RankSync

LINGER_S = 5.0  # longest time that a closing leader waits for ranks that have taken fewer batches than itself
_reading: weakref.WeakSet[Leader] = weakref.WeakSet()  # leaders whose ring is open


class Leader(RankSync):
    """The hook of an engine whose ring other ranks read. A slot is reused when all ranks have released it."""

    def started(self, ring: Ring) -> None:
        self._ring, self._ready = ring.native, ring.ready
        num_ranks = len(self._rank_group.members)
        nbytes = share_nbytes(num_ranks, ring.num_slots)
        segment = ring.group.segment("share", nbytes)
        share = Share(Mapping(segment.fd, nbytes), me=0, num_ranks=num_ranks, num_slots=ring.num_slots)
        ring.native.share(share)
        self.attach(share, self._wait, ring.native.wake)
        self._rank_group.announce({"control": ring.control_segment.path, "share": segment.path, "ready": ring.ready.name})
        self._rank_group.meeting.leave()
        self._pid = os.getpid()
        _reading.add(self)

    def failed(self, error: BaseException) -> None:
        self._rank_group.announce({"failed": f"{type(error).__name__}: {error}"})
        self._rank_group.close()

    def _wait(self, order: Order | None) -> None:
        self._ring.begin_wait(ANY_SLOT)  # so that ranks ring the bell when they have released a slot
        try:
            self._ready.wait(WAIT_S)
        finally:
            self._ring.end_wait()

    def counters(self) -> dict[str, Any]:
        return {"shared_by": len(self._rank_group.members)}

    def closing(self, *, is_broken: bool) -> None:
        """Wait up to `LINGER_S` for slower ranks, which may still have to open segments of this ring."""
        if self not in _reading or os.getpid() != self._pid:
            return
        _reading.discard(self)
        self.leave()
        deadline = monotonic() + LINGER_S
        while not is_broken and not self.others_have_caught_up() and monotonic() < deadline:
            self._wait(None)

    def closed(self) -> None:
        self._rank_group.close()


@atexit.register  # after the segments' own function was registered, so this one runs before it
def _wait_for_slower_ranks() -> None:
    for leader in list(_reading):
        leader.closing(is_broken=False)
