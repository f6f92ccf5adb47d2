"""The samples of remote shards, by number: the fluent dataset and the map-style views read from here."""

from __future__ import annotations

import copy
import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from shmload.errors import ShardCorrupt
from shmload.formats.block_index import Read
from shmload.formats.encryption import ENCRYPTED, SampleCipher
from shmload.formats.tar.shards import ShardIndex
from shmload.remote.listing import shards_of
from shmload.remote.local_shards import LocalShards
from shmload.remote.manifest import MANIFEST_NAME, Manifest
from shmload.schedule.node_shuffle import NodeShuffle
from shmload.schedule.shard_shuffle import ShardShuffle

__all__ = ["RemoteSource", "taken_at"]

_WINDOW = 16  # shards mixed, unless there is no room for three times as many
_AHEAD = 3  # windows that are fetched: the one that is read and those behind it, as far as there is room
_KNOWN = 64  # windows that are announced, for the order of eviction


class RemoteSource:
    """Samples by number, and the order in which shards are needed.

    Args:
        local: the shards as they are here.
        window: shards whose samples are mixed; None: up to 16, as many as the budget holds three times.
        ahead_bytes: of shards behind the window that is read, that may be fetched before they are needed; None: two windows.
        chosen: the numbers, in ascending order, of the samples that count, int64; None: all of the shards'.
        cipher: decrypts what members are; None: they are plain.
    """

    def __init__(
        self,
        local: LocalShards,
        window: int | None,
        ahead_bytes: float | None = None,
        chosen: NDArray[np.int64] | None = None,
        cipher: SampleCipher | None = None,
    ) -> None:
        self.local, self.cipher = local, cipher
        self._given_window, self.ahead_bytes, self._chosen = window, ahead_bytes, chosen
        self._starts: array[int] | None = None
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
        fits = self.local.cache.capacity_bytes // (_AHEAD * max(self.local.shards.largest, 1))
        return max(1, min(_WINDOW, fits))

    @property
    def starts(self) -> array[int]:
        """Number of each shard's first sample, and the end."""
        if self._starts is None:
            self._starts = array("q", np.cumsum([0, *self.local.counts()], dtype=np.int64).tobytes())
        return self._starts

    @property
    def has_chosen(self) -> bool:
        """Whether these are some of the shards' samples."""
        return self._chosen is not None

    @property
    def num_samples(self) -> int:
        return self.starts[-1] if self._chosen is None else len(self._chosen)

    @property
    def url(self) -> str:
        """Of the dataset's folder, where a manifest says what is in it."""
        home = self.local.shards.home
        return "" if home is None else home.url

    def follow(self) -> Manifest:
        """Takes in what was appended since; the manifest as it is now.

        Raises:
            ShardCorrupt: the dataset was packed anew.
        """
        home = self.local.shards.home
        assert home is not None
        manifest = Manifest.parse(home.get(MANIFEST_NAME), name=f"{home.url}/{MANIFEST_NAME}")
        self.local.extend(shards_of(home, manifest))
        self._starts = None
        return manifest

    def part(self, chosen: NDArray[np.int64]) -> RemoteSource:
        """Some of these samples, by their numbers, in ascending order; over the same copies of shards."""
        return self._another(self.whole(chosen))

    def followed(self) -> RemoteSource:
        """The same samples, to which those that are appended will come; here they do not.

        Raises:
            ValueError: they are a part of a dataset, or it has no manifest, or was asked for as it was at a generation.
        """
        shards = self.local.shards
        if shards.home is None or self.has_chosen:
            raise ValueError(
                "follow=True reads all of a dataset that upload_cv_dataset or `shmload pack` has packed, by its folder: this is a "
                "part of one, or has no manifest"
            )
        if shards.is_earlier:
            raise ValueError(
                f"follow=True reads what is appended, and generation={shards.generation!r} says that nothing behind it is read: "
                "leave out one of the two"
            )
        return self._another(None)

    def _another(self, chosen: NDArray[np.int64] | None) -> RemoteSource:
        return RemoteSource(self.local.another(), self._given_window, self.ahead_bytes, chosen, self.cipher)

    def order(
        self, *, shuffle: bool, window: int | None = None, nodes: int = 1, global_batch: int = 1
    ) -> ShardShuffle | NodeShuffle:
        """The order of an epoch's samples."""
        counts = self.local.counts() if self._chosen is None else np.diff(np.searchsorted(self._chosen, self.starts))
        if nodes != 1:
            return NodeShuffle(counts, nodes=nodes, global_batch=global_batch, window=window or self.window, shuffle=shuffle)
        return ShardShuffle(counts, window=window or self.window, shuffle=shuffle)

    def whole(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers among all of the shards' samples."""
        return indices if self._chosen is None else self._chosen[indices]

    def whole_number(self, index: int) -> int:
        """The same of one."""
        return index if self._chosen is None else int(self._chosen[index])

    def place(self, index: int) -> tuple[int, int]:
        """(shard, sample within it)."""
        return self.place_in_whole(self.whole_number(index))

    def place_in_whole(self, number: int) -> tuple[int, int]:
        """The same of a number among all of the shards' samples."""
        shard = bisect_right(self.starts, number) - 1
        return shard, number - self.starts[shard]

    def enter(self, order: ShardShuffle | NodeShuffle, shard: int, seed: int, epoch: int) -> None:
        """Says that a shard of this order is read: what its window and those behind it need is announced, if that is news."""
        window = order.window_of(shard, seed=seed, epoch=epoch)
        if self._now is not None and self._now[:2] == (seed, epoch) and window <= self._now[2]:
            return
        with self._lock:
            if self._now is not None and self._now[:2] != (seed, epoch):
                self.local.try_anew()
            self._now, self._is_settled = (seed, epoch, window), False
            windows = order.shards_from(window, seed=seed, epoch=epoch, num_windows=min(_KNOWN, 2 * order.num_windows))
            coming = [shard for shards in windows for shard in shards]
            self.local.announce(coming, len(windows[0]) + self._num_ahead(coming[len(windows[0]) :], windows[1:_AHEAD]))

    def _num_ahead(self, behind: Sequence[int], windows: Sequence[Sequence[int]]) -> int:
        """How many of the shards behind the window that is read are fetched ahead."""
        if self.ahead_bytes is None:
            return sum(map(len, windows))
        taken = np.cumsum(self.local.shards.sizes[behind])
        return int(np.searchsorted(taken, self.ahead_bytes, "right"))

    def begin(self) -> None:
        """Says that what was read so far is done with: shards of a window that was passed are let go."""
        if not self._is_settled:
            self._is_settled = True
            self.local.let_go_passed()

    def read(self, index: int) -> dict[str, Any]:
        """A sample's members, as bytes, with its key and URL."""
        shard, sample = self.place(index)
        found = self.index(shard)
        layout = self.local.shards.all[shard].layout
        fields = layout.sample(found, sample, lambda offset, nbytes: self.local.range(shard, offset, nbytes))
        if self.cipher is not None:
            fields = {extension: self.decrypted(shard, sample, extension, data) for extension, data in fields.items()}
        return {"__key__": found.key(sample), "__url__": found.path, **fields}

    def index(self, shard: int) -> Any:
        """Where a shard's samples lie, under the names that they have when they are decrypted."""
        found = self.local.index(shard)
        return found if self.cipher is None else _decrypted_names(found)

    def decrypted(self, shard: int, sample: int, extension: str, data: Buffer) -> bytes:
        """A member as it was before it was encrypted.

        Raises:
            ShardCorrupt: it cannot be decrypted; names shard, sample and remedy.
        """
        assert self.cipher is not None
        found = self.local.index(shard)
        key = found.key(sample)
        try:
            return self.cipher.decrypt(bytes(data), f"{key}.{extension}{ENCRYPTED}".encode("utf-8", "surrogateescape"))
        except ValueError as error:
            raise ShardCorrupt(f"{found.path}: member {extension!r} of sample {key!r} {error}") from None

    def read_some(self, indices: Sequence[int], *, has_names: bool = True) -> list[dict[str, Any]]:
        """As `read`, of several, perhaps without key and URL: what of them is not here is read by as many ranges at once as pay."""
        places = [self.place(index) for index in indices]
        local = self.local
        numbers = list(dict.fromkeys(shard for shard, _ in places))
        local.copies(numbers)
        of = {number: (local.index(number), local.shards.all[number].layout, local.copy(number)) for number in numbers}
        alone: dict[tuple[int, int, int], Buffer] = {}
        for shard, sample in places:
            found, layout, copy = of[shard]
            if copy is None and getattr(found, "firsts", None) is None:  # what is decoded many at a time is kept so, too
                alone[shard, *layout.span(found, sample)] = b""
        alone = dict(zip(alone, local.ranges(list(alone)), strict=True))

        def reading(shard: int, copy: NDArray[np.uint8] | None) -> Read:
            if copy is not None:
                return lambda offset, nbytes: copy[offset : offset + nbytes].data
            return lambda offset, nbytes: alone.get((shard, offset, nbytes)) or local.range(shard, offset, nbytes)

        readers = {shard: reading(shard, copy) for shard, (_, _, copy) in of.items()}
        made = []
        for shard, sample in places:
            found, layout, _ = of[shard]
            fields = layout.sample(found, sample, readers[shard])
            made.append({"__key__": found.key(sample), "__url__": found.path, **fields} if has_names else fields)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_now": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def taken_at(order: ShardShuffle | NodeShuffle, positions: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """The indices at positions that mostly lie close together, in ascending order."""
    if not len(positions):
        return positions
    found = np.empty(len(positions), np.int64)
    breaks = np.flatnonzero((np.diff(positions) < 0) | (np.diff(positions) > 1024)) + 1
    for part in np.split(np.arange(len(positions)), breaks):
        begin, end = int(positions[part[0]]), int(positions[part[-1]]) + 1
        found[part] = order.take(begin, end, seed=seed, epoch=epoch)[positions[part] - begin]
    return found


def _decrypted_names(index: Any) -> ShardIndex:
    """The index with the names that members have when they are decrypted.

    Raises:
        ShardCorrupt: one is not encrypted.
    """
    if (known := _with_decrypted_names.get(index)) is not None:
        return known
    for extension in index.extensions:
        if not extension.endswith(ENCRYPTED):
            raise ShardCorrupt(
                f"{index.path}: its members {extension!r} are not encrypted, and key= was given: somebody has put them there, or "
                "the dataset is a plain one, which is read without key="
            )
    found: ShardIndex = copy.copy(index)
    found.extensions = [extension.removesuffix(ENCRYPTED) for extension in index.extensions]
    _with_decrypted_names[index] = found
    return found


_with_decrypted_names: WeakKeyDictionary[Any, ShardIndex] = WeakKeyDictionary()
