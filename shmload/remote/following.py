"""A packed dataset that is followed: each epoch reads what has been appended before it begins.

An epoch is a snapshot: the first `n` samples, up to the end of a generation. Appending only adds behind what is there, so a sample
has the same number in every snapshot, and a worker that meets a number beyond what it knows reads the manifest anew.

All ranks read the same snapshot in an epoch: the first that settles it says so in the store of torch.distributed's process group,
by one compare-and-set, and the others find it there. No rank waits for another, so ranks may order ahead at their own pace. A state
names the snapshot by a digest of its shards, and is resumed on it for as long as the manifest begins with these shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt, StateMismatch, StoreError
from shmload.remote.indexed import RemoteSource
from shmload.remote.manifest import Manifest

__all__ = ["FollowedEpochs", "ShardSnapshot"]


class ShardSnapshot(NamedTuple):
    """What an epoch reads: the first `n` samples, of shards with this digest."""

    n: int
    digest: str


class FollowedEpochs:
    """The trainer's side of a followed dataset, of one loader: which snapshot an epoch has.

    Args:
        source: of the samples; knows all shards that any snapshot has.
        world_size: of how many ranks each is to read the same one.
    """

    identity = "followed shards"
    n = 0

    def __init__(self, source: RemoteSource, world_size: int = 1) -> None:
        self._source, self.world_size = source, world_size
        self._snapshots: dict[int, ShardSnapshot] = {}
        self._begun = -1
        self._unsettled = -1  # an epoch that could not be settled ahead of its time

    def snapshot(self, epoch: int) -> ShardSnapshot:
        """An epoch's snapshot; settled by the first rank that asks for it.

        Raises:
            StoreError: the store does not answer, or ranks have no way to agree.
            ShardCorrupt: the dataset was packed anew.
        """
        if epoch not in self._snapshots:
            manifest = self._source.follow()
            found = ShardSnapshot(manifest.num_samples, manifest.digest)
            if self.world_size > 1:
                found = self._agreed(epoch, found)
            self._snapshots[epoch] = found
        return self._snapshots[epoch]

    def _agreed(self, epoch: int, ours: ShardSnapshot) -> ShardSnapshot:
        """What the ranks read in an epoch: this, unless another rank was first."""
        from shmload.torch_names import default_store

        if (store := default_store()) is None:
            raise StoreError(
                f"{self._source.url}: {self.world_size} ranks follow this dataset and have to agree on what an epoch reads: call "
                "torch.distributed.init_process_group() before the first batch, or read it without follow=True"
            )
        key, said = f"shmload/followed/{self._source.url}/{epoch}", f"{ours.n} {ours.digest}"
        n, digest = bytes(store.compare_set(key, "", said)).decode().split()
        agreed = ShardSnapshot(int(n), digest)
        if agreed != ours and agreed not in _snapshots_of(manifest := self._source.follow()):
            raise ShardCorrupt(
                f"{self._source.url}: another rank reads {agreed.n} samples in epoch {epoch}, which this dataset of "
                f"{manifest.num_samples} does not begin with: it was packed anew meanwhile. Make the dataset anew in all ranks"
            )
        return agreed

    def state(self, epoch: int) -> dict[str, Any] | None:
        """What a state says of an epoch's snapshot; None before it is begun, as a resume may read more by then."""
        return self._snapshots[epoch]._asdict() if epoch == self._begun else None

    def go_on_from(self, named: Mapping[str, Any] | None, epoch: int) -> None:
        """Takes a state's snapshot for its epoch.

        Raises:
            StateMismatch: the dataset does not begin with it.
        """
        if named is None:  # what was read of the epoch before the state was loaded does not settle it
            self._snapshots, self._begun, self._unsettled = {}, epoch - 1, -1
            return
        manifest = self._source.follow()
        found = next((each for each in _snapshots_of(manifest) if each._asdict() == named), None)
        if found is None:
            raise StateMismatch(
                f"{self._source.url}: the state is of a snapshot, {named!r:.100}, that the {manifest.num_samples} samples there do "
                "not begin with: they were packed anew since. Resume with the dataset that the state was saved with"
            )
        self._snapshots, self._begun = {epoch: found}, epoch

    def is_settled(self, epoch: int) -> bool:
        """Whether an epoch has a snapshot, or is to have one now, whatever it takes; what lies ahead must not disturb it."""
        if epoch in self._snapshots or epoch <= self._begun or self._begun < 0:
            return True
        if epoch == self._unsettled:
            return False
        try:
            self.snapshot(epoch)
        except (StoreError, ShardCorrupt):
            self._unsettled = epoch  # another look with each batch would cost too much
            return False
        return True

    def begins(self, epoch: int) -> None:
        """Says that an epoch is read from now on."""
        self._unsettled = -1
        self.snapshot(epoch)
        self._begun = epoch
        self._snapshots = {each: kept for each, kept in self._snapshots.items() if each >= epoch - 1}

    def ended(self) -> None:
        """Says that none is read any more."""

    def keys(self, epoch: int, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices of an epoch's records: samples keep their numbers."""
        return records


def _snapshots_of(manifest: Manifest) -> list[ShardSnapshot]:
    """Those that the dataset has had, and has."""
    then = map(manifest.at, manifest.generations)
    return [ShardSnapshot(each.num_samples, each.digest) for each in then]
