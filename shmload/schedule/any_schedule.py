"""The interface of all schedules, with the methods of a schedule whose epochs are all alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

SCHEDULE_VERSION = 1
"""Version of all orders in this package. A change that alters one index adds a version and keeps the old one available."""
Uneven = Literal["pad", "drop", "exact"]


class AnySchedule:
    """Base class of schedules, which map (epoch, step, rank) to sample indices.

    A step is one batch on each rank. It is named by an integer that grows by `stride` from one step to the next: the number of the
    step, or the position at which it begins.

    Attributes:
        grows: the samples of an epoch are fixed only shortly before it begins, so the loader orders nothing beyond the end of
            the current epoch.
    """

    grows = False

    @property
    def stride(self) -> int:
        """Return the difference between the names of two consecutive steps."""
        return 1

    @property
    def stream(self) -> dict[str, Any] | None:
        """Return how a pipeline's positions and keys number its items; None for the schedule of a dataset."""
        return None

    def next_step(self, step: int) -> int:
        """Return the step after `step`."""
        return step + self.stride

    def number(self, step: int) -> int:
        """Return the number of steps before `step`."""
        return -(-step // self.stride)

    def begins(self, epoch: int) -> None:
        """Record that a pass over `epoch` begins and that earlier epochs are finished."""

    def ended(self) -> None:
        """Release what epochs hold, because none is read any more."""

    def children(self, epoch: int) -> dict[str, Any] | None:
        """Return what a state that is saved in `epoch` needs besides its position, such as the snapshot; None for nothing."""
        return None

    def go_on_from(self, children: Mapping[str, Any], epoch: int) -> None:
        """Restore a result of `children` from a state, before a resume in `epoch`."""
