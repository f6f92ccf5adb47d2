"""The packing itself: which stretches of the order are still to be packed, and each of them from the loader's batches to
shards.

The order is cut into shards as it comes, so where a shard begins depends on the sizes of all samples before it. A packing that
goes on therefore keeps whole shards where they are, and packs the *gaps* between them: a gap begins where the shard before it
ends, and ends where the next one begins, with the number that the next one says. Should a dataset not be the same any more, and
a gap not come out at that number, the shards behind it are packed again, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shmload import faults
from shmload.formats.tar.header import archive_nbytes
from shmload.loader import ShmLoader
from shmload.remote.manifest import Manifest
from shmload.remote.packing.encoding import RECORD, EncodedSamples
from shmload.remote.packing.generation import Generation
from shmload.remote.packing.sender import NUM_THREADS, Sender
from shmload.remote.packing.shard_file import Record, ShardFile
from shmload.remote.packing.sources import Files, source_of
from shmload.remote.packing.spool import Spool
from shmload.storage.store import Store

logger = logging.getLogger("shmload")
VERSION = 1  # of what samples become: another one is another generation
NUM_PROBED = 8  # samples that tell one dataset from another
_BATCH_NBYTES = 4 << 20
_BATCH_SIZE_MAX = 256


@dataclass(frozen=True)
class Options:
    """How a dataset is packed.

    Attributes:
        maxsize, maxcount: bytes of a shard's file, and its samples.
        workers: processes that encode; 0: this one.
        quality: of JPEG for images that are not encoded yet; None: PNG.
        multiprocessing_context: how workers start.
        spool_folder: where shards lie until they are sent; None: in memory, or if that is short where temporary files do.
    """

    maxsize: int
    maxcount: int
    workers: int
    seed: int
    quality: int | None = None
    restart_markers: bool = False
    multiprocessing_context: Any = None
    spool_folder: str | None = None

    def __post_init__(self) -> None:
        if self.maxsize < archive_nbytes(0) or self.maxcount < 1 or self.workers < 0:
            raise ValueError(
                f"maxsize is at least {archive_nbytes(0)} bytes, maxcount 1 and workers 0; got {self.maxsize}, {self.maxcount} and "
                f"{self.workers}"
            )
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ValueError(f"quality is from 1 to 100, or None for no loss; got {self.quality}")


@dataclass(frozen=True)
class Progress:
    """How far a packing is.

    Attributes:
        num_samples: packed, of `total`; those of shards that were there count.
        nbytes: of shards that are whole in the store; `num_shards` of them, of which `num_found` were there before.
    """

    total: int
    num_samples: int = 0
    nbytes: int = 0
    num_shards: int = 0
    num_found: int = 0


class Packing:
    """One packing of a dataset into a store.

    Attributes:
        num_found: shards that were there when it began.
    """

    def __init__(
        self, dataset: Any, store: Store, options: Options, on_progress: Callable[[Progress], None] | None
    ) -> None:
        source = source_of(dataset, options.quality)
        if not len(source):
            raise ValueError("a dataset of at least 1 sample is needed; this one is empty: check the path it reads")
        self._options, self._store, self._on_progress = options, store, on_progress
        self._samples = EncodedSamples(source, seed=options.seed, restart_markers=options.restart_markers)
        probed = sorted({number * (len(source) - 1) // (NUM_PROBED - 1) for number in range(NUM_PROBED)})
        probes = [self._samples.record(index) for index in probed]
        mean = sum(map(len, probes)) // len(probes)
        self._batch_size = min(max(_BATCH_NBYTES // mean, 1), _BATCH_SIZE_MAX)
        self._generation = Generation(store, self._name(probes))
        self._records: dict[int, Record] = {}  # by number of the shard
        self.num_found = self._num_packed = 0

    def _name(self, probes: list[bytes]) -> str:
        """The generation's name: another one for other arguments or another dataset."""
        options, digest = self._options, hashlib.sha256()
        told = (
            VERSION,
            len(self._samples),
            options.seed,
            options.maxsize,
            options.maxcount,
            options.quality,
            options.restart_markers,
        )
        digest.update(json.dumps(told).encode("ascii"))
        for probe in probes:
            digest.update(probe)
        if isinstance(self._samples.source, Files):
            self._samples.source.update(digest)
        return digest.hexdigest()[:16]

    def run(self) -> Manifest:
        """Packs what is not in the store yet, and writes the manifest."""
        total = len(self._samples)
        self._keep(self._generation.records())
        self.num_found = len(self._records)
        if self.num_found:
            logger.info(
                "%s: %d shards of generation %s are there already",
                self._store.url,
                self.num_found,
                self._generation.name,
            )
        if not self._generation.is_settled():
            self._generation.claim()
            faults.hit("claimed")
        self._num_packed = sum(record.shard.num_samples for record in self._records.values())
        self._tell()
        self._spool = Spool((NUM_THREADS + 1) * self._options.maxsize, self._options.spool_folder)
        sender = Sender(self._store, self._generation, self._sent)
        try:
            at, number = 0, 0
            while at < total:
                at, number = self._fill(sender, at, number)
            sender.finish()
        finally:
            sender.close()
            self._spool.close()
        return self._generation.commit([self._records[number] for number in sorted(self._records)], self._options.seed)

    def _keep(self, records: list[Record]) -> None:
        """Keeps shards that can stay: numbered in the order of their samples, none over another."""
        stop, last = 0, -1
        for record in records:
            if record.first >= stop and record.number > last and record.stop <= len(self._samples):
                self._records[record.number] = record
                stop, last = record.stop, record.number

    def _fill(self, sender: Sender, at: int, number: int) -> tuple[int, int]:
        """Passes a shard that is there, or packs the gap before the next one; where that ends, in position and number."""
        there = self._records.get(number)
        if there is not None and there.first == at:
            return there.stop, number + 1
        following = min((each for each in self._records if each >= number), default=None)
        stop = len(self._samples) if following is None else self._records[following].first
        if stop == at:  # the dataset is not what it was
            self._forget_from(number)
            return at, number
        sender.finish()
        number = self._pack(sender, at, stop, number)
        if following is not None and number != following:
            self._forget_from(number)
        return stop, number

    def _forget_from(self, number: int) -> None:
        """Lets go of shards that were there, from a number on: they are packed anew."""
        forgotten = [each for each in self._records if each >= number]
        self._generation.forget([self._records.pop(each) for each in forgotten])

    def _pack(self, sender: Sender, at: int, stop: int, number: int) -> int:
        """Packs the samples from position `at` up to `stop` into shards from `number` on; the number behind the last."""
        shard: ShardFile | None = None
        try:
            for records, ends in self._batches(at, stop):
                begin = last = 0  # of what is not written yet
                count = 0
                for end in ends:
                    if shard is not None and self._is_full(shard, end - begin, count + 1):
                        shard.append(records[begin:last], count)
                        sender.send(shard)
                        begin, count, number, shard = last, 0, number + 1, None
                    if shard is None:
                        if number in self._records:  # the gap holds more than it did
                            self._forget_from(number)
                        sender.make_room()
                        shard = ShardFile(self._generation.shard_name(number), at, self._spool)
                    last, count, at = end, count + 1, at + 1
                assert shard is not None
                shard.append(records[begin:last], count)
                self._num_packed += len(ends)
                self._tell()
            assert shard is not None
            sender.send(shard)
            shard = None
            return number + 1
        finally:
            if shard is not None:
                shard.close()

    def _is_full(self, shard: ShardFile, nbytes: int, count: int) -> bool:
        """Whether a shard has no room for so many more bytes and samples."""
        is_full = shard.num_samples + count > self._options.maxcount
        return is_full or archive_nbytes(shard.nbytes + nbytes) > self._options.maxsize

    def _batches(self, at: int, stop: int) -> Iterator[tuple[memoryview, list[int]]]:
        """Records from position `at` up to `stop`, in their order: bytes of a batch, and where in it each ends."""
        num_workers = self._num_workers(stop - at)
        loader: ShmLoader[Any] = ShmLoader(
            self._samples,
            self._batch_size,
            sampler=range(at, stop),
            num_workers=num_workers,
            multiprocessing_context=self._options.multiprocessing_context if num_workers else None,
            seed=0,
            seed_samples=False,
            ragged="jagged",
        )
        with loader:
            for batch in loader:
                values, offsets = batch[RECORD]
                yield memoryview(values.numpy()), offsets[1:].tolist()

    def _num_workers(self, num_samples: int) -> int:
        wanted = self._options.workers
        found = min(wanted, len(os.sched_getaffinity(0)), -(-num_samples // self._batch_size))
        if found < wanted:
            logger.info(
                "packing takes %d of %d workers: there are that many processors, or batches of samples", found, wanted
            )
        return found

    def _sent(self, record: Record) -> None:
        self._records[record.number] = record
        self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            nbytes = sum(record.shard.nbytes for record in self._records.values())
            self._on_progress(
                Progress(len(self._samples), self._num_packed, nbytes, len(self._records), self.num_found)
            )
