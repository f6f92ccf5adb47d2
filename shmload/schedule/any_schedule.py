"""The interface of all schedules, with the implementation for a schedule whose epochs are all alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

SCHEDULE_VERSION = 1
"""Version of all orders in this package. A change that alters one index adds a version and keeps the old one available."""
Uneven = Literal["pad", "drop", "exact"]


class AnySchedule:
    """Base class of schedules.

    Attributes:
        grows: the samples of an epoch are fixed only shortly before it begins, so the loader orders nothing beyond the end of
            the current epoch.
    """

    grows = False

    @property
    def stride(self) -> int:
        """Return the difference between two consecutive steps."""
        return 1

    @property
    def stream(self) -> dict[str, Any] | None:
        """Return how positions and keys number the items of a stream (a pipeline); None if this is not a stream."""
        return None

    def behind(self, step: int) -> int:
        """Return the step after `step`."""
        return step + self.stride

    def number(self, step: int) -> int:
        """Return the number of steps before `step`, for a record of steps."""
        return -(-step // self.stride)

    def begins(self, epoch: int) -> None:
        """Record that a pass over `epoch` begins and that earlier epochs are finished."""

    def ended(self) -> None:
        """Record that no pass is running."""

    def children(self, epoch: int) -> dict[str, Any] | None:
        """Return the part of a state in `epoch` besides its position."""
        return None

    def go_on_from(self, children: Mapping[str, Any], epoch: int) -> None:
        """Restore a result of `children`, before a resume in `epoch`."""
