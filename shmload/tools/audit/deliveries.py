"""Deliveries, ends of epochs, and restarts, as audit files record them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shmload.audit.audit_file import AuditLog, Batch, Header


@dataclass(eq=False)
class AuditPart:
    """One file: the deliveries to one rank in one start."""

    log: AuditLog
    header: Header
    start: int = 0  # number of the start it belongs to


@dataclass(eq=False)
class End:
    """The end of an epoch for a rank, and whether a resume has rolled it back (`is_superseded`)."""

    part: AuditPart
    epoch: int
    step: int
    is_superseded: bool = False
    until: int | None = None
    """In a pipeline: the rows from this position on do not count, because a resume within this group has repeated them."""

    @property
    def rank(self) -> int:
        """Return the rank that received it."""
        return self.part.header.rank


@dataclass(eq=False)
class Delivery(End):
    """A delivered batch, and whether a resume has rolled it back (`is_superseded`)."""

    batch: Batch = field(kw_only=True)
    life: int = 0
    """Number of times that its rank had started without a state before."""

    @property
    def where(self) -> str:
        """Return the place of the batch in the audit file as text."""
        return f"rank {self.rank}, epoch {self.epoch}, step {self.step} ({self.part.log.name}, offset {self.batch.offset})"


class Restart(NamedTuple):
    """A start that loaded no state although there was an earlier one. The counts describe the deliveries that it replaced."""

    part: AuditPart
    num_batches: int
    num_samples: int
