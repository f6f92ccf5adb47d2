"""RemoteSource: the samples of remote shards by index. RemoteDataset and the map-style datasets of indexed.py read through it."""

from __future__ import annotations

import copy
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
from shmload.formats.tar.shard_index import ShardIndex
from shmload.processes.fork_lock import ForkLock
from shmload.remote.listing import shards_of
from shmload.remote.local_shards import LocalShards
from shmload.remote.manifest import MANIFEST_NAME, Manifest
from shmload.schedule.node_shuffle import NodeShuffle
from shmload.schedule.shard_shuffle import ShardShuffle

__all__ = ["RemoteSource", "taken_at"]

_WINDOW = 16  # shards that are mixed, unless the cache cannot hold three times as many
_AHEAD = 3  # windows that are fetched: the current one and the next ones, as far as there is room
_KNOWN = 64  # windows that are announced, for the order of eviction


class RemoteSource:
    """Samples by index, and the order in which their shards are needed.

    Args:
        local: the local copies of the shards.
        window: number of shards whose samples are mixed. If None, up to 16, as long as three windows fit into the cache.
        ahead_bytes: limit for prefetching shards after the current window. If None, two windows.
        chosen: indices of the samples to use among all samples, ascending, int64; None uses all.
        cipher: decrypts members; None if they are not encrypted.
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
        self._now: tuple[int, int, int, int] | None = None  # process, seed, epoch and window that were announced last
        self._is_settled = True  # shards that were passed have been released
        self._lock = ForkLock()  # the trainer may fork workers while another of its threads reads

    @property
    def window(self) -> int:
        """Return the number of shards whose samples are mixed.

        It depends only on the arguments and the shards, so it is the same on all ranks.
        """
        if self._given_window is not None:
            return self._given_window
        fits = self.local.cache.capacity_bytes // (_AHEAD * max(self.local.shards.largest, 1))
        return max(1, min(_WINDOW, fits))

    @property
    def starts(self) -> array[int]:
        """Return the index of each shard's first sample, and the number of all samples."""
        if self._starts is None:
            self._starts = array("q", np.cumsum([0, *self.local.counts()], dtype=np.int64).tobytes())
        return self._starts

    @property
    def has_chosen(self) -> bool:
        """Return whether only some of the shards' samples are used."""
        return self._chosen is not None

    @property
    def num_samples(self) -> int:
        return self.starts[-1] if self._chosen is None else len(self._chosen)

    @property
    def url(self) -> str:
        """Return the URL of the dataset's folder if it has a manifest, else ""."""
        home = self.local.shards.home
        return "" if home is None else home.url

    def follow(self) -> Manifest:
        """Add what has been appended to the dataset. Return the current manifest.

        Raises:
            ShardCorrupt: the dataset was packed again.
        """
        home = self.local.shards.home
        assert home is not None
        manifest = Manifest.parse(home.get(MANIFEST_NAME), name=f"{home.url}/{MANIFEST_NAME}")
        self.local.extend(shards_of(home, manifest))
        self._starts = None
        return manifest

    def part(self, chosen: NDArray[np.int64]) -> RemoteSource:
        """Return a source for some of these samples, given by ascending indices, with the same copies of shards."""
        return self._another(self.whole(chosen))

    def followed(self) -> RemoteSource:
        """Return a source for the same samples that can `follow` what is appended; this source does not change.

        Raises:
            ValueError: this is a part of a dataset, or it has no manifest, or was opened at a given generation.
        """
        shards = self.local.shards
        if shards.home is None or self.has_chosen:
            raise ValueError(
                "follow=True reads all of a dataset that upload_cv_dataset or `shmload pack` has packed, by its folder: this is a "
                "part of one, or has no manifest"
            )
        if shards.is_earlier:
            raise ValueError(
                f"follow=True reads what is appended later, but generation={shards.generation!r} excludes it: leave out one of "
                "the two"
            )
        return self._another(None)

    def _another(self, chosen: NDArray[np.int64] | None) -> RemoteSource:
        return RemoteSource(self.local.another(), self._given_window, self.ahead_bytes, chosen, self.cipher)

    def order(
        self, *, shuffle: bool, window: int | None = None, nodes: int = 1, global_batch: int = 1
    ) -> ShardShuffle | NodeShuffle:
        """Return the order of the samples, a function of seed and epoch.

        Args:
            shuffle: whether shards and samples are shuffled.
            window: number of shards whose samples are mixed; None is this source's.
            nodes: number of nodes that each read their own share of the shards.
            global_batch: number of samples of one step over all ranks; only used with several nodes.
        """
        counts = self.local.counts() if self._chosen is None else np.diff(np.searchsorted(self._chosen, self.starts))
        if nodes != 1:
            return NodeShuffle(counts, nodes=nodes, global_batch=global_batch, window=window or self.window, shuffle=shuffle)
        return ShardShuffle(counts, window=window or self.window, shuffle=shuffle)

    def whole(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert indices to indices among all of the shards' samples."""
        return indices if self._chosen is None else self._chosen[indices]

    def whole_number(self, index: int) -> int:
        """Convert an index to an index among all of the shards' samples."""
        return index if self._chosen is None else int(self._chosen[index])

    def place(self, index: int) -> tuple[int, int]:
        """Return (shard, sample within it)."""
        return self.place_in_whole(self.whole_number(index))

    def place_in_whole(self, number: int) -> tuple[int, int]:
        """Return (shard, sample within it) for an index among all of the shards' samples."""
        shard = bisect_right(self.starts, number) - 1
        return shard, number - self.starts[shard]

    def enter(self, order: ShardShuffle | NodeShuffle, shard: int, seed: int, epoch: int) -> None:
        """Announce the shards of the window that contains `shard`, and of the next windows, unless they are announced already.

        Args:
            order: the order in which samples are read.
            shard: the shard that is read next.
            seed, epoch: determine the order.
        """
        window = order.window_of(shard, seed=seed, epoch=epoch)
        this_pass = self.local.process(), seed, epoch  # a forked worker prefetches for itself, whatever the trainer has read
        if self._now is not None and self._now[:3] == this_pass and window <= self._now[3]:
            return
        with self._lock:
            if self._now is not None and self._now[:3] != this_pass:
                self.local.try_again()
            self._now, self._is_settled = (*this_pass, window), False
            windows = order.shards_from(window, seed=seed, epoch=epoch, num_windows=min(_KNOWN, 2 * order.num_windows))
            coming = [shard for shards in windows for shard in shards]
            self.local.announce(coming, len(windows[0]) + self._num_ahead(coming[len(windows[0]) :], windows[1:_AHEAD]))

    def _num_ahead(self, later: Sequence[int], windows: Sequence[Sequence[int]]) -> int:
        """Return the number of shards after the current window to prefetch."""
        if self.ahead_bytes is None:
            return sum(map(len, windows))
        taken = np.cumsum(self.local.shards.sizes[later])
        return int(np.searchsorted(taken, self.ahead_bytes, "right"))

    def begin(self) -> None:
        """Begin to read a sample: earlier ones are no longer used, so shards that were passed are released."""
        if not self._is_settled:
            self._is_settled = True
            self.local.let_go_passed()

    def read(self, index: int) -> dict[str, Any]:
        """Return a sample's fields as its format decodes them, with `__key__` and `__url__`. Members are decrypted."""
        shard, sample = self.place(index)
        found = self.index(shard)
        format = self.local.shards.all[shard].format
        fields = format.sample(found, sample, lambda offset, nbytes: self.local.range(shard, offset, nbytes))
        if self.cipher is not None:
            fields = {extension: self.decrypted(shard, sample, extension, data) for extension, data in fields.items()}
        return {"__key__": found.key(sample), "__url__": found.path, **fields}

    def index(self, shard: int) -> Any:
        """Return the index of a shard. Names of encrypted members lack their ending ".enc"."""
        found = self.local.index(shard)
        return found if self.cipher is None else _decrypted_names(found)

    def decrypted(self, shard: int, sample: int, extension: str, data: Buffer) -> bytes:
        """Return the decrypted content of a member.

        Args:
            shard: number of the shard.
            sample: number of the sample in it.
            extension: extension of the member, without ".enc".
            data: the encrypted content.
        Raises:
            ShardCorrupt: it cannot be decrypted; the message names shard, sample and remedy.
        """
        assert self.cipher is not None
        found = self.local.index(shard)
        key = found.key(sample)
        try:
            return self.cipher.decrypt(bytes(data), f"{key}.{extension}{ENCRYPTED}".encode("utf-8", "surrogateescape"))
        except ValueError as error:
            raise ShardCorrupt(f"{found.path}: member {extension!r} of sample {key!r} {error}") from None

    def read_some(self, indices: Sequence[int], *, has_names: bool = True) -> list[dict[str, Any]]:
        """Return several samples like `read`. What has no local copy is fetched by parallel range requests.

        Args:
            indices: indices of the samples.
            has_names: whether samples have `__key__` and `__url__`.
        """
        places = [self.place(index) for index in indices]
        local = self.local
        numbers = list(dict.fromkeys(shard for shard, _ in places))
        local.copies(numbers)
        of = {number: (local.index(number), local.shards.all[number].format, local.copy(number)) for number in numbers}
        alone: dict[tuple[int, int, int], Buffer] = {}
        for shard, sample in places:
            found, format, copy = of[shard]
            if copy is None and getattr(found, "firsts", None) is None:  # others have several samples per block and fetch blocks
                alone[shard, *format.span(found, sample)] = b""
        alone = dict(zip(alone, local.ranges(list(alone)), strict=True))

        def reading(shard: int, copy: NDArray[np.uint8] | None) -> Read:
            if copy is not None:
                return lambda offset, nbytes: copy[offset : offset + nbytes].data
            return lambda offset, nbytes: alone.get((shard, offset, nbytes)) or local.range(shard, offset, nbytes)

        readers = {shard: reading(shard, copy) for shard, (_, _, copy) in of.items()}
        made = []
        for shard, sample in places:
            found, format, _ = of[shard]
            fields = format.sample(found, sample, readers[shard])
            made.append({"__key__": found.key(sample), "__url__": found.path, **fields} if has_names else fields)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_now": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def taken_at(order: ShardShuffle | NodeShuffle, positions: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the samples' indices at these positions of the order. Fast if positions are mostly ascending and close together."""
    if not len(positions):
        return positions
    found = np.empty(len(positions), np.int64)
    breaks = np.flatnonzero((np.diff(positions) < 0) | (np.diff(positions) > 1024)) + 1
    for part in np.split(np.arange(len(positions)), breaks):
        begin, end = int(positions[part[0]]), int(positions[part[-1]]) + 1
        found[part] = order.take(begin, end, seed=seed, epoch=epoch)[positions[part] - begin]
    return found


def _decrypted_names(index: Any) -> ShardIndex:
    """Return the index with the names of decrypted members.

    Raises:
        ShardCorrupt: a member is not encrypted.
    """
    if (known := _with_decrypted_names.get(index)) is not None:
        return known
    for extension in index.extensions:
        if not extension.endswith(ENCRYPTED):
            raise ShardCorrupt(
                f"{index.path}: its members {extension!r} are not encrypted, but key= was given: another program has added them, "
                "or the dataset is not encrypted and must be read without key="
            )
    found: ShardIndex = copy.copy(index)
    found.extensions = [extension.removesuffix(ENCRYPTED) for extension in index.extensions]
    _with_decrypted_names[index] = found
    return found


_with_decrypted_names: WeakKeyDictionary[Any, ShardIndex] = WeakKeyDictionary()
