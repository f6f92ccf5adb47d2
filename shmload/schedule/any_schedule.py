"""What a loader asks of every schedule, with the answers of a schedule whose epochs are all alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

SCHEDULE_VERSION = 1
"""Version of every order made here. A change that alters one index adds a version and keeps the old one repeatable."""
Uneven = Literal["pad", "drop", "exact"]


class AnySchedule:
    """What a loader asks of its schedule besides the batches; the answers of one whose epochs are alike.

    Attributes:
        grows: an epoch's samples are settled only shortly before it begins: nothing is ordered ahead of the next one's end.
    """

    grows = False

    @property
    def stride(self) -> int:
        """From one step to the next."""
        return 1

    @property
    def stream(self) -> dict[str, Any] | None:
        """What positions and keys mean where they number the items of a stream, as a pipeline's do; else None."""
        return None

    def behind(self, step: int) -> int:
        """The step that follows one."""
        return step + self.stride

    def number(self, step: int) -> int:
        """How many steps came before it, for a record of them."""
        return -(-step // self.stride)

    def begins(self, epoch: int) -> None:
        """Says that a pass over an epoch begins; those before it are over."""

    def ended(self) -> None:
        """Says that no pass runs any more."""

    def children(self, epoch: int) -> dict[str, Any] | None:
        """What a state in that epoch says besides its position."""
        return None

    def go_on_from(self, children: Mapping[str, Any], epoch: int) -> None:
        """Takes over what `children` gave, before a resume in that epoch."""
