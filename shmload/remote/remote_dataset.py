"""RemoteDataset: the samples of shards in an object store, read fluently.

    order       ShardShuffle: shards in random order, mixed by windows; a formula of (seed, epoch)
    rank r      its positions r, r + world_size, ... of that order: sample by sample, so all ranks have equally many
    worker w    units w, w + n, ... of the rank's: a unit is what makes one item (worker/stage_engine.py)
    stages      decode, to_tuple, ... over the samples of a worker's units

Every rank reads from the same windows at the same time. So the processes of a node fetch each shard once and share it, and what
they hold at a time is a few shards, however many they are.

Which pass over a dataset an iterator begins, agreed on by all workers of a rank.

A loader says nothing of epochs to an iterable dataset, and its workers, which may be new ones for every pass, each begin an
iterator of their own. What they have in common is the base seed that torch draws for a pass (persistent workers keep it and count
their turns). So they meet at a board in memory:

    nonce | number of the next pass | (base seed, turn, its pass) of the newest passes

Who finds its seed and turn there takes the pass; who does not begins a new one. A worker of a pass that was broken off may come
late: it finds its own, or takes a number that nobody misses, and the passes of others stay what they are.

The board is a memfd, which forked workers inherit and others open under /proc/<trainer>/fd. What is sent to other machines counts
by itself, from the pass that is next; here, where nobody hears of it, that pass is taken for begun.

The fluent methods: each gives a new dataset with one stage more, and keeps account of how many items that makes
(worker/stage_engine.py).
"""

from __future__ import annotations

import fcntl
import mmap
import operator
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial as of
from itertools import accumulate, count, islice
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from shmload.formats.encryption import SampleCipher
from shmload.formats.format import ShardFormat
from shmload.remote import fluent
from shmload.remote.fluent import MemberHandler, SampleDecoder, default_collation_fn, reraise_exception
from shmload.remote.indexed import RemoteRecords, RemoteSamples, RemoteUnits
from shmload.remote.listing import shards_in, shards_of_urls
from shmload.remote.local_shards import LocalShards
from shmload.remote.manifest import Shards
from shmload.remote.packing.pack import store_of
from shmload.remote.remote_source import RemoteSource, taken_at
from shmload.schedule.any_schedule import Uneven
from shmload.schedule.checks import own_int, whole_number
from shmload.schedule.node_shuffle import NodeShuffle
from shmload.schedule.permutation import Permutation
from shmload.schedule.shard_shuffle import ShardShuffle
from shmload.shm import travel
from shmload.storage.open_store import open_store
from shmload.worker import stage_engine
from shmload.worker.stage_engine import Batched, Each, Handler, Program, Sliced, Stage, Units
from shmload.world import OwnRank

__all__ = ["CACHE_BYTES", "Passes", "RemoteDataset"]

_KEPT = 256  # passes that are remembered
_NBYTES = 8 * (4 + 3 * _KEPT)


