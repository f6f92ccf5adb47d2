"""ShardRecord: a complete shard of a packing, with the positions of its samples in the packing order."""

from __future__ import annotations

from dataclasses import dataclass

from shmload.remote.manifest import ShardEntry


@dataclass(frozen=True)
class ShardRecord:
    """A complete shard in the store, as its note describes it, so that the packing can be continued.

    Attributes:
        first: position of its first sample in the packing order.
        extensions: extensions of its members, sorted.
        shard: its entry in the manifest.
        versions: ETags of the shard and of its index from their upload; None if unknown.
    """

    first: int
    extensions: tuple[str, ...]
    shard: ShardEntry
    versions: tuple[str, str] | None = None

    @property
    def number(self) -> int:
        """Return the number of the shard, at the end of its name; numbers of a part begin with `PackPart.first_number`."""
        return int(self.shard.name.rpartition("-")[2].partition(".")[0])

    @property
    def stop(self) -> int:
        """Return the position after its last sample."""
        return self.first + self.shard.num_samples
