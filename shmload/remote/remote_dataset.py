"""RemoteDataset: an iterable dataset over the shards of an object store, with webdataset's fluent methods.

    order       ShardShuffle: shards in random order, mixed within windows; a function of (seed, epoch)
    rank r      positions r, r + world_size, ... of that order: ranks are interleaved, so all have equally many samples
    worker w    units w, w + n, ... of the rank; a unit is the samples of one item (schedule/units.py)
    stages      decode, to_tuple, ... applied to the samples of a worker's units

All ranks read from the same windows at the same time. The processes of a node therefore fetch each shard once and share it, and
keep only a few shards at a time, however many there are.

The fluent methods each return a new dataset with one more stage: fluent_methods.py.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, count, islice
from typing import Any, Self

import numpy as np
from torch.utils.data import get_worker_info

from shmload.formats.encryption import SampleCipher
from shmload.formats.format import ShardFormat
from shmload.introspect.abilities import overrides
from shmload.processes.ranks import OwnRank
from shmload.remote.fluent_methods import FluentMethods, checked_count
from shmload.remote.indexed import RemoteRecords, RemoteSamples, RemoteUnits
from shmload.remote.listing import shards_in, shards_of_urls
from shmload.remote.local_shards import LocalShards
from shmload.remote.packing.upload import store_of
from shmload.remote.pass_counter import PassCounter
from shmload.remote.program import Program
from shmload.remote.remote_source import RemoteSource, taken_at
from shmload.remote.shards import Shards
from shmload.schedule.any_schedule import Uneven
from shmload.schedule.checks import own_int, whole_number
from shmload.schedule.node_shuffle import NodeShuffle
from shmload.schedule.permutation import Permutation
from shmload.schedule.shard_shuffle import ShardShuffle
from shmload.storage.open_store import open_store

__all__ = ["CACHE_BYTES", "RemoteDataset"]

CACHE_BYTES = 10 << 30  # default size limit of the copies of shards
_UNKNOWN_EPOCHS = 1 << 20  # epochs reserved for a pass of unknown length; a longer pass would repeat epochs of the next one


def _cipher_of(key: bytes | None, shards: Shards) -> SampleCipher | None:
    """Return the cipher that decrypts the samples of these shards.

    Raises:
        ValueError: they are not encrypted, or encrypted with another key.
    """
    if key is None:
        return None
    cipher, where = SampleCipher(key), shards.all[0].url
    if any(shard.format.name != "tar" for shard in shards.all) or (shards.generation is not None and not shards.key):
        raise ValueError(f"{where}: this dataset is not encrypted, but key= was given: leave key= out if you expect that")
    if shards.key not in ("", cipher.fingerprint):
        raise ValueError(
            f"{where}: the samples of this dataset are encrypted with another key than key=, {shards.key} and not "
            f"{cipher.fingerprint} by their fingerprints: give the key that it was packed with"
        )
    return cipher


class RemoteDataset(FluentMethods):
    """An IterableDataset of the samples of shards in a store: dicts of fields, with `__key__` and `__url__`.

    The fields of tar shards are the members as bytes, by extension. For other formats (Parquet, TFRecord, JSON lines, .npy,
    MosaicML's and LitData's shards, images), the format decodes the fields: shmload.remote.layouts.

    The folder is listed once, when the dataset is created. If a later upload replaces these shards, reading them is an error; a
    dataset is never a mix of two uploads. If there is a manifest (from upload_cv_dataset or `shmload pack`), all sizes and counts
    are known at once; for other shards, the headers are read on first use, and their index is kept in the cache folder.

    In each epoch, every sample is delivered exactly once over all ranks and workers. Each pass is the next epoch, and its order
    depends on `seed` and the epoch number. Shards are prefetched into a folder of at most `cache_bytes`.

    Args:
        client: from make_client, or boto3's; None if `bucket` is a local folder or a URL; a dict of options for a URL of another
            cloud (`open_store`).
        bucket, folder: the location of the dataset.
        shuffle: if False, read shards and samples in their stored order.
        seed: seed of all orders, 0 to 2^64 - 1.
        cache_folder: folder for copies of shards, which all processes of this machine share and later runs reuse; None uses a
            private folder that is removed with the dataset and its workers.
        cache_bytes: size limit of that folder; 0 keeps nothing and reads each sample separately. All users of a folder must pass
            the same number.
        window: number of shards whose samples are mixed. If None, up to 16, as long as three windows fit into `cache_bytes`. Must
            be the same on all ranks.
        ahead_bytes: limit for prefetching, in whole shards after the current window, as far as `cache_bytes` has room; 0 fetches
            only the current window. If None, two windows, or everything if it fits and there is no `block_shuffle`. Does not change
            the order.
        uneven: what to do if the ranks do not divide the samples evenly: "pad" repeats some from the start of the epoch, "drop"
            omits some, "exact" gives the last ranks one less.
        rank: rank of this process.
        world_size: number of ranks; by default, both come from torch.distributed or the environment when iteration begins.
        layout: format of the shards: "tar", "tfrecord", "jsonl", "npy", "parquet", "mds", "files", or an object of
            shmload.remote.layouts; None detects it from their names and the folder's index.
        nodes: if more than 1, each node of the job has a fixed share of the samples, the same in each epoch, and fetches only the
            shards that contain them (NodeShuffle). The ranks of a node must be consecutive, as launchers number them.
        generation: for a dataset that was appended to, the newest generation to read. The dataset then has the contents and order
            of that time, which a state saved at that time needs. None reads all generations.
        key: the 32-byte key that upload_cv_dataset encrypted the samples with; it is passed only to workers.
    Raises:
        ObjectMissing: there are no shards.
        ShardCorrupt: the manifest is damaged.
        StoreError: the store does not answer.
        ValueError: an argument is out of range.
    Thread/process safety: iterators are independent; each process fetches for itself, into the shared folder.
    """

    def __init__(
        self,
        client: Any,
        bucket: str | Shards,
        folder: str = "",
        shuffle: bool = True,
        seed: int = 0,
        *,
        cache_folder: str | os.PathLike[str] | None = None,
        cache_bytes: float = CACHE_BYTES,
        window: int | None = None,
        uneven: Uneven = "pad",
        rank: int | None = None,
        world_size: int | None = None,
        layout: str | ShardFormat | None = None,
        nodes: int = 1,
        ahead_bytes: float | None = None,
        generation: str | None = None,
        key: bytes | None = None,
    ) -> None:
        shards = bucket if isinstance(bucket, Shards) else shards_in(store_of(client, bucket, folder), layout, generation)
        seed = own_int(seed)
        if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be an int from 0 to 2**64 - 1, got {seed!r}")
        if uneven not in ("pad", "drop", "exact"):
            raise ValueError(f'uneven must be "pad", "drop" or "exact", got {uneven!r}')
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank and world_size go together; got rank={rank}, world_size={world_size}")
        if not cache_bytes >= 0:
            raise ValueError(f"cache_bytes must be at least 0, got {cache_bytes!r}")
        if ahead_bytes is not None and not ahead_bytes >= 0:
            raise ValueError(f"ahead_bytes must be at least 0, or None, got {ahead_bytes!r}")
        if window is not None and not window >= 1:
            raise ValueError(f"window must be at least 1, or None, got {window!r}")
        if window is not None and (needed := min(window, len(shards.all)) * shards.largest) > cache_bytes:
            raise ValueError(
                f"window={window} shards of up to {shards.largest} bytes need {needed} bytes at once, and cache_bytes is "
                f"{int(cache_bytes)}: give it three times that, to fetch ahead too, or a smaller window"
            )
        if (too_large := shards.too_large(int(cache_bytes))) is not None:
            raise ValueError(
                f"{too_large.url} is compressed, and its samples are read from its {too_large.nbytes} decompressed bytes: "
                f"cache_bytes must be at least that, and is {int(cache_bytes)}"
            )
        self.program = Program()
        self.nodes = checked_count("nodes", nodes, 1)
        self.shuffled, self.seed, self.uneven = shuffle, seed, uneven
        local = LocalShards(shards, cache_folder, max(int(cache_bytes), 1))
        self._source = RemoteSource(local, window, ahead_bytes, cipher=_cipher_of(key, shards))
        self._world = OwnRank(rank, world_size)
        self._passes = PassCounter()
        self._order: ShardShuffle | NodeShuffle | None = None

    @classmethod
    def from_urls(cls, urls: str | Iterable[str], client: Any = None, shuffle: bool = True, seed: int = 0, **options: Any) -> Self:
        """Create a dataset from the URLs of shards ("s3://bucket/x-{000000..000009}.tar", https://, file://, paths) or of a folder.

        Args:
            urls: URLs of objects, with braces expanded, or of a folder.
            client: for s3://, or a dict of options for other clouds, as in `open_store`. If None, a client configured by the
                environment.
            shuffle: as for the class.
            seed: as for the class.
            options: `cache_folder`, `cache_bytes`, `window`, `uneven`, `rank`, `world_size`, `layout`, `nodes`, `ahead_bytes`,
                `generation`, `key`, as for the class.
        Raises:
            ObjectMissing: a shard does not exist.
        """
        named = {name: options.pop(name, None) for name in ("layout", "generation")}
        return cls(None, shards_of_urls(urls, lambda url: open_store(url, client), **named), "", shuffle, seed, **options)

    # ------------------------------------------------------------ contents

    @property
    def num_samples(self) -> int:
        """Return the number of samples in all shards, before any stage."""
        return self._source.num_samples

    def __len__(self) -> int:
        """Return the number of items of this rank's pass, over all its workers.

        Raises:
            TypeError: the number is unknown, for example after select.
        """
        if self.program.length is not None:
            return self.program.length
        self._source.local.try_again()  # a loader asks when a pass begins
        rank, world_size = self._world()
        return self.program.count(self._share(rank, world_size))

    def indexed(self, **options: Any) -> RemoteSamples | RemoteRecords:
        """Return the same shards as a map-style dataset, for ShmLoader's own shuffle, ranks and resume.

        Args:
            options: for tar shards, `fields`, `schema`, `decode` and `allow_pickle`, as for TarDataset, and `follow=True`: each
                epoch of a ShmLoader with a seed then includes what was appended before it began, the same on all ranks. For other
                shards, `fields`, and `decode` as a dict of functions by field (RemoteRecords).
        Raises:
            ValueError: the dataset already has stages.
            TypeError: the option is for tar shards, and these have another format.
        """
        if self.program.stages or self.program.units.levels:
            raise ValueError("indexed() reads the shards without stages: call it before decode and the other stages")
        found = {format.name for format in self._source.local.shards.values("format")}
        if found == {"tar"}:
            return RemoteSamples(self._source, **options)
        if others := sorted(options.keys() - {"fields", "decode"}):
            raise TypeError(
                f"indexed({others[0]}=...) is an option for tar shards, but these are {', '.join(sorted(found))}, whose fields "
                "have the types of their format: select some with fields=[...], and convert them with decode={field: function} or "
                "with an option of the format, such as layout=TFRecords(schema=...) or Parquet(columns=...)"
            )
        return RemoteRecords(self._source, **options)

    def split(self, parts: Mapping[str, float], seed: int = 0) -> dict[str, Self]:
        """Split the samples into disjoint parts, which are the same on every rank, with any workers and any cache.

        Each part is a dataset over the same shards and the same cache folder, with the stages of this dataset. It can be split
        again, or read with `indexed()`. To subsample, pass fractions that add up to less than 1.

        Args:
            parts: name -> its share of the samples, {"train": 0.9, "val": 0.1}; whole numbers above 1 are numbers of samples.
            seed: seed of the random choice, 0 to 2^64 - 1.
        Returns:
            The parts by name; their samples keep the order of the shards.
        Raises:
            ValueError: the shares add up to more than there is, or a part would be empty.
        Cost: 8 bytes per sample in each process that is not forked; 4 ns per sample, once.
        Example:
            >>> import tempfile
            >>> from shmload.formats import TarWriter
            >>> bucket = tempfile.mkdtemp()
            >>> with TarWriter(f"{bucket}/x.tar") as writer:
            ...     for number in range(100):
            ...         writer.write({"__key__": f"{number:03d}", "cls": number})
            >>> parts = RemoteDataset.from_urls(bucket).split({"train": 0.9, "val": 0.1})
            >>> len(parts["train"]), len(parts["val"].indexed())
            (90, 10)
        """
        total = self.num_samples
        shares = [share * total if share <= 1 else share for share in parts.values()]
        ends = [round(end) for end in accumulate(shares)]
        sizes = dict(zip(parts, np.diff([0, *ends]).tolist(), strict=True))
        if not sizes or min(sizes.values()) < 1 or ends[-1] > total:
            raise ValueError(
                f"split: each part needs at least one sample, and all parts together at most the {total} samples of the dataset; "
                f"got {dict(parts)}, which is {sizes}"
            )
        order = Permutation(total, seed=seed).take(0, ends[-1])
        made = {}
        for name, chosen in zip(sizes, np.split(order, ends[:-1]), strict=True):
            part = made[name] = self._with(self.program)
            part._source, part._order, part._passes = self._source.part(np.sort(chosen)), None, PassCounter()
        return made

    @property
    def given_rank(self) -> tuple[int, int] | None:
        """Return the rank and world size as passed to the constructor; None if they were not."""
        return self._world.given

    @property
    def given_uneven(self) -> Uneven | None:
        """Return `uneven` as passed to the constructor; None for the default."""
        return None if self.uneven == "pad" else self.uneven

    def keyed_items(self) -> RemoteUnits:
        """Return the items as a map-style dataset, whose index k is the k-th item of an epoch. ShmLoader reads it in seed mode.

        Raises:
            TypeError: a subclass overrides `__iter__`, which would not be called.
            ValueError: it is unknown which samples make up an item.
        """
        if overrides(self, ("__iter__",), ("keyed_items",)):
            raise TypeError(
                f"{type(self).__name__} overrides __iter__, which is not called when items are read by number (seed mode, Items): "
                "express it as stages (map, select, ...), or leave out the loader's seed, or use Stream in place of Items"
            )
        program = self.program
        if self.nodes > 1:
            raise ValueError(
                "with nodes=, the order depends on the ranks, and seed mode has its own: read indexed() with "
                "sampler=view.block_shuffle(nodes=..., global_batch=...)"
            )
        if program.known == "nothing" or program.repetitions != 1 or program.limit is not None:
            what = program.unknown or ("with_epoch" if program.limit is not None else "repeat")
            raise ValueError(f"seed mode needs the k-th item of an epoch, which is unknown after {what}: leave out {what}, or seed")
        return RemoteUnits(self._source, self._ordered(), self.seed, program)

    @property
    def order_identity(self) -> str:
        """Return a text that differs for another order of the samples, so that a state of another order is refused."""
        way = f"window={self._source.window}" if self.shuffled else "in order"
        return f"{way}, nodes={self.nodes}, seed={self.seed}"

    # ------------------------------------------------------------ reading

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, also in running workers. Without this call, each pass has the number after the last one.

        Args:
            epoch: from 0 to 2^62.
        Raises:
            ValueError: `epoch` is out of range.
            TypeError: `epoch` is not an integer.
        """
        self._passes.set_next(whole_number("epoch", epoch, at_least=0, remedy="epochs are counted from 0"))

    @property
    def next_pass(self) -> int:
        """Return the number of the next pass: its epoch, unless `repeat` or `with_epoch` make passes of several epochs."""
        return self._passes.next

    def pass_of(self, base_seed: int | None, since: int) -> int:
        """Return the number of a pass that a loader has begun, for the loader's state.

        Args:
            base_seed: the seed that torch drew for the pass's workers; None without workers.
            since: `next_pass` when the pass began.
        """
        return self._passes.number_of(base_seed, since)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        self._source.local.try_again()
        number = self._passes.begin(None if worker is None else worker.seed - worker.id)
        rank, world_size = self._world()
        items = self._items(number, rank, world_size, *((0, 1) if worker is None else (worker.id, worker.num_workers)))
        limit = self.program.limit
        if limit is None or worker is None:
            return islice(items, limit)
        return islice(items, len(range(worker.id, limit, worker.num_workers)))

    def _items(self, number: int, rank: int, world_size: int, worker: int, num_workers: int) -> Iterator[Any]:
        """Yield a worker's items of a pass, epoch by epoch."""
        program = self.program
        num_units = program.units.count(self._share(rank, world_size))
        first = number * self._epochs_of_a_pass(num_units)
        is_endless = program.limit is not None or program.repetitions is None
        for repetition in count() if is_endless else range(program.repetitions or 0):
            begin = (worker - repetition * num_units) % num_workers  # the workers' turns continue across the ends of epochs
            mine = range(begin, num_units, num_workers)
            epoch = first + repetition
            num_items = 0
            stage_seed = zlib.crc32(f"{self.seed} {epoch} {rank} {worker}".encode()) << 16
            for item in program.run(self._samples(mine, epoch, rank, world_size), stage_seed):
                num_items += 1
                yield item
            if is_endless and not num_items and (mine or not num_units):
                return  # an empty epoch would repeat forever

    def _samples(self, units: Iterable[int], epoch: int, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
        source, share = self._source, self._share(rank, world_size)
        for unit in units:
            order = self._ordered()  # created here because zero samples have no order
            positions = self.program.units.samples(unit, share) * world_size + rank  # wraps around if the rank's share is padded
            for index in taken_at(order, positions % order.n, self.seed, epoch).tolist():
                source.begin()
                source.enter(order, source.place(index)[0], self.seed, epoch)
                yield source.read(index)

    def _share(self, rank: int, world_size: int) -> int:
        """Return the number of samples of a rank."""
        whole, rest = divmod(self.num_samples, world_size)
        if self.uneven == "exact":
            return whole + (rank < rest)
        return whole + (rest > 0 and self.uneven == "pad")

    def _epochs_of_a_pass(self, num_units: int) -> int:
        """Return the greatest number of epochs that a pass may take, so that the next pass begins after them."""
        program = self.program
        if program.limit is not None and program.known != "nothing":
            return -(-program.limit // max(num_units, 1))
        if program.limit is not None or program.repetitions is None:
            return _UNKNOWN_EPOCHS
        return program.repetitions

    def _ordered(self) -> ShardShuffle | NodeShuffle:
        if self._order is None:
            world_size = self._world()[1] if self.nodes > 1 else 1
            if world_size % self.nodes:
                raise ValueError(f"nodes={self.nodes} must divide the number of ranks, which is {world_size}")
            self._order = self._source.order(shuffle=self.shuffled, nodes=self.nodes, global_batch=world_size)
        return self._order

    def _with(self, program: Program) -> Self:
        made = self.__class__.__new__(self.__class__)
        made.__dict__.update(self.__dict__, program=program, _passes=PassCounter(self._passes.next))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def close(self) -> None:
        """Release all shards, and remove the private cache folder. Later reads fetch from the store."""
        self._source.local.close()

    def __repr__(self) -> str:
        shards = self._source.local.shards
        stages = "".join(f".{name}" for name, _ in self.program.stages)
        return f"<RemoteDataset of {len(shards.all)} shards, {shards.nbytes} bytes{stages}>"
