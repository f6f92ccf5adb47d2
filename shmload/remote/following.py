"""Follow a packed dataset: each epoch reads what was appended before the epoch begins.

An epoch reads a snapshot: the first `n` samples, up to the end of a generation. Appending only adds at the end, so a sample has the
same number in every snapshot, and a worker that gets a number beyond those it knows reads the manifest again.

The first rank that settles an epoch writes its snapshot to the store of torch.distributed's process group, by one compare-and-set.
A state identifies the snapshot by a digest of its shards, and can be resumed as long as the manifest begins with these shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from shmload.errors import ShardCorrupt, StateMismatch, StoreError
from shmload.remote.manifest import Manifest
from shmload.remote.remote_source import RemoteSource
from shmload.schedule.epoch_snapshots import EpochSnapshots

__all__ = ["FollowedEpochs", "ShardSnapshot"]


class ShardSnapshot(NamedTuple):
    """The first `n` samples, in the shards that have this digest."""

    n: int
    digest: str


# (URL of the dataset, rank, number of ranks) -> number of the rank's next loader of it; all ranks make the loaders that they read
# together in one order, also if several ranks are in one process
_numbers: dict[tuple[str, int, int], Iterator[int]] = defaultdict(count)


class FollowedEpochs(EpochSnapshots[ShardSnapshot]):
    """The epochs of one loader of a followed dataset. Ranks agree through the store of torch.distributed's process group.

    Args:
        source: the samples; it knows the shards of every snapshot.
        rank: this rank.
        world_size: number of ranks that read the same snapshots.
    """

    identity = "followed shards"
    not_yet = (StoreError, ShardCorrupt)

    def __init__(self, source: RemoteSource, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self._source, self.world_size = source, world_size
        self._number = next(_numbers[source.url, rank, world_size]) if world_size > 1 else 0
        self._num_restarts = 0

    def settle(self, epoch: int, *, is_ahead: bool) -> ShardSnapshot:
        """Return an epoch's snapshot, settled by the first rank that asks for it.

        Args:
            epoch: the epoch.
            is_ahead: makes no difference.

        Raises:
            StoreError: the store does not answer, or ranks have no way to agree.
            ShardCorrupt: the dataset was packed again.
        """
        manifest = self._source.follow()
        found = ShardSnapshot(manifest.num_samples, manifest.digest)
        return self._agreed(epoch, found) if self.world_size > 1 else found

    def _agreed(self, epoch: int, ours: ShardSnapshot) -> ShardSnapshot:
        """Return the snapshot that all ranks read in an epoch: ours, unless another rank was first."""
        from shmload.torch_names import default_store

        if (store := default_store()) is None:
            raise StoreError(
                f"{self._source.url}: {self.world_size} ranks follow this dataset and have to agree on what an epoch reads: call "
                "torch.distributed.init_process_group() before the first batch, or read it without follow=True"
            )
        key, said = f"shmload/followed/{self._source.url}/{self._number}/{self._num_restarts}/{epoch}", f"{ours.n} {ours.digest}"
        n, digest = bytes(store.compare_set(key, "", said)).decode().split()
        agreed = ShardSnapshot(int(n), digest)
        if agreed != ours and agreed not in _snapshots_of(manifest := self._source.follow()):
            raise ShardCorrupt(
                f"{self._source.url}: another rank reads {agreed.n} samples in epoch {epoch}, which this dataset of "
                f"{manifest.num_samples} does not begin with: it was packed again in the meantime. Create the dataset again in all "
                "ranks"
            )
        return agreed

    def named(self, snapshot: ShardSnapshot) -> dict[str, Any]:
        """Return the description of a snapshot for a state."""
        return snapshot._asdict()

    def restart(self, epoch: int) -> None:
        """Begin an epoch whose state names no snapshot. Forget all snapshots that were settled before the state was loaded."""
        self._num_restarts += 1
        self._snapshots, self._begun, self._unsettled = {}, epoch - 1, -1

    def resume(self, named: Mapping[str, Any], epoch: int) -> None:
        """Let an epoch read the snapshot that a state describes.

        Raises:
            StateMismatch: the dataset does not begin with this snapshot.
        """
        manifest = self._source.follow()
        found = next((each for each in _snapshots_of(manifest) if each._asdict() == named), None)
        if found is None:
            raise StateMismatch(
                f"{self._source.url}: the state is of a snapshot, {named!r:.100}, that the {manifest.num_samples} samples there do "
                "not begin with: they were packed again since. Resume with the dataset that the state was saved with"
            )
        self._num_restarts += 1
        self._read_from(epoch, found)


def _snapshots_of(manifest: Manifest) -> list[ShardSnapshot]:
    """Return the dataset's snapshots, one for each generation, the oldest first."""
    then = map(manifest.at, manifest.generations)
    return [ShardSnapshot(each.num_samples, each.digest) for each in then]
