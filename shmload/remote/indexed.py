"""Remote shards as map-style datasets: samples by index, or the items of a fluent pipeline by number.

* `RemoteSamples`, for tar shards, is a TarDataset whose shards come from the cache, with the same fields, schema and decoding into
  rows.
* `RemoteRecords` is for shards of all other formats.
* `RemoteUnits` is for ShmLoader in seed mode, given a RemoteDataset with stages.

If the cache has room for all shards, each is fetched completely when it is first needed. Otherwise only the shards in the windows
of a `block_shuffle` are fetched completely, and any other sample is read by one range request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from shmload._core.tar_rows import TarRows
from shmload.batch.row_placer import OneSample
from shmload.errors import ShardCorrupt
from shmload.formats.field_names import names_of
from shmload.formats.images.crops import check_decoder
from shmload.formats.images.shared_choices import one_sample
from shmload.formats.row_numbers import checked_index, checked_indices
from shmload.formats.tar.decoders import Decode
from shmload.formats.tar.opened_shards import OpenedShards
from shmload.formats.tar.shard_index import KEY, ShardIndex
from shmload.formats.tar.tar_dataset import TarDataset
from shmload.formats.tar.tar_format import members_span
from shmload.introspect.abilities import overrides
from shmload.remote.program import Program
from shmload.remote.remote_source import RemoteSource, taken_at
from shmload.schedule.any_schedule import Uneven
from shmload.schedule.node_shuffle import NodeShuffle
from shmload.schedule.shard_shuffle import ShardShuffle
from shmload.schedule.snapshot_schedule import SnapshotSchedule
from shmload.worker.sample_rng import seed_and_epoch

__all__ = ["RemoteRecords", "RemoteSamples", "RemoteUnits"]

_GAP_NBYTES = 64 << 10  # unneeded bytes that may be read to get a sample's members with one range request


class _NotHere(Exception):
    """Raised if a shard has no complete local copy."""


class _Indexes(Sequence[ShardIndex]):
    """Indexes that are loaded when they are needed."""

    def __init__(self, source: RemoteSource) -> None:
        self._source = source

    def __getitem__(self, number: Any) -> Any:
        return self._source.index(number)

    def __len__(self) -> int:
        return len(self._source.local.shards.all)


class _Held(OpenedShards):
    """The `OpenedShards` over local copies. `map` raises `_NotHere` for a shard without one.

    It is discarded, with its references to copies, when `num_dropped` of the source has changed.
    """

    def __init__(self, source: RemoteSource, alternatives: Sequence[Sequence[str]]) -> None:
        super().__init__(_Indexes(source), alternatives, source.local.counts())
        self._source = source
        self.num_dropped = source.local.num_dropped

    def map(self, shard: int) -> tuple[Any, bytes | None, Any]:
        data = self._source.local.copy(shard)
        if data is None:
            raise _NotHere
        return data, None, None  # local copies never change


class _Ordered:
    """Base class of map-style datasets that prefetch shards in the order of a block shuffle."""

    _source: RemoteSource
    _order: ShardShuffle | NodeShuffle | None = None

    def block_shuffle(
        self, window: int | None = None, *, nodes: int = 1, global_batch: int | None = None
    ) -> ShardShuffle | NodeShuffle:
        """Return an order for `sampler=` that reads each shard within one window of a few, which are prefetched.

        Args:
            window: number of shards whose samples are mixed; None uses the dataset's.
            nodes: if more than 1, each node of the job reads its own share of the shards, and fetches only these (NodeShuffle).
            global_batch: required with `nodes`: samples of one step over all ranks, `batch_size * world_size`.
        Returns:
            The order. The view prefetches for the last one that it returned.
        Raises:
            ValueError: only one of `nodes` and `global_batch` is given.
        """
        if (nodes == 1) != (global_batch is None):
            raise ValueError(f"block_shuffle: nodes and global_batch go together; got nodes={nodes}, global_batch={global_batch}")
        self._order = self._source.order(shuffle=True, window=window, nodes=nodes, global_batch=global_batch or 1)
        return self._order

    def _enter(self, shard: int) -> None:
        """Announce which shards come next, now that a sample of `shard` is read: those of the block shuffle, or all shards."""
        now = seed_and_epoch()
        if self._order is None:
            if self._source.ahead_bytes is None:
                self._source.local.announce_all()
        elif now is not None and now[0] is not None:
            self._source.enter(self._order, shard, now[0], now[1])


class RemoteRecords(_Ordered):
    """The samples of remote shards by index, from RemoteDataset.indexed() for formats other than tar.

    With ShmLoader, `shuffle=True` is an exact shuffle over all samples; `sampler=view.block_shuffle()` reads whole shards, a few at
    a time, and prefetches the next ones. Both resume on any number of ranks and workers from the loader's state.

    Args:
        source: source of the RemoteDataset.
        fields: fields of the samples, from the format's and "__key__" and "__url__"; None for all fields of the format.
        decode: functions of a field's value, by field: {"image": ImageDecoder(...)}. None, or False as in TarDataset, decodes none.
    Raises:
        TypeError: a function of `decode` is not callable.
        ValueError: on reading: a sample lacks a field.
        ShardCorrupt: on reading: a shard does not match its format, or has changed.
        StoreError: on reading: the store does not answer.
    Thread/process safety: any number of readers.
    """

    def __init__(
        self,
        source: RemoteSource,
        *,
        fields: Sequence[str] | None = None,
        decode: Mapping[str, Callable[[Any], Any]] | Literal[False] | None = None,
    ) -> None:
        self._source = source
        self._fields = None if fields is None else names_of(fields, "fields")
        self._decode = dict(decode or {})
        for name, decoder in self._decode.items():
            check_decoder(f"decode[{name!r}]", decoder)

    def __len__(self) -> int:
        return self._source.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._read([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices] if overrides(self, ("__getitem__",), ("__getitems__",)) else self._read(indices)

    def _read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        numbers = checked_indices(indices, len(self)).tolist()
        self._source.begin()
        for shard in dict.fromkeys(self._source.place(number)[0] for number in numbers):
            self._enter(shard)
        if self._fields is None and not self._decode:
            return [_plain(made) for made in self._source.read_some(numbers, has_names=False)]
        return [self._sample(made) for made in self._source.read_some(numbers)]

    def _sample(self, made: dict[str, Any]) -> dict[str, Any]:
        names = _plain(made) if self._fields is None else self._fields
        if missing := [name for name in names if name not in made]:
            raise ValueError(f"{made['__key__']} of {made['__url__']} has no field {missing[0]!r}; it has {sorted(made)}")
        with one_sample(self._decode.values()):
            return {name: self._decoded(name, made) if name in self._decode else made[name] for name in names}

    def _decoded(self, name: str, made: dict[str, Any]) -> Any:
        try:
            return self._decode[name](made[name])
        except (ImportError, MemoryError):  # the sample is not the cause
            raise
        except Exception as error:  # raised by a library or the user's decoder
            raise ShardCorrupt(f"{made['__url__']}: field {name!r} of sample {made['__key__']!r}: {error}") from error

    def __repr__(self) -> str:
        return f"<RemoteRecords of {len(self._source.local.shards.all)} shards>"


def _plain(made: dict[str, Any]) -> dict[str, Any]:
    """Return a sample without key and URL, because plain files have a key field of their own."""
    return {name: value for name, value in made.items() if name not in ("__key__", "__url__")}


class RemoteSamples(_Ordered, TarDataset):
    """The samples of remote tar shards by index, from RemoteDataset.indexed().

    With ShmLoader, `shuffle=True` is an exact shuffle over all samples; `sampler=view.block_shuffle()` reads whole shards, a few at
    a time, and prefetches the next ones. Both resume on any number of ranks and workers from the loader's state.

    Args:
        source: source of the RemoteDataset.
        fields, schema, decode, allow_pickle: as for TarDataset.
        follow: each epoch includes what was appended before it.
    Raises:
        ValueError: `follow` is given for a part of a dataset, for one without a manifest, or for one at a `generation`.
    """

    def __init__(
        self,
        source: RemoteSource,
        *,
        fields: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        schema: Mapping[str, Any] | None = None,
        decode: Decode = True,
        allow_pickle: bool = False,
        follow: bool = False,
    ) -> None:
        if follow:
            source = source.followed()
        self._follows = follow
        super().__init__(PurePath(os.devnull), fields=fields, schema=schema, decode=decode, allow_pickle=allow_pickle)
        self.paths = []  # the shards are those of the source
        self._source = source
        if source.cipher is not None:  # native code cannot decrypt
            self._columns = [replace(column, way="decode") for column in self._columns]
        self._samples: _Held | None = None
        self._spans = threading.local()

    def __len__(self) -> int:
        return self._source.num_samples

    @property
    def epoch_schedule(self) -> Callable[..., SnapshotSchedule] | None:
        """Return the schedule of a followed dataset, which ShmLoader uses with a seed: the samples of each rank, step and epoch."""
        return self._epoch_schedule if self._follows else None

    def _epoch_schedule(
        self, *, seed: int, rank: int, world_size: int, batch_size: int, shuffle: bool, uneven: Uneven
    ) -> SnapshotSchedule:
        from shmload.remote.following import FollowedEpochs

        epochs = FollowedEpochs(self._source, rank, world_size)  # for one loader, because each may be in a different epoch
        return SnapshotSchedule(epochs, seed=seed, uneven=uneven, world_size=world_size, batch_size=batch_size, is_shuffled=shuffle)

    def block_shuffle(
        self, window: int | None = None, *, nodes: int = 1, global_batch: int | None = None
    ) -> ShardShuffle | NodeShuffle:
        if self._follows:
            raise ValueError("block_shuffle needs a fixed length, which follow=True does not have: use shuffle=True")
        return super().block_shuffle(window, nodes=nodes, global_batch=global_batch)

    def _checked(self, indices: Any) -> NDArray[np.int64]:
        """Return indices as row numbers. If one is beyond the known samples, first add what has been appended."""
        if self._follows and len(indices) and max(indices) >= len(self):
            self._source.follow()
        return checked_indices(indices, len(self))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._follows and index >= len(self):
            self._source.follow()
        number = checked_index(index, len(self))
        if self.schema is not None:
            out = OneSample(self.schema)
            self._read_batch_into([number], out)
            return out.sample()
        self._source.begin()
        self._enter(self._source.place(number)[0])
        return super().__getitem__(self._source.whole_number(number))

    def _read_batch_into(self, indices: Sequence[int], out: Any) -> None:
        source = self._source
        numbers = source.whole(self._checked(indices))
        source.begin()
        for shard in dict.fromkeys((np.searchsorted(source.starts, numbers, "right") - 1).tolist()):
            self._enter(shard)
            source.local.copy(shard)  # now, because the next shard may begin a window whose announcement releases this one
        try:
            super()._read_batch_into(cast(Any, numbers), out)
        except _NotHere:
            self._read_alone(numbers, out)

    def _read_alone(self, numbers: NDArray[np.int64], out: Any) -> None:
        """Read a batch without copies of all its shards: sample by sample, with parallel range requests."""
        local = self._source.local
        places = [self._source.place_in_whole(number) for number in numbers.tolist()]
        wanted = {extension for column in self._columns for extension in (self._fields or {})[column.name]}
        spans: dict[tuple[int, int], tuple[int, int, int]] = {}  # member (shard, offset) -> its range (shard, begin, nbytes)
        for shard, sample in places:
            named = [each for each in self._source.index(shard).members(sample) if each[0] in wanted]
            begin, nbytes = members_span(named) if named else (0, 0)
            for _, offset, size in named:
                is_near = nbytes <= _GAP_NBYTES + sum(each[2] for each in named)
                spans[shard, offset] = (shard, begin, nbytes) if is_near else (shard, offset, size)
        ranges = list(dict.fromkeys(spans.values()))
        read = dict(zip(ranges, local.ranges(ranges), strict=True))
        self._spans.found = {member: (spans[member][1], read[spans[member]]) for member in spans}
        try:
            nothing = TarRows(np.array([0, len(numbers)], np.int64))
            empty = np.zeros(0, np.uint64)
            ranks = np.full((max(len(self._fields or ()), 1), 1), 255, np.uint8)
            first = np.zeros(len(numbers) + 1, np.uint64)
            nothing.open(0, np.zeros(1, np.uint8), empty, empty, np.zeros(0, np.uint16), first, ranks)
            rows = np.arange(len(numbers))
            for column in self._columns:  # native code finds no member, so each row is read in Python
                column.read(nothing.find(rows, column.number), out, partial(self._row, numbers, column))
            if self.schema is not None and KEY in self.schema:
                out[KEY] = [local.index(shard).key(sample) for shard, sample in places]
        finally:
            del self._spans.found

    def _bytes(self, shard: int, sample: int, offset: int, size: int) -> bytes:
        found = getattr(self._spans, "found", {}).get((shard, offset))
        begin, data = (offset, self._source.local.range(shard, offset, size)) if found is None else found
        member = bytes(memoryview(data)[offset - begin : offset - begin + size])
        if self._source.cipher is None:
            return member
        extension = next(extension for extension, at, _ in self._source.index(shard).members(sample) if at == offset)
        return self._source.decrypted(shard, sample, extension, member)

    def _opened(self) -> OpenedShards:
        held = self._samples
        if held is None or held.num_dropped != self._source.local.num_dropped:
            held = self._samples = _Held(self._source, list((self._fields or {}).values()))
        return held

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_samples": None, "_spans": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._spans = threading.local()

    def __repr__(self) -> str:
        return f"<RemoteSamples of {len(self._source.local.shards.all)} shards>"


@dataclass(repr=False, eq=False)
class RemoteUnits:
    """The items of a fluent pipeline by number, for pipelines in which the samples of each item are known.

    Args:
        source, order, seed, program: from the RemoteDataset.
    """

    source: RemoteSource
    order: ShardShuffle | NodeShuffle
    seed: int
    program: Program

    @property
    def order_identity(self) -> str:
        """Return a text that differs for another order of the items, so that a state of another order is refused."""
        return f"{self.order.identity}, seed={self.seed}"

    def cache_identity(self) -> Any:
        """Return what determines the items: the shards, their order and the stages, but not where copies of shards are kept."""
        return [(shard.url, shard.version) for shard in self.source.local.shards.all], self.order_identity, self.program

    def __len__(self) -> int:
        return self.program.units.count(self.order.n)

    def __getitem__(self, number: int) -> Any:
        now = seed_and_epoch()
        return self.item(number, 0 if now is None else now[1])

    def item(self, number: int, epoch: int) -> Any:
        """Return one item of an epoch."""
        positions = self.program.units.samples(int(number), self.order.n)
        source, order, seed = self.source, self.order, self.seed
        indices = taken_at(order, positions, seed, epoch).tolist()

        def read(index: int) -> dict[str, Any]:
            source.begin()
            source.enter(order, source.place(index)[0], seed, epoch)
            return source.read(index)

        items = list(self.program.run(map(read, indices), number))
        if len(items) != 1:
            raise ValueError(
                f"item {number} of epoch {epoch}: the stages made {len(items)} items of its {len(indices)} samples, and seed mode "
                "needs one: map must return a value for every sample, and no handler may skip a sample"
            )
        return items[0]
