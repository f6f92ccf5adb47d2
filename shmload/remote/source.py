"""The samples of remote shards, by number: what the fluent dataset and the indexed view both read from."""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.remote.local_shards import LocalShards
from shmload.schedule.shard_shuffle import ShardShuffle

__all__ = ["RemoteSource", "span", "taken_at"]

_WINDOW = 16  # shards mixed, unless there is no room for three times as many
_AHEAD = 3  # windows that are fetched: the one that is read and those behind it, as far as there is room
_KNOWN = 64  # windows that are announced, for the order of eviction


class RemoteSource:
    """Samples by number, and the order in which shards are needed.

    Args:
        local: the shards as they are here.
        window: shards whose samples are mixed; None: up to 16, as many as the budget holds three times.
    """

    def __init__(self, local: LocalShards, window: int | None) -> None:
        self.local = local
        self._given_window = window
        self._starts: list[int] | None = None
        self._begin()

    def _begin(self) -> None:
        self._now: tuple[int, int, int] | None = None  # seed, epoch and window that were announced
        self._is_settled = True  # what was passed is let go
        self._lock = threading.Lock()

    @property
    def window(self) -> int:
        """Shards whose samples are mixed. It depends on the arguments and the shards alone, so all ranks have the same."""
        if self._given_window is not None:
            return self._given_window
        fits = self.local.cache.capacity_bytes // (_AHEAD * self.local.shards.largest)
        return max(1, min(_WINDOW, fits))

    @property
    def starts(self) -> list[int]:
        """Number of each shard's first sample, and the end."""
        if self._starts is None:
            self._starts = np.concatenate([[0], np.cumsum(self.local.counts())]).tolist()
        return self._starts

    @property
    def num_samples(self) -> int:
        return self.starts[-1]

    def order(self, *, shuffle: bool, window: int | None = None) -> ShardShuffle:
        """The order of an epoch's samples."""
        return ShardShuffle(self.local.counts(), window=window or self.window, shuffle=shuffle)

    def place(self, index: int) -> tuple[int, int]:
        """(shard, sample within it)."""
        shard = bisect_right(self.starts, index) - 1
        return shard, index - self.starts[shard]

    def enter(self, order: ShardShuffle, index: int, seed: int, epoch: int) -> None:
        """Says that a sample of this order is read: what its window and those behind it need is announced, if that is news."""
        window = order.window_of(self.place(index)[0], seed=seed, epoch=epoch)
        if self._now is not None and self._now[:2] == (seed, epoch) and window <= self._now[2]:
            return
        with self._lock:
            self._now, self._is_settled = (seed, epoch, window), False
            windows = order.shards_from(window, seed=seed, epoch=epoch, num_windows=min(_KNOWN, 2 * order.num_windows))
            self.local.announce([shard for shards in windows for shard in shards], sum(map(len, windows[:_AHEAD])))

    def begin(self) -> None:
        """Says that what was read so far is done with: shards of a window that was passed are let go."""
        if not self._is_settled:
            self._is_settled = True
            self.local.let_go_passed()

    def read(self, index: int) -> dict[str, Any]:
        """A sample's members, as bytes, with its key and URL."""
        shard, sample = self.place(index)
        local = self.local
        found = local.index(shard)
        members = found.members(sample)
        made: dict[str, Any] = {"__key__": found.key(sample), "__url__": found.path}
        copy = local.copy(shard)
        if copy is not None:
            for extension, offset, size in members:
                made[extension] = copy[offset : offset + size].tobytes()
            return made
        begin, nbytes = span(members)
        data = memoryview(local.range(shard, begin, nbytes))
        for extension, offset, size in members:
            made[extension] = bytes(data[offset - begin : offset - begin + size])
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_now": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def span(members: list[tuple[str, int, int]]) -> tuple[int, int]:
    """The (offset, nbytes) of a sample's members, which lie next to each other; ranges of shards and objects are always told so."""
    begin = min(offset for _, offset, _ in members)
    return begin, max(offset + size for _, offset, size in members) - begin


def taken_at(order: ShardShuffle, positions: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """The indices at positions that mostly lie close together, in ascending order."""
    if not len(positions):
        return positions
    found = np.empty(len(positions), np.int64)
    breaks = np.flatnonzero((np.diff(positions) < 0) | (np.diff(positions) > 1024)) + 1
    for part in np.split(np.arange(len(positions)), breaks):
        begin, end = int(positions[part[0]]), int(positions[part[-1]]) + 1
        found[part] = order.take(begin, end, seed=seed, epoch=epoch)[positions[part] - begin]
    return found
