"""Create the indexes of shards in advance, for `shmload index`: next to the shards, or in the folder of a RemoteDataset's cache."""

from __future__ import annotations

import os
from collections.abc import Iterator

from shmload.remote.fetch import SIDECAR, fetch_index, index_beside, pack_beside
from shmload.remote.shards import RemoteShard, Shards

__all__ = ["indexes_beside", "indexes_kept"]


NOT_NEEDED, THERE_ALREADY = "needs no index", "has its index beside it"  # what was done with a shard: nothing


def indexes_beside(shards: Shards) -> Iterator[tuple[RemoteShard, str]]:
    """Create the index of each shard that needs one and has no current one next to it. Yield each shard and what was done.

    Raises:
        StoreError: the index cannot be written.
        ShardCorrupt: a shard does not match its format.
    """
    for shard in shards.all:
        if shard.num_samples is not None:
            yield shard, NOT_NEEDED
        elif index_beside(shard) is not None:
            yield shard, THERE_ALREADY
        else:
            text, num_samples = pack_beside(shards, shard)
            shard.store.put(shard.key + SIDECAR, text)
            yield shard, f"{num_samples} samples, index of {len(text)} bytes written beside it"


def indexes_kept(shards: Shards, cache_folder: str | os.PathLike[str]) -> Iterator[tuple[RemoteShard, str]]:
    """Create the indexes that a RemoteDataset with this `cache_folder` would create on first use.

    Yield each shard and what was done.

    Raises:
        ShardCorrupt: a shard does not match its format.
    """
    folder = f"{os.path.abspath(cache_folder)}/indexes"
    os.makedirs(folder, exist_ok=True)
    for shard in shards.all:
        found = fetch_index(shards, shard, folder, None)
        yield shard, f"{found.num_samples} samples, index in {folder}"
