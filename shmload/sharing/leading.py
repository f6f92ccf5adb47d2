"""The engine of the rank that leads: as any loader's, but a slot is used again when all ranks have let it go."""

from __future__ import annotations

import os
from time import monotonic
from typing import Any

from shmload._core.mapping import Mapping
from shmload._core.trainer import ANY_SLOT, Order, Share, share_nbytes
from shmload.engine.engine import WAIT_S, Engine
from shmload.engine.orders import BadSamples, Delivery
from shmload.engine.parts import EngineOptions
from shmload.sharing.company import Company
from shmload.sharing.gathering import Party
from shmload.worker.crew import STOP_GRACE_S
from shmload.worker.spec import Job

LINGER_S = 5.0  # how long a leader that closes waits for ranks that have not read yet what it has


class LeadingEngine(Engine):
    """An engine whose ring other ranks read.

    Args:
        party: these ranks.
    """

    def __init__(self, job: Job, options: EngineOptions, bad_samples: BadSamples, party: Party) -> None:
        self._party = party
        self._company: Company | None = None
        try:
            super().__init__(job, options, bad_samples)
        except BaseException as error:
            party.announce({"failed": f"{type(error).__name__}: {error}"})
            party.close()
            raise

    def _build(self) -> None:
        super()._build()
        num_ranks = len(self._party.seats)
        nbytes = share_nbytes(num_ranks, self.num_slots)
        segment = self._group.segment("share", nbytes)
        share = Share(Mapping(segment.fd, nbytes), me=0, num_ranks=num_ranks, num_slots=self.num_slots)
        self._ring.share(share)
        self._company = Company(self._party, share, self._sleep, self._ring.wake, self._options.timeout_s)
        self._party.announce({"control": self._control_path, "share": segment.path, "ready": self._ready.name})

    def _sleep(self, order: Order | None) -> None:
        self._ring.begin_wait(ANY_SLOT)  # so that ranks ring when they have passed a batch
        try:
            self._ready.wait(WAIT_S)
        finally:
            self._ring.end_wait()

    def next(self, *, in_order: bool = True) -> Delivery:
        """As of any engine.

        Raises:
            RankLeft: another rank does not take this batch, or has ended.
        """
        self._begin_next()  # what may raise does so before the others are told
        company, order = self._company, self._queue[0]
        assert company is not None
        company.before(order)
        try:
            return super().next(in_order=in_order)
        finally:
            if self.front is not order:
                company.took()

    def _see_to_deaths(self) -> None:
        super()._see_to_deaths()
        if self._company is not None:
            self._company.look()
            self._company.check()

    def abandon(self) -> None:
        """As of any engine; what is ordered from now on is another generation's."""
        super().abandon()
        if self._company is not None:
            self._company.abandon()

    def begin_pass(self, num_steps: int, *, step_stride: int = 1, epoch_base: int = 0) -> None:
        """As of any engine; counts passes."""
        super().begin_pass(num_steps, step_stride=step_stride, epoch_base=epoch_base)
        if self._company is not None:
            self._company.begin_pass()

    def leave_pass(self) -> None:
        """Tells the others that this rank has left the pass before its end."""
        if self._company is not None and not self._is_closed:
            self._company.leave_pass()

    def counters(self) -> dict[str, Any]:
        """As of any engine; and how many ranks read this ring."""
        return {**super().counters(), "shared_by": len(self._party.seats)}

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """As of any engine. Ranks that are behind may still open what they have not opened yet, for a while."""
        company = self._company
        if self._is_closed or os.getpid() != self._pid or company is None:
            super().close(grace_s=grace_s)
            return
        try:
            company.close()
            deadline = monotonic() + LINGER_S
            while self._broken is None and not company.are_done() and monotonic() < deadline:
                self._sleep(None)
        finally:
            super().close(grace_s=grace_s)
            self._party.close()