class Passes:
    """Counts passes. Shared with every copy of it in this process's children.

    Args:
        next_pass: the number of the first.
    """

    def __init__(self, next_pass: int = 0) -> None:
        fd = os.memfd_create("shmload-passes")
        os.ftruncate(fd, _NBYTES)
        self._open(fd, f"/proc/{os.getpid()}/fd/{fd}")
        self._board[:2] = np.frombuffer(os.urandom(16), np.uint64)
        self._board[2] = next_pass

    def _open(self, fd: int, home: str) -> None:
        self._lock = threading.Lock()
        self._turns: dict[int, int] = {}  # of this process's passes, by base seed
        self._since = 0  # the first entry that counts; for a late worker, of before `set_next`, that is still another
        self._fd, self._home = fd, home
        self._board = np.frombuffer(mmap.mmap(fd, _NBYTES), np.uint64)  # nonce (2 words), next pass, entries ever written, entries
        self._close = weakref.finalize(self, os.close, fd)

    def begin(self, base_seed: int | None) -> int:
        """The number of the pass that an iterator begins.

        Args:
            base_seed: that torch has drawn for the workers; None in the trainer, where each iterator is a pass.
        """
        with self._held() as board:
            number = int(board[2])
            if base_seed is not None:
                turn = self._turns[base_seed] = self._turns.get(base_seed, 0) + 1
                entries, written = board[4:].reshape(_KEPT, 3), int(board[3])
                passes = entries[np.arange(max(self._since, written - _KEPT), written) % _KEPT]
                (known,) = np.nonzero((passes[:, 0] == base_seed) & (passes[:, 1] == turn))
                if len(known):
                    return int(passes[known[0], 2])
                entries[written % _KEPT] = base_seed, turn, number
                board[3] = written + 1
            board[2] = number + 1
            return number

    def set_next(self, number: int) -> None:
        """Makes the next pass this one, in all processes, although torch may draw a seed for it that a pass before it had."""
        with self._held() as board:
            board[2] = number
            self._since = int(board[3])

    @property
    def next(self) -> int:
        """The number of the next pass."""
        return int(self._board[2])

    @contextmanager
    def _held(self) -> Iterator[NDArray[np.uint64]]:
        with self._lock:  # a lock on a file is the process's, not the thread's
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield self._board
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        if travel.is_abroad():
            return {"home": "", "nonce": b"", "next": self.begin(None)}
        return {"home": self._home, "nonce": self._board[:2].tobytes(), "next": self.next, "since": self._since}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd = -1
        with suppress(OSError):
            fd = os.open(state["home"], os.O_RDWR | os.O_CLOEXEC)
        if fd >= 0 and os.pread(fd, 16, 0) == state["nonce"]:
            self._open(fd, state["home"])
            self._since = state["since"]
            return
        if fd >= 0:  # another process has the number by now
            os.close(fd)
        self.__init__(state["next"])  # type: ignore[misc]  # as a new one


T = TypeVar("T")


def _function(method: str, given: T) -> T:
    if not callable(given):
        raise TypeError(f"{method} needs a function; got {given!r}")
    return given


