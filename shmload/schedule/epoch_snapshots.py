"""`EpochSnapshots`: the snapshot of a growing dataset that each epoch reads, the same in all ranks.

A snapshot is *settled* and then *begun*. The first rank that needs it settles it: it decides which samples the epoch has, and
writes that to a place that all ranks can see; the others find it there. No rank waits for another, so ranks may order batches ahead
at their own pace. The dataset chooses the place: a folder of the run, or the store of torch.distributed.

It is begun when the first rank reads its epoch. Until then the epoch may be settled again, with more samples. A state names only
the snapshot of an epoch that has begun.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class Sized(Protocol):
    """A snapshot: all that is required here is its number of samples."""

    @property
    def n(self) -> int:
        """Return the number of samples."""


S = TypeVar("S", bound=Sized)


class EpochSnapshots(ABC, Generic[S]):
    """The snapshots of one loader's epochs. `SnapshotSchedule` uses it as its order.

    Attributes:
        identity: the name of this kind of order in states.
        n: 0, because each epoch has a length of its own.
        not_yet: errors that leave an epoch unsettled while an earlier one is read.
    """

    identity: str
    n = 0
    not_yet: tuple[type[Exception], ...]

    def __init__(self) -> None:
        self._snapshots: dict[int, S] = {}
        self._begun = -1  # the epoch that is read; -1 if none is
        self._unsettled = -1  # an epoch that could not be settled ahead of its time

    def snapshot(self, epoch: int, *, is_ahead: bool = False) -> S:
        """Return an epoch's snapshot. The first rank that asks for it settles it.

        Args:
            epoch: the epoch.
            is_ahead: whether an earlier epoch is still being read, which must not be disturbed or delayed.

        Raises:
            Exception: one of `not_yet`.
        """
        if epoch not in self._snapshots:
            self._snapshots[epoch] = self.settle(epoch, is_ahead=is_ahead)
        return self._snapshots[epoch]

    @abstractmethod
    def settle(self, epoch: int, *, is_ahead: bool) -> S:
        """Settle an epoch's snapshot, or return the one that another rank has settled. Arguments are those of `snapshot`."""

    @abstractmethod
    def named(self, snapshot: S) -> dict[str, Any]:
        """Return the description of a snapshot for a state."""

    @abstractmethod
    def resume(self, named: Mapping[str, Any], epoch: int) -> None:
        """Let an epoch read the snapshot that a state describes, and no other. Call `_read_from`.

        Raises:
            StateMismatch: it cannot be read any more.
        """

    def restart(self, epoch: int) -> None:
        """Begin an epoch whose state names no snapshot."""

    def _read_from(self, epoch: int, snapshot: S) -> None:
        self._snapshots, self._begun = {epoch: snapshot}, epoch

    def state(self, epoch: int) -> dict[str, Any] | None:
        """Return the description of an epoch's snapshot for a state, or None before the epoch has begun."""
        snapshot = self._snapshots.get(epoch)
        return None if snapshot is None or epoch != self._begun else self.named(snapshot)

    def go_on_from(self, named: Mapping[str, Any] | None, epoch: int) -> None:
        """Continue in a state's epoch.

        Args:
            named: the state's description of the snapshot; None if the state was taken before the epoch began.
            epoch: the epoch.

        Raises:
            StateMismatch: the snapshot cannot be read any more, or the state is invalid.
        """
        if named is None:
            self.restart(epoch)
        else:
            self.resume(named, epoch)

    def is_settled(self, epoch: int) -> bool:
        """Return whether an epoch has a snapshot, or must get one now. Try to settle a later epoch without waiting.

        Args:
            epoch: the epoch.
        """
        if epoch in self._snapshots or epoch <= self._begun or self._begun < 0:
            return True
        if epoch == self._unsettled:
            return False
        try:
            self.snapshot(epoch, is_ahead=True)
        except self.not_yet:
            self._unsettled = epoch  # not tried again with each batch; the error is raised when the epoch begins
            return False
        return True

    def begins(self, epoch: int) -> None:
        """Begin to read an epoch: settle it if necessary, and forget the snapshots before the previous epoch's.

        Args:
            epoch: the epoch.
        """
        self._unsettled = -1
        self.opened(epoch, self.snapshot(epoch))
        self._begun = epoch
        self._snapshots = {each: kept for each, kept in self._snapshots.items() if each >= epoch - 1}

    def opened(self, epoch: int, snapshot: S) -> None:
        """Prepare for an epoch that is about to be read."""

    def ended(self) -> None:
        """Release the epochs' resources, because no epoch is read any more."""

    def keys(self, epoch: int, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of records of an epoch.

        Args:
            epoch: the epoch.
            records: numbers of samples in its snapshot.
        """
        return records

    def has_lost(self, epoch: int) -> bool:
        """Return whether `keys` leaves out records of an epoch, because they are gone."""
        return False

    def num_kept(self, epoch: int, records: NDArray[np.int64]) -> int:
        """Return how many records of an epoch are not left out. Arguments are those of `keys`."""
        return len(records)
