"""RemoteDataset: the samples of shards in an object store, read fluently.

    order       ShardShuffle: shards in random order, mixed by windows; a formula of (seed, epoch)
    rank r      its positions r, r + world_size, ... of that order: sample by sample, so all ranks have equally many
    worker w    units w, w + n, ... of the rank's: a unit is what makes one item (units.py)
    stages      decode, to_tuple, ... over the samples of a worker's units

Every rank reads from the same windows at the same time. So the processes of a node fetch each shard once and share it, and what
they hold at a time is a few shards, however many they are.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from shmload.remote.fluent import Fluent
from shmload.remote.indexed import RemoteSamples, RemoteUnits
from shmload.remote.local_shards import LocalShards
from shmload.remote.passes import Passes
from shmload.remote.program import Program, run_stages
from shmload.remote.shards import Shards, shards_in, shards_of_urls
from shmload.remote.source import RemoteSource, taken_at
from shmload.remote.upload import store_of
from shmload.schedule.schedule import Uneven
from shmload.schedule.shard_shuffle import ShardShuffle
from shmload.storage.urls import open_store
from shmload.world import rank_and_world_size

__all__ = ["CACHE_BYTES", "RemoteDataset"]

CACHE_BYTES = 10 << 30
_UNKNOWN_EPOCHS = 1 << 20  # that a pass of unknown length may take before it would repeat the next one's


class RemoteDataset(Fluent, IterableDataset[Any]):
    """The samples of tar shards in an object store: dicts of members as bytes, `__key__` and `__url__`. An IterableDataset.

    What is in the folder is looked up here and stays as it is now: a later upload is an error when its shards replace these, never
    a mix. With a manifest (of upload_cv_dataset or `shmload pack`) all is known at once; of other shards the headers are read at
    the first use, and their index is kept in the cache's folder.

    Every sample comes exactly once an epoch over all ranks and workers. Each pass is the next epoch, with an order of its own that
    follows from `seed` and the epoch's number. Shards are fetched ahead of need into a folder within `cache_bytes`.

    Args:
        client: of make_client, or boto3's; None: `bucket` is a folder of this machine, or a URL.
        bucket, folder: where the dataset is.
        shuffle: False reads shards and samples in their own order.
        seed: 0 to 2^64 - 1; of all orders.
        cache_folder: where copies of shards are kept and found again, by all processes of this machine; None: in a folder of its
            own that ends with the dataset and its workers.
        cache_bytes: what that folder may hold; 0: nothing is kept, each sample is read alone. All users of a folder say the same.
        window: shards whose samples are mixed; None: up to 16, as many as `cache_bytes` holds three times. All ranks need the same.
        uneven: where the samples do not divide evenly by the ranks: "pad" repeats some from the epoch's start, "drop" leaves some
            out, "exact" lets the last ranks have one less.
        rank: of this process.
        world_size: of how many ranks; by default both as torch.distributed or the environment say, when iteration begins.
    Raises:
        ObjectMissing: there are no shards.
        ShardCorrupt: the manifest is damaged.
        StoreError: the store does not answer.
        ValueError: an argument is out of its range.
    Thread/process safety: iterators are independent; each process fetches for itself, into the one folder.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
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
    ) -> None:
        shards = shards_in(store_of(client, bucket, folder))
        self._begin(
            shards,
            shuffle,
            seed,
            cache_folder,
            cache_bytes,
            window=window,
            uneven=uneven,
            rank=rank,
            world_size=world_size,
        )

    @classmethod
    def from_urls(
        cls,
        urls: str | Iterable[str],
        client: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        *,
        cache_folder: str | os.PathLike[str] | None = None,
        cache_bytes: float = CACHE_BYTES,
        window: int | None = None,
        uneven: Uneven = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Self:
        """The samples of shards by their URLs: "s3://bucket/x-{000000..000009}.tar", https://, file://, paths; or of one folder.

        Args:
            urls: of .tar objects, in which braces expand, or of a folder.
            client: for s3://; None: one that goes by the environment.
            shuffle: as of the class.
            seed: as of the class.
            cache_folder: as of the class.
            cache_bytes: as of the class.
            window: as of the class.
            uneven: as of the class.
            rank: as of the class.
            world_size: as of the class.
        Raises:
            ObjectMissing: a shard is not there.
        """
        made = cls.__new__(cls)
        shards = shards_of_urls(urls, lambda url: open_store(url, client))
        made._begin(
            shards,
            shuffle,
            seed,
            cache_folder,
            cache_bytes,
            window=window,
            uneven=uneven,
            rank=rank,
            world_size=world_size,
        )
        return made

    def _begin(
        self,
        shards: Shards,
        shuffle: bool,
        seed: int,
        cache_folder: str | os.PathLike[str] | None,
        cache_bytes: float,
        *,
        window: int | None,
        uneven: Uneven,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is an int from 0 to 2**64 - 1; got {seed!r}")
        if uneven not in ("pad", "drop", "exact"):
            raise ValueError(f'uneven is "pad", "drop" or "exact"; got {uneven!r}')
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank and world_size go together; got rank={rank}, world_size={world_size}")
        if not cache_bytes >= 0:
            raise ValueError(f"cache_bytes is a number of bytes, 0 or more; got {cache_bytes!r}")
        if window is not None and not window >= 1:
            raise ValueError(f"window is a number of shards, at least 1, or None; got {window!r}")
        if window is not None and (needed := min(window, len(shards.all)) * shards.largest) > cache_bytes:
            raise ValueError(
                f"window={window} shards of up to {shards.largest} bytes need {needed} bytes at once, and cache_bytes is "
                f"{int(cache_bytes)}: give it three times that, to fetch ahead too, or a smaller window"
            )
        self.program = Program()
        self.shuffled, self.seed, self.uneven = shuffle, seed, uneven
        self._source = RemoteSource(LocalShards(shards, cache_folder, max(int(cache_bytes), 1)), window)
        self._rank_and_world_size = (rank, world_size)
        self._passes = Passes()
        self._order: ShardShuffle | None = None

    # ------------------------------------------------------------ what there is

    @property
    def num_samples(self) -> int:
        """Samples in all shards, whatever the stages make of them."""
        return self._source.num_samples

    def __len__(self) -> int:
        """Items of this rank's pass, over all its workers.

        Raises:
            TypeError: nobody can know, behind select and the like.
        """
        if self.program.length is not None:
            return self.program.length
        rank, world_size = self._world()
        return self.program.count(self._share(rank, world_size))

    def indexed(self, **options: Any) -> RemoteSamples:
        """The same shards as a map-style dataset: any sample by its index, for ShmLoader's own shuffle, ranks and resume.

        Args:
            options: `fields`, `schema`, `decode` and `allow_pickle`, as of TarDataset.
        Raises:
            ValueError: there are stages already.
        """
        if self.program.stages or self.program.units.levels:
            raise ValueError(
                "indexed() reads the shards themselves: call it on the dataset as it was made, before decode and the other stages"
            )
        return RemoteSamples(self._source, **options)

    def keyed_items(self) -> RemoteUnits:
        """The items as a map-style dataset, the k-th of an epoch by k: what ShmLoader reads in seed mode.

        Raises:
            ValueError: which samples make up an item is not known.
        """
        program = self.program
        if program.known == "nothing" or program.repetitions != 1 or program.limit is not None:
            what = program.unknown or ("with_epoch" if program.limit is not None else "repeat")
            raise ValueError(
                f"seed mode asks for the k-th item of an epoch, and behind {what} nobody knows which that is: leave out {what}, "
                "or seed"
            )
        return RemoteUnits(self._source, self._ordered(), self.seed, program)

    # ------------------------------------------------------------ reading

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass the one of this number, in workers that live already, too. Each pass is the next by itself.

        Args:
            epoch: from 0 on.
        Raises:
            ValueError: it is below 0.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is at least 0; got {epoch}")
        self._passes.set_next(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = self._passes.begin(None if worker is None else worker.seed - worker.id)
        rank, world_size = self._world()
        items = self._items(number, rank, world_size, *((0, 1) if worker is None else (worker.id, worker.num_workers)))
        limit = self.program.limit
        if limit is None or worker is None:
            return islice(items, limit)
        return islice(items, len(range(worker.id, limit, worker.num_workers)))

    def _items(self, number: int, rank: int, world_size: int, worker: int, num_workers: int) -> Iterator[Any]:
        """A worker's items of a pass, epoch by epoch."""
        program = self.program
        num_units = program.units.count(self._share(rank, world_size))
        first = number * self._epochs_of_a_pass(num_units)
        is_endless = program.limit is not None or program.repetitions is None
        for repetition in count() if is_endless else range(program.repetitions or 0):
            begin = (worker - repetition * num_units) % num_workers  # turns go on round the epochs' ends
            mine = range(begin, num_units, num_workers)
            epoch = first + repetition
            num_items = 0
            for item in run_stages(
                program.stages, self._samples(mine, epoch, rank, world_size), self._stage_seed(epoch, rank, worker)
            ):
                num_items += 1
                yield item
            if is_endless and not num_items and (mine or not num_units):
                return  # there is nothing to repeat

    def _samples(self, units: Iterable[int], epoch: int, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
        source, order, share = self._source, self._ordered(), self._share(rank, world_size)
        for unit in units:
            for index in self._indices(order, unit, share, epoch, rank, world_size).tolist():
                source.begin()
                source.enter(order, index, self.seed, epoch)
                yield source.read(index)

    def _indices(
        self, order: ShardShuffle, unit: int, share: int, epoch: int, rank: int, world_size: int
    ) -> NDArray[np.int64]:
        """The indices of a unit's samples: the rank's k-th is at position k * world_size + rank, round the end if padded."""
        positions = self.program.units.samples(unit, share) * world_size + rank
        return taken_at(order, positions % order.n, self.seed, epoch)

    def _share(self, rank: int, world_size: int) -> int:
        """Samples of a rank."""
        whole, rest = divmod(self.num_samples, world_size)
        if self.uneven == "exact":
            return whole + (rank < rest)
        return whole + (rest > 0 and self.uneven == "pad")

    def _epochs_of_a_pass(self, num_units: int) -> int:
        """Epochs that a pass takes at most, so that the next begins behind them."""
        program = self.program
        if program.limit is not None and program.known != "nothing":
            return -(-program.limit // max(num_units, 1))
        if program.limit is not None or program.repetitions is None:
            return _UNKNOWN_EPOCHS
        return program.repetitions

    def _stage_seed(self, epoch: int, rank: int, worker: int) -> int:
        return zlib.crc32(f"{self.seed} {epoch} {rank} {worker}".encode()) << 16

    def _ordered(self) -> ShardShuffle:
        if self._order is None:
            self._order = self._source.order(shuffle=self.shuffled)
        return self._order

    def _world(self) -> tuple[int, int]:
        return rank_and_world_size(*self._rank_and_world_size)

    # ------------------------------------------------------------ copies

    def _with(self, program: Program) -> Self:
        made = self.__class__.__new__(self.__class__)
        made.__dict__.update(self.__dict__, program=program, _passes=Passes(self._passes.next))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A worker that is spawned does not know its rank: it is told."""
        return {**self.__dict__, "_order": None, "_rank_and_world_size": self._world()}

    def close(self) -> None:
        """Lets go of all shards; a folder of its own is removed, and made anew if it is needed again.

        Workers that still read do so from the store.
        """
        self._source.local.close()

    def __repr__(self) -> str:
        shards = self._source.local.shards
        stages = "".join(f".{getattr(s, 'name', type(s).__name__.lower())}" for s in self.program.stages)
        return f"<RemoteDataset of {len(shards.all)} shards, {shards.nbytes} bytes{stages}>"