def _whole(what: str, given: Any, at_least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = at_least - 1
    if number < at_least:
        raise ValueError(f"{what} is a whole number, at least {at_least}; got {given!r}")
    return number


CACHE_BYTES = 10 << 30
_UNKNOWN_EPOCHS = 1 << 20  # that a pass of unknown length may take before it would repeat the next one's


def _cipher_of(key: bytes | None, shards: Shards) -> SampleCipher | None:
    """What decrypts the samples of shards.

    Raises:
        ValueError: they are not encrypted, or by another key.
    """
    if key is None:
        return None
    cipher, where = SampleCipher(key), shards.all[0].url
    if any(shard.layout.name != "tar" for shard in shards.all) or (shards.generation is not None and not shards.key):
        raise ValueError(f"{where}: this dataset is not encrypted, and key= was given: read it without, if that is what you expect")
    if shards.key not in ("", cipher.fingerprint):
        raise ValueError(
            f"{where}: the samples of this dataset are encrypted with another key than key=, {shards.key} and not "
            f"{cipher.fingerprint} by their fingerprints: give the key that it was packed with"
        )
    return cipher


class RemoteDataset(IterableDataset[Any]):
    """The samples of shards in a store: dicts of fields, `__key__` and `__url__`. An IterableDataset.

    Of tar shards the fields are members as bytes, by extension; of data as they lie (Parquet, TFRecord, JSON lines, .npy,
    MosaicML's and LitData's shards, images) what their layout says, decoded: shmload.remote.layouts.

    What is in the folder is looked up here and stays as it is now: a later upload is an error when its shards replace these, never
    a mix. With a manifest (of upload_cv_dataset or `shmload pack`) all is known at once; of other shards the headers are read at
    the first use, and their index is kept in the cache's folder.

    Every sample comes exactly once an epoch over all ranks and workers. Each pass is the next epoch, with an order of its own that
    follows from `seed` and the epoch's number. Shards are fetched ahead of need into a folder within `cache_bytes`.

    Args:
        client: of make_client, or boto3's; None: `bucket` is a folder of this machine, or a URL; a dict: a URL of another
            cloud, whose library takes that (`open_store`).
        bucket, folder: where the dataset is.
        shuffle: False reads shards and samples in their own order.
        seed: 0 to 2^64 - 1; of all orders.
        cache_folder: where copies of shards are kept and found again, by all processes of this machine; None: in a folder of its
            own that ends with the dataset and its workers.
        cache_bytes: what that folder may hold; 0: nothing is kept, each sample is read alone. All users of a folder say the same.
        window: shards whose samples are mixed; None: up to 16, as many as `cache_bytes` holds three times. All ranks need the same.
        ahead_bytes: the most that is fetched before it is needed, in whole shards behind the window that is read, as far as
            `cache_bytes` has room; 0: nothing but that window. None: two windows, and without `block_shuffle` all if it fits. No
            order depends on it.
        uneven: where the samples do not divide evenly by the ranks: "pad" repeats some from the epoch's start, "drop" leaves some
            out, "exact" lets the last ranks have one less.
        rank: of this process.
        world_size: of how many ranks; by default both as torch.distributed or the environment say, when iteration begins.
        layout: of the shards: "tar", "tfrecord", "jsonl", "npy", "parquet", "mds", "files", or an object of
            shmload.remote.layouts; None: as their names and the folder's index say.
        nodes: more than 1: each node of the job has a share of the samples, the same one in each epoch, and fetches no shards but
            those that this lies in (NodeShuffle). Its ranks follow each other, as launchers number them.
        generation: of a dataset that others were appended to, the newest that counts: what it was then is read, in the same order,
            as a state of a run of that time needs it. None: all that is there now.
        key: 32 bytes, with which the samples were encrypted by upload_cv_dataset; workers get it, and nobody else.
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
            raise ValueError(f"seed is an int from 0 to 2**64 - 1; got {seed!r}")
        if uneven not in ("pad", "drop", "exact"):
            raise ValueError(f'uneven is "pad", "drop" or "exact"; got {uneven!r}')
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank and world_size go together; got rank={rank}, world_size={world_size}")
        if not cache_bytes >= 0:
            raise ValueError(f"cache_bytes is a number of bytes, 0 or more; got {cache_bytes!r}")
        if ahead_bytes is not None and not ahead_bytes >= 0:
            raise ValueError(f"ahead_bytes is a number of bytes, 0 or more, or None; got {ahead_bytes!r}")
        if window is not None and not window >= 1:
            raise ValueError(f"window is a number of shards, at least 1, or None; got {window!r}")
        if window is not None and (needed := min(window, len(shards.all)) * shards.largest) > cache_bytes:
            raise ValueError(
                f"window={window} shards of up to {shards.largest} bytes need {needed} bytes at once, and cache_bytes is "
                f"{int(cache_bytes)}: give it three times that, to fetch ahead too, or a smaller window"
            )
        if (too_large := shards.too_large(int(cache_bytes))) is not None:
            raise ValueError(
                f"{too_large.url} is compressed, and its samples are read out of the {too_large.nbytes} bytes that it expands to: "
                f"cache_bytes has to hold those, and is {int(cache_bytes)}"
            )
        self.program = Program()
        self.nodes = _whole("nodes", nodes, 1)
        self.shuffled, self.seed, self.uneven = shuffle, seed, uneven
        local = LocalShards(shards, cache_folder, max(int(cache_bytes), 1))
        self._source = RemoteSource(local, window, ahead_bytes, cipher=_cipher_of(key, shards))
        self._world = OwnRank(rank, world_size)
        self._passes = Passes()
        self._order: ShardShuffle | NodeShuffle | None = None

    @classmethod
    def from_urls(cls, urls: str | Iterable[str], client: Any = None, shuffle: bool = True, seed: int = 0, **options: Any) -> Self:
        """The samples of shards by their URLs: "s3://bucket/x-{000000..000009}.tar", https://, file://, paths; or of one folder.

        Args:
            urls: of objects, in which braces expand, or of a folder.
            client: for s3://, or a dict for other clouds, as of `open_store`; None: one that goes by the environment.
            shuffle: as of the class.
            seed: as of the class.
            options: `cache_folder`, `cache_bytes`, `window`, `uneven`, `rank`, `world_size`, `layout`, `nodes`, `ahead_bytes`,
                `generation`, `key`, as of the class.
        Raises:
            ObjectMissing: a shard is not there.
        """
        named = {name: options.pop(name, None) for name in ("layout", "generation")}
        return cls(None, shards_of_urls(urls, lambda url: open_store(url, client), **named), "", shuffle, seed, **options)

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
        self._source.local.try_anew()  # a loader asks when a pass begins
        rank, world_size = self._world()
        return self.program.count(self._share(rank, world_size))

    def indexed(self, **options: Any) -> RemoteSamples | RemoteRecords:
        """The same shards as a map-style dataset: any sample by its index, for ShmLoader's own shuffle, ranks and resume.

        Args:
            options: `fields`, `schema`, `decode` and `allow_pickle`, as of TarDataset, and `follow=True`: each epoch of a ShmLoader
                with a seed reads what was appended before it begins, the same in all ranks; of shards that are no tar files
                `fields`, and `decode` as functions by field (RemoteRecords).
        Raises:
            ValueError: there are stages already.
            TypeError: an option of tar shards, and these are none.
        """
        if self.program.stages or self.program.units.levels:
            raise ValueError(
                "indexed() reads the shards themselves: call it on the dataset as it was made, before decode and the other stages"
            )
        found = {layout.name for layout in self._source.local.shards.values("layout")}
        if found == {"tar"}:
            return RemoteSamples(self._source, **options)
        if others := sorted(options.keys() - {"fields", "decode"}):
            raise TypeError(
                f"indexed({others[0]}=...) is an option of tar shards, and these are {', '.join(sorted(found))}, whose fields have "
                "the types that the layout says: choose some by fields=[...], and convert them by decode={field: function} or by "
                "an option of the layout, as layout=TFRecords(schema=...) or Parquet(columns=...)"
            )
        return RemoteRecords(self._source, **options)

    def split(self, parts: Mapping[str, float], seed: int = 0) -> dict[str, Self]:
        """The samples in parts that have none in common: the same ones on every rank, whatever workers and cache there are.

        Each part is a dataset of its own over the same shards and the same folder of copies, with the stages that this one has; it
        is split again, or reads `indexed()`, as any other. A part by fractions that do not add up to 1 is a subsample.

        Args:
            parts: name -> its share of the samples, {"train": 0.9, "val": 0.1}; whole numbers above 1 are numbers of samples.
            seed: of the random choice, 0 to 2^64 - 1.
        Returns:
            the parts by their names; their samples keep the order of the shards.
        Raises:
            ValueError: the shares are more than there is, or one is of no sample.
        Cost: 8 bytes a sample, in each process that is not forked; 4 ns a sample, once.
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
                f"split: each part needs at least one of the {total} samples, and all of them together no more than there are; got "
                f"{dict(parts)}, which is {sizes}"
            )
        order = Permutation(total, seed=seed).take(0, ends[-1])
        made = {}
        for name, chosen in zip(sizes, np.split(order, ends[:-1]), strict=True):
            part = made[name] = self._with(self.program)
            part._source, part._order, part._passes = self._source.part(np.sort(chosen)), None, Passes()
        return made

    @property
    def given_rank(self) -> tuple[int, int] | None:
        """Rank and world size as they were given; None: they were not."""
        return self._world.given

    def keyed_items(self) -> RemoteUnits:
        """The items as a map-style dataset, the k-th of an epoch by k: what ShmLoader reads in seed mode.

        Raises:
            ValueError: which samples make up an item is not known.
        """
        program = self.program
        if self.nodes > 1:
            raise ValueError(
                "with nodes= the order depends on the ranks, and seed mode has its own: read indexed(), with "
                "sampler=view.block_shuffle(nodes=..., global_batch=...)"
            )
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
            epoch: from 0 to 2^62.
        Raises:
            ValueError: it is outside of that.
            TypeError: it is no integer.
        """
        self._passes.set_next(whole_number("epoch", epoch, at_least=0, remedy="epochs are counted from 0"))

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        self._source.local.try_anew()
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
            stage_seed = zlib.crc32(f"{self.seed} {epoch} {rank} {worker}".encode()) << 16
            for item in program.run(self._samples(mine, epoch, rank, world_size), stage_seed):
                num_items += 1
                yield item
            if is_endless and not num_items and (mine or not num_units):
                return  # there is nothing to repeat

    def _samples(self, units: Iterable[int], epoch: int, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
        source, share = self._source, self._share(rank, world_size)
        for unit in units:
            order = self._ordered()  # not before: there is none of no samples
            positions = self.program.units.samples(unit, share) * world_size + rank  # round the end if the rank's share is padded
            for index in taken_at(order, positions % order.n, self.seed, epoch).tolist():
                source.begin()
                source.enter(order, source.place(index)[0], self.seed, epoch)
                yield source.read(index)

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

    def _ordered(self) -> ShardShuffle | NodeShuffle:
        if self._order is None:
            world_size = self._world()[1] if self.nodes > 1 else 1
            if world_size % self.nodes:
                raise ValueError(f"nodes={self.nodes} have equally many ranks each, and there are {world_size} ranks")
            self._order = self._source.order(shuffle=self.shuffled, nodes=self.nodes, global_batch=world_size)
        return self._order

    # ------------------------------------------------------------ webdataset's methods

    def decode(
        self,
        *handlers: str | MemberHandler,
        pre: Sequence[MemberHandler] | None = None,
        post: Sequence[MemberHandler] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        allow_pickle: bool = False,
        handler: Handler = reraise_exception,
    ) -> Self:
        """Members from bytes to values: images by a spec ("pil", "rgb8", "torchrgb", ...), all else by its extension.

        Args:
            handlers: image specs, or functions of (extension with a dot before it, bytes); the first that gives something other
            than
                None counts.
            pre: functions before them; None expands .gz and .zst.
            post: functions behind them; None are the decoders by extension. What nobody decodes stays bytes.
            only: extensions that are decoded; None is all.
            partial: leave members that are no bytes any more.
            allow_pickle: decode pickles and what torch.load reads, which can run any code; without it they are an error.
            handler: what becomes of a sample that fails; of shmload.remote: reraise_exception, warn_and_continue and so on.
        """
        decoder = SampleDecoder(handlers, pre, post, only, partial=partial, allow_pickle=allow_pickle)
        return self._each("decode", decoder, handler)

    def to_tuple(
        self, *fields: str, handler: Handler = reraise_exception, missing_is_error: bool = True, none_is_error: bool | None = None
    ) -> Self:
        """Samples from dicts to tuples.

        Args:
            fields: names, with alternatives: "jpg;png". One string with spaces is several.
            handler: what becomes of a sample that fails.
            missing_is_error: otherwise a missing field is None.
            none_is_error: whether a field may be None; None: as `missing_is_error` says.
        Raises:
            ValueError: no field is named.
        """
        names = tuple(fields[0].split()) if len(fields) == 1 else fields
        if not names:
            raise ValueError('to_tuple needs at least one field: to_tuple("jpg;png", "cls")')
        none = missing_is_error if none_is_error is None else none_is_error
        return self._each("to_tuple", of(fluent.to_tuple, names, missing_is_error, none), handler)

    def map(self, function: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """A function of each item. A sample that stays a dict keeps its key; one for which it gives None is left out.

        Args:
            function: of the item.
            handler: what becomes of an item that fails.
        """
        return self._each("map", of(fluent.mapped, _function("map", function)), handler)

    def map_dict(self, handler: Handler = reraise_exception, **functions: Callable[[Any], Any]) -> Self:
        """Functions of fields by name.

        Args:
            handler: what becomes of a sample that fails.
            functions: field=function.
        Raises:
            ValueError: there is none.
        """
        if not functions:
            raise ValueError("map_dict needs functions by field: map_dict(jpg=f)")
        checked = {name: _function("map_dict", function) for name, function in functions.items()}
        return self._each("map_dict", of(fluent.mapped_dict, checked), handler)

    def map_tuple(self, *functions: Callable[[Any], Any] | None, handler: Handler = reraise_exception) -> Self:
        """Functions of fields by place; None, and fields without one, stay as they are.

        Args:
            functions: of the first fields.
            handler: what becomes of an item that fails.
        """
        checked = [None if function is None else _function("map_tuple", function) for function in functions]
        return self._each("map_tuple", of(fluent.mapped_tuple, checked), handler)

    def rename(self, handler: Handler = reraise_exception, keep: bool = True, **names: str | Sequence[str]) -> Self:
        """Fields under other names.

        Args:
            handler: what becomes of a sample that fails.
            keep: whether other fields stay.
            names: new="old;older".
        Raises:
            ValueError: there is none.
        """
        if not names:
            raise ValueError('rename needs names: rename(image="jpg;png")')
        return self._each("rename", of(fluent.renamed, names, keep), handler)

    def select(self, predicate: Callable[[Any], Any]) -> Self:
        """Only the items that a function says True of. How many there are is not known any more.

        Args:
            predicate: of the item.
        """
        stage = Stage("select", stage_engine.select, (_function("select", predicate),))
        return self._with(self.program.then(stage).ended_by("select"))

    def shuffle(self, size: int = 1000, initial: int = 100) -> Self:
        """A buffer that gives a random one of the items it holds, on top of the dataset's own order.

        Args:
            size: items it holds; 0 does nothing.
            initial: how many are there before it gives one.
        """
        size = _whole("shuffle: size", size, 0)
        if size < 1:
            return self._with(self.program)
        arguments = (size, min(_whole("shuffle: initial", initial, 0), size))
        program = self.program.then(Stage("shuffle", stage_engine.shuffle, arguments))
        return self._with(replace(program, known="number" if program.known == "units" else program.known))

    def batched(
        self, batchsize: int = 20, collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn, partial: bool = True
    ) -> Self:
        """Items in batches. They are the same ones for any number of workers.

        Args:
            batchsize: items of each.
            collation_fn: from a list of items to the batch; None: the list.
            partial: whether the last may be shorter.
        """
        size = _whole("batched: batchsize", batchsize, 1)
        program = self.program.then(Stage("batched", stage_engine.batch, (size, collation_fn, bool(partial))))
        if program.known != "nothing":
            program = replace(program, units=Units((*program.units.levels, Batched(size, bool(partial)))))
        return self._with(program)

    def unbatched(self) -> Self:
        """The items of batches, one by one. How many there are is not known any more."""
        return self._with(self.program.then(Stage("unbatched", stage_engine.unbatch)).ended_by("unbatched"))

    def slice(self, *bounds: int | None) -> Self:
        """Some of the items of a rank's pass: slice(stop), slice(start, stop), slice(start, stop, step).

        Behind shuffle, select, unbatched or then it counts in each worker for itself.

        Args:
            bounds: as of itertools.islice.
        Raises:
            TypeError: there are none, or more than three.
        """
        if not 1 <= len(bounds) <= 3:
            raise TypeError(f"slice takes stop, or start, stop and perhaps step; got {len(bounds)} arguments")
        start, stop, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        start, step = _whole("slice: start", start or 0, 0), _whole("slice: step", 1 if step is None else step, 1)
        stop = None if stop is None else _whole("slice: stop", stop, 0)
        if self.program.known == "units":
            return self._with(replace(self.program, units=Units((*self.program.units.levels, Sliced(start, stop, step)))))
        return self._with(self.program.then(Stage("slice", stage_engine.some, (start, stop, step))).ended_by("slice"))

    def then(self, function: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> Self:
        """A function of the iterator: a generator of your own. How many items there are is not known any more.

        Args:
            function: (items, *args, **kwargs) -> items.
            args: for it.
            kwargs: for it.
        """
        stage = Stage("then", stage_engine.piped, (_function("then", function), args, kwargs))
        return self._with(self.program.then(stage).ended_by("then"))

    def repeat(self, nepochs: int | None = None) -> Self:
        """Several epochs in one pass, each in an order of its own.

        Args:
            nepochs: how many; None: without end.
        """
        number = None if nepochs is None else _whole("repeat: nepochs", nepochs, 1)
        return self._with(replace(self.program, repetitions=number))

    def with_epoch(self, n: int) -> Self:
        """Passes of so many items in each rank, over as many epochs as that takes.

        Args:
            n: items of a rank's pass, over all its workers.
        """
        return self._with(replace(self.program, limit=_whole("with_epoch: n", n, 1)))

    def with_length(self, n: int) -> Self:
        """Says what len() is; what is read stays.

        Args:
            n: the length.
        """
        return self._with(replace(self.program, length=_whole("with_length: n", n, 0)))

    def _each(self, name: str, function: Callable[[Any], Any], handler: Handler) -> Self:
        return self._with(self.program.then(Each(name, function, handler)))

    # ------------------------------------------------------------ copies

    def _with(self, program: Program) -> Self:
        made = self.__class__.__new__(self.__class__)
        made.__dict__.update(self.__dict__, program=program, _passes=Passes(self._passes.next))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def close(self) -> None:
        """Lets go of all shards, and removes a folder of its own. What is still read comes from the store."""
        self._source.local.close()

    def __repr__(self) -> str:
        shards = self._source.local.shards
        stages = "".join(f".{stage.name}" for stage in self.program.stages)
        return f"<RemoteDataset of {len(shards.all)} shards, {shards.nbytes} bytes{stages}>"
